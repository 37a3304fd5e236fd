"""The process that runs inputs: a crash, a hang or a memory leak of one ends it, and not the run.

What it measures of each input: the exit code, what was printed, what files were left, its time, its peak of resident
memory, and which arcs (jumps from line to line) of trtopt it was the first to reach.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import re
import resource
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import coverage

import trtopt
from trtopt.cli import main as command_line
from trtopt.engine.manifest import load_engine
from trtopt.errors import TrtoptError

LIMIT_S = 10.0
"""Processor time, that of its child processes included: no input takes more. Unlike the clock's, it is the same on a
machine that does other work."""

HANG_S = 60.0
"""By the clock: what waits this long waits for ever."""

LARGEST_GROWTH_MIB = 1024
"""Of resident memory by one input; inputs are a few hundred KiB, and twelve of the largest tensors tried fit."""

ADDRESS_SPACE_BYTES = 16 << 30
"""Of the process, with all libraries: what asks for more gets MemoryError in place of the machine's last page."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""What a terminal acts on, and marks that reverse the direction of writing."""
_GATE = 7
_CODES = (0, 2, 3, 4, 5, 6, _GATE)

Arc = tuple[str, int, int]


@dataclass(frozen=True)
class Job:
    """One input: a folder with its files, and what is run in it."""

    folder: Path
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What an input did.

    Attributes:
        code: The exit code.
        problems: The rules it broke, as ``kind: what``.
        seconds: Processor time.
        growth_mib: Peak of resident memory above what it was before.
        arcs: Arcs that no input before it reached.
        text: What it printed on stderr, cut.
    """

    code: int
    problems: tuple[str, ...]
    seconds: float
    growth_mib: float
    arcs: frozenset[Arc]
    text: str


def serve(pipe: Connection, folder: Path, seen: frozenset[Arc]) -> None:
    """Answer jobs until the pipe closes; the entry point of the process.

    Args:
        pipe: Takes :class:`Job`, gives :class:`Outcome`.
        folder: Its files: ``stdout``, ``stderr`` and ``fault``, the stack where it died.
        seen: Arcs that were reached before.
    """
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fault = open(folder / "fault", "w")  # noqa: SIM115
    faulthandler.enable(fault)
    streams = []
    for number, name in ((1, "stdout"), (2, "stderr")):
        handle = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(handle, number)
        streams.append(handle)
    runner = _Runner(folder, set(seen))
    with contextlib.suppress(EOFError):
        while True:
            job = pipe.recv()
            faulthandler.dump_traceback_later(HANG_S, exit=True, file=fault)
            outcome = runner.run(job)
            faulthandler.cancel_dump_traceback_later()
            pipe.send(outcome)


class _Runner:
    def __init__(self, folder: Path, seen: set[Arc]) -> None:
        self._folder, self._seen = folder, seen
        self._root = str(Path(trtopt.__file__).parent)
        self._coverage = coverage.Coverage(
            data_file=None, branch=True, source=[self._root], config_file=False, check_preimported=False
        )
        self._coverage.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])

    def run(self, job: Job) -> Outcome:
        for number in (1, 2):
            os.ftruncate(number, 0)
        _reset_peak()
        before, began = _memory_mib("VmRSS"), _processor_s()
        self._coverage.start()
        code, trace = _call(job)
        self._coverage.stop()
        seconds, growth = _processor_s() - began, _memory_mib("VmHWM") - before
        out = (self._folder / "stdout").read_bytes().decode("utf-8", "replace")
        text = (self._folder / "stderr").read_bytes().decode("utf-8", "replace")
        problems = [*_judged(code, trace, out, text), *_files(job, code)]
        if seconds > LIMIT_S:
            problems.append(f"slow: {seconds:.0f} s")
        if growth > LARGEST_GROWTH_MIB:
            problems.append(f"memory: {growth:.0f} MiB")
        return Outcome(code, tuple(problems), seconds, growth, self._new_arcs(), (trace or text)[-4000:])

    def _new_arcs(self) -> frozenset[Arc]:
        data = self._coverage.get_data()
        skip = len(self._root) + 1
        reached = {(file[skip:], start, end) for file in data.measured_files() for start, end in data.arcs(file) or ()}
        self._coverage.erase()
        new = reached - self._seen
        self._seen |= new
        return frozenset(new)


def _call(job: Job) -> tuple[int, str]:
    """The exit code, and the traceback of what was not caught; as the console script would end."""
    here = os.getcwd()
    os.chdir(job.folder)
    # Line buffered, so that native output keeps its place.
    out, err = (os.fdopen(os.dup(number), "w", encoding="utf-8", errors="strict") for number in (1, 2))
    saved, (sys.stdout, sys.stderr) = (sys.stdout, sys.stderr), (out, err)
    code, trace = 1, ""
    try:
        code = _entry(job.arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:  # noqa: BLE001 - whatever it is, it is a finding
        trace = traceback.format_exc()
    finally:
        sys.stdout, sys.stderr = saved
        for stream in (out, err):
            with contextlib.suppress(ValueError, OSError):
                stream.close()
        os.chdir(here)
        gc.collect()
    return code, trace


def _entry(arguments: tuple[str, ...]) -> int:
    name, _, function = arguments[0].partition(":")
    if name != "python":
        return command_line.main(list(arguments))
    rest = list(arguments[1:])
    options: dict[str, str] = {}
    if "--key" in rest:
        options["key"] = rest.pop(rest.index("--key") + 1)
    try:
        if function == "verify":
            trtopt.verify(rest[0], **options)
        else:
            load_engine(rest[0], allow_unverified=True)
    except TrtoptError as error:
        command_line.print_error(error)
        return error.exit_code
    return 0


def _judged(code: int, trace: str, out: str, text: str) -> list[str]:
    """The rules of every run: an exit code of the contract, an error with a remedy, no traceback, no escapes."""
    found = []
    if trace:
        found.append(f"traceback: {_frame(trace)}")
    elif code not in _CODES:
        found.append(f"exit code {code}")
    elif "Traceback (most recent call last)" in text:
        found.append(f"traceback printed: {_frame(text)}")
    elif code not in (0, _GATE) and text.lstrip() and not ("remedy: " in text and "where: " in text):
        found.append("message: no where or no remedy")
    elif code not in (0, _GATE) and not text.strip() and not out.strip():
        found.append("message: none")
    if _CONTROL.search(out) or _CONTROL.search(text):
        found.append("control characters printed")
    return found


def _frame(trace: str) -> str:
    """The error and its last place in trtopt, which tell findings apart."""
    places = re.findall(r'File "[^"]*?/(trtopt/[^"]*)", line (\d+), in (\S+)', trace)
    last = trace.strip().splitlines()[-1]
    kind = re.match(r"[\w.]+", last)
    return f"{kind[0] if kind else last[:40]} in {' '.join(places[-1]) if places else 'another package'}"


def _files(job: Job, code: int) -> list[str]:
    """What was left: with exit code 0 every output, whole; with another one none, and never an unfinished file."""
    found = [f"unfinished file {path.name}" for path in job.folder.rglob("*.partial")]
    for name in job.outputs:
        path = job.folder / name
        if code == 0 and not path.is_file():
            found.append(f"output {name} is missing")
        elif code not in (0, _GATE) and path.exists():
            found.append(f"output {name} written with exit code {code}")
        elif path.suffix == ".json" and path.is_file():
            try:
                json.loads(path.read_bytes())
            except ValueError:
                found.append(f"output {name} is no JSON")
    return found


def _processor_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _reset_peak() -> None:
    """Linux: writing 5 sets VmHWM to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _memory_mib(name: str) -> float:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) / 1024 if match else 0.0
