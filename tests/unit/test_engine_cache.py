"""The cache of engines: what is damaged is seen, what cannot be kept is no loss, and one process builds at a time."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
from cache_damage import corruptions

from trtopt.cache.folder import Pruned, damage, files, is_outdated, prune
from trtopt.engine.cache import Compiled, EngineCache
from trtopt.errors import EngineBuildError, UsageError
from trtopt.events import Event, ignore

KEY = "0123456789abcdef" * 4
OTHER = "f" * 64
ENTRY = Compiled(
    engine=bytes(range(256)) * 8,
    layers="Layers:\nName: \u00e9, ...",
    messages=(("WARNING", "odd \ud800 text\nin two lines"),),
    version="1.7.1.116",
    seconds=12.5,
    timing_cache=b"times",
    sized="Layers:\n",
)
DAMAGES = 50


def builds(entry: Compiled = ENTRY) -> tuple[list[Compiled], Callable[[], Compiled]]:
    """A builder of one engine, and the list of what it built."""
    made: list[Compiled] = []

    def make() -> Compiled:
        made.append(entry)
        return entry

    return made, make


def same(compiled: Compiled) -> Compiled:
    return compiled


def kept(folder: Path, key: str = KEY, entry: Compiled = ENTRY) -> Path:
    """The file of an entry that was just kept."""
    cache = EngineCache(folder, ignore)
    assert cache.obtain(key, builds(entry)[1], same) == (entry, False)
    return cache.path(key)


def read(folder: Path, key: str = KEY) -> tuple[bool, list[str]]:
    """Whether the entry was taken from the cache, and the warnings; what came is right in either case."""
    events: list[Event] = []
    made, make = builds()
    found, cached = EngineCache(folder, events.append).obtain(key, make, same)
    assert found == ENTRY and cached == (not made)
    return cached, [event.text for event in events if event.kind == "warning"]


@pytest.mark.parametrize("missing", [{}, {"timing_cache": None}, {"sized": None}, {"messages": (), "layers": ""}])
def test_an_entry_comes_back_as_it_was(tmp_path: Path, missing: dict[str, Any]) -> None:
    entry = Compiled(**{**vars(ENTRY), **missing})
    kept(tmp_path, entry=entry)
    assert EngineCache(tmp_path, ignore).obtain(KEY, builds()[1], same) == (entry, True)


def test_another_key_is_another_engine(tmp_path: Path) -> None:
    kept(tmp_path)
    assert read(tmp_path, OTHER)[0] is False
    assert read(tmp_path, KEY)[0] is True


def test_random_damage_is_seen_and_the_engine_built_anew(tmp_path: Path) -> None:
    path = kept(tmp_path)
    whole = path.read_bytes()
    for index, (what, damaged) in enumerate(corruptions(whole, DAMAGES, random.Random(8))):
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(damaged)
            (file,) = files(tmp_path)
            assert damage(file), f"{index}: {what} was not seen by verify"
        cached, warnings = read(tmp_path)
        assert not cached, f"{index}: {what} was not seen"
        assert damaged is None or (len(warnings) == 1 and "built anew" in warnings[0]), (index, what, warnings)
        assert path.read_bytes() == whole
        assert read(tmp_path) == (True, [])


def test_no_bit_of_the_header_can_change(tmp_path: Path) -> None:
    path = kept(tmp_path)
    whole = path.read_bytes()
    for bit in range(0, 8 * (whole.index(b"\n") + 1), 3):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert read(tmp_path)[0] is False, bit


def test_an_entry_under_the_name_of_another_is_not_used(tmp_path: Path) -> None:
    path = kept(tmp_path)
    os.rename(path, path.with_name(f"{OTHER}.entry"))
    cached, warnings = read(tmp_path, OTHER)
    assert not cached and "another model" in warnings[0]


def test_an_entry_that_the_reader_refuses_is_built_anew(tmp_path: Path) -> None:
    kept(tmp_path)

    def refuse(compiled: Compiled) -> Compiled:
        raise EngineBuildError("The list of layers is not understood")

    events: list[Event] = []
    with pytest.raises(EngineBuildError):  # the one of the new build: what is in the cache is never an error
        EngineCache(tmp_path, events.append).obtain(KEY, builds()[1], refuse)
    assert [event.kind for event in events] == ["warning"] and "not understood" in events[0].text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are POSIX's")
def test_a_pipe_or_a_folder_in_the_place_of_an_entry_stops_nothing(tmp_path: Path) -> None:
    path = EngineCache(tmp_path, ignore).path(KEY)
    os.mkfifo(path)
    assert "no file" in read(tmp_path)[1][0]
    assert read(tmp_path)[0] is True
    path.unlink()
    path.mkdir()
    cached, warnings = read(tmp_path)
    assert not cached and any("not kept" in text for text in warnings)


def test_a_build_that_fails_keeps_nothing_and_frees_the_next(tmp_path: Path) -> None:
    def fail() -> Compiled:
        raise EngineBuildError("refused")

    for _ in range(2):
        with pytest.raises(EngineBuildError, match="refused"):
            EngineCache(tmp_path, ignore).obtain(KEY, fail, same)
    assert files(tmp_path) == [] and read(tmp_path)[0] is False


@pytest.mark.skipif(os.name == "nt", reason="limits of a file's size are POSIX's")
def test_on_a_full_disk_the_build_works_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit of the size of files stands in for the full disk: writing fails half-way in the same place."""
    import resource

    cache_of = EngineCache(tmp_path, (events := []).append)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        found = cache_of.obtain(KEY, builds()[1], same)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert found == (ENTRY, False)
    assert len(events) == 1 and "not kept" in events[0].text
    assert [path.name for path in (tmp_path / "engines").iterdir()] == []


