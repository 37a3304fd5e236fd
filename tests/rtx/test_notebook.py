"""The notebook of examples/ runs from top to bottom: its cells, in this process, in an empty folder."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "onnxscript", "onnxruntime", "tensorrt_rtx", "pandas", "plotly"):
    pytest.importorskip(package, reason="the notebook needs it")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def shown(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; what its last line gives."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


def test_every_cell_runs_and_shows_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert book["nbformat"] == 4 and not any(cell.get("outputs") for cell in book["cells"])
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    results = [shown(cell, names) for cell in cells]
    analysis, figure, frame, report = (item for item in results if hasattr(item, "_repr_html_"))
    assert "on L4" in analysis._repr_html_() and "INT8" in report._repr_html_().upper()
    assert len(frame) == len(analysis.layers) and figure.data
    assert (tmp_path / "net.rtx.engine").is_file()
