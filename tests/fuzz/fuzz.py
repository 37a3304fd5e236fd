"""Malformed files through the public entry points, guided by the lines of trtopt that they reach.

    python tests/fuzz/fuzz.py [--inputs 10000] [--seed 1] [--plain] [--findings FOLDER] [--json FILE]

Seeds are what trtopt itself wrote (``seeds``). An input is one of them with one file mutated; one that reaches an arc
(a jump from line to line) of trtopt that no input before it reached becomes a seed. ``--plain`` keeps only the seeds of
the start, to see what the guidance does. The same seed gives the same inputs.

Considered: Atheris has wheels for CPython 3.10 to 3.14 on Linux x86-64 and knows custom mutators, but its loop is that
of libFuzzer: it takes over the process, ends it at the first finding, and has one buffer of bytes as its input; several
files, an exit code to judge, a native crash to attribute and a fixed number of inputs within pytest have all to be
built around it. HypoFuzz drives Hypothesis tests by coverage; its licence is its own, not an open one. Hypothesis alone
has no guidance. What is guided here is trtopt's Python, and coverage.py measures that on every Python trtopt supports.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# As pytest has it; behind what is there, since modules of its tests share names.
sys.path += [str(Path(__file__).parents[1] / name) for name in ("unit", "cli")]

import seeds
from mutate_files import MUTATIONS
from targets import ARGUMENTS, OTHER_SEEDS, SHARES, TARGETS, Target
from worker import HANG_S, Arc, Job, Outcome, serve

_LONGEST_INPUT = 4 << 20
"""Bytes: what grew beyond is not mutated further."""

_RECENT = 0.5
"""How often an input starts from what reached new code, when there is any."""

_JOBS_OF_A_PROCESS = 1500
"""After which another one takes over, so that what leaks adds up to little."""

_GRACE_S = HANG_S + 10


@dataclass(frozen=True)
class Seed:
    """Content of a file, and the slots (names of files) that it fits."""

    content: bytes
    slot: str


@dataclass
class Finding:
    """A rule that was broken, the first input that did it, and how many did."""

    problem: str
    target: str
    slot: str
    number: int
    text: str
    count: int = 1


@dataclass
class Run:
    """The figures of a run."""

    inputs: int = 0
    per_format: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)
    arcs: set[Arc] = field(default_factory=set)
    start_lines: int = 0
    curve: list[tuple[int, int]] = field(default_factory=list)
    kept: int = 0
    slowest: tuple[float, str] = (0.0, "")
    largest: tuple[float, str] = (0.0, "")
    processes: int = 0
    seconds: Counter[str] = field(default_factory=Counter)
    per_target: Counter[str] = field(default_factory=Counter)

    def lines(self) -> int:
        """Lines of trtopt that were reached."""
        return len({(file, abs(line)) for file, *ends in self.arcs for line in ends if line})


class _Process:
    """The worker, started again after each death."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Connection | None = None
        self.started = self._done = 0

    def run(self, job: Job, seen: set[Arc]) -> Outcome:
        """What a job did; of one that ended the process, the signal and the stack."""
        if self._process is None or self._done >= _JOBS_OF_A_PROCESS:
            self._start(seen)
        self._done += 1
        pipe = self._pipe
        if pipe is None:
            raise RuntimeError("the worker has no pipe")
        try:
            pipe.send(job)
            if pipe.poll(_GRACE_S):
                outcome = pipe.recv()
                if not isinstance(outcome, Outcome):
                    raise TypeError(outcome)
                return outcome
        except (EOFError, OSError):
            pass
        return self._died()

    def _start(self, seen: set[Arc]) -> None:
        self.stop()
        self._pipe, other = self._context.Pipe()
        arguments = other, self._folder, frozenset(seen)
        self._process = self._context.Process(target=serve, args=arguments, daemon=False)
        self._process.start()
        other.close()
        self.started += 1
        self._done = 0

    def _died(self) -> Outcome:
        self._process.join(1)
        code = self._process.exitcode
        self.stop()
        stack = (self._folder / "fault").read_text(errors="replace")[-3000:]
        if code is None or "Timeout" in stack:
            problem = f"hang: longer than {HANG_S:g} s"
        else:
            problem = f"death: exit code {code}"
        return Outcome(code or -9, (problem,), HANG_S, 0.0, frozenset(), stack)

    def stop(self) -> None:
        """End the process."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.join(2)
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None


class Fuzzer:
    """One run.

    Args:
        folder: An empty folder for its files.
        fixtures: The folder of :func:`seeds.make`.
        seed: Of the dice.
        is_guided: Whether inputs that reach new code become seeds.
        keep: A folder for the first input of each finding; None for none.
        targets: What is run.
    """

    def __init__(
        self,
        folder: Path,
        fixtures: Path,
        seed: int,
        *,
        is_guided: bool = True,
        keep: Path | None = None,
        targets: Sequence[Target] = TARGETS,
    ) -> None:
        self._targets = targets
        self._folder, self._fixtures, self._keep = folder, fixtures, keep
        self._dice, self._is_guided = random.Random(seed), is_guided
        (folder / "worker").mkdir()
        self._process = _Process(folder / "worker")
        self.run = Run()
        self._slots = self._all_slots()
        forms = {form for target in targets for form in target.slots.values()}
        self._shares = {name: share for name, share in SHARES.items() if name in forms}
        self._seeds = {name: self._first_seeds(name) for name in self._shares}
        self._found: dict[str, list[Seed]] = {name: [] for name in self._shares}

    def close(self) -> None:
        """End the worker."""
        self._process.stop()

    def start(self) -> None:
        """Run every target on its whole files, which has to work, and count what that reaches as known."""
        for target in self._targets:
            outcome = self._outcome(target, "", b"")
            # A measurement takes seconds, more of them where other programs run: no matter, when the file is whole.
            problems = [problem for problem in outcome.problems if not problem.startswith("slow")]
            if problems or outcome.code != target.code:
                what = f"{problems}, exit code {outcome.code}"
                raise RuntimeError(f"{target.line}: {what} on whole files\n{outcome.text}")
            self.run.arcs |= outcome.arcs
        self.run.start_lines = self.run.lines()

    def step(self) -> None:
        """Make one input, run it, judge it."""
        dice, run = self._dice, self.run
        form = dice.choices(list(self._shares), list(self._shares.values()))[0]
        targets = [target for target in self._targets if form in target.slots.values()]
        target = dice.choices(targets, [target.share for target in targets])[0]
        slot = dice.choice([name for name in self._slots[target.line] if self._slots[target.line][name] == form])
        content = self._mutated(form, slot)
        outcome = self._outcome(target, slot, content)
        run.inputs += 1
        run.per_format[form] += 1
        run.codes[outcome.code] += 1
        run.per_target[target.line] += 1
        run.seconds[target.line] += outcome.seconds
        run.arcs |= outcome.arcs
        if outcome.arcs and self._is_guided and len(content) < _LONGEST_INPUT:
            self._found[form].append(Seed(content, slot))
            run.kept += 1
        what = f"{target.line} ({slot})"
        run.slowest = max(run.slowest, (outcome.seconds, what))
        run.largest = max(run.largest, (outcome.growth_mib, what))
        run.processes = self._process.started
        for problem in outcome.problems:
            self._note(problem, target, slot, content, outcome)

    def _all_slots(self) -> dict[str, dict[str, str]]:
        """The files that may be mutated by the line of the target, with their format; patterns resolved."""
        files = [str(path.relative_to(self._fixtures)) for path in sorted(self._fixtures.rglob("*")) if path.is_file()]
        return {
            target.line: {
                name: form for pattern, form in target.slots.items() for name in files if fnmatch(name, pattern)
            }
            for target in self._targets
        }

    def _first_seeds(self, form: str) -> list[Seed]:
        names = {name for slots in self._slots.values() for name, kind in slots.items() if kind == form}
        names |= {name for name in OTHER_SEEDS.get(form, ()) if (self._fixtures / name).is_file()}
        return [Seed((self._fixtures / name).read_bytes(), name) for name in sorted(names)]

    def _mutated(self, form: str, slot: str) -> bytes:
        dice = self._dice
        fits = [seed for seed in self._seeds[form] if form in OTHER_SEEDS or seed.slot == slot]
        grown = [seed for seed in self._found[form] if form in OTHER_SEEDS or seed.slot == slot]
        seed = dice.choice(grown if grown and dice.random() < _RECENT else fits)
        content = seed.content
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            other = dice.choice((*self._seeds[form], *self._found[form])).content
            content = MUTATIONS[form](content, other, dice)
            if len(content) > _LONGEST_INPUT:
                break
        return content

    def _outcome(self, target: Target, slot: str, content: bytes) -> Outcome:
        folder = self._folder / "input"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in {*self._slots[target.line], *target.needs} - {ARGUMENTS}:
            source, place = self._fixtures / name, folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, place, dirs_exist_ok=True)
            else:
                shutil.copyfile(source, place)
        arguments = target.line.split()
        if slot == ARGUMENTS:
            arguments += [
                word.replace("\0", "") for word in content.decode("utf-8", "surrogateescape").split("\n") if word
            ]
        elif slot:
            (folder / slot).write_bytes(content)
        return self._process.run(Job(folder, tuple(arguments), target.outputs), self.run.arcs)

    def _note(self, problem: str, target: Target, slot: str, content: bytes, outcome: Outcome) -> None:
        known = self.run.findings.get(problem)
        if known is not None:
            known.count += 1
            return
        number = self.run.inputs
        self.run.findings[problem] = Finding(problem, target.line, slot, number, outcome.text)
        if self._keep is not None:
            place = self._keep / str(number)
            place.mkdir(parents=True, exist_ok=True)
            (place / Path(slot).name).write_bytes(content)
            (place / "README").write_text(
                f"{problem}\ntrtopt {target.line}\nfile: {slot}\n\n{outcome.text}\n", errors="backslashreplace"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="mutate the first seeds only")
    parser.add_argument("--fixtures", type=Path, help="seeds made before; made there when it is empty or missing")
    parser.add_argument("--findings", type=Path, help="keep the first input of each finding here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}, {options.inputs} inputs, {'plain' if options.plain else 'guided'}", flush=True)
    with tempfile.TemporaryDirectory(prefix="trtopt-fuzz-") as name:
        folder = Path(name)
        _own_home(folder / "home")
        fixtures = options.fixtures or folder / "fixtures"
        if not fixtures.is_dir() or not any(fixtures.iterdir()):
            fixtures.mkdir(parents=True, exist_ok=True)
            seeds.make(fixtures)
        fuzzer = Fuzzer(folder, fixtures, options.seed, is_guided=not options.plain, keep=options.findings)
        try:
            seconds = _all(fuzzer, options)
        finally:
            fuzzer.close()
    show(fuzzer.run, seconds)
    if fuzzer.run.findings:
        raise SystemExit(1)


def _own_home(home: Path) -> None:
    """No input reads or fills the user's cache; hashes are the same in every process."""
    home.mkdir()
    os.environ.update(HOME=str(home), PYTHONHASHSEED="0", COLUMNS="100")


