"""A short run of the fuzzer (``scripts/soak fuzz`` is the long one), and what it takes for broken."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("coverage", reason="the fuzzer is guided by coverage.py")
pytest.importorskip("cryptography", reason="the seeds are signed")

import fuzz
import seeds
from drawn_cases import few_or
from targets import QUICK
from worker import Job, _files, _judged


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fixtures")
    seeds.make_quick(folder)
    return folder


@pytest.mark.parametrize("inputs", few_or(60))
def test_malformed_files_end_in_an_error_message(
    inputs: int, fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    fuzzer = fuzz.Fuzzer(tmp_path, fixtures, seed=8, targets=QUICK)
    try:
        fuzzer.start()
        for _ in range(inputs):
            fuzzer.step()
    finally:
        fuzzer.close()
    run = fuzzer.run
    assert run.inputs == inputs == sum(run.codes.values()) and run.kept > 0 and run.lines() > run.start_lines
    assert {2, 3} <= run.codes.keys()
    assert not run.findings, [(item.problem, item.target, item.slot, item.text) for item in run.findings.values()]


@pytest.mark.parametrize(
    ("code", "trace", "text", "problem"),
    [
        (0, "", "", None),
        (7, "", "error: a gate failed: x", None),
        (2, "", "error: x\n  where:  y\n  remedy: z", None),
        (2, "", "error: x", "remedy"),
        (2, "", "", "none"),
        (1, "", "error: x\n  where:  y\n  remedy: z", "exit code 1"),
        (1, 'File "/a/trtopt/b.py", line 3, in f\nKeyError: 1', "", "KeyError in trtopt/b.py 3 f"),
        (0, "", "a\x1b[2J", "control"),
        (0, "", "a\u202eb", "control"),
        (3, "", 'Traceback (most recent call last)\nFile "/a/trtopt/b.py", line 3, in f\nE: 1', "printed"),
    ],
)
def test_the_rules_see_what_is_broken(code: int, trace: str, text: str, problem: str | None) -> None:
    found = _judged(code, trace, "", text)
    assert not found if problem is None else any(problem in item for item in found)


def test_the_rules_see_files_that_are_left(tmp_path: Path) -> None:
    job = Job(tmp_path, (), ("a.json",))
    assert _files(job, 0) == ["output a.json is missing"] and _files(job, 2) == []
    (tmp_path / "a.json").write_text("{")
    assert "no JSON" in _files(job, 0)[0] and "exit code 2" in _files(job, 2)[0]
    (tmp_path / ".x.partial").touch()
    assert "unfinished" in _files(job, 7)[0]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("os.kill(os.getpid(), 11)", "death: exit code -11"),
        pytest.param("numpy.ones(1200 << 20, numpy.uint8)", "memory: ", marks=pytest.mark.long),
    ],
    ids=["death", "memory"],
)
def test_an_input_that_breaks_a_rule_is_a_finding(fixtures: Path, tmp_path: Path, line: str, problem: str) -> None:
    """A metric that does harm, in the worker as any input is."""
    input_folder, worker = tmp_path / "input", tmp_path / "worker"
    input_folder.mkdir(), worker.mkdir()
    shutil.copyfile(fixtures / "model.onnx", input_folder / "model.onnx")
    code = f"import os, numpy\n\ndef f(run):\n    {line}\n    return 1.0\n"
    (input_folder / "m.py").write_text(code)
    arguments = ("optimize", "model.onnx", "-o", "o.onnx", "--recipes", "none", "--no-cache", "--metric", "m.py:f")
    process = fuzz._Process(worker)
    try:
        outcome = process.run(Job(input_folder, arguments, ("o.onnx",)), set())
    finally:
        process.stop()
    assert [found for found in outcome.problems if found.startswith(problem)], (outcome.problems, outcome.text)
