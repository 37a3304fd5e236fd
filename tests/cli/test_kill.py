"""A run killed at any moment leaves whole files or none."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from small_models import samples, save_small

from trtopt.cache.folder import damage, files
from trtopt.engine.backend import read_header
from trtopt.engine.manifest import load_engine, manifest_path
from trtopt.errors import IntegrityError, UsageError

pytestmark = [pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX's"), pytest.mark.long]

KILLS_BY_TIME = 4
KILLS_BY_FILE = 6
_PAUSE_S = 0.0002
OUTPUTS = {
    "-o": "model.engine",
    "--save-onnx": "model.onnx",
    "--report": "report.json",
    "--export-layer-info": "layers.json",
    "--calib-cache": "calib.cache",
}
INT8 = ("--int8", "--keep-all-int8", "--recipes", "none")
ENGINE = OUTPUTS["-o"]
ALL = {*OUTPUTS.values(), "report.build.log", f"{ENGINE}.manifest.json"}


def _start(folder: Path, *, precision: Sequence[str] = INT8) -> subprocess.Popen[bytes]:
    outputs = [argument for option, name in OUTPUTS.items() for argument in (option, f"out/{name}")]
    environment = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder / "tmp")}
    return subprocess.Popen(
        [sys.executable, "-m", "trtopt", "build", "model.onnx", *precision, "--calib", "calib.npz", *outputs],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the command alone, look at what is there only when its worker has gone too."""
    process.kill()
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _check_whole(out: Path) -> set[str]:
    """Check every visible file; returns their names."""
    names = {path.name for path in out.iterdir()}
    visible = {name for name in names if not name.startswith(".")}
    assert all(name.endswith(".partial") for name in names - visible)
    assert visible <= ALL
    if ENGINE in visible and f"{ENGINE}.manifest.json" not in visible:
        with pytest.raises(UsageError, match="no manifest"):
            load_engine(out / ENGINE)
    elif f"{ENGINE}.manifest.json" in visible:
        load_engine(out / ENGINE)
    for name in visible:
        data = (out / name).read_bytes()
        assert data, name
        if name == ENGINE:
            assert read_header(data).bytes == len(data)
        elif name.endswith(".json"):
            assert json.loads(data)["schema"].startswith("trtopt.")
        elif name.endswith(".onnx"):
            onnx.checker.check_model(onnx.load_from_string(data))
    return visible


def _killed_run(folder: Path, until: Callable[[], bool]) -> set[str]:
    """Start a run, kill it as soon as ``until``, check its files, and remove them."""
    out = folder / "out"
    process = _start(folder)
    try:
        while process.poll() is None and not until():
            time.sleep(_PAUSE_S)
    finally:
        _kill(process)
    visible = _check_whole(out)
    for path in out.iterdir():
        path.unlink()
    cache = folder / ".cache" / "trtopt"
    assert [file for file in files(cache) if damage(file)] == []
    shutil.rmtree(cache, ignore_errors=True)  # the next run compiles as well
    return visible


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_small(tmp_path)
    np.savez(tmp_path / "calib.npz", x=samples())
    (tmp_path / "out").mkdir()
    (tmp_path / "tmp").mkdir()
    return tmp_path


def test_a_killed_run_leaves_whole_files_or_none(folder: Path) -> None:
    """Kills at seeded random moments, then as soon as the first, second, ... name appears in the folder."""
    out = folder / "out"
    start = time.monotonic()
    assert _start(folder).wait(timeout=300) == 0
    duration = time.monotonic() - start
    assert _check_whole(out) == ALL

    dice = random.Random(20)
    for _ in range(KILLS_BY_TIME):
        moment = time.monotonic() + dice.uniform(0.0, duration)
        _killed_run(folder, lambda moment=moment: time.monotonic() >= moment)  # type: ignore[misc]

    entries: set[str] = set()
    partial = False
    for count in range(1, KILLS_BY_FILE + 1):
        entries.clear()

        def enough(count: int = count) -> bool:
            entries.update(os.listdir(out))
            return len(entries) >= count

        partial |= len(_killed_run(folder, enough)) < len(ALL)
    assert partial, "no run was killed before it had written everything"

    assert _start(folder).wait(timeout=300) == 0
    assert _check_whole(out) == ALL


def test_a_run_killed_over_an_older_build_leaves_no_mixture_that_is_accepted(folder: Path) -> None:
    """Kills as soon as the engine, and then the manifest, is another file than before."""
    out = folder / "out"
    engine = out / ENGINE
    assert _start(folder, precision=("--fp32", "--recipes", "none")).wait(timeout=300) == 0
    older = {path: path.read_bytes() for path in out.iterdir()}
    for watched in (engine, manifest_path(engine)):
        for path, content in older.items():
            path.write_bytes(content)
        before, old = load_engine(engine), watched.stat().st_ino
        process = _start(folder)
        try:
            while process.poll() is None and watched.stat().st_ino == old:
                time.sleep(_PAUSE_S)
        finally:
            _kill(process)
        assert engine.read_bytes() != before.data
        try:
            found = load_engine(engine)
        except IntegrityError as error:
            assert watched == engine and "not the one that its manifest describes" in error.what
        else:
            assert found.manifest is not None and found.manifest.options["precision"] == "int8"
