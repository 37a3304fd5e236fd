"""Temporary folders: which of them the next run removes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trtopt.support.temporary import TEMPORARY, TemporaryFolder, remove_left

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs locks of folders")

HOLDS = """
import os, sys, time
from trtopt.support.temporary import TemporaryFolder
folder = TemporaryFolder("build-")
open(os.path.join(folder.name, "weights"), "w").close()
if sys.argv[1] == "forks" and os.fork():
    os.kill(os.getpid(), 9)
print(os.getpid(), folder.name, flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def started(how: str) -> tuple[subprocess.Popen[str], int, Path]:
    """A process that holds a folder: itself, its number (that of its child where it forks) and the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    number, _, name = process.stdout.readline().strip().partition(" ")
    return process, int(number), Path(name)


def remove() -> None:
    """What the next run does when it starts, some minutes later."""
    remove_left.cache_clear()
    remove_left()


def aged(folder: Path) -> Path:
    os.utime(folder, (time.time() - 3600,) * 2)
    return folder


def test_a_folder_goes_with_its_owner_and_one_of_a_killed_process_with_the_next_run(place: Path) -> None:
    with TemporaryFolder("parse-") as name:
        assert Path(name).name.startswith(f"{TEMPORARY}parse-")
        remove()
    assert not Path(name).exists()
    process, _, folder = started("alone")
    remove()
    aged(folder)
    remove()
    assert folder.exists(), "its process lives"
    process.kill()
    process.wait()
    remove()
    assert not folder.exists()


def test_a_folder_stays_while_a_forked_process_lives_though_its_parent_is_killed(place: Path) -> None:
    process, child, folder = started("forks")
    process.wait()
    aged(folder)
    try:
        remove()
        assert (folder / "weights").exists()
    finally:
        os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while folder.exists() and time.monotonic() < deadline:
        remove()
        aged(folder) if folder.exists() else None
        time.sleep(0.05)
    assert not folder.exists()


def test_only_old_folders_of_ours_go(place: Path) -> None:
    own = place / "keep"
    own.mkdir()
    (own / "file").touch()
    link = place / "trtopt-run-00000000-link"
    link.symlink_to(own)
    file = place / "trtopt-run-00000000-file"
    file.touch()
    young, other, left = (place / name for name in ("trtopt-run-00000000-young", "trtopt-results", "trtopt-run-1-old"))
    for folder in (young, other, left):
        folder.mkdir()
    (left / "a").mkdir()
    (left / "outside").symlink_to(own)
    for path in (own, other, left):
        aged(path)
    os.utime(file, (time.time() - 3600,) * 2)
    remove()
    assert sorted(path.name for path in place.iterdir()) == sorted(
        path.name for path in (own, link, file, young, other)
    )
    assert (own / "file").exists()


def test_the_folder_of_an_object_that_nobody_holds_goes_and_frees_its_lock(place: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.warns(ResourceWarning):
        TemporaryFolder()
    assert not list(place.iterdir())
    if before:
        assert len(os.listdir("/proc/self/fd")) == before
