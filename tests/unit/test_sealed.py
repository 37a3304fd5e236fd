"""Files and lines with checksums: what was written comes back, anything else is refused."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from cache_damage import corruptions

from trtopt.cache.checksummed import (
    OtherVersionError,
    from_line,
    is_of_other_version,
    read_checksummed,
    to_line,
    write_checksummed,
)
from trtopt.cache.folder import FORMATS, CachedFile, damage

FORM = FORMATS["engines"]

RECORDS: list[dict[str, Any]] = [
    {},
    {"key": "a\nb\ud800", "total": [1, 2.5, None], "of": {"b": [], "a": {"c": True}}},
    {"time": 0.1 + 0.2, "large": 1e300, "small": 5e-324, "count": 2**60},
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_line_comes_back_as_it_was(record: dict[str, Any]) -> None:
    line = to_line(record)
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and from_line(line) == record
    assert {name: json.loads(line)[name] for name in record} == record  # JSON, for other readers


@pytest.mark.parametrize("record", RECORDS)
def test_a_line_with_one_bit_changed_is_refused_or_says_the_same(record: dict[str, Any]) -> None:
    line = to_line(record)
    for bit in range(8 * (len(line) - 1)):
        data = bytearray(line)
        data[bit // 8] ^= 1 << bit % 8
        assert from_line(bytes(data)) in (record, None)


@pytest.mark.parametrize("line", [b"", b"7", b"[]", b"{}", b"null", b'{"crc32": 0}', b"[" * 100_000, b"\xff"])
def test_what_is_no_line_is_refused(line: bytes) -> None:
    assert from_line(line) is None


def test_a_file_comes_back_as_it_was_and_damage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "abc.entry"
    write_checksummed(path, FORM, "abc", [b"one\n", b"", b"\x00two"])
    assert bytes(read_checksummed(path, FORM, "abc", 100)) == b"one\n\x00two"
    with pytest.raises(ValueError, match="made from another model"):
        read_checksummed(path, FORM, "abd", 100)
    for wrong in ("trtopt.test/2", ""):
        with pytest.raises(ValueError, match="another format"):
            read_checksummed(path, wrong, "abc", 100)
    whole = path.read_bytes()
    for what, damaged in corruptions(whole, 300, random.Random(1)):
        if damaged is not None:
            path.write_bytes(damaged)
            with pytest.raises(ValueError):
                pytest.fail(f"{what}: {bytes(read_checksummed(path, FORM, 'abc', 1000))!r}")
            assert damage(CachedFile(path, "engines", len(damaged), 0.0)), what


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "abc.entry"
    write_checksummed(path, FORM, "abc", [bytes(5000)])
    with pytest.raises(ValueError, match="too large"):
        read_checksummed(path, FORM, "abc", 1000)


def test_the_size_is_checked_before_the_content_is_read(tmp_path: Path) -> None:
    """A file that was made huge, with a hole of a terabyte: reading it would take all memory."""
    path = tmp_path / "abc.entry"
    write_checksummed(path, FORM, "abc", [b"content"])
    os.truncate(path, 1 << 40)
    assert "size is not what was written" in damage(CachedFile(path, "engines", 1 << 40, 0.0))
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)
    assert "no header" in damage(CachedFile(path, "engines", 1 << 40, 0.0))


@pytest.mark.parametrize(
    "head",
    [
        b'{"format": "trtopt.engine-cache/1", "identity": "abc", "sha256": "0"}',
        b'{"format": "trtopt.engine-cache/99", "anything": 1}',
    ],
)
def test_a_file_of_another_version_is_no_damage(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "abc.entry"
    path.write_bytes(head + b"\ncontent")
    with pytest.raises(OtherVersionError, match="another version of trtopt"):
        read_checksummed(path, FORM, "abc", 1000)
    assert is_of_other_version(path, FORM)
    assert not is_of_other_version(path, "trtopt.timing-cache/1")
    path.write_bytes(head[5:] + b"\ncontent")
    assert not is_of_other_version(path, FORM)
