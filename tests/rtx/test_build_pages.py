"""Pages and Markdown of builds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import onnx
import pytest
from rtx_nets import conv_net

import trtopt
from trtopt.errors import MissingDependencyError

pytest.importorskip("tensorrt_rtx")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(conv_net(), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_a_build_writes_its_page_and_its_markdown(model: Path, tmp_path: Path) -> None:
    page, text = tmp_path / "r.html", tmp_path / "r.md"
    report = trtopt.build(model, cache_dir=tmp_path, recipes="none", html=page, markdown=text, output=tmp_path / "e")
    assert report.config["html"] == str(page)
    shown = page.read_text(encoding="utf-8")
    assert "Layers as a graph" in shown and "Precision achieved" in shown and len(shown) < 2_000_000
    assert re.match(r"## ✅ FP16 on .*predicted", text.read_text(encoding="utf-8"))


def test_without_jinja_the_build_is_refused_before_the_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingDependencyError, match="jinja2"):
        trtopt.build(model, cache_dir=tmp_path, html=tmp_path / "r.html")
