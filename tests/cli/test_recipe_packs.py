"""Recipes of other people: a pack is a package with an entry point, installed beside trtopt."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import onnx
import onnx.parser
import pytest
from command_line import Run

GOOD = '''
from dataclasses import dataclass
from trtopt.rewrite.protocol import Findings, Match, Stage

@dataclass(frozen=True)
class DoubleNeg:
    """Removes Neg(Neg(x))."""
    name: str = "double-neg"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model, target):
        return Findings(tuple(
            Match((node, node.inputs[0].producer())) for node in model.graph
            if node.op_type == "Neg" and node.inputs[0].producer() is not None
            and node.inputs[0].producer().op_type == "Neg" and not node.outputs[0].is_graph_output()
        ))

    def rewrite(self, model, match):
        second, first = match.nodes
        second.outputs[0].replace_all_uses_with(first.inputs[0])
        return None

PACK = (DoubleNeg(),)
'''


def install(folder: Path, name: str, source: str, target: str = "PACK") -> None:
    """What ``pip install`` leaves: a module and its metadata."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[trtopt.recipes]\n{name} = {name}:{target}\n")


@pytest.fixture
def trtopt(trtopt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs in a folder whose packages are installed."""
    monkeypatch.syspath_prepend(tmp_path)
    return trtopt


def model(folder: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y) { a = Neg(x) b = Neg(a) y = Exp(b) }'
    )
    onnx.save(onnx.parser.parse_model(text), folder / "m.onnx")


def optimize(
    trtopt: Run, folder: Path, *options: str
) -> tuple[subprocess.CompletedProcess[str], list[str], dict[str, object]]:
    result = trtopt("optimize", "m.onnx", "-o", "o.onnx", "--report", "r.json", *options)
    nodes = [node.op_type for node in onnx.load(folder / "o.onnx").graph.node] if result.returncode == 0 else []
    report = json.loads((folder / "r.json").read_text()) if result.returncode == 0 else {}
    return result, nodes, report


def test_an_installed_pack_is_listed_explained_and_applied(trtopt: Run, tmp_path: Path) -> None:
    model(tmp_path)
    install(tmp_path, "mypack", GOOD)
    assert "double-neg" in trtopt("recipe", "list").stdout
    assert "Removes Neg(Neg(x))." in trtopt("recipe", "explain", "double-neg").stdout
    _, nodes, report = optimize(trtopt, tmp_path)
    assert nodes == ["Exp"]
    assert "double-neg" in [step["name"] for step in report["steps"]]  # type: ignore[index, attr-defined]
    assert optimize(trtopt, tmp_path, "--recipes", "dead-node")[1] == ["Neg", "Neg", "Exp"]


def test_a_pack_that_cannot_be_loaded_is_left_out_and_the_report_says_so(trtopt: Run, tmp_path: Path) -> None:
    model(tmp_path)
    install(tmp_path, "broken", "raise RuntimeError('no licence')")
    result, nodes, report = optimize(trtopt, tmp_path)
    assert result.returncode == 0 and nodes == ["Neg", "Neg", "Exp"]
    assert "pack broken" in result.stdout + result.stderr and "no licence" in result.stdout + result.stderr
    step = next(step for step in report["steps"] if step["stage"] == "PACK")  # type: ignore[attr-defined]
    assert step["refusals"][0]["reason"] == "broken:PACK: RuntimeError: no licence"
    strict = trtopt("optimize", "m.onnx", "-o", "s.onnx", "--strict-recipes")
    assert strict.returncode == 5 and "no licence" in strict.stderr and not (tmp_path / "s.onnx").exists()


def test_a_recipe_that_raises_is_left_out_and_the_report_says_so(trtopt: Run, tmp_path: Path) -> None:
    model(tmp_path)
    install(tmp_path, "mypack", GOOD.replace("second, first = match.nodes", "raise ValueError('oops')"))
    result, nodes, report = optimize(trtopt, tmp_path)
    assert result.returncode == 0 and nodes == ["Neg", "Neg", "Exp"]
    step = next(step for step in report["steps"] if step["name"] == "double-neg")  # type: ignore[attr-defined]
    assert step["refusals"][0]["reason"].startswith("rolled back: ValueError: oops")


def test_a_pack_or_recipe_that_ends_the_program_is_left_out_as_one_that_raises(trtopt: Run, tmp_path: Path) -> None:
    model(tmp_path)
    install(tmp_path, "broken", "import sys\nsys.exit('no licence')")
    install(tmp_path, "mypack", GOOD.replace("second, first = match.nodes", "raise SystemExit(3)"))
    result, nodes, report = optimize(trtopt, tmp_path)
    assert result.returncode == 0 and nodes == ["Neg", "Neg", "Exp"]
    steps = {step["name"]: step for step in report["steps"] if step["refusals"]}  # type: ignore[attr-defined]
    reasons = [refusal["reason"] for step in steps.values() for refusal in step["refusals"]]
    assert "broken:PACK: SystemExit: no licence" in reasons
    assert steps["double-neg"]["refusals"][0]["reason"].startswith("rolled back: SystemExit: 3")


def test_a_pack_that_takes_a_name_or_is_none_is_left_out(trtopt: Run, tmp_path: Path) -> None:
    install(tmp_path, "twin", GOOD.replace('"double-neg"', '"identity"'))
    install(tmp_path, "other", "PACK = (1,)")
    listed = trtopt("recipe", "list")
    assert listed.returncode == 0 and listed.stdout.count("identity") >= 1
    assert "there is already a recipe named identity" in listed.stderr and "1 is not a recipe" in listed.stderr


def test_an_unknown_recipe_names_the_nearest(trtopt: Run, tmp_path: Path) -> None:
    model(tmp_path)
    result = trtopt("optimize", "m.onnx", "-o", "o.onnx", "--recipes", "dead-nod")
    assert result.returncode == 2 and "did you mean dead-node?" in result.stderr
    result = trtopt("optimize", "m.onnx", "-o", "o.onnx", "--recipes", "GLOBAL_AVERAGE_POOL")
    assert result.returncode == 2 and "did you mean global-average-pool?" in result.stderr
