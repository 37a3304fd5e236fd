"""What ``trtopt.Engine`` costs over a bare ONNX Runtime session, and what it answers under load.

    python benchmarks/serve/run.py [--calls 20000]

The digits model of examples/digits.py (8x8 images), trained first; both sides run the same file by ONNX Runtime with
as many threads within operators. One call at a time, batch 1: bare and served calls take turns in blocks of 50, so that
the machine's other work moves both; the median of the blocks, in time and in CPU time of the calling thread, which
other processes move less. Under load: threads, or coroutines, that call again as soon as they have a reply, in 20
rounds in which all cases take turns; the ratios are medians of those of the rounds, with the 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

import trtopt  # noqa: E402

MACHINE = "2-core x86-64, no GPU"
BLOCK_CALLS = 50
CONTEXTS = 2
CALLERS = (1, 2, 8, 32)
ROUNDS = 20

Call = Callable[[], Any]


def block_us(call: Call) -> tuple[float, float]:
    """Microseconds of a call, of time and of this thread's CPU time, over a block."""
    began, cpu = time.perf_counter(), time.thread_time()
    for _ in range(BLOCK_CALLS):
        call()
    return (time.perf_counter() - began) / BLOCK_CALLS * 1e6, (time.thread_time() - cpu) / BLOCK_CALLS * 1e6


def overhead(bare: Call, served: Call, calls: int) -> dict[str, float]:
    """Medians of both, and of the difference of neighbouring blocks."""
    blocks = [(block_us(bare), block_us(served)) for _ in range(max(calls // BLOCK_CALLS, 20))]
    found = {}
    for index, kind in enumerate(("us", "cpu_us")):
        found[f"bare_{kind}"] = statistics.median(a[index] for a, _ in blocks)
        found[f"served_{kind}"] = statistics.median(b[index] for _, b in blocks)
        found[f"difference_{kind}"] = statistics.median(b[index] - a[index] for a, b in blocks)
    return found


def by_threads(call: Call, callers: int, calls: int) -> float:
    """Calls per second of threads that call again at once."""
    left = itertools.count()

    def work() -> None:
        while next(left) < calls:
            call()

    threads = [threading.Thread(target=work) for _ in range(callers)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return calls / (time.perf_counter() - began)


def by_coroutines(call: Call, callers: int, calls: int) -> float:
    """Calls per second of coroutines that call again at once; ``call`` gives something to await."""

    async def main() -> float:
        left = itertools.count()

        async def work() -> None:
            while next(left) < calls:
                await call()

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(callers)))
        return calls / (time.perf_counter() - began)

    return asyncio.run(main())


def in_turn(calls: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Medians of several rounds, in each of which all cases take turns; what each has of its bare one."""
    rounds = [{name: measure() for name, measure in calls.items()} for _ in range(ROUNDS)]
    rates = {name: statistics.median(one[name] for one in rounds) for name in calls}
    for name in ("threads", "coroutines"):
        ratios = [one[name] / one[f"bare_{name}"] for one in rounds]
        rates[f"{name}_ratio"] = statistics.median(ratios)
        rates[f"{name}_ratio_p10"], *_, rates[f"{name}_ratio_p90"] = statistics.quantiles(ratios, n=10)
    return rates


def measure(model: Path, calls: int) -> dict[str, Any]:
    """All figures of one model."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = max(1, len(os.sched_getaffinity(0)) - CONTEXTS + 1)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feed = {"input": np.random.default_rng(0).random((1, 1, 8, 8), np.float32)}
    found: dict[str, Any] = {"load": {}}
    pool = ThreadPoolExecutor(CONTEXTS)
    with trtopt.Engine.load(model, contexts=CONTEXTS, queue=max(CALLERS)) as engine:
        if not np.array_equal(session.run(None, feed)[0], engine.run(feed)["linear"]):
            raise SystemExit("the replies differ")

        def bare() -> Any:
            return session.run(None, feed)

        def served() -> Any:
            return engine.run(feed)

        def bare_awaited() -> Any:
            return asyncio.get_running_loop().run_in_executor(pool, bare)

        def awaited() -> Any:
            return engine.run_async(feed)

        for _ in range(10):
            block_us(bare), block_us(served)
        found["alone"] = overhead(bare, served, calls)
        count = calls // ROUNDS
        for callers in CALLERS:
            found["load"][str(callers)] = in_turn(
                {
                    "bare_threads": lambda callers=callers: by_threads(bare, callers, count),  # type: ignore[misc]
                    "threads": lambda callers=callers: by_threads(served, callers, count),  # type: ignore[misc]
                    "bare_coroutines": lambda callers=callers: by_coroutines(bare_awaited, callers, count),  # type: ignore[misc]
                    "coroutines": lambda callers=callers: by_coroutines(awaited, callers, count),  # type: ignore[misc]
                }
            )
    pool.shutdown()
    return found


def table(found: dict[str, Any]) -> str:
    """The figures as Markdown."""
    alone, load = found["alone"], found["load"]
    lines = ["| one call at a time, batch 1, us | bare session | `Engine.run` | difference |", "|---|---|---|---|"]
    for name, kind in (("time", "us"), ("CPU time", "cpu_us")):
        values = [alone[f"{side}_{kind}"] for side in ("bare", "served", "difference")]
        lines.append(f"| {name} | {' | '.join(f'{value:.1f}' for value in values)} |")
    lines += [
        "",
        "| callers: calls per second | bare, threads | `run`, threads | ratio (p10 .. p90) "
        "| bare, `run_in_executor` | `run_async` | ratio (p10 .. p90) |",
        "|---|---|---|---|---|---|---|",
    ]
    for callers, rates in load.items():
        values = [
            f"{rates[f'bare_{name}']:,.0f} | {rates[name]:,.0f} | {rates[f'{name}_ratio']:.2f} "
            f"({rates[f'{name}_ratio_p10']:.2f} .. {rates[f'{name}_ratio_p90']:.2f})"
            for name in ("threads", "coroutines")
        ]
        lines.append(f"| {callers} | {' | '.join(values)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples" / "digits.py"), "train", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = measure(Path(folder) / "digits.onnx", arguments.calls)
    found["machine"] = {"name": MACHINE, "load_before": before, "load_after": os.getloadavg()[0]}
    found["date"] = time.strftime("%Y-%m-%d")
    found["versions"] = {name: metadata.version(name) for name in ("onnxruntime", "numpy")}
    (HERE / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    readme = HERE / "README.md"
    text = re.sub(
        r"(?<=<!-- table -->\n).*(?=\n<!-- end of table -->)",
        lambda _: table(found),
        readme.read_text(),
        flags=re.DOTALL,
    )
    readme.write_text(text)
    print(table(found))


if __name__ == "__main__":
    main()
