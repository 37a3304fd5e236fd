"""Files and lines that carry a checksum of themselves, so that damage is seen before their content is used.

A checksum tells damage, not who wrote the file: whoever may write to a cache folder can write an entry that fits.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from trtopt.support.files import atomic_path

_MAX_HEADER_BYTES = 1024
_VERSION = re.compile(r"/\d{1,4}$")
_HEADER = {"format": str, "identity": str, "bytes": int, "sha256": str}
_CRC = "crc32"

MOST_LINE_BYTES = 16 << 20
"""Of a file of lines: about 30000 prices; the checkpoint of a search has about a hundred lines."""

_MOST_LINES = 200_000


class OtherVersionError(ValueError):
    """A file of a version of trtopt that wrote it in another form; damage is not the same."""


def write_checksummed(path: Path, form: str, identity: str, parts: Sequence[bytes]) -> None:
    """Write ``parts`` behind a line with their checksum, whole or not at all.

    Args:
        form: The name and version of the format.
        identity: What the content was made from, as a hash.
        parts: The content; several, so that large ones need not be copied into one.

    Raises:
        UsageError: The file cannot be created.
        OSError: The disk is full, or fails otherwise.
    """
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(_header(form, identity, parts) + b"\n")
        for part in parts:
            file.write(part)


def read_checksummed(path: Path, form: str, identity: str, max_bytes: int) -> memoryview:
    """The content of a file that :func:`write_checksummed` wrote.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read.
        OtherVersionError: It says that it is of another version of the format.
        ValueError: It is larger than ``max_bytes``, of another format or identity, or not what was written. Its size is
            compared with what its first line says before the content is read.
    """
    with _opened(path) as file:
        head, header = _read_head(file, form)
        if header["bytes"] > max_bytes:
            raise ValueError("the file is too large")
        if os.fstat(file.fileno()).st_size != len(head) + header["bytes"]:
            raise ValueError("its size is not what was written")
        # Not mapped: a file that another process cuts off would end this one.
        body = memoryview(file.read(header["bytes"]))
    if head != _header(form, header["identity"], [body]) + b"\n":
        raise ValueError("its content is not what was written")
    if header["identity"] != identity:
        raise ValueError("it was made from another model, other samples or options, or by another version of trtopt")
    return body


def is_of_other_version(path: Path, form: str) -> bool:
    """Whether a file says that it is of another version of a format. Raises OSError: it cannot be read."""
    try:
        with _opened(path) as file:
            _read_head(file, form)
    except ValueError as error:
        return isinstance(error, OtherVersionError)
    return False


def _opened(path: Path) -> BinaryIO:
    """The file, opened without waiting for the other end where it is a pipe."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))


def _header(form: str, identity: str, parts: Sequence[bytes | memoryview]) -> bytes:
    """The first line; its checksum is that of format, identity, size and content."""
    names = {"format": form, "identity": identity, "bytes": sum(map(len, parts))}
    digest = hashlib.sha256(json.dumps(names).encode())
    for part in parts:
        digest.update(part)
    return json.dumps({**names, "sha256": digest.hexdigest()}).encode()


def _read_head(file: BinaryIO, form: str) -> tuple[bytes, dict[str, Any]]:
    """The first line with its line feed, and what it says; no more than that is read."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise ValueError("it is no file")
    head = file.readline(_MAX_HEADER_BYTES)
    try:
        header = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise ValueError("its first line is no header") from error
    if not isinstance(header, dict) or not isinstance(header.get("format"), str):
        raise ValueError("its first line is no header")
    name = header["format"]
    if name != form and _VERSION.sub("", name) == _VERSION.sub("", form):
        raise OtherVersionError(f"it is of another version of trtopt ({name})")
    if name != form:
        raise ValueError("another format")
    if {key: type(value) for key, value in header.items()} != _HEADER or header["bytes"] < 0:
        raise ValueError("its first line is no header")
    return head, header


def lines_of(content: bytes) -> list[bytes]:
    """The lines of a file, the last one without its end.

    Raises:
        ValueError: There are more than anybody writes: each costs time, one of a single line feed too.
    """
    if content.count(b"\n") > _MOST_LINES:
        raise ValueError(f"it has more than {_MOST_LINES} lines")
    return content.split(b"\n")


def to_line(record: Mapping[str, Any]) -> bytes:
    """A record as one line of JSON, its line feed included, that :func:`from_line` takes back."""
    return json.dumps({**record, _CRC: _crc(record)}).encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None where it is no line that :func:`to_line` wrote, whole."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and record.pop(_CRC, None) == _crc(record) else None


def _crc(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record).encode())
