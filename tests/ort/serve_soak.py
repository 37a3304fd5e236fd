"""A million calls of one engine, from threads and coroutines, with random batches: every reply equal to the serial one,
and memory that stays flat.

python tests/ort/serve_soak.py [--calls 1000000] [--threads 4] [--seed 9]

The digits model of examples/digits.py, trained first; ONNX Runtime on the CPU. Three quarters of the calls come from
threads, the rest from 50 coroutines at a time. Resident memory is read every 10,000 calls; after the first fifth of
each kind of calls, its growth (a line through the readings) may be at most 2 MiB per million calls.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import trtopt

ROOT = Path(__file__).parents[2]
LARGEST_GROWTH_BYTES = 2 << 20
SAMPLE_CALLS = 10_000
COROUTINES = 50
OUTPUT = "linear"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Readings:
    """Resident memory over the number of calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls: list[int] = []
        self.resident: list[int] = []

    def add(self, done: int) -> None:
        with self._lock:
            self.calls.append(done)
            self.resident.append(resident_bytes())

    def growth_bytes(self) -> float:
        """Growth per million calls, of the readings but the first fifth."""
        skip = len(self.calls) // 5
        slope, _ = np.polyfit(self.calls[skip:], self.resident[skip:], 1)
        return float(slope) * 1e6


class Soak:
    """The calls, their replies when made one after the other, and a count of those that differ."""

    def __init__(self, engine: trtopt.Engine, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.engine = engine
        self.feeds = [{"input": rng.random((size, 1, 8, 8), np.float32)} for size in rng.integers(1, 17, 200)]
        self.expected = [engine.run(feed)[OUTPUT] for feed in self.feeds]
        self.wrong = 0

    def check(self, index: int, reply: dict[str, np.ndarray]) -> None:
        if not np.array_equal(reply[OUTPUT], self.expected[index]):
            self.wrong += 1

    def by_threads(self, calls: int, threads: int, readings: Readings) -> None:
        numbers = itertools.count()

        def work() -> None:
            while (number := next(numbers)) < calls:
                index = number % len(self.feeds)
                self.check(index, self.engine.run(self.feeds[index]))
                if number % SAMPLE_CALLS == 0:
                    readings.add(number)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    async def by_coroutines(self, calls: int, readings: Readings) -> None:
        numbers: Iterator[int] = itertools.count()

        async def work() -> None:
            while (number := next(numbers)) < calls:
                index = number % len(self.feeds)
                self.check(index, await self.engine.run_async(self.feeds[index]))
                if number % SAMPLE_CALLS == 0:
                    readings.add(number)

        await asyncio.gather(*(work() for _ in range(COROUTINES)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=9)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="trtopt-soak-") as name:
        digits = ROOT / "examples" / "digits.py"
        subprocess.run([sys.executable, digits, "train", name], check=True, stdout=subprocess.DEVNULL)
        engine = trtopt.Engine.load(Path(name) / "digits.onnx", contexts=2, queue=COROUTINES)
    failed = False
    with engine:
        soak = Soak(engine, options.seed)
        awaited = options.calls // 4
        for what, calls in (("threads", options.calls - awaited), ("coroutines", awaited)):
            readings, began = Readings(), time.perf_counter()
            if what == "threads":
                soak.by_threads(calls, options.threads, readings)
            else:
                asyncio.run(soak.by_coroutines(calls, readings))
            seconds, growth = time.perf_counter() - began, readings.growth_bytes()
            first, last = readings.resident[0] / 2**20, readings.resident[-1] / 2**20
            memory = f"resident {first:.1f} MiB at first, {last:.1f} MiB at last, {growth / 2**20:+.2f} MiB per million"
            print(f"{calls} calls by {what} in {seconds:.0f} s: {memory}", flush=True)
            failed = failed or growth > LARGEST_GROWTH_BYTES
        errors = {line for line in engine.metrics().splitlines() if line.startswith("trtopt_errors_total")}
    print(f"{soak.wrong} wrong replies, {len(errors)} kinds of errors {sorted(errors)}")
    if failed or soak.wrong or errors:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
