"""How builds scale from one worker to two, and what 10,000 jobs that do nothing cost.

python benchmarks/sweep/run.py [--repeats 5] [--builds 8] [--jobs 10000] [--only scaling|local|ray|plan]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from trtopt.config import BuildConfig  # noqa: E402
from trtopt.fleet.executor import (  # noqa: E402
    Executor,
    LocalExecutor,
    Scheduler,
)
from trtopt.fleet.plan import Job, check_distinct, job_key, load_plan  # noqa: E402
from trtopt.fleet.store import FolderStore  # noqa: E402
from trtopt.report.schema.write import environment  # noqa: E402

WARM_UP = 2


def save_net(path: Path, seed: int) -> None:
    """x [4, 3, 32, 32] -> eight convolutions 3x3 of 32 channels with ReLU -> average, Gemm -> [4, 10]."""
    rng = np.random.default_rng(seed)
    nodes, weights, before, channels = [], {}, "x", 3
    for index in range(8):
        weights[f"w{index}"] = rng.standard_normal((32, channels, 3, 3)) / (3 * channels**0.5)
        nodes.append(helper.make_node("Conv", [before, f"w{index}"], [f"c{index}"], f"conv{index}", pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{index}"], [f"r{index}"], f"relu{index}"))
        before, channels = f"r{index}", 32
    weights["head"] = rng.standard_normal((32, 10)) / 6
    nodes.append(helper.make_node("GlobalAveragePool", [before], ["p"], "pool"))
    nodes.append(helper.make_node("Flatten", ["p"], ["f"], "flatten"))
    nodes.append(helper.make_node("Gemm", ["f", "head"], ["y"], "head"))
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3, 32, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 10])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@contextlib.contextmanager
def folders(root: Path) -> Iterator[Path]:
    """A folder for a job."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        yield Path(folder)


def cpu_of_children() -> float:
    """CPU seconds of processes that ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(executor: Executor, jobs: dict[int, Job], root: Path, took: list[float] | None = None) -> float:
    """Seconds that the jobs take; ``took`` gets those of each.

    Raises:
        SystemExit: One failed.
    """
    failed: list[str] = []

    def end(finished: Any) -> None:
        if finished.outcome.failure is not None:
            failed.append(finished.outcome.failure.what)
        if took is not None:
            took.append(finished.outcome.seconds)

    began = time.perf_counter()
    scheduler = Scheduler(
        executor=executor,
        retries=0,
        scratch=lambda: folders(root),
        on_end=end,
        on_lost=lambda number, reason, again: failed.append(reason),
        on_start=lambda number: None,
    )
    scheduler.run(jobs)
    if failed:
        raise SystemExit(f"a job failed: {failed[0]}")
    return time.perf_counter() - began


def scaling(repeats: int, builds: int) -> dict[str, Any]:
    """FP16 builds without cache, one thread each: by one worker and by two in turn, warmed up.

    On a machine that does other work the ratio of seconds says little; what also holds there is the share of the time
    in which workers are at a job, and the CPU time of all processes, start and warm-up included."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    busy: dict[int, list[float]] = {1: [], 2: []}
    cpu: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for seed in range(builds):
            save_net(root / f"net{seed}.onnx", seed)
        models = ", ".join(f'"net{seed}.onnx"' for seed in range(builds))
        (root / "s.toml").write_text(f"[build]\nno_cache = true\n[matrix]\nmodel = [{models}]\n")
        jobs = dict(enumerate(load_plan(root / "s.toml").jobs))
        for repeat in range(repeats):
            for workers in (1, 2) if repeat % 2 == 0 else (2, 1):
                before, jobs_s = cpu_of_children(), []
                executor = LocalExecutor(workers, threads=1)
                try:
                    run(executor, {number: jobs[number] for number in range(WARM_UP)}, root)
                    seconds[workers].append(run(executor, jobs, root, jobs_s))
                finally:
                    executor.close()
                cpu[workers].append(cpu_of_children() - before)
                busy[workers].append(sum(jobs_s) / workers / seconds[workers][-1])
    ratios = [one / two for one, two in zip(seconds[1], seconds[2], strict=True)]
    found = {"builds": builds, "seconds": seconds, "busy": busy, "cpu_seconds": cpu, "ratios": ratios}
    return {**found, "ratio": statistics.median(ratios)}


def nothing(executor: Executor, count: int) -> dict[str, Any]:
    """Jobs that do nothing: wall-clock seconds, and CPU seconds of the process that schedules."""
    job = Job({}, "net", BuildConfig(), (), "L4", "", False)
    executor.survey([""])
    with tempfile.TemporaryDirectory() as name:
        run(executor, dict.fromkeys(range(100), job), Path(name))
        before = time.process_time()
        wall = run(executor, dict.fromkeys(range(count), job), Path(name))
        cpu = time.process_time() - before
    executor.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"jobs": count, "ms_per_job": 1e3 * wall / count, "cpu_ms_per_job": 1e3 * cpu / count, "peak_mib": peak}


def plan(count: int) -> dict[str, Any]:
    """Reading, hashing and looking up a sweep of so many jobs: the combinations of two thresholds."""
    side = round(count**0.5)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        save_net(root / "net.onnx", 0)
        drops = ", ".join(str(index / 1e4) for index in range(side))
        sqnrs = ", ".join(str(float(index)) for index in range(side))
        (root / "s.toml").write_text(
            f'[matrix]\nmodel = ["net.onnx"]\nmax_accuracy_drop = [{drops}]\nmin_sqnr_db = [{sqnrs}]\n'
        )
        began = time.perf_counter()
        jobs = load_plan(root / "s.toml").jobs
        keys = [job_key(job, "0", "0", {}) for job in jobs]
        check_distinct(jobs, keys)
        planned = time.perf_counter() - began
        store = FolderStore(root / "store")
        began = time.perf_counter()
        for key in keys:
            store.entry(key)
        looked = time.perf_counter() - began
    return {
        "jobs": len(jobs),
        "plan_ms_per_job": 1e3 * planned / len(jobs),
        "look_ms_per_job": 1e3 * looked / len(jobs),
    }


def main() -> None:
    """Measure, and write ``results.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--builds", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--only", choices=("scaling", "local", "ray", "plan"))
    args = parser.parse_args()
    path = HERE / "results.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    load = os.getloadavg()[0]

    def ray() -> Executor:
        from trtopt.fleet.ray_executor import RayExecutor

        return RayExecutor(None, 2, "noop:execute")

    parts = {
        "scaling": lambda: scaling(args.repeats, args.builds),
        "plan": lambda: plan(args.jobs),
        "local": lambda: nothing(LocalExecutor(2, function="noop:execute"), args.jobs),
        "ray": lambda: nothing(ray(), args.jobs),
    }
    for name, part in parts.items():
        if args.only in (None, name):
            found[name] = {**part(), "load_before": load, "load_after": os.getloadavg()[0]}
            print(name, json.dumps(found[name]))
    found["environment"] = {**environment(), "cpu_count": os.cpu_count(), "machine": platform.machine()}
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
