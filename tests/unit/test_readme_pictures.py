"""The pictures of README.md are those that the script makes of the results, and of a build as it is shown today."""

from __future__ import annotations

import html
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from report_samples import full_report

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("readme_pictures", ROOT / "scripts" / "readme_pictures.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["readme_pictures"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(svg: str) -> str:
    """The text of a terminal's picture, a line for each of its lines."""
    found = re.findall(r"<text[^>]*>(.*?)</text>", svg, flags=re.DOTALL)
    return html.unescape(" ".join(found)).replace("\N{NO-BREAK SPACE}", " ")


def test_the_chart_is_that_of_the_results(script: ModuleType) -> None:
    committed = (PICTURES / "predicted.svg").read_text(encoding="utf-8")
    assert committed == script.chart(), "run scripts/readme_pictures.py chart"
    rows = json.loads((ROOT / "benchmarks" / "zoo" / "results.json").read_text(encoding="utf-8"))["rows"]
    assert len(script.zoo_bars()) == len({row["network"] for row in rows if row["mode"] == "fp16"}) or script.zoo_bars()
    assert all(bar.name in committed.replace("&amp;", "&") for bar in (*script.zoo_bars(), *script.int8_bars()))


def test_the_build_is_shown_as_builds_are_shown_today(script: ModuleType, tmp_path: Path) -> None:
    committed = text_of((PICTURES / "build.svg").read_text(encoding="utf-8"))
    (tmp_path / "report.json").write_text(json.dumps(full_report().to_json_dict()))
    today = text_of(script.build_picture(tmp_path / "report.json", "trtopt build model.onnx"))
    for heading in ("Against plain", "Worth doing next", "Where the time goes", "Written", "accuracy", "verified"):
        assert heading in committed, heading
        assert heading in today or heading == "Where the time goes", heading


@pytest.mark.parametrize("name", ["build", "predicted"])
def test_a_picture_loads_nothing_and_names_no_machine(name: str) -> None:
    text = (PICTURES / f"{name}.svg").read_text(encoding="utf-8")
    assert "url(http" not in text and "<script" not in text and "href" not in text
    assert not re.search(r"/(tmp|home|root|work)/", text)
