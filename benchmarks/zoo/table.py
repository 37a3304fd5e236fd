"""The zoo's results as results.json and as tables in the README."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EIGHT_BIT_DB = 20.0
"""What every output has to keep for an 8-bit time to count."""
EIGHT_BIT = ("int8", "fp8", "auto")
PEERS = ("modelopt-int8", "modelopt-fp8")
SAME = 0.02
LEAST_SHOWN = 0.03
"""Of the predicted time, what a reason has to take to be named."""
Rows = Mapping[str, Mapping[str, Any]]


def write(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Write results.json and the tables: one per GPU, dynamic and fixed.

    Args:
        rows: Of ``results.jsonl``, the last of each network, mode, GPU and kind of shape.
        facts: Machine, date and versions.
    """
    order = list(dict.fromkeys(row["network"] for row in rows))
    (HERE / "results.json").write_text(json.dumps({**facts, "rows": list(rows)}, indent=1) + "\n")
    lines: list[str] = []
    for gpu, fixed in sorted({(row["gpu"], row["fixed"]) for row in rows}):
        mine: dict[str, dict[str, Mapping[str, Any]]] = {name: {} for name in order}
        for row in rows:
            if (row["gpu"], row["fixed"]) == (gpu, fixed):
                mine[row["network"]][row["mode"]] = row
        lines += ["", f"### {gpu}, {'fixed shapes' if fixed else 'a range of shapes'}", ""]
        lines += [
            *table({name: modes for name, modes in mine.items() if modes}, gpu),
            "",
            *summary(mine, gpu),
            *peers(mine, gpu),
            *limits(mine, gpu),
        ]
    readme = HERE / "README.md"
    before, opening, rest = readme.read_text().partition("<!-- table -->\n")
    _, closing, after = rest.partition("<!-- end of table -->")
    readme.write_text(before + opening + "\n".join(lines).strip() + "\n" + closing + after)


def ratio(modes: Rows, mode: str, gpu: str) -> float | None:
    """The second judge's time of a mode over that of plain: what did not build or has too little accuracy in 8 bits
    counts as the next simpler mode; None where plain is not known or the mode did not run."""
    plain, row = modes.get("plain", {}), modes.get(mode)
    if "us" not in plain or row is None:
        return None
    accurate = (
        mode not in EIGHT_BIT or (row.get("db") is not None and row["db"] >= EIGHT_BIT_DB) or row.get("difference") == 0
    )
    if "us" in row and accurate:
        return row["us"][gpu] / plain["us"][gpu]
    return ratio(modes, "fp16", gpu) or 1.0 if mode in EIGHT_BIT else 1.0


def best_mode(modes: Rows, gpu: str) -> str:
    """The 8-bit mode of least ratio among those that ran."""
    found = {mode: each for mode in EIGHT_BIT if (each := ratio(modes, mode, gpu)) is not None}
    return min(found, key=found.__getitem__, default=EIGHT_BIT[0])


def best(modes: Rows, gpu: str) -> float | None:
    """The least ratio of the 8-bit modes that ran."""
    return ratio(modes, best_mode(modes, gpu), gpu)


def _engine(row: Mapping[str, Any] | None, gpu: str) -> str:
    if row is None:
        return "-"
    if "us" not in row:
        return _short(row["reason"])
    syncs = f"+{row['syncs']}" if row["syncs"] else ""
    return f"{row['kernels']}{syncs} / {row['mb']:.0f} / {row['us'][gpu]:.0f}"


def _short(reason: str) -> str:
    return reason.replace("|", "/").split(". ")[0][:60]


def _db(row: Mapping[str, Any] | None) -> str:
    if row is None or "us" not in row:
        return "-"
    if row.get("difference") == 0:
        return "equal"
    text = "other shapes" if row.get("other_shapes") else "not finite" if row.get("db") is None else f"{row['db']:g}"
    return text if row.get("ort") == "yes" else f"{text} (ONNX Runtime: {_short(row.get('ort', 'no'))})"


def _short_engine(modes: Rows, mode: str, gpu: str) -> str:
    """The second judge's time, of plain, and dB; what has too little of these in brackets, as it counts as FP16."""
    row = modes.get(mode)
    if row is None or "us" not in row:
        return _engine(row, gpu)
    plain = modes.get("plain", {})
    share = f" / {row['us'][gpu] / plain['us'][gpu]:.2f}" if "us" in plain else ""
    text = f"{row['us'][gpu]:.0f}{share} / {_db(row)}"
    return text if row.get("difference") == 0 or (row.get("db") or 0.0) >= EIGHT_BIT_DB else f"({text})"


