"""What a build or an engine loses against FP32, as it is shown."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from trtopt.report.schema.build import BuildReport, FloorRecord, OutputAccuracy
from trtopt.report.text.blocks import Block, Name, Table, line, table
from trtopt.report.text.format import count, decibels, percent, some

_MOST_ROWS, _WORST_TENSORS = 12, 5


def accuracy_table(heading: str, outputs: Mapping[str, OutputAccuracy]) -> Table:
    """Each output against FP32."""
    rows = []
    for name, item in itertools.islice(outputs.items(), _MOST_ROWS):
        figures = decibels(item.sqnr_db), f"{item.cosine:.6f}", f"{item.max_abs:.3g}"
        if item.shapes_differ:
            figures = f"other shape in {count(item.shapes_differ, 'sample')}", "", ""
        top1 = "" if item.top1_agreement is None else percent(item.top1_agreement)
        rows.append((Name(name), *figures, top1, str(item.nonfinite or "")))
    heads = [heading, "SQNR", "cosine", "max abs", "top-1 agreement", "not finite"]
    used = 6 if any(row[5] for row in rows) else 5
    return table(heads[:used], [row[:used] for row in rows], right=range(1, used))


def loss_text(report: BuildReport) -> str:
    """What a build costs that may cost accuracy: said first. Empty for others."""
    found = report.accuracy
    if not report.config.get("allow_accuracy_loss") or found is None:
        return ""
    metric, outputs = found.product_metric, found.outputs if found.engine is None else found.engine
    if metric is not None:
        what = f"{metric.name} {metric.baseline:.4f} -> {metric.optimized:.4f}, a drop of {metric.drop:.4f}"
    else:
        name, worst = min(outputs.items(), key=lambda item: item[1].sqnr_db, default=("", None))
        if worst is None:
            return ""
        agrees = "" if worst.top1_agreement is None else f", top-1 agreement {percent(worst.top1_agreement)}"
        what = f"{name} keeps {decibels(worst.sqnr_db)}, cosine {worst.cosine:.4f}{agrees}"
        if worst.sqnr_db == math.inf:
            what = "the outputs are equal"
    against = "FP32" if metric is not None else _reference(report)
    return f"Accuracy against {against}, as --allow-accuracy-loss lets it be: {what}"


def _reference(report: BuildReport) -> str:
    """What outputs were compared with."""
    recorded = report.config.get("reference")
    return "FP32" if recorded is None else f"the outputs in {recorded}"


def accuracy_section(report: BuildReport) -> list[Block]:
    """How the outputs of a build compare with FP32, the bounds they keep, and the metric."""
    record = report.accuracy
    if record is None:
        return [line("not verified", "warn")]
    where = {
        "onnx-only": "the graph was verified on the CPU; the engine itself has not run here",
        "engine": "the engine itself has run",
    }[record.verified]
    body: list[Block] = [
        line(f"{count(record.samples, 'sample')} ({record.source}) against {_reference(report)}: {where}"),
        *(line(note, "warn") for note in record.notes),
        accuracy_table("output", record.outputs),
    ]
    if record.selections:
        names = some(list(record.selections))
        body.append(line(f"behind a selection, where the least rounding makes entries change places: {names}"))
    if record.ranked:
        body.append(accuracy_table("selected from", record.ranked))
    if record.floor is not None:
        body.append(line(f"floor: {floor_text(record.floor)}"))
    body += [line(text) for text in _tolerances(record.engine or record.outputs)]
    if record.engine is not None:
        body.append(accuracy_table("output of the engine", record.engine))
    of = {"optimized": record.metric, "engine": record.engine_metric, "saved, in ONNX Runtime": record.saved_metric}
    for what, metric in of.items():
        if metric is not None:
            values = f"FP32 {metric.baseline:.6g}, {what} {metric.optimized:.6g}, drop {metric.drop:.6g}"
            body.append(line(f"metric {metric.name}: {values}"))
    return body


def floor_text(floor: FloorRecord) -> str:
    """What the outputs have to keep, and which of them."""
    bounds = {
        "agreement": "" if floor.agreement is None else f"top-1 agreement of {percent(floor.agreement)}",
        "sqnr": "" if floor.sqnr_db is None else f"SQNR of {decibels(floor.sqnr_db)}",
        "none": "no bound behind a selection",
    }
    names = {bound: [name for name, own in floor.outputs.items() if own == bound] for bound in bounds}
    texts = [f"{text} ({some(names[bound])})" for bound, text in bounds.items() if text and names[bound]]
    return "; ".join(texts) or "no output that it bounds"


def _tolerances(outputs: Mapping[str, OutputAccuracy]) -> list[str]:
    """How many values are beyond their tolerance, an output each, where one was given."""
    judged = {name: accuracy.tolerance for name, accuracy in outputs.items() if accuracy.tolerance is not None}
    return [
        f"{name}: {found.beyond} of {found.values} values beyond --atol {found.atol:g} and --rtol {found.rtol:g}"
        for name, found in judged.items()
    ]


def tensors_section(report: BuildReport) -> list[Block]:
    """The tensors that lose most, and where the error enters."""
    accuracy = report.accuracy
    if accuracy is None or not accuracy.tensors:
        return []
    worst = sorted(accuracy.tensors.items(), key=lambda item: (-item[1].nonfinite, item[1].sqnr_db))[:_WORST_TENSORS]
    body: list[Block] = [accuracy_table("tensor", dict(worst))]
    if accuracy.first_bad is not None:
        body.insert(0, line(f"the error enters at {accuracy.first_bad}", "warn"))
    return body