def test_a_folder_that_cannot_be_made_is_an_error_only_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".cache").write_text("in the way")
    with pytest.raises(UsageError, match="cannot be made") as caught:
        EngineCache(tmp_path / ".cache", ignore)
    assert "--cache-dir" in caught.value.remedy
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    made, make = builds()
    events: list[Event] = []
    assert EngineCache(None, events.append).obtain(KEY, make, same) == (ENTRY, False)
    assert len(made) == 1 and len(events) == 1 and "not kept" in events[0].text


def test_a_folder_of_another_user_is_read_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    folder = tmp_path / ".cache" / "trtopt"
    kept(folder)
    places = [folder, *(path for path in folder.iterdir() if path.is_dir())]
    for place in places:
        place.chmod(0o555)
    if os.access(folder, os.W_OK):
        pytest.skip("whoever runs this may write everywhere")
    try:
        events: list[Event] = []
        assert EngineCache(None, events.append).obtain(KEY, builds()[1], same) == (ENTRY, True)
        assert EngineCache(None, events.append).obtain(OTHER, builds()[1], same) == (ENTRY, False)
        assert all("not kept" in event.text for event in events)
    finally:
        for place in places:
            place.chmod(0o755)


def test_an_engine_larger_than_the_cache_may_be_is_not_kept(tmp_path: Path) -> None:
    events: list[Event] = []
    cache = EngineCache(tmp_path, events.append, max_bytes=100)
    assert cache.obtain(KEY, builds()[1], same) == (ENTRY, False)
    assert files(tmp_path) == [] and "larger" in events[0].text


def test_timing_caches_are_kept_by_gpu_and_version(tmp_path: Path) -> None:
    events: list[Event] = []
    cache = EngineCache(tmp_path, events.append)
    cache.keep_timing("NVIDIA L4 8.9 10.13.0", b"times")
    assert cache.timing("NVIDIA L4 8.9 10.13.0") == b"times"
    assert cache.timing("NVIDIA L4 8.9 10.14.0") == cache.timing("NVIDIA A10 8.6 10.13.0") == b""
    assert events == []
    (file,) = files(tmp_path)
    assert "NVIDIA-L4-8.9-10.13.0" in file.path.name and damage(file) == ""
    for what, damaged in corruptions(file.path.read_bytes(), DAMAGES, random.Random(9)):
        if damaged is not None:
            file.path.write_bytes(damaged)
            assert cache.timing("NVIDIA L4 8.9 10.13.0") == b"", what
    assert all("timed anew" in event.text for event in events) and events


def test_what_was_used_longest_ago_is_evicted_first(tmp_path: Path) -> None:
    keys = [f"{index:064}" for index in range(4)]
    paths = [kept(tmp_path, key) for key in keys]
    size = paths[0].stat().st_size
    for age, path in enumerate(paths):
        os.utime(path, (0, 1_000_000 + age))
    assert EngineCache(tmp_path, ignore).obtain(keys[0], builds()[1], same)[1]  # used now
    removed = prune(tmp_path, max_bytes=2 * size).removed
    assert [file.path for file in removed] == paths[1:3]
    assert {file.path for file in files(tmp_path)} == {paths[0], paths[3]}
    assert [file.path for file in prune(tmp_path, older_than_s=3600).removed] == [paths[3]]
    assert prune(tmp_path, max_bytes=size) == Pruned((), ())


