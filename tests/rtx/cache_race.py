"""Many processes that build into one cache at once, some of them killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from rtx_nets import conv_net

from trtopt.cache.folder import damage, files
from trtopt.engine.backend import read_header

_TIMEOUT_S = 300


def make_models(folder: Path, count: int) -> list[Path]:
    """Models that differ in one weight each."""
    paths = []
    for index in range(count):
        proto = conv_net()
        proto.graph.initializer[0].CopyFrom(
            onnx.numpy_helper.from_array(
                onnx.numpy_helper.to_array(proto.graph.initializer[0]) + index, proto.graph.initializer[0].name
            )
        )
        paths.append(folder / f"model{index}.onnx")
        onnx.save(proto, paths[-1])
    return paths


def build(model: Path, name: str, *options: str) -> subprocess.Popen[bytes]:
    """Start a build that leaves ``NAME.engine`` and ``NAME.json``, in a session of its own."""
    outputs = ("-o", f"{name}.engine", "--report", f"{name}.json")
    return subprocess.Popen(
        [sys.executable, "-m", "trtopt", "build", str(model), "--fp32", "--recipes", "none", *outputs, *options],
        cwd=model.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def reference(models: Sequence[Path]) -> list[bytes]:
    """The engine of each model, built without a cache."""
    for model in models:
        assert build(model, f"{model.stem}-plain", "--no-cache").wait(_TIMEOUT_S) == 0
    return [(model.parent / f"{model.stem}-plain.engine").read_bytes() for model in models]


def race(
    models: Sequence[Path], engines: Sequence[bytes], processes: int, kills: int, dice: random.Random
) -> Counter[str]:
    """One round: ``processes`` builds in turn of the models start at once, and ``kills`` of them are killed.

    Checks that each engine that came out is the right one, that no model was built twice by those that came to their
    end, that the cache holds whole entries only, and that a second round builds nothing that is in it.

    Args:
        models: The models; all lie in one folder, and the cache in ``cache`` below it.
        engines: Their engines.
        processes: How many builds.
        kills: How many of them are killed with SIGKILL, at random moments.
        dice: Chooses which and when.

    Returns:
        How many were ``built``, ``cached`` and ``killed``.
    """
    folder = models[0].parent
    jobs = [index % len(models) for index in range(processes)]
    victims = dice.sample(range(processes), kills)
    begin = time.monotonic()
    running = [build(models[job], f"run{index}", "--cache-dir", "cache") for index, job in enumerate(jobs)]
    for victim, moment in sorted(
        ((victim, dice.uniform(0.2, 0.5 * processes)) for victim in victims), key=lambda x: x[1]
    ):
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[victim].wait(max(begin + moment - time.monotonic(), 0))
        _kill(running[victim])
    codes = [process.wait(_TIMEOUT_S) for process in running]
    done = [index for index, code in enumerate(codes) if code == 0]
    assert all(code == 0 or index in victims for index, code in enumerate(codes)), codes
    cached = _check(folder, engines, {index: jobs[index] for index in done})
    builders = Counter(jobs[index] for index in done if not cached[index])
    assert all(count == 1 for count in builders.values()), builders
    entries = files(folder / "cache")
    assert {file.path: why for file in entries if (why := damage(file))} == {}
    held = len([file for file in entries if file.kind == "engines"])
    assert held <= len(models)

    again = {index: build(model, f"run{index}", "--cache-dir", "cache") for index, model in enumerate(models)}
    assert all(process.wait(_TIMEOUT_S) == 0 for process in again.values())
    found = _check(folder, engines, {index: index for index in again})
    assert sum(found.values()) == held, "what was in the cache was built again"
    return Counter(built=sum(builders.values()), cached=sum(cached.values()), killed=processes - len(done))


def _check(folder: Path, engines: Sequence[bytes], done: dict[int, int]) -> dict[int, bool]:
    """Whether each run took its engine from the cache; the engines are the right ones."""
    cached = {}
    for index, job in done.items():
        data = (folder / f"run{index}.engine").read_bytes()
        assert read_header(data).bytes == len(data) and data == engines[job], f"run {index} has another engine"
        report: dict[str, Any] = json.loads((folder / f"run{index}.json").read_text())
        cached[index] = bool(report["engine"]["cached"])
    return cached


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the command, and wait until its worker has gone too."""
    process.kill()
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
