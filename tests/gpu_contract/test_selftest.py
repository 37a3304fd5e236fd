"""The self-test of a GPU machine, on the stand-in: every kind passes, and one that computes something else does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from machine import RELEASES, Machine
from plans import KINDS

from trtopt.cli import doctor
from trtopt.engine.backend import TENSORRT, TENSORRT_RTX
from trtopt.errors import EngineBuildError, GateError
from trtopt.hardware.spec import find_gpu
from trtopt.serve import selftest

SHARED = [name for name in KINDS if name not in ("aliased-output", "HWC8")]


@pytest.mark.parametrize("machine", RELEASES, indirect=True)
@pytest.mark.parametrize("name", SHARED)
def test_a_kind_passes_in_a_session_timed_and_served(name: str, machine: Machine, tmp_path: Path) -> None:
    kind, backend = KINDS[name], TENSORRT_RTX if machine.is_rtx else TENSORRT
    found = selftest.run_everywhere(machine.engine(kind.plan), backend, kind.calls, tmp_path)
    assert found["ok"] and found["difference_ratio"] == 0 and found["layers"] == 2 and found["device_us"] == 250.0


def test_a_kind_that_computes_something_else_fails(machine: Machine, tmp_path: Path) -> None:
    kind = KINDS["dynamic"]
    wrong = replace(kind.plan, compute=lambda feeds: {"y": 2.1 * feeds["x"]})
    found = selftest.run_everywhere(machine.engine(wrong), TENSORRT, kind.calls, tmp_path)
    assert not found["ok"] and found["difference_ratio"] > 0.02


def test_the_self_test_knows_the_kinds_of_the_suite() -> None:
    assert selftest.engine_kinds().keys() == set(SHARED)


def test_the_file_names_the_check_in_which_the_process_ended(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "doctor.json"

    def ends(*arguments: object) -> dict[str, object]:
        raise SystemExit(139)

    monkeypatch.setattr(selftest, "why_not_checked", lambda backend: "" if backend == TENSORRT else "no")
    monkeypatch.setattr(selftest, "_checked", ends)
    monkeypatch.setattr("trtopt.engine.doctor.selftest", lambda: {"ok": True, "environment": {}, "checks": []})
    with pytest.raises(SystemExit):
        doctor.run(["--selftest", "--json", "--report", str(path)])
    found = json.loads(path.read_text(encoding="utf-8"))
    (kind,) = found["kinds"]
    assert not found["ok"] and kind["kind"] == "static" and kind["error"] == "it did not end"


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ({"ok": True, "difference_ratio": 0.0, "device_us": 1.0, "layers": 1, "graphs": {}}, 0),
        ({"ok": False, "difference_ratio": 1.0, "device_us": 1.0, "layers": 1, "graphs": {}}, GateError.exit_code),
        (EngineBuildError("The engine failed", where="here", remedy="none"), EngineBuildError.exit_code),
    ],
)
def test_a_kind_that_fails_fails_the_self_test(
    outcome: object, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def checked(*arguments: object) -> object:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    done = {"ok": True, "precision": "fp16", "backend": "tensorrt", "error": "", "target": "L4"}
    monkeypatch.setattr(selftest, "why_not_checked", lambda backend: "" if backend == TENSORRT else "no")
    monkeypatch.setattr(selftest, "_checked", checked)
    del done["error"]
    monkeypatch.setattr("trtopt.engine.doctor.selftest", lambda: {"ok": True, "environment": {}, "checks": [done]})
    assert doctor.run(["--selftest", "--json"]) == code
    assert len(json.loads(capsys.readouterr().out)["kinds"]) == len(SHARED)


@pytest.mark.parametrize(("gpu", "refuses"), [("H100", True), ("L4", False)])
def test_rtx_is_not_checked_on_a_gpu_that_it_does_not_build_for(
    gpu: str, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "present_gpu", lambda: find_gpu(gpu))
    monkeypatch.setattr(selftest, "why_not_run", lambda backend: "")
    assert bool(selftest.why_not_checked(TENSORRT_RTX)) == refuses and not selftest.why_not_checked(TENSORRT)
