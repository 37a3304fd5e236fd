"""The store of a sweep: entries are whole or not there."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sweep_samples import result

from trtopt.errors import UsageError
from trtopt.fleet.store import ENTRY, FolderStore, RemoteStore, Store, open_store, shown

KEY, OTHER = "ab" * 32, "cd" * 32


def _fill(store: Store, key: str, content: bytes = b"engine") -> None:
    with store.scratch() as folder:
        (folder / "model.rtx.engine").write_bytes(content)
        (folder / "report.json").write_bytes(b"{}")
        store.commit(key, folder, result())


@pytest.fixture(params=["folder", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(str(tmp_path / "store"))
    pytest.importorskip("fsspec", reason="needs fsspec")
    return open_store(f"file://{tmp_path}/store" if request.param == "file" else f"memory://{tmp_path.name}")


def test_what_is_committed_is_found_and_nothing_else(store: Store) -> None:
    store.check()
    assert store.entry(KEY) is None
    _fill(store, KEY)
    found = store.entry(KEY)
    assert found is not None and found.result == result()
    assert {name: item.bytes for name, item in found.files.items()} == {"model.rtx.engine": 6, "report.json": 2}
    assert store.entry(OTHER) is None
    assert store.location(KEY, "model.rtx.engine").endswith(f"{KEY}/model.rtx.engine")


def test_what_scripts_leave_beside_the_results_is_not_kept(store: Store) -> None:
    store.check()
    with store.scratch() as folder:
        (folder / "model.rtx.engine").write_bytes(b"engine")
        (folder / "my debug.txt").write_text("seen")
        (folder / "seen").mkdir()
        (folder / "seen" / "more").touch()
        (folder / "link").symlink_to(folder / "model.rtx.engine")
        store.commit(KEY, folder, result())
    found = store.entry(KEY)
    assert found is not None and list(found.files) == ["model.rtx.engine"]


def test_names_cannot_leave_the_store(store: Store) -> None:
    for key, name in (("../" + KEY, "engine"), (KEY, "../engine"), (KEY, ".hidden"), (KEY, "a/b"), ("", "engine")):
        with pytest.raises(ValueError, match="is no"):
            store.location(key, name)


def _cut(folder: Path) -> None:
    (folder / "model.rtx.engine").write_bytes(b"engin")


def _change(folder: Path) -> None:
    (folder / "model.rtx.engine").write_bytes(b"egnine")


def _remove(folder: Path) -> None:
    (folder / "report.json").unlink()


def _unseal(folder: Path) -> None:
    (folder / ENTRY).unlink()


def _replace_seal(folder: Path) -> None:
    (folder / ENTRY).write_bytes((folder / ENTRY).read_bytes().replace(b'"kernels": 3', b'"kernels": 4'))


def _link(folder: Path) -> None:
    (folder / "model.rtx.engine").rename(folder.parent / "elsewhere")
    (folder / "model.rtx.engine").symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize("damage", [_cut, _change, _remove, _unseal, _replace_seal, _link])
def test_a_damaged_entry_is_none_and_is_replaced(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = FolderStore(tmp_path)
    _fill(store, KEY)
    damage(tmp_path / KEY)
    assert store.entry(KEY) is None
    _fill(store, KEY, b"again!")
    assert store.entry(KEY) is not None and (tmp_path / KEY / "model.rtx.engine").read_bytes() == b"again!"
    assert not list(tmp_path.glob(".*.partial"))


def test_an_entry_of_another_job_is_none(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    _fill(store, KEY)
    (tmp_path / KEY).rename(tmp_path / OTHER)
    assert store.entry(OTHER) is None


def test_of_two_that_commit_the_first_stays(store: Store) -> None:
    store.check()
    _fill(store, KEY, b"first!")
    before = store.entry(KEY)
    _fill(store, KEY, b"second")
    assert store.entry(KEY) == before is not None


def test_sweeps_that_replace_a_damaged_entry_at_once_all_succeed(tmp_path: Path) -> None:
    store, sweeps = FolderStore(tmp_path), 8
    _fill(store, KEY)
    for _ in range(20):
        _cut(tmp_path / KEY)
        start = threading.Barrier(sweeps)

        def replace(_: int, start: threading.Barrier = start) -> None:
            start.wait()
            store.entry(KEY)
            _fill(store, KEY)

        with ThreadPoolExecutor(sweeps) as pool:
            list(pool.map(replace, range(sweeps)))
        assert store.entry(KEY) is not None
    assert [path.name for path in tmp_path.iterdir()] == [KEY]


def test_a_store_that_goes_away_is_refused(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    store.check()
    (tmp_path / "store").rmdir()
    with pytest.raises(UsageError, match="The store cannot be written: No such file"), store.scratch():
        pass


class OddError(Exception):
    """Of a kind of URL that has errors of its own."""


def test_errors_of_any_kind_of_url_are_those_of_the_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="needs fsspec")
    with pytest.raises(UsageError, match="The store cannot be used"):
        open_store("reference://x")
    store = open_store(f"memory://{tmp_path.name}")

    def fail(*_: object, **__: object) -> None:
        raise OddError("the line is dead")

    for name in ("makedirs", "size"):
        monkeypatch.setattr(fsspec.filesystem("memory"), name, fail)
    for ask in (store.check, lambda: store.entry(KEY), lambda: _fill(store, KEY)):
        with pytest.raises(UsageError, match=r"The store cannot be (read|written): the line is dead"):
            ask()


def test_a_job_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with pytest.raises(KeyboardInterrupt), store.scratch() as folder:
        (folder / "model.rtx.engine").write_bytes(b"engine")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_rights_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="The store cannot be written"):
        FolderStore(tmp_path / "store").check()


@pytest.mark.parametrize("place", ["/proc/trtopt-store", "/dev/null/store"])
def test_a_place_that_takes_no_folder_is_refused(place: str) -> None:
    if not Path("/proc").is_dir():
        pytest.skip("no /proc on this system")
    with pytest.raises(UsageError, match="The store cannot be written") as caught:
        FolderStore(Path(place)).check()
    assert caught.value.where == place
    pytest.importorskip("fsspec", reason="needs fsspec")
    with pytest.raises(UsageError, match="The store cannot be written"):
        RemoteStore(f"file://{place}").check()


def test_an_unknown_kind_of_url_is_refused() -> None:
    pytest.importorskip("fsspec", reason="needs fsspec")
    with pytest.raises(UsageError, match="The store cannot be used") as caught:
        open_store("nowhere://bucket/sweeps")
    assert caught.value.where == "nowhere://bucket/sweeps"


def test_a_result_keeps_every_field(tmp_path: Path) -> None:
    store, odd = FolderStore(tmp_path), result(drop=None, latency_us=None, failures=("one", "two"), engine="")
    with store.scratch() as folder:
        store.commit(KEY, folder, odd)
    found = store.entry(KEY)
    assert found is not None and dataclasses.asdict(found.result) == dataclasses.asdict(odd)


def test_what_killed_sweeps_left_is_removed_after_a_day(tmp_path: Path) -> None:
    for name, age in ((f".{'0' * 16}.partial", 90_000), (f".{'1' * 16}.partial", 60), (".mine.partial", 90_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.rtx.engine").write_bytes(b"engine")
        os.utime(tmp_path / name, (time.time() - age, time.time() - age))
    FolderStore(tmp_path).check()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{'1' * 16}.partial", ".mine.partial"]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("ftp://user:pw@host:21/sweeps", "ftp://***@host:21/sweeps"),
        ("s3://KEY:sec/ret+@bucket/sweeps", "s3://***@bucket/sweeps"),
        ("ftp://user:p?w@host/a", "ftp://***@host/a"),
        ("https://token@host/a@b", "https://***@host/a@b"),
        ("simplecache::ftp://user:pw@host/a", "simplecache::ftp://***@host/a"),
        ("abfs://box/sweeps?sv=1&sig=secret", "abfs://box/sweeps?***"),
        ("s3://bucket/me@here", "s3://bucket/me@here"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("ftp://host:21/a@b", "ftp://host:21/a@b"),
        ("/home/me@here/a?b", "/home/me@here/a?b"),
    ],
)
def test_a_store_is_shown_without_credentials(place: str, expected: str) -> None:
    assert shown(place) == expected


def test_credentials_reach_the_store_and_neither_locations_nor_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec", reason="needs fsspec")
    store = open_store("memory://user:p%40ss@host/credentials")
    _fill(store, KEY)
    files = fsspec.filesystem("memory")
    assert files.exists(f"/user:p%40ss@host/credentials/{KEY}/{ENTRY}")
    assert store.location(KEY, "model.rtx.engine") == f"memory://***@host/credentials/{KEY}/model.rtx.engine"

    def fail(*_: object, **__: object) -> None:
        raise OddError("530 user:p%40ss@host: the password p@ss is wrong")

    for name in ("makedirs", "size"):
        monkeypatch.setattr(files, name, fail)
    for ask in (store.check, lambda: store.entry(KEY)):
        with pytest.raises(UsageError) as caught:
            ask()
        assert (
            "ss" not in caught.value.what.replace("password", "")
            and caught.value.where == "memory://***@host/credentials"
        )
    for url in ("ftp://user:secret@127.0.0.1:1/x", "nowhere://user:secret@host/x"):
        with pytest.raises(UsageError, match="The store cannot be used") as caught:
            open_store(url)
        assert "secret" not in str(caught.value) and "***@" in caught.value.where