def test_entries_of_another_version_are_pruned_when_asked_and_before_others(tmp_path: Path) -> None:
    old, new = kept(tmp_path), kept(tmp_path, OTHER)
    old.write_bytes(old.read_bytes().replace(b"engine-cache/2", b"engine-cache/1", 1))
    size = new.stat().st_size
    os.utime(new, (0, 1_000_000))
    assert read(tmp_path / "elsewhere")[0] is False
    assert [is_outdated(file) for file in files(tmp_path)] == [False, True]
    assert prune(tmp_path, max_bytes=2 * size).removed == ()  # whoever shares the folder may still use them
    assert [file.path for file in prune(tmp_path, max_bytes=size, outdated=True).removed] == [old]
    kept(tmp_path)
    old.write_bytes(old.read_bytes().replace(b"engine-cache/2", b"engine-cache/1", 1))
    cached, warnings = read(tmp_path)
    assert not cached and "another version of trtopt" in warnings[0]
    assert read(tmp_path) == (True, [])


def test_what_killed_runs_left_is_swept_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    path = kept(tmp_path)
    fresh, old = (path.with_name(f".{name}.{8 * '0f'}.partial") for name in ("fresh", "old"))
    foreign = path.with_name("notes.txt")
    for file in (fresh, old, foreign):
        file.write_bytes(b"x")
    lock, held = (tmp_path / "locks" / f"{key}.lock" for key in (KEY, OTHER))
    long_ago = time.time() - 10 * 86400
    with EngineCache(tmp_path, ignore)._locked(OTHER):
        for file in (old, foreign, lock, held):
            os.utime(file, (long_ago, long_ago))
        assert prune(tmp_path, max_bytes=1e9) == Pruned((), ())
        assert held.exists()
    assert fresh.exists() and foreign.exists() and not old.exists() and not lock.exists()
    assert read(tmp_path)[0] is True


@pytest.mark.long
def test_an_entry_that_is_evicted_while_it_is_read_is_whole_or_missing(tmp_path: Path) -> None:
    """A reader against a process that keeps removing and writing: never an error, never another content."""
    context = multiprocessing.get_context("spawn")
    evictor = context.Process(target=_evict_and_keep, args=(tmp_path, 1.5))
    evictor.start()
    hits = misses = 0
    try:
        while evictor.is_alive():
            cached, warnings = read(tmp_path)
            hits, misses = hits + cached, misses + (not cached)
            assert [text for text in warnings if "waiting" not in text] == []
    finally:
        evictor.join(30)
    assert hits and misses


def _evict_and_keep(folder: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        prune(folder, max_bytes=0)
        EngineCache(folder, ignore).obtain(KEY, builds()[1], same)


SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def said() -> Iterator[Queue[str]]:
    queue: Queue[str] = SPAWN.Queue()
    yield queue
    queue.close()


def _hold(folder: Path, said: Queue[str]) -> None:
    """Start to build, and never end."""

    def make() -> Compiled:
        said.put("building")
        time.sleep(600)
        return ENTRY

    EngineCache(folder, ignore).obtain(KEY, make, same)


def _obtain(folder: Path, said: Queue[str]) -> None:
    def make() -> Compiled:
        time.sleep(0.3)
        return ENTRY

    def listen(event: Event) -> None:
        said.put(event.kind)

    found, cached = EngineCache(folder, listen).obtain(KEY, make, same)
    said.put(f"{'cached' if cached else 'built'} {found == ENTRY}")


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX's")
@pytest.mark.long
def test_who_waits_goes_on_when_the_builder_is_killed(tmp_path: Path, said: Queue[str]) -> None:
    holder = SPAWN.Process(target=_hold, args=(tmp_path, said))
    holder.start()
    assert said.get(timeout=60) == "building"
    waiter = SPAWN.Process(target=_obtain, args=(tmp_path, said))
    waiter.start()
    assert said.get(timeout=60) == "warning"  # it says that it waits
    assert waiter.is_alive()
    holder.kill()
    holder.join(60)
    assert said.get(timeout=60) == "built True"
    waiter.join(60)
    assert read(tmp_path) == (True, [])


@pytest.mark.long
def test_of_many_that_want_one_engine_one_builds(tmp_path: Path, said: Queue[str]) -> None:
    processes = [SPAWN.Process(target=_obtain, args=(tmp_path, said)) for _ in range(4)]
    for process in processes:
        process.start()
    answers = []
    while len(answers) < len(processes):
        text = said.get(timeout=60)
        if text != "warning":
            answers.append(text)
    for process in processes:
        process.join(60)
    assert sorted(answers) == ["built True", *["cached True"] * 3]
