"""The page of an analysis in a real browser."""

from __future__ import annotations

import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from analysis_samples import GPU, analysis_of, full_analysis, hostile_layers, many_layers

from trtopt.report.html import plots as analysis_plots
from trtopt.report.html.page import html_page
from trtopt.report.schema.analysis import Analysis
from trtopt.report.text.analysis import view
from trtopt.report.text.names import Labels, equal_layers

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

SPY = """<script>
window.complaints = [];
addEventListener("error", (event) => complaints.push(event.message));
addEventListener("securitypolicyviolation", (event) => complaints.push("blocked: " + event.blockedURI));
addEventListener("load", () => setTimeout(() => {
  const slow = document.querySelector("table.layers:not(#layers)");
  const heading = [...slow.querySelectorAll("th button")].find((item) => item.textContent === "time");
  const first = () => slow.querySelector("tbody td .name").textContent;
  const slowest = first();
  heading.click();
  document.body.dataset.sorted = JSON.stringify([slowest, first()]);
  document.body.dataset.points = document.querySelectorAll("#roofline .points path").length;
  document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth;
  document.body.dataset.complaints = JSON.stringify(complaints);
}, 500));
</script>"""
"""Stands first in the page: notes errors and refused requests, sorts the slowest layers, and leaves what it sees."""


def _seen(analysis: Analysis, folder: Path, width: int) -> dict[str, str]:
    """What the browser made of the page: the notes of ``SPY`` and the title."""
    path = folder / "page.html"
    path.write_text(html_page(view(analysis, GPU)).replace("<style>", SPY + "<style>", 1), encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--window-size={width},800", "--virtual-time-budget=20000", "--dump-dom", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    body = dom[dom.rindex("<body") :].split(">", 1)[0]
    notes = {part.split('="', 1)[0]: unescape(part.split('="', 1)[1].rstrip('"')) for part in body.split(" data-")[1:]}
    return {**notes, "title": dom.split("<title>", 1)[1].split("</title>", 1)[0]}


@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_draws_its_points_without_errors_and_without_requests(tmp_path: Path, width: int) -> None:
    analysis = full_analysis()
    seen = _seen(analysis, tmp_path, width)
    assert seen["complaints"] == "[]"
    assert int(seen["points"]) == len(analysis.layers)
    assert seen["wide"] == "false"


def test_names_of_the_model_run_no_script(tmp_path: Path) -> None:
    seen = _seen(analysis_of(hostile_layers), tmp_path, 1280)
    assert seen["title"] == "model.onnx on L4, fp16"
    assert seen["complaints"] == "[]"


def test_thousands_of_layers_are_drawn_and_a_click_sorts_them(tmp_path: Path) -> None:
    analysis = analysis_of(many_layers)
    seen = _seen(analysis, tmp_path, 1280)
    assert int(seen["points"]) == analysis_plots.MOST_POINTS
    rows = equal_layers(analysis.layers, Labels(analysis.names))
    slowest, first_after = [part.strip('"') for part in seen["sorted"].strip("[]").split(",")]
    assert slowest == rows[0].name.text
    assert first_after == rows[499].name.text
