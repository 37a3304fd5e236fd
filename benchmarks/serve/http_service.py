"""examples/serve under twice the load it can take.

    python benchmarks/serve/http_service.py digits digits.onnx
    python benchmarks/serve/http_service.py text minilm.onnx --tokenizer tokenizer.json

The service is pinned to one core and the generator to another. Prints what was measured and adds it to http.json
under the task's name; exits with 1 when something that was promised does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from generator import Load, Tally

HERE = Path(__file__).parent
APP = HERE.parents[1] / "examples" / "serve" / "app.py"
RESULTS = HERE / "http.json"
WORDS = "the a model engine runs on slow fast small network reads writes many few tensors over under cold green".split()


def bodies(task: str, count: int = 64) -> list[bytes]:
    """Requests that differ; texts of 3 to 12 words."""
    rng = np.random.default_rng(0)
    if task == "digits":
        images = (rng.integers(0, 17, (count, 64)) / 16).tolist()
        return [json.dumps({"pixels": image}).encode() for image in images]
    texts = [" ".join(rng.choice(WORDS, rng.integers(3, 13))) for _ in range(count)]
    return [json.dumps({"text": text}).encode() for text in texts]


def start(arguments: list[str], port: int, core: int) -> subprocess.Popen[str]:
    """Start the service, pinned, and wait until it is ready."""
    command = [sys.executable, str(APP), *arguments, "--port", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    ready = output_of(process).readline()
    if not ready.startswith("ready"):
        raise SystemExit(f"the service did not start: {ready}")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process
        except OSError:
            time.sleep(0.05)
    raise SystemExit("the service does not listen")


def output_of(process: subprocess.Popen[str]) -> IO[str]:
    """What the service prints."""
    return cast(IO[str], process.stdout)


def resident_mb(pid: int) -> float:
    """Resident memory in MB (1e6 bytes)."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) * 1024 / 1e6


async def watch_memory(pid: int, samples: list[tuple[float, float]]) -> None:
    """Sample the memory each half second, until cancelled."""
    while True:
        samples.append((time.perf_counter(), resident_mb(pid)))
        await asyncio.sleep(0.5)


def slope_mb_per_min(samples: list[tuple[float, float]]) -> float:
    """The line through the samples."""
    times, sizes = zip(*samples, strict=True)
    return float(np.polyfit(np.array(times), np.array(sizes), 1)[0] * 60)


def show(name: str, tally: Tally) -> None:
    """Print a tally."""
    counts = ", ".join(f"{count} x {status}" for status, count in sorted(tally.statuses.items()) if count)
    print(
        f"{name}: {counts}; {tally.refused} connections refused; wrong replies {tally.wrong}; 503 without Retry-After "
        f"{tally.without_retry_after}; p50 {tally.percentile_ms(0.5):.1f} ms, p99 {tally.percentile_ms(0.99):.1f} ms; "
        f"sent at most {1000 * tally.late_s:.1f} ms late",
        flush=True,
    )


async def measure(args: argparse.Namespace, process: subprocess.Popen[str], port: int) -> dict[str, Any]:
    """The serial replies, the closed-loop rate, twice that rate, and a SIGTERM under that load."""
    load = Load("127.0.0.1", port, bodies(args.task))
    tallies = {"serial": load.tally}
    await load.run_serially()
    await load.run_closed(args.closed_s / 4, args.clients)  # fills allocators and caches
    tallies["warm-up"] = load.tally
    rate = await load.run_closed(args.closed_s, args.clients)
    tallies["closed"] = load.tally
    show(f"closed loop, {args.clients} clients, {rate:.0f} requests/s", load.tally)

    tallies["filling"] = await load.run_open(
        args.open_s / 6, 2 * rate
    )  # connections and buffers grow to what they need
    samples: list[tuple[float, float]] = []
    watcher = asyncio.create_task(watch_memory(process.pid, samples))
    tallies["open"] = await load.run_open(args.open_s, 2 * rate)
    watcher.cancel()
    slope = slope_mb_per_min(samples)
    show(f"open loop, {args.open_s:.0f} s at {2 * rate:.0f} requests/s", tallies["open"])
    if args.verbose:
        print(" ".join(f"{size:.1f}" for _, size in samples))
    print(f"memory {samples[-1][1]:.1f} MB, slope {slope:+.2f} MB/min", flush=True)

    asyncio.get_running_loop().call_later(1, process.send_signal, signal.SIGTERM)
    tallies["sigterm"] = await load.run_open(6, 2 * rate)
    show("SIGTERM after 1 s of the same", tallies["sigterm"])
    return {"rate": rate, "slope": slope, "memory_mb": samples[-1][1], "tallies": tallies}


def main() -> None:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("digits", "text"))
    parser.add_argument("model")
    parser.add_argument("--tokenizer")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--closed-s", type=float, default=12)
    parser.add_argument("--open-s", type=float, default=60)
    parser.add_argument("--verbose", action="store_true", help="print every sample of the memory")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("needs two cores: one for the service, one for the generator")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [args.task, args.model] + (["--tokenizer", args.tokenizer] if args.tokenizer else [])
    process = start(arguments, port, cores[0])
    os.sched_setaffinity(0, {cores[1]})
    try:
        found = asyncio.run(measure(args, process, port))
        last = output_of(process).read().strip()
        process.wait(60)
    finally:
        process.kill()
    print(f"service: {last}")
    judge(args, found, last)


def judge(args: argparse.Namespace, found: dict[str, Any], last: str) -> None:
    """Hold what was measured against what was promised, and store it."""
    tallies: dict[str, Tally] = found["tallies"]
    accepted, answered = map(int, re.findall(r"\d+", last))
    replies = sum((tally.statuses for tally in tallies.values()), Counter())
    checks = {
        "every reply of the load is 200 or 503": set(+tallies["open"].statuses) == {"200", "503"},
        "every 503 has Retry-After": not any(tally.without_retry_after for tally in tallies.values()),
        "every accepted reply equals the serial one": not any(tally.wrong for tally in tallies.values()),
        "memory grows by less than 1 MB a minute": found["slope"] < 1,
        "SIGTERM loses no accepted request": accepted == answered == replies["200"],
    }
    for promise, holds in checks.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {promise}")
    opened = tallies["open"]
    record = {
        "clients": args.clients,
        "closed_loop_rate": round(found["rate"], 1),
        "open_s": args.open_s,
        "accepted": opened.statuses["200"],
        "rejected": opened.statuses["503"],
        "p50_ms": round(opened.percentile_ms(0.5), 1),
        "p99_ms": round(opened.percentile_ms(0.99), 1),
        "sent_late_ms": round(1000 * opened.late_s, 1),
        "memory_mb": round(found["memory_mb"], 1),
        "slope_mb_per_min": round(found["slope"], 3),
        "after_sigterm": {"accepted_in_all": accepted, "answered": answered, "received": replies["200"],
                          "lost_unaccepted": replies["lost"], "refused": tallies["sigterm"].refused},
        "checks": checks,
    }  # fmt: skip
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**stored, args.task: record}, indent=1) + "\n")
    if not all(checks.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
