"""``trtopt check`` in the life of a pull request, and the action that runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import onnx
import pytest
from command_line import run_here
from digit_models import digit_model, save_samples

Run = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).parents[2]
CONFIG = """\
[build]
precision = "int8"
keep_all_int8 = true
recipes = "none"
calib = "calib.npz"
eval = "eval.npz"
metric = "top1"
output = "engines/digits.rtx.engine"
report = "engines/digits.json"
"""
BUILD = ("build", "digits.onnx", "--config", "trtopt.toml")
CHECK = ("check", "engines/digits.json", "--baseline", "baseline.json")
FORMS = ("--markdown", "comment.md", "--junit", "gates.xml", "--json")
"""What CI runs on a branch. Recipes and the guard are judged by compiling, which takes most of the time of a build."""


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a CI job: ``trtopt`` is a command, the home is a folder of the test's own."""
    folder = tmp_path_factory.mktemp("tools")
    command = folder / "trtopt"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trtopt "$@"\n')
    command.chmod(0o755)
    paths = os.pathsep.join([str(folder), os.environ["PATH"]])
    source = os.pathsep.join([str(ROOT), str(ROOT / "recipes")])
    identity = {f"GIT_{who}_{what}": "ci@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return {**os.environ, **identity, "PATH": paths, "PYTHONPATH": source, "HOME": str(folder), "COLUMNS": "100"}


@pytest.fixture(scope="module")
def repository(tools: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose main branch holds the model, the options of its build, and the report they gave."""
    folder = tmp_path_factory.mktemp("repository")
    save_samples(folder)
    onnx.save(digit_model(), folder / "digits.onnx")
    (folder / "trtopt.toml").write_text(CONFIG)
    (folder / ".gitignore").write_text("engines/\ncomment.md\ngates.xml\n")
    (folder / "engines").mkdir()
    _trtopt(folder, tools, *BUILD)
    shutil.copy(folder / "engines" / "digits.json", folder / "baseline.json")
    _command(folder, tools, "git", "init", "-q", "-b", "main")
    _commit(folder, tools, "the model, and what it is built to")
    return folder


def _trtopt(folder: Path, tools: dict[str, str], *arguments: str, code: int = 0) -> str:
    """What the command prints."""
    done = run_here(arguments, folder, tools)
    assert done.returncode == code, done.stderr
    return done.stdout


def _command(folder: Path, tools: dict[str, str], *arguments: str) -> None:
    done = subprocess.run(arguments, cwd=folder, env=tools, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def _commit(folder: Path, tools: dict[str, str], message: str) -> None:
    _command(folder, tools, "git", "add", "-A")
    _command(folder, tools, "git", "commit", "-q", "-m", message)


def _pull_request(
    folder: Path, tools: dict[str, str], branch: str, code: int, **change: Any
) -> tuple[str, dict[str, dict[str, Any]]]:
    """Commit another model on a branch and run CI there, whose exit code is known; returns the comment and the gates
    by name."""
    _command(folder, tools, "git", "checkout", "-q", "-b", branch, "main")
    onnx.save(digit_model(**change), folder / "digits.onnx")
    _commit(folder, tools, branch)
    _trtopt(folder, tools, *BUILD)
    found = json.loads(_trtopt(folder, tools, *CHECK, *FORMS, code=code))
    assert found["schema"] == "trtopt.check/1" and found["passed"] == (code == 0)
    failures = ElementTree.parse(folder / "gates.xml").getroot().attrib["failures"]
    gates = {gate["name"]: gate for gate in found["gates"]}
    assert int(failures) == sum(gate["verdict"] == "failed" for gate in gates.values())
    return (folder / "comment.md").read_text(), gates


def _failed(gates: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, gate in gates.items() if gate["verdict"] == "failed"]


def test_a_change_that_costs_two_points_of_accuracy_is_stopped(repository: Path, tools: dict[str, str]) -> None:
    comment, gates = _pull_request(repository, tools, "less-data", 7, train=300)
    assert _failed(gates) == ["accuracy:top1"]
    assert 0.02 < gates["accuracy:top1"]["before"] - gates["accuracy:top1"]["after"] < 0.03
    assert re.search(
        r"^\| ❌ failed \| accuracy, top1 \| 0\.98\d\d \| 0\.95\d\d \| at least 0\.97", comment, flags=re.MULTILINE
    )
    assert re.search(
        r"^### Failed: accuracy, top1\n\nthe model is 2\.\d+ points less accurate than the baseline; its FP32 form",
        comment,
        re.M,
    )


def test_a_change_that_loses_int8_layers_is_stopped(repository: Path, tools: dict[str, str]) -> None:
    comment, gates = _pull_request(repository, tools, "depthwise", 7, depthwise=True)
    assert _failed(gates) == ["share:8-bit"]
    assert re.search(r"^\| ❌ failed \| 8 bits or fewer, share of the flop \| 9\d\.\d % \| 6\d\.\d % \|", comment, re.M)
    what = comment.partition("### Failed")[2]
    assert re.search(r"^\| conv2 \\\+\d+ \|  \| 2 \| int8 fp16 \\-\\> fp16 \|", what, flags=re.MULTILINE)


def test_a_change_that_adds_a_kernel_and_its_quantizer_is_stopped(repository: Path, tools: dict[str, str]) -> None:
    comment, gates = _pull_request(repository, tools, "mixed-scores", 7, mixed=True)
    assert "kernels" in _failed(gates) and gates["accuracy:top1"]["verdict"] == "passed"
    assert re.search(r"^\| ❌ failed \| kernels \| 6 \| 8 \| at most 6", comment, flags=re.MULTILINE)
    assert re.search(
        r"^### Failed: kernels\n\n2 kernels more than the baseline, at .*\bmix\b", comment, flags=re.MULTILINE
    )
    assert re.search(r"^\| head \\\+\d+ \|  \| 2 \\-\\> 4 \|", comment, flags=re.MULTILINE)


def test_a_good_change_passes_and_becomes_the_baseline(repository: Path, tools: dict[str, str]) -> None:
    comment, gates = _pull_request(repository, tools, "more-data", 0, train=1300)
    assert {gate["verdict"] for gate in gates.values()} == {"passed"}
    assert comment.startswith("## ✅ trtopt check: 9 gates passed\n")
    assert "the model changed: sha256" in comment
    shutil.copy(repository / "engines" / "digits.json", repository / "baseline.json")
    _commit(repository, tools, "its baseline")
    _trtopt(repository, tools, *CHECK, "--markdown", "comment.md")
    assert "### Notes" not in (repository / "comment.md").read_text()


@pytest.mark.long
def test_the_steps_of_the_action_run(repository: Path, tools: dict[str, str], tmp_path: Path) -> None:
    """Building, gating, the summary; the second time a gate of the build itself fails, and is shown like the others."""
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    inputs = {name: item.get("default", "") for name, item in action["inputs"].items()}
    _command(repository, tools, "git", "checkout", "-q", "main")
    inputs |= {"model": "digits.onnx", "output": "out/digits.rtx.engine", "precision": "int8", "gpu": "L4"}
    inputs |= {"calib": "calib.npz", "eval": "eval.npz", "metric": "top1", "reports": "out/reports", "extras": ""}
    inputs |= {"options": "--keep-all-int8\n--recipes none\n", "thresholds": "--max-kernels 6 --min-share int8=0.9"}
    first = _act(action, inputs | {"baseline": "baseline.json"}, repository, tools, tmp_path / "first")
    assert first["code"] == 0, first["stderr"]
    assert "files=out/digits.*\n" in first["outputs"] and (repository / "out" / "digits.rtx.engine").exists()
    assert first["summary"] == (repository / "out" / "reports" / "check.md").read_text()
    assert first["summary"].startswith("## ✅")
    options = inputs["options"] + "--min-sqnr-db 200 -o out/other.engine"
    second = _act(action, inputs | {"options": options}, repository, tools, tmp_path / "second")
    assert second["code"] == 7
    assert "the gates of the build itself" in second["summary"].partition("Failed: ")[2]
    third = _act(action, inputs | {"model": "none.onnx"}, repository, tools, tmp_path / "third")
    assert third["code"] == 2 and "none.onnx" in third["stderr"] and third["summary"] == ""


def _act(
    action: dict[str, Any], inputs: dict[str, str], folder: Path, tools: dict[str, str], scratch: Path
) -> dict[str, Any]:
    """Run the steps as a runner does: each in bash with its environment, up to the first that fails."""
    scratch.mkdir()
    found: dict[str, Any] = {"code": 0, "stderr": "", "outputs": "", "summary": ""}
    files = {"GITHUB_OUTPUT": scratch / "outputs", "GITHUB_STEP_SUMMARY": scratch / "summary"}
    shutil.rmtree(folder / "out", ignore_errors=True)
    for step in action["runs"]["steps"]:
        if "run" not in step or step["name"] == "Install":
            continue
        own = {
            name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: inputs[match[1]], value)
            for name, value in step["env"].items()
        }
        environment = {**tools, **own, **{name: str(path) for name, path in files.items()}}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        found["code"], found["stderr"] = done.returncode, found["stderr"] + done.stderr
        if done.returncode:
            break
    found["outputs"], found["summary"] = (path.read_text() if path.exists() else "" for path in files.values())
    return found


def test_the_action_uses_its_inputs_safely() -> None:
    """Inputs reach the shell through the environment only, each is used, and other actions are pinned to a commit."""
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    action = yaml.safe_load(text)
    for step in action["runs"]["steps"]:
        assert "${{" not in step.get("run", "")
        assert "uses" not in step or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(action["inputs"])
    assert "secrets." not in text


@pytest.mark.parametrize("name", ["github.yml", "gitlab-ci.yml"])
def test_the_commands_of_the_examples_parse(name: str) -> None:
    """Every command is one of trtopt's, with options that it has."""
    yaml = pytest.importorskip("yaml")
    from command_line import parse

    from trtopt.cli import check

    example = yaml.safe_load((ROOT / "examples" / "ci" / name).read_text(encoding="utf-8"))
    jobs = example["jobs"] if "jobs" in example else {key: job for key, job in example.items() if "script" in job}
    lines = [line for job in jobs.values() for line in job.get("script", [])]
    steps = [step for job in jobs.values() for step in job.get("steps", [])]
    lines += [line for step in steps for line in step.get("run", "").splitlines()]
    commands = [line.split() for line in lines if line.startswith("trtopt ")]
    assert {words[1] for words in commands} >= {"analyze", "check", "profile"}
    for words in commands:
        if words[1] in ("build", "optimize"):
            parse(words[1], words[2:])
        elif words[1] == "check":
            check.make_parser().parse(words[2:])
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    for step in steps:
        if step.get("uses", "").startswith("OWNER/"):
            assert set(step["with"]) <= set(action["inputs"])
            assert {key for key, item in action["inputs"].items() if item.get("required")} <= set(step["with"])
            check.make_parser().parse(["r.json", *step["with"].get("thresholds", "").split()])
            options = step["with"].get("options", "").split()
            parse(step["with"].get("command", "build"), [step["with"]["model"], *options])
        elif "uses" in step:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])