def _all(fuzzer: Fuzzer, options: argparse.Namespace) -> float:
    """Run all inputs; the figures are written as they come, so that a run that is stopped has them too."""
    inputs: int = options.inputs
    began = time.perf_counter()
    fuzzer.start()
    print(f"{fuzzer.run.start_lines} lines reached by the seeds", flush=True)
    known: set[str] = set()
    for number in range(1, inputs + 1):
        fuzzer.step()
        for problem in fuzzer.run.findings.keys() - known:
            found = fuzzer.run.findings[problem]
            print(f"input {found.number}: {problem} | {found.target} ({found.slot})", flush=True)
        known |= fuzzer.run.findings.keys()
        if number % 250 == 0 or number == inputs:
            fuzzer.run.curve.append((number, fuzzer.run.lines()))
            if options.json is not None:
                figures = as_json(fuzzer.run, options, time.perf_counter() - began)
                options.json.write_text(json.dumps(figures, indent=1) + "\n")
            print(f"{number} inputs, {time.perf_counter() - began:.0f} s, {fuzzer.run.lines()} lines", flush=True)
    return time.perf_counter() - began


def show(run: Run, seconds: float) -> None:
    """Print the figures."""
    print(f"{run.inputs} inputs in {seconds:.0f} s, {run.processes} processes, {run.kept} kept as seeds")
    print(f"lines of trtopt: {run.start_lines} by the seeds, {run.lines()} in all; arcs: {len(run.arcs)}")
    print("inputs by format:", dict(run.per_format.most_common()))
    print("exit codes:", dict(sorted(run.codes.items())))
    print(f"slowest: {run.slowest[0]:.1f} s, {run.slowest[1]}; largest: {run.largest[0]:.0f} MiB, {run.largest[1]}")
    for line, seconds in run.seconds.most_common(12):
        print(f"  {seconds:6.0f} s {run.per_target[line]:6d} {line}")
    for finding in run.findings.values():
        print(
            f"  {finding.count:5d} {finding.problem} | first: input {finding.number}, {finding.target} ({finding.slot})"
        )


def as_json(run: Run, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The figures, for ``benchmarks/fuzz``."""
    from importlib.metadata import version

    packages = ("trtopt", "onnx", "onnx_ir", "onnxruntime", "numpy", "msgspec", "coverage")
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in packages}},
        "machine": "2-core x86-64, no GPU",
        "seed": options.seed,
        "guided": not options.plain,
        "inputs": run.inputs,
        "seconds": round(seconds),
        "inputs_per_format": dict(sorted(run.per_format.items())),
        "inputs_per_target": dict(run.per_target.most_common()),
        "exit_codes": {str(code): count for code, count in sorted(run.codes.items())},
        "lines_by_the_seeds": run.start_lines,
        "lines": run.lines(),
        "arcs": len(run.arcs),
        "lines_after_inputs": dict(run.curve),
        "kept_as_seeds": run.kept,
        "processes": run.processes,
        "slowest_s": {"seconds": round(run.slowest[0], 2), "input": run.slowest[1]},
        "largest_growth_mib": {"mib": round(run.largest[0]), "input": run.largest[1]},
        "findings": {item.problem: {"count": item.count, "target": item.target} for item in run.findings.values()},
    }


if __name__ == "__main__":
    main()
