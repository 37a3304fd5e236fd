"""The pictures of README.md: a build as the terminal shows it, and predicted times against plain FP16.

    python scripts/readme_pictures.py build REPORT.json "trtopt build model.onnx --int8 ..."
    python scripts/readme_pictures.py chart

The first renders the report of a real build (``--report``) below the command that made it; the second draws
benchmarks/zoo/results.json and benchmarks/precision/results.json. Both write SVG into docs/pictures.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
_COLUMNS = 88
_MOST = 1.6
_LINE, _NAME, _BAR, _TOP = 15, 120, 380, 54
_GREY, _GREEN, _ORANGE, _TEXT = "#9aa4b2", "#76b900", "#e8833a", "#57606a"


def build_picture(report: Path, command: str) -> str:
    """The terminal's form of a build's report, below its command, as SVG without the machine's folders."""
    from rich.console import Console

    from trtopt.report.schema.read import read_report
    from trtopt.report.text.build import view

    found: Any = read_report(report)
    if found.model.get("path"):
        found = dataclasses.replace(found, model={**found.model, "path": Path(found.model["path"]).name})
    console = Console(
        file=io.StringIO(), width=_COLUMNS, record=True, force_terminal=True, highlight=False, markup=False
    )
    console.print(f"$ {command}\n", style="bold")
    console.print(view(found))
    text = console.export_svg(title="trtopt", unique_id="trtopt-build")
    return re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)  # a picture loads nothing


@dataclass(frozen=True)
class Bar:
    """A network, and times as shares of its plain FP16 build, by the colour of the bar."""

    name: str
    shares: tuple[tuple[str, float], ...]


def zoo_bars() -> list[Bar]:
    """FP16 of trtopt against a plain cast, by the plain second judge on an L4, the best first."""
    rows = json.loads((ROOT / "benchmarks" / "zoo" / "results.json").read_text(encoding="utf-8"))["rows"]
    times: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["gpu"] == "L4" and not row["fixed"] and row.get("us"):
            times[row["network"], row["mode"]] = row["us"]["L4"]
    names = sorted({name for name, _ in times if (name, "plain") in times and (name, "fp16") in times})
    bars = [Bar(name, ((_GREEN, times[name, "fp16"] / times[name, "plain"]),)) for name in names]
    return sorted(bars, key=lambda bar: bar.shares[0][1])


def int8_bars() -> list[Bar]:
    """INT8 of trtopt and of Model Optimizer against plain FP16, as trtopt predicts them on an RTX 4090."""
    found = json.loads((ROOT / "benchmarks" / "precision" / "results.json").read_text(encoding="utf-8"))["networks"]
    bars = []
    for name, rows in found.items():
        plain, peer = (rows[kind]["predicted_us"]["RTX-4090"] for kind in ("FP16, plain build", "ModelOpt INT8"))
        own = rows["ours --int8"]["for"]["RTX-4090"]["predicted_us"]["RTX-4090"]
        bars.append(Bar(name, ((_GREEN, own / plain), (_ORANGE, peer / plain))))
    return sorted(bars, key=lambda bar: bar.shares[0][1])


def chart() -> str:
    """Both groups of bars; 1 is the plain FP16 build."""
    int8, zoo = int8_bars(), zoo_bars()
    mean = math.exp(sum(math.log(bar.shares[0][1]) for bar in zoo) / len(zoo))
    first, y = _group(int8, _TOP, "INT8 on an RTX 4090, predicted by trtopt (orange: Model Optimizer's INT8)")
    head = (
        f"FP16 of {len(zoo)} real exports on an L4, by a second judge that is not trtopt's (geometric mean {mean:.2f})"
    )
    second, end = _group(zoo, y + 34, head)
    width = round(_NAME + _MOST * _BAR + 90)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {end + 10}" width="{width}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{_TEXT}">\n'
        f"<title>Predicted time as a share of a plain FP16 build, TensorRT for RTX</title>\n"
        f'<text x="8" y="20" font-size="14" font-weight="bold">Predicted time as a share of a plain FP16 build '
        f"(TensorRT for RTX; shorter is faster)</text>\n{first}{second}</svg>\n"
    )


def _group(bars: Sequence[Bar], top: float, title: str) -> tuple[str, float]:
    """A title and rows, and where they end; bars longer than :data:`_MOST` times plain are cut."""
    parts = [f'<text x="8" y="{top}" font-weight="bold">{escape(title)}</text>\n']
    y = top + 8.0
    start = y
    for bar in bars:
        height = _LINE / len(bar.shares) - 2
        parts.append(f'<text x="{_NAME - 6}" y="{y + 10}" text-anchor="end">{escape(bar.name)}</text>\n')
        for index, (color, share) in enumerate(bar.shares):
            wide, at = min(share, _MOST) * _BAR, y + index * _LINE / len(bar.shares)
            parts.append(f'<rect x="{_NAME}" y="{at:.1f}" width="{wide:.1f}" height="{height:.1f}" fill="{color}"/>\n')
        label = " / ".join(f"{share:.2f}" for _, share in bar.shares)
        longest = max(share for _, share in bar.shares)
        end = _NAME + min(longest, _MOST) * _BAR
        mark = "" if longest <= _MOST else "\N{RIGHTWARDS ARROW} "
        parts.append(f'<text x="{end + 4:.1f}" y="{y + 10}" font-size="9">{mark}{label}</text>\n')
        y += _LINE + (3 if len(bar.shares) > 1 else 0)
    one = _NAME + _BAR
    parts.append(f'<line x1="{one}" x2="{one}" y1="{start}" y2="{y}" stroke="{_GREY}" stroke-dasharray="3"/>\n')
    return "".join(parts), y


def main() -> None:
    """Write one of the pictures."""
    PICTURES.mkdir(exist_ok=True)
    if sys.argv[1:] == ["chart"]:
        (PICTURES / "predicted.svg").write_text(chart(), encoding="utf-8")
    elif len(sys.argv) == 4 and sys.argv[1] == "build":
        (PICTURES / "build.svg").write_text(build_picture(Path(sys.argv[2]), sys.argv[3]), encoding="utf-8")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