@pytest.mark.parametrize(
    ("arguments", "message", "remedy"),
    [
        ((), "required: REPORT", "trtopt check --help"),
        (("none.json",), "No such file", "check the path"),
        (("digits.onnx",), "an ONNX model, not a report", "trtopt build digits.onnx --report"),
        (("baseline.json", "--baseline", "other.json"), "has other inputs: ", "same way"),
        (("baseline.json", "--max-latency-regress", "0.1"), "needs a baseline", "--baseline"),
        (("baseline.json", "--min-share", "int=0.5"), "'int' is no type", "did you mean int"),
        (("baseline.json", "--min-share", "int8"), "not TYPE=SHARE", "trtopt check --help"),
        (("baseline.json", "--max-kernel", "3"), "no option --max-kernel", "--max-kernels"),
        (("baseline.json", "--markdown", "no/where.md"), "does not exist", "mkdir"),
        (("baseline.json", "--junit", "baseline.json"), "overwrite the report", "another file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_request_is_one_message_with_a_remedy(
    repository: Path, tools: dict[str, str], trtopt: Run, arguments: tuple[str, ...], message: str, remedy: str
) -> None:
    report = json.loads((repository / "baseline.json").read_text())
    report["model"]["inputs"][0]["name"] = "image"
    (repository / "other.json").write_text(json.dumps(report))
    done = trtopt("check", *arguments, cwd=repository)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and remedy in done.stderr.partition("remedy: ")[2]
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr


def test_the_terminal_says_what_failed(repository: Path, trtopt: Run) -> None:
    done = trtopt("check", "baseline.json", "--max-bytes", "1000", "--markdown", "m.md", cwd=repository)
    assert done.returncode == 7 and done.stderr == ""
    assert done.stdout.startswith("1 of 4 gates failed\n")
    assert "Failed: engine size" in done.stdout and "a larger engine than allowed" in done.stdout
    assert (repository / "m.md").read_text().startswith("## ❌")


def test_python_callers_get_the_gates(repository: Path) -> None:
    import trtopt as package

    found = package.check(repository / "baseline.json", baseline=repository / "baseline.json", max_kernels=5)
    assert [gate.name for gate in found.failed] == ["kernels"]
    with pytest.raises(package.TrtoptError, match="There is no threshold 'max_kernel'"):
        package.check(repository / "baseline.json", max_kernel=5)
