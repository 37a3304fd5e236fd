"""The page of a profile with 1,500 layers: its size, the time to write it, and how fast a browser shows it and answers.

    python benchmarks/profile/page.py [--repeats N]

The layers are those of the tests' large sample. Times in the browser are those of its own clock, in a headless Chromium
without a GPU; an answer counts until the frame that shows it is drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE.parents[1] / "tests" / folder) for folder in ("unit", "ui")]

from browser import Page, chromium  # noqa: E402
from profile_samples import large_profile  # noqa: E402

from trtopt.report.html.page import html_page  # noqa: E402
from trtopt.report.html.profile import layer_data  # noqa: E402
from trtopt.report.html.profile_graph import graph  # noqa: E402
from trtopt.report.text.profile import view  # noqa: E402

MACHINE = "2-core x86-64, no GPU"
ANSWERS = {
    "a search that finds one layer": "find.value = 'layer.106/attention/query'; find.dispatchEvent(new Event('input'))",
    "a search that finds 214 layers": "find.value = 'query'; find.dispatchEvent(new Event('input'))",
    "a click on a layer": "cy.getElementById('700').emit('tap')",
    "other colours": "colors.selectedIndex = 2; colors.dispatchEvent(new Event('change'))",
    "the table sorted anew": "document.querySelector('#layers th button').click()",
    "the table filtered": "filter.value = 'intermediate'; filter.dispatchEvent(new Event('input'))",
    "a step of a move over the whole graph": "cy.panBy({ x: 5, y: 0 })",
}
"""What is asked of the page, as its script would be."""
ANSWER = """
(async () => {
  const [find, filter, colors] = ["find", "filter", "coloring"].map((id) => document.getElementById(id));
  const cy = document.getElementById("graph")._cyreg.cy;
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const start = performance.now();
  ACTION;
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - start;
})()
"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def shown(page: Page, path: Path) -> dict[str, float]:
    """Milliseconds of one visit."""
    page.open(path)
    found = {"first paint": page.run(PAINT), "all drawn": page.run("performance.now()")}
    for words, action in ANSWERS.items():
        page.run("document.getElementById('whole').click()")
        found[words] = page.run(ANSWER.replace("ACTION", action))
    return found


def written(repeats: int) -> tuple[str, dict[str, float]]:
    """The page, and the milliseconds it takes to lay out the graph and to write all of it."""
    report = large_profile()
    runs: dict[str, list[float]] = {"graph laid out": [], "page written": []}
    for _ in range(repeats):
        start = time.perf_counter()
        graph(report.layers)
        runs["graph laid out"].append(1e3 * (time.perf_counter() - start))
        start = time.perf_counter()
        page = html_page(view(report))
        runs["page written"].append(1e3 * (time.perf_counter() - start))
    return page, {words: statistics.median(times) for words, times in runs.items()}


def write_table(readme: Path, lines: list[str]) -> None:
    """Replace the table of the page in the README."""
    opening, closing = "<!-- page -->\n", "<!-- end of page -->"
    before, found, rest = readme.read_text().partition(opening)
    _, end, after = rest.partition(closing)
    if not found or not end:
        raise SystemExit(f"{readme} has no markers for the table")
    readme.write_text(before + opening + "\n".join(lines) + "\n" + closing + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    load = [os.getloadavg()[0]]
    text, times = written(options.repeats)
    visits = []
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "page.html"
        path.write_text(text, encoding="utf-8")
        with chromium(Path(name) / "chromium") as page:
            version = page.call("Browser.getVersion")["product"]
            page.size(1280, 900)
            for repeat in range(options.repeats + 1):
                found = shown(page, path)
                if repeat:  # the first visit starts the browser's own caches
                    visits.append(found)
        if page.complaints:
            raise SystemExit("\n".join(page.complaints))
    times |= {words: statistics.median(visit[words] for visit in visits) for words in visits[0]}
    load.append(os.getloadavg()[0])
    sizes = {"page": len(text.encode()), "data of the layers": len(layer_data(large_profile().layers))}
    results: dict[str, Any] = {
        "machine": MACHINE,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "browser": version,
        "repeats": options.repeats,
        "load_average_before_and_after": [round(value, 1) for value in load],
        "bytes": sizes,
        "milliseconds": {words: round(value, 1) for words, value in times.items()},
    }
    (HERE / "page.json").write_text(json.dumps(results, indent=2) + "\n")
    lines = ["| 1,500 layers | |", "|---|---|"]
    lines += [f"| {words}, MB | {value / 1e6:.2f} |" for words, value in sizes.items()]
    lines += [f"| {words}, ms | {value:.0f} |" for words, value in times.items()]
    print("\n".join(lines))
    write_table(HERE / "README.md", lines)


if __name__ == "__main__":
    main()
