"""What of a job is done on a machine without its GPU, and taken over by the one that builds."""

from __future__ import annotations

import json
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sweep_nets import write_sweep

from trtopt.fleet.plan import load_plan
from trtopt.fleet.ray_executor import prepared_files, receive
from trtopt.fleet.run import execute
from trtopt.fleet.run import prepare as prepare_in
from trtopt.fleet.task import REPORT, Task

pytest.importorskip("tensorrt_rtx", reason="builds engines")


def _task(folder: Path, precision: str, model: str = "net1", **options: Any) -> Task:
    """The job of a precision, with a cache in ``folder``."""
    (folder / "cache").mkdir(exist_ok=True)
    jobs = load_plan(write_sweep(folder / "sweep.toml", store="store")).jobs
    task = next(job for job in jobs if job.precision == precision and job.model == model).task()
    return Task(task.model, {**task.options, "cache_dir": str(folder / "cache"), **options})


def prepare(task: Task) -> dict[str, bytes]:
    """What is prepared, in a folder that goes."""
    with tempfile.TemporaryDirectory() as folder:
        assert prepare_in(task, Path(folder)).failure is None
        return prepared_files(Path(folder))


def _built(task: Task, folder: Path) -> tuple[dict[str, Any], bytes]:
    folder.mkdir()
    assert execute(task, folder).failure is None
    return json.loads((folder / REPORT).read_bytes()), (folder / "model.rtx.engine").read_bytes()


def test_what_was_prepared_elsewhere_is_not_done_again_and_the_engine_is_the_same(tmp_path: Path) -> None:
    task = _task(tmp_path, "int8")
    prepared = prepare(task)
    assert {name.split("/")[0] for name in prepared} >= {"calibration", "prices"}
    assert not any((tmp_path / "cache").iterdir())
    receive(prepared, task)
    report, engine = _built(task, tmp_path / "prepared")
    assert report["calibration"]["cached"]
    alone = _task(tmp_path, "int8", cache_dir=str(tmp_path / "other"))
    report, again = _built(alone, tmp_path / "alone")
    assert not report["calibration"]["cached"] and again == engine


def test_prices_are_added_to_those_of_the_gpu(tmp_path: Path) -> None:
    first, second = (prepare(_task(tmp_path, "int8", model)) for model in ("net1", "net2"))
    both = {name for name in first if name.startswith("prices/")} & second.keys()
    name = max(both, key=lambda name: len(first[name]))  # those of the regions; the others are of the recipes
    task, path = _task(tmp_path, "int8"), tmp_path / "cache" / name
    for prepared in (first, second, second):
        receive(prepared, task)
    lines = path.read_bytes().splitlines()
    assert set(lines) == {*first[name].splitlines(), *second[name].splitlines()} and len(lines) == len(set(lines))
    torn = second[name].splitlines(keepends=True)[0] + b'{"half'
    path.write_bytes(torn)
    receive(second, task)
    assert path.read_bytes().startswith(torn + b"\n") and set(second[name].splitlines()) <= {
        *path.read_bytes().splitlines()
    }


def test_a_cache_that_cannot_be_written_leaves_the_work_to_the_job(tmp_path: Path) -> None:
    task = _task(tmp_path, "int8", cache_dir=str(tmp_path / "sweep.toml"))
    receive({"calibration/x.calib": b"x"}, task)
    assert (tmp_path / "sweep.toml").read_text().startswith("[build]")


def test_only_jobs_that_calibrate_are_prepared(tmp_path: Path) -> None:
    assert [_task(tmp_path, name).is_worth_preparing for name in ("fp32", "fp16", "int8")] == [False, False, True]


def test_a_job_that_fails_is_left_to_fail_where_it_is_built(tmp_path: Path) -> None:
    task = _task(tmp_path, "int8")
    Path(task.model).write_bytes(b"no model")
    assert prepare(task) == {}
    (tmp_path / "out").mkdir()
    assert execute(task, tmp_path / "out").failure is not None


def test_what_cannot_be_received_leaves_the_rest(tmp_path: Path) -> None:
    task = _task(tmp_path, "int8")
    (tmp_path / "cache" / "prices").write_text("no folder")
    receive({"prices/p.jsonl": b"{}\n", "calibration/c.calib": b"statistics"}, task)
    assert (tmp_path / "cache" / "calibration" / "c.calib").read_bytes() == b"statistics"


def test_what_is_received_stays_in_the_folders_of_its_kinds(tmp_path: Path) -> None:
    task, before = _task(tmp_path, "int8"), sorted(tmp_path.rglob("*"))
    names = ("../out", "calibration/../../out", str(tmp_path / "out"), "engines/e.entry", "prices/a/b", "search/..", "")
    receive(dict.fromkeys(names, b"x"), task)
    left = {path for path in tmp_path.rglob("*") if path.is_file()} - set(before)
    assert not left


def test_jobs_that_receive_prices_at_once_lose_none(tmp_path: Path) -> None:
    task, workers = _task(tmp_path, "int8"), 8
    for turn in range(20):
        start = threading.Barrier(workers)

        def take(number: int, name: str = f"prices/{turn}.jsonl", start: threading.Barrier = start) -> None:
            start.wait()
            receive({name: b'{"of": %d}\n' % number}, task)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(take, range(workers)))
        assert len((tmp_path / "cache" / "prices" / f"{turn}.jsonl").read_bytes().splitlines()) == workers


def test_the_bound_of_the_cache_is_for_the_machine_that_builds(tmp_path: Path) -> None:
    assert any(name.startswith("calibration/") for name in prepare(_task(tmp_path, "int8", cache_gb=0.0)))
