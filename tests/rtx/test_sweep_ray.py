"""A sweep on a real Ray cluster: several nodes of this machine, with GPUs they say they have."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sweep_nets import write_sweep

import trtopt
from trtopt.errors import TargetError
from trtopt.fleet import ray_executor

pytest.importorskip("tensorrt_rtx", reason="builds engines")
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs Ray")

_PATIENT = {"agent_register_timeout_ms": 120_000, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}


def _node(gpu: str) -> dict[str, Any]:
    label = {f"accelerator_type:{gpu}": 1}
    return {"num_cpus": 1, "num_gpus": 1, "resources": label, "object_store_memory": 80 << 20}


def _started(start: Callable[[], Any]) -> Any:
    """What ``start`` gives: on a busy machine Ray loses patience with its own processes, which take 30 s and more."""
    for _ in range(5):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    pytest.skip("this machine is too busy to start Ray: its processes did not answer in time, five times")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head with an A10 and a node with an L4; the test adds another."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    head = {**_node("A10"), "include_dashboard": False, "_system_config": _PATIENT}
    found = _started(lambda: cluster_utils.Cluster(initialize_head=True, head_node_args=head))
    try:
        _started(lambda: found.add_node(**_node("L4"), wait=False))
        yield found
    finally:
        found.shutdown()


_AT_A_JOB = [f"ray::{task.__name__}".encode() for task in (ray_executor.run, ray_executor.prepare)]
"""What Ray calls a worker while it runs a job, or prepares one: a node with one core may do only the latter."""


def _busy(raylet: int) -> int | None:
    """A worker of the node that runs a job: Ray names the process after it, and its own agents otherwise."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                name = (folder / "cmdline").read_bytes().rstrip(b"\0 ")
                if parent == raylet and name in _AT_A_JOB:
                    return int(folder.name)
            except OSError:
                continue
    return None


def _stopped_at_work(raylet: int) -> int | None:
    """A worker of the node, stopped in the middle of its job; None where it has none for ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        worker = _busy(raylet)
        if worker is not None:
            os.kill(worker, signal.SIGSTOP)
            if _busy(raylet) == worker:
                return worker
            os.kill(worker, signal.SIGCONT)
        time.sleep(0.02)
    return None


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, of the nodes too."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", tempfile.gettempdir())  # its sockets need short names
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def _left(temporary: Path) -> list[str]:
    return sorted(path.name for path in temporary.glob("trtopt-*"))


@pytest.mark.long
def test_24_builds_survive_the_loss_of_a_node_and_are_those_of_local_processes(
    tmp_path: Path, temporary: Path, cluster: Any
) -> None:
    doomed = _started(lambda: cluster.add_node(**_node("L4"), wait=False))
    cluster.wait_for_nodes()
    raylet = doomed.all_processes["raylet"][0].process.pid
    ended: list[str] = []

    def watch(event: Any) -> None:
        if event.kind == "end":
            ended.append(event.row.key)

    def strike() -> None:
        # In a thread of its own: that of the sweep gives out the jobs, and the node has one for a moment only.
        while len(ended) < 24:
            if len(ended) >= 2 and (worker := _stopped_at_work(raylet)) is not None:
                cluster.remove_node(doomed, allow_graceful=False)
                os.kill(worker, signal.SIGKILL)
                return
            time.sleep(0.02)

    striking = threading.Thread(target=strike, daemon=True)
    striking.start()
    on_ray = write_sweep(tmp_path / "ray.toml", store="ray", settings="on_gpu = true")
    report = trtopt.sweep(on_ray, executor="ray", address=cluster.address, on_progress=watch)
    striking.join(timeout=30)
    assert not doomed.all_processes, "the node got no job"
    assert [row.failure for row in report.rows] == [None] * 24
    assert sorted(ended) == sorted(row.key for row in report.rows) and len(set(ended)) == 24
    assert sum(row.attempts for row in report.rows) > 24 and "the worker was lost" in report.warnings[0]
    assert sorted(path.name for path in (tmp_path / "ray").iterdir()) == sorted(ended)
    eight = [row.key for row in report.rows if row.precision == "int8"]
    calibrations = [json.loads((tmp_path / "ray" / key / "report.json").read_bytes())["calibration"] for key in eight]
    assert len(eight) == 8 and all(found["cached"] for found in calibrations)  # none on a GPU's node
    assert _left(temporary) == [], "also of the node that was killed at a job"

    def stop(event: Any) -> None:
        if event.kind == "end":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trtopt.sweep(
            write_sweep(tmp_path / "s.toml", store="stopped"),
            executor="ray",
            address=cluster.address,
            on_progress=stop,
        )
    assert _left(temporary) == [] and len(list((tmp_path / "stopped").iterdir())) == 1

    with pytest.raises(TargetError, match="No node of the cluster has the GPU RTX-4090") as caught:
        on_ray.write_text(on_ray.read_text().replace('"L4", "A10"', '"L4", "RTX 4090"'))
        trtopt.sweep(on_ray, executor="ray", address=cluster.address)
    assert "A10, L4" in caught.value.where and "accelerator_type:RTX-4090" in caught.value.remedy

    here = trtopt.sweep(write_sweep(tmp_path / "here.toml", store="here"), workers=2)
    for there, mine in zip(report.rows, here.rows, strict=True):
        assert there.varied == mine.varied and mine.attempts == 1
        for suffix in ("", ".manifest.json"):
            assert Path(there.engine + suffix).read_bytes() == Path(mine.engine + suffix).read_bytes()
