"""Blobs and lines: what is kept comes back, what is not is said once, and writers lose nothing to each other."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trtopt.cache import folder as cache_files
from trtopt.cache.checksummed import from_line, to_line
from trtopt.cache.folder import Blobs, CachedFile, Lines, damage
from trtopt.events import Event, ignore

KEY, OTHER = 64 * "a", 64 * "b"
SPAWN = multiprocessing.get_context("spawn")


def blobs(folder: Path, events: list[Event], **options: Any) -> Blobs:
    words = ("build", "calibration cache", "calibrating anew")
    return Blobs("calibration", folder, events.append, **{"words": words, "max_bytes": 1000, **options})


def lines(folder: Path, events: list[Event] | None = None, key: str = KEY) -> Lines:
    return Lines("prices", folder, ignore if events is None else events.append, key)


def test_a_blob_comes_back_and_another_key_has_none(tmp_path: Path) -> None:
    events: list[Event] = []
    kept = blobs(tmp_path, events)
    assert kept.load(KEY, bytes) is None
    kept.store(KEY, [b"one", b"two"])
    assert kept.load(KEY, bytes) == b"onetwo" and kept.load(OTHER, bytes) is None and events == []
    os.rename(kept.path(KEY), kept.path(OTHER))
    assert kept.load(OTHER, bytes) is None and "another model" in events[0].text


def test_a_blob_that_its_reader_refuses_is_damaged(tmp_path: Path) -> None:
    events: list[Event] = []
    kept = blobs(tmp_path, events)
    kept.store(KEY, [b"no number"])
    assert kept.load(KEY, lambda content: int(bytes(content)), warns=False) is None and events == []
    assert kept.load(KEY, lambda content: int(bytes(content))) is None
    assert events[0].task == "build" and events[0].text.endswith("; calibrating anew")


def test_a_blob_that_cannot_be_kept_is_said_once(tmp_path: Path) -> None:
    events: list[Event] = []
    blobs(tmp_path, events, max_bytes=3).store(KEY, [b"four"])
    assert "larger" in events.pop().text
    (tmp_path / "calibration").write_text("in the way")
    kept = blobs(tmp_path, events)
    for key in (KEY, OTHER):
        kept.store(key, [b"content"])
    assert not kept.can_be_written() and kept.load(KEY, bytes) is None
    assert ["is not kept" in event.text for event in events] == [True]


def test_records_come_back_in_their_order(tmp_path: Path) -> None:
    records = [{"key": f"\n\ud800{number}", "of": [number, None]} for number in range(5)]
    for record in records:
        lines(tmp_path).add(record)
    assert lines(tmp_path).load() == records and lines(tmp_path, key=OTHER).load() == []


def test_a_file_without_any_record_is_said_and_used_again(tmp_path: Path) -> None:
    events: list[Event] = []
    kept = lines(tmp_path, events)
    kept.add({"a": 1})
    for content in (b'{"a": 1}\n', b"\x00\xff", b"\n", b"\n" * 300_000):
        kept.path(KEY).write_bytes(content)
        assert kept.load() == []
    assert ["starting anew" in event.text for event in events] == [True, True, True]  # an empty line is no damage
    kept.path(KEY).write_bytes(b'{"torn": ')
    kept.add({"b": 2})
    assert kept.load() == [{"b": 2}]


def test_a_full_file_loses_its_older_half_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "MOST_LINE_BYTES", 1000)
    kept = lines(tmp_path)
    for number in range(200):
        kept.add({"number": number})
        found = [record["number"] for record in lines(tmp_path).load()]
        assert found == list(range(found[0], number + 1)) and kept.path(KEY).stat().st_size <= 1000
        assert number < 15 or len(found) > 10
    assert damage(CachedFile(kept.path(KEY), "prices", 0, 0)) == ""


@pytest.mark.parametrize("size", [2000, 1 << 40])
def test_a_file_that_is_too_large_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Also one with a hole of a terabyte: only its end is read."""
    monkeypatch.setattr(cache_files, "MOST_LINE_BYTES", 1000)
    kept = lines(tmp_path)
    kept.add({"old": 1})
    os.truncate(kept.path(KEY), size)
    kept.add({"new": 2})
    assert lines(tmp_path).load() == [{"new": 2}]


def _adds(folder: Path, writer: int, count: int) -> None:
    cache_files.MOST_LINE_BYTES = 3000
    kept = lines(folder)
    for number in range(count):
        kept.add({"writer": writer, "number": number})


def test_writers_of_a_file_that_is_full_lose_no_line_but_the_oldest(tmp_path: Path) -> None:
    """Each finds the file full and replaces it, while the others add to it: what they add is in the new one."""
    writers, count = 3, 150
    processes = [SPAWN.Process(target=_adds, args=(tmp_path, writer, count)) for writer in range(writers)]
    seen: set[tuple[int, int]] = set()
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        found = [(record["writer"], record["number"]) for record in lines(tmp_path).load()]
        for writer in range(writers):
            numbers = [number for who, number in found if who == writer]
            assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True, "one is missing between"
        seen.update(found)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * writers
    last = lines(tmp_path).load()[-1]
    assert last["number"] == count - 1 and len(seen) > writers * 10


def test_without_locks_lines_are_added_and_a_full_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "MOST_LINE_BYTES", 200)
    (tmp_path / "locks").write_text("in the way")
    events: list[Event] = []
    kept = lines(tmp_path, events)
    for number in range(20):
        kept.add({"number": number})
    found = [record["number"] for record in lines(tmp_path).load()]
    assert found == list(range(len(found))) and 2 < len(found) < 20
    assert ["is full" in event.text and "is not kept" in event.text for event in events] == [True]


def test_lines_of_another_file_are_added_once(tmp_path: Path) -> None:
    content = b"".join(to_line({"number": number}) for number in range(5))
    start = threading.Barrier(4)

    def merge(_: int) -> None:
        start.wait()
        lines(tmp_path).merge(content + b'{"torn"')

    lines(tmp_path).add({"number": 2})
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(merge, range(4)))
    held = lines(tmp_path).path(KEY).read_bytes().splitlines()
    assert {record["number"] for record in map(from_line, held) if record is not None} == set(range(5))
    lines(tmp_path).merge(content)
    assert lines(tmp_path).path(KEY).read_bytes().splitlines() == held
