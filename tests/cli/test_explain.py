"""``trtopt explain``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from trtopt.cli import explain
from trtopt.errors import UsageError
from trtopt.profiling.explain import PAGES as REASONS
from trtopt.roofline.rules.registry import PAGES as RULES

PAGES = {**RULES, **REASONS}
"""What `trtopt analyze` finds, and why a measured layer takes longer than it could."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize("arguments", [[], ["--list"]])
def test_all_rules_are_listed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.run(arguments) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines() if line.split() and line.split()[0] in PAGES] == list(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_every_rule_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.run([name]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{name}\n\n")
    for heading in ("What:", "Why:", "Example:", "Remedy:"):
        assert f"\n{heading}\n" in text


def test_a_name_of_both_kinds_has_both_pages(capsys: pytest.CaptureFixture[str]) -> None:
    """A network is bound by launches, or one of its layers."""
    assert explain.run(["launch-bound"]) == 0
    text = capsys.readouterr().out
    assert RULES["launch-bound"] in text and REASONS["launch-bound"] in text


def test_pages_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.run(["--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["schema"] == "trtopt.rules/1"
    assert [rule["name"] for rule in listed["rules"]] == list(PAGES)
    assert explain.run(["alignment", "--json"]) == 0
    (rule,) = json.loads(capsys.readouterr().out)["rules"]
    assert rule in listed["rules"]
    assert rule["page"].startswith(rule["summary"])


def test_a_misspelt_rule_gets_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean alignment"):
        explain.run(["alignmnt"])


def test_a_rule_and_the_list_are_one_too_many() -> None:
    with pytest.raises(UsageError, match="--list lists all rules"):
        explain.run(["alignment", "--list"])


def test_the_command_is_there(trtopt: Run) -> None:
    done = trtopt("explain", "qkv")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("qkv\n")
