"""The page of a sweep in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import CHROMIUM, chromium
from sweep_samples import failed, report, row

from trtopt.report.html.page import html_page
from trtopt.report.text.sweep import view

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

NAME = "<img src=x onerror=alert(1)>"


def test_the_page_plots_sorts_and_filters_without_errors_and_without_requests(tmp_path: Path) -> None:
    rows = [
        *(row(f"a{index}", gpu, latency_us=100.0 * (index + 1), drop=0.01 * index) for index, gpu in enumerate("LMN")),
        row("b0", "L4", "fp16", model=NAME, model_sha256="2" * 64, latency_us=5.0),
        row("b1", "L4", "int8", model=NAME, model_sha256="2" * 64, latency_us=4.0, latency="measured"),
        failed("c"),
    ]
    path = tmp_path / "page.html"
    path.write_text(html_page(view(report(*rows, warnings=("a worker was lost",)), drop=0.01)), encoding="utf-8")
    shown = "[...document.querySelectorAll('#jobs tbody tr')].filter((row) => row.offsetParent !== null)"
    (tmp_path / "profile").mkdir()
    with chromium(tmp_path / "profile") as page:
        for width in (1280, 420):
            page.size(width, 900)
            page.open(path)
            assert page.run("document.documentElement.scrollWidth") <= width
        # Measured and predicted times have plots of their own.
        assert page.run("document.querySelectorAll('.js-plotly-plot').length") == 3
        assert page.run("document.querySelectorAll('.points path').length") == 5
        assert page.run(f"{shown}.length") == 6
        page.click_on("input[type=search]")
        page.write("int8 img")
        assert page.run(f"{shown}.length") == 1
        page.run("document.querySelector('input').value = ''")
        page.write(" ")
        assert page.run(f"{shown}.length") == 6
        latency = "[...document.querySelectorAll('#jobs th')].findIndex((item) => item.textContent === 'latency')"
        page.run(f"document.querySelectorAll('#jobs th button')[{latency}].click()")
        times = page.run(f"{shown}.map((row) => row.cells[{latency}].textContent)")
        assert times[1:] == ["300 µs", "200 µs", "100 µs", "5.00 µs", "4.00 µs"], "what is not known stands first"
        assert page.complaints == [] and page.requests == []