def table(networks: Mapping[str, Rows], gpu: str) -> list[str]:
    """One row a network: kernels+syncs / MB of activations / us of the second judge."""
    head = "network | plain | FP16 | of plain | predicted, us | FP16, dB | INT8 | of plain | INT8, dB | recipes alone"
    more = "FP8: us / of plain / dB | `--auto`: us / of plain / dB | FP16, INT8, `--auto`: s (CPU s)"
    lines = [f"| {head} | {more} |", "|---" * 13 + "|"]
    for name, modes in networks.items():
        ratios = [ratio(modes, mode, gpu) for mode in ("fp16", "int8")]
        shown = ["-" if each is None else f"{each:.2f}" for each in ratios]
        times = " -> ".join(
            f"{modes[m]['predicted_us']:.0f}" if "us" in modes.get(m, {}) else "-" for m in ("plain", "fp16")
        )
        recipes = modes.get("recipes", {})
        alone = (
            f"{recipes['difference']:.0e}"
            if "difference" in recipes
            else _short(recipes.get("reason", recipes.get("ort", "-")))
        )
        took = ", ".join(
            f"{modes[m]['seconds']:.0f} ({modes[m]['cpu_s']:.0f})" if "us" in modes.get(m, {}) else "-"
            for m in ("fp16", "int8", "auto")
        )
        cells = [name, _engine(modes.get("plain"), gpu), _engine(modes.get("fp16"), gpu), shown[0], times]
        cells += [
            _db(modes.get("fp16")),
            _engine(modes.get("int8"), gpu),
            shown[1],
            _db(modes.get("int8")),
            alone,
            *(_short_engine(modes, mode, gpu) for mode in ("fp8", "auto")),
            took,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def peers(networks: Mapping[str, Rows], gpu: str) -> list[str]:
    """Model Optimizer beside the best of ours, where it ran: us of the second judge, of plain, dB."""
    lines = ["| network | FP16 | the best of ours in 8 bits, of plain | Model Optimizer INT8 | FP8 |", "|---" * 5 + "|"]
    found = {name: modes for name, modes in networks.items() if any(mode in modes for mode in PEERS)}
    for name, modes in found.items():
        ours = [f"{each:.2f}" if each is not None else "-" for each in (ratio(modes, "fp16", gpu), best(modes, gpu))]
        lines.append(f"| {' | '.join([name, *ours, *(_short_engine(modes, mode, gpu) for mode in PEERS)])} |")
    return ["", "Model Optimizer: us / of plain / dB, in brackets below 20 dB", "", *lines] if found else []


def mean_of(ratios: Iterable[float | None]) -> float:
    """The geometric mean of those that are known."""
    found = [math.log(each) for each in ratios if each is not None]
    return math.exp(sum(found) / len(found)) if found else math.nan


def limits(networks: Mapping[str, Rows], gpu: str) -> list[str]:
    """For each network above the mean, in FP16 and in its best 8-bit mode, what stands between it and its limit;
    other dialects of a network end at the same kernels."""
    lines = ["| network | mode | of plain | predicted, us | necessary, us | beyond, us (kernels) | most of it, us |"]
    lines += ["|---" * 7 + "|"]
    for function in (lambda _: "fp16", lambda modes: best_mode(modes, gpu)):
        ratios = {name: ratio(modes, function(modes), gpu) for name, modes in networks.items()}
        mean = mean_of(ratios.values())
        lines += [
            _limit_row(name, function(networks[name]), each, networks[name])
            for name, each in ratios.items()
            if each is not None and each > mean and "." not in name
            if "limit" in networks[name].get(function(networks[name]), {})
        ]
    title = "Above the mean: what stands between a network and its limit ([reasons](../../docs/analyze.md))"
    return ["", title, "", *lines] if len(lines) > 2 else []


def _limit_row(name: str, mode: str, share: float, modes: Rows) -> str:
    row, limit = modes[mode], modes[mode]["limit"]
    reasons = ", ".join(
        f"{reason} {us:.0f} ({kernels})"
        for reason, kernels, us in limit["reasons"]
        if us > LEAST_SHOWN * row["predicted_us"]
    )
    first = ", ".join(f"{kernels} {op} {us:.0f} ({reason})" for op, reason, kernels, us in limit["kernels"][:2])
    times = (f"{row['predicted_us']:.0f}", f"{limit['us']:.0f} ({limit['us'] / row['predicted_us']:.0%})")
    return "| " + " | ".join((name, mode, f"{share:.2f}", *times, reasons, first)) + " |"


def summary(networks: Mapping[str, Rows], gpu: str) -> list[str]:
    """Geometric means over all networks that ran, and how many are better, the same and worse."""
    lines = []
    for label, function in (
        ("FP16", lambda modes: ratio(modes, "fp16", gpu)),
        ("the best 8-bit mode", lambda modes: best(modes, gpu)),
    ):
        found = [each for each in map(function, networks.values()) if each is not None]
        if not found:
            continue
        mean = mean_of(found)
        better, worse = (sum(each < 1 - SAME for each in found), sum(each > 1 + SAME for each in found))
        lines.append(
            f"{label}: geometric mean {mean:.3f} of plain over {len(found)} networks; {better} better, "
            f"{len(found) - better - worse} within {SAME:.0%}, {worse} worse (at most {max(found):.2f})."
        )
        lines.append("")
    return lines[:-1]
