"""What came of a build in five lines, what changed against plain, and what to do next."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trtopt.report.schema.build import BuildReport, OutputAccuracy
from trtopt.report.schema.shipped import DynamicCost
from trtopt.report.schema.steps import Cost
from trtopt.report.text.blocks import Block, Command, Line, line, pairs
from trtopt.report.text.calibration import calibration_lines
from trtopt.report.text.command import asked as options_of
from trtopt.report.text.command import build_line, model_words, shell
from trtopt.report.text.decisions import EIGHT_BIT, guarded
from trtopt.report.text.format import (
    bytes_text,
    count,
    decibels,
    percent,
    seconds_text,
    some,
    some_names,
    time_text,
    visible,
)
from trtopt.support.precision import Precision

AS_IS = "as-is"
"""The precision of ``optimize`` when none is asked for."""
_PRODUCTS = {"tensorrt-rtx": "TensorRT for RTX"}
_FORMS = {AS_IS: "the model as it is", "int8": "INT8 everywhere", "fp8": "FP8 everywhere"}
_FIXES = "--opt-shapes "
"""How the remedy of what a range of shapes costs begins."""
_MOST_ADVICE = 3
_NO_COST = 0.001
"""Share of the time below which a range of shapes adds none: roundings of the prediction."""
_RANGES_COST = 0.02
"""Share of the time from which on the cost of a range of shapes is worth a line."""
_CONVERTS = 0.01
"""Share of the time from which on the conversion of an input is worth a line."""
_LARGE = 1_000_000
"""Bytes of weights from which on an engine is mostly weights."""


@dataclass(frozen=True)
class Speed:
    """A predicted time, the batch it is for (None where inputs have none in common), and how plain compares.

    Attributes:
        us: Microseconds; None where nobody can say.
        batch: First axis of the inputs at the optimum.
        plain: The price of plain in the type between which quantized values are; None where it was not priced.
        form: That type.
    """

    us: float | None
    batch: int | None
    plain: Cost | None
    form: str

    @property
    def ratio(self) -> float | None:
        """How many times as fast as plain."""
        return self.plain.predicted_us / self.us if self.plain is not None and self.us else None


def failed(report: BuildReport) -> bool:
    """Whether a gate failed and nothing but the report was written."""
    return bool(report.gate_failures) and not report.config.get("allow_accuracy_loss")


def speed_of(report: BuildReport) -> Speed:
    """The predicted time of what was made."""
    cost = report.shipped
    us = cost.predicted_us if report.analysis is None and cost is not None else None
    us = us if report.analysis is None else report.analysis.totals.predicted_us
    forms = report.plain_forms or (() if report.plain is None else (report.plain,))
    plain = next((form for form in forms if form.form not in (Precision.INT8, Precision.FP8)), None)
    return Speed(us or None, _batch(report), plain, "fp16" if plain is None else plain.form)


def _batch(report: BuildReport) -> int | None:
    profiles = () if report.engine is None else report.engine.profiles
    best = [shapes["opt"] for shapes in profiles[0].values() if shapes.get("opt")] if profiles else []
    sizes = {dims[0] for dims in best}
    return sizes.pop() if len(sizes) == 1 else None


def verdict(report: BuildReport) -> tuple[Line, tuple[Block, ...]]:
    """The headline, and four lines below it: size, accuracy, what was verified, and whether it is ready.

    Example:
        INT8 on L4, TensorRT for RTX: 179 us predicted at batch 8 (44,700/s), 1.11x FP16
          size       16.5 MB, 0.72x of its weights in FP16; 58 kernels
          accuracy   top-1 agrees on 100 % of 200 samples (eval), 29.3 dB
          verified   on the CPU only: the engine itself has not run here
          ready      model.rtx.engine
    """
    if failed(report):
        rows = [("failed", "; ".join(map(visible, report.gate_failures)))]
        rows += [("accuracy", text) for text in accuracy_texts(report)]
        return Line("Nothing was made: a gate failed", "bad"), (pairs(rows),)
    rows = [("size", text) for text in _size(report)]
    rows += [("accuracy", text) for text in accuracy_texts(report)]
    rows.append(("verified", _verified(report)))
    rows += [("calibrated", text) for text in calibration_lines(report.gpu)]
    if report.engine is not None and report.engine.cached:
        rows.append(("engine", f"from the cache, {seconds_text(report.engine.build_seconds)} of building saved"))
    look = list(_look_at(report))
    rows.append(("look at", "; ".join(look)) if look else ("ready", _main_file(report)))
    return Line(_headline(report), "good"), (pairs(rows),)


def _headline(report: BuildReport) -> str:
    asked = report.precision.requested
    gpu = "a portable engine" if report.gpu is None else visible(str(report.gpu.get("name")))
    types = {AS_IS: "types as they are", Precision.AUTO: "the fastest mix"}.get(asked, asked.upper())
    what = f"{types[0].upper()}{types[1:]} on {gpu}, {_backend(report)}"
    if report.engine is None:
        what = f"ONNX model for {_backend(report)} on {gpu}, {types}"
    found = speed_of(report)
    if found.us is None:
        return what
    batch = "" if found.batch is None else f" at batch {found.batch} ({_rate(1e6 * found.batch / found.us)})"
    plain = f"{'plain ' if found.form == asked else ''}{_form(found.form)}"
    against = "" if found.ratio is None else f", {found.ratio:.2f}x {plain}"
    return f"{what}: {time_text(found.us)} predicted{batch}{against}"


def _backend(report: BuildReport) -> str:
    """The product that loads it."""
    engine = report.engine
    name = report.judge.partition(":")[2].split(" ")[0] if engine is None else engine.backend
    return _PRODUCTS.get(name, "TensorRT")


def _rate(per_second: float) -> str:
    digits = max(0, math.floor(math.log10(per_second)) - 2) if per_second >= 1 else 0
    return f"{round(per_second, -digits):,.0f}/s" if per_second >= 10 else f"{per_second:.2g}/s"


def _form(form: str) -> str:
    return _FORMS.get(form, form.upper())


def _size(report: BuildReport) -> Iterator[str]:
    engine = report.engine
    if engine is None:
        return
    half = 2 * report.parameters
    share = f" ({engine.bytes / half:.2f}x its weights in FP16)" if half >= _LARGE else ""
    kernels = "" if engine.kernels is None else f", {count(engine.kernels, 'kernel')}"
    yield f"{bytes_text(engine.bytes)}{share}{kernels}"


def accuracy_texts(report: BuildReport) -> Iterator[str]:
    """The metric, else the output that lost most."""
    found = report.accuracy
    if found is None:
        return
    samples = f"{count(found.samples, 'sample')} ({'RANDOM data' if found.source == 'synthetic' else found.source})"
    metric = found.product_metric
    if metric is not None:
        yield f"{metric.name} {metric.baseline:.4f} in FP32, {metric.optimized:.4f} now, on {samples}"
        saved = found.saved_metric
        if saved is not None and f"{saved.optimized:.4f}" != f"{metric.optimized:.4f}":
            found_there = f"{metric.name} {saved.optimized:.4f}"
            yield f"{found_there} by ONNX Runtime on the saved model: its kernels round in other places"
        return
    outputs = found.outputs if found.engine is None else found.engine
    outputs = {name: item for name, item in outputs.items() if name not in found.host_outputs}
    compared = {name: item for name, item in outputs.items() if name not in found.selections}
    outputs = compared or outputs
    if not outputs:
        return
    name, worst = min(outputs.items(), key=lambda item: _order(item[1]))
    of = f"{some_names([name], 1)}, the worst of {len(outputs)} outputs: " if len(outputs) > 1 else ""
    agrees = "" if worst.top1_agreement is None else f"top-1 agrees on {percent(worst.top1_agreement)} of "
    yield f"{of}{agrees}{samples}{': ' if not agrees else ', '}{decibels(worst.sqnr_db)} SQNR against FP32"
    if not compared:
        yield f"{some_names([name], 1)} is a selection: the least rounding makes entries change places; give a --metric"


def _order(item: OutputAccuracy) -> tuple[float, float]:
    sqnr = -math.inf if math.isnan(item.sqnr_db) else item.sqnr_db
    return (1.0 if item.top1_agreement is None else item.top1_agreement), sqnr


def _verified(report: BuildReport) -> str:
    if report.accuracy is None:
        return "not at all"
    if report.accuracy.verified == "engine":
        return "the engine itself has run"
    if report.engine is None:
        return "on the CPU, by ONNX Runtime"
    return "on the CPU only: the engine itself has not run here"


def _look_at(report: BuildReport) -> Iterator[str]:
    """What keeps it from being ready."""
    yield from (f"a gate failed: {visible(text)}" for text in report.gate_failures)
    calibration, asked = report.calibration, report.precision.requested
    if calibration is not None and calibration.source == "synthetic" and asked in EIGHT_BIT:
        yield "8-bit ranges from RANDOM data"
    elif report.accuracy is not None and report.accuracy.source == "synthetic":
        yield "nothing was checked on real data"
    achieved = report.precision.achieved
    runs = asked in achieved if achieved else any(item.kept for item in report.guard)
    if asked in (Precision.INT8, Precision.FP8) and (achieved or report.guard) and not runs:
        yield f"nothing runs in {asked.upper()}: nowhere is that {'accurate enough' if _lost(report) else 'faster'}"
    uncosted = () if report.analysis is None else report.analysis.uncosted
    if uncosted:
        yield f"the time is without {some([visible(item.op) for item in uncosted])}"
    found = speed_of(report)
    if found.ratio is not None and found.ratio < 1 / 1.001:
        yield "slower than plain"
    if report.host is not None:
        yield f"its end runs on the host: {visible(str(report.host.path))}"


def _lost(report: BuildReport) -> bool:
    """Whether regions that pay went back for the accuracy."""
    return report.search is not None and bool(report.search.reverted)


def _main_file(report: BuildReport) -> str:
    path = report.config.get("output") if report.engine is None else report.engine.path
    return visible(str(path or "in memory"))


def against_plain(report: BuildReport) -> list[Block]:
    """What changed against plain: time, kernels, bytes, types, recipes; what accuracy and a range of shapes cost."""
    found, shipped = speed_of(report), report.shipped
    rows: list[tuple[str, str]] = []
    if shipped is not None and found.plain is not None:
        plain = found.plain
        rows.append(("time", f"{time_text(plain.predicted_us)} -> {time_text(shipped.predicted_us)}"))
        syncs = f", stream syncs {plain.syncs} -> {shipped.syncs}" if plain.syncs or shipped.syncs else ""
        rows.append(("kernels", f"{plain.kernels} -> {shipped.kernels}{syncs}"))
        rows.append(("bytes moved", f"{bytes_text(plain.bytes)} -> {bytes_text(shipped.bytes)}"))
    others = [form for form in report.plain_forms if form.form != found.form]
    rows += [(_form(item.form), f"would take {time_text(item.predicted_us)}") for item in others]
    types = sorted(report.precision.achieved.items(), key=lambda item: -item[1].flop_share)
    shares = [f"{percent(item.flop_share)} {dtype}" for dtype, item in types if item.flop_share >= _CONVERTS]
    if shares:
        rows.append(("arithmetic", ", ".join(shares)))
    if report.guard:
        kept = sum(item.kept for item in report.guard)
        where = "where it pays and is accurate enough" if _lost(report) else "where it pays"
        rows.append((guarded(report), f"{kept} of {count(len(report.guard), 'region')}: {where}"))
    recipes = _recipes(report)
    if recipes:
        rows.append(("recipes", recipes))
    if report.dynamic_cost is not None:
        rows.append(("shapes", _dynamic_text(report, report.dynamic_cost)))
    if report.accuracy_cost is not None:
        cost = report.accuracy_cost
        nodes = f", {count(len(cost.nodes), 'node')} in a wider type" if cost.nodes else ""
        rows.append(("accuracy", f"costs {time_text(cost.predicted_us)}{nodes}: {visible(cost.reason)}; {cost.remedy}"))
    return [pairs(rows)] if rows else []


def _dynamic_text(report: BuildReport, found: DynamicCost) -> str:
    """What a range of shapes adds, and what takes it away; a gain within the roundings is none."""
    if found.kernels <= 0 and found.syncs <= 0 and found.share < _NO_COST:
        return f"{found.ranges} costs nothing at the optimum"
    parts = (found.kernels, "kernel"), (found.syncs, "stream sync")
    added = [count(number, noun) for number, noun in parts if number > 0]
    text = ", ".join([*added, percent(found.share)])
    return f"{found.ranges} costs {text}" + ("" if _grows(report) else f": fix it with {found.remedy}")


def _grows(report: BuildReport) -> bool:
    """Whether a state has another size in each step: an axis behind the batch is dynamic."""
    return any(item.state and any(isinstance(dim, str) for dim in item.shape[1:]) for item in report.network_io)


def _recipes(report: BuildReport) -> str:
    """The judged rewrites, each with its places."""
    places = {step.name: sum(len(item.nodes) for item in step.regions if item.kept) for step in report.steps}
    return some([f"{name} at {count(number, 'place')}" for name, number in places.items() if number], 6)


def advice(report: BuildReport) -> list[Block]:
    """The three things most worth doing, each a line for a shell."""
    found = list(_advice(report))[:_MOST_ADVICE]
    return [block for why, command in found for block in (line(why), Command(command))]


def _advice(report: BuildReport) -> Iterator[tuple[str, str]]:
    """Why, and what to type; the most urgent first."""
    asked = report.precision.requested
    samples = options_of(report).get("calib") or "samples.npz"
    model = model_words(report)
    gpu = [] if report.gpu is None else ["--gpu", str(report.gpu.get("name"))]
    is_random = report.accuracy is not None and report.accuracy.source == "synthetic"
    if report.gate_failures and asked in EIGHT_BIT:
        dtype = Precision.FP8 if asked == Precision.FP8 else Precision.INT8
        yield (
            "find the layers that lose accuracy",
            shell("trtopt", "sensitivity", *model, f"--{dtype}", "--calib", samples),
        )
        if asked != Precision.AUTO:
            yield "keep what the budget bears", build_line(report, {"precision": "auto", "calib": samples})
    if is_random:
        what = "take ranges from your data, and check on it" if asked in EIGHT_BIT else "check it on your data"
        yield f"{what} (an array by input name)", build_line(report, {"calib": "samples.npz"})
    elif report.accuracy is not None and report.accuracy.metric is None and _has_classes(report):
        yield "measure your metric on labelled samples", build_line(report, {"eval": "labelled.npz", "metric": "top1"})
    cost = report.dynamic_cost
    has_sizes = options_of(report).get("batches") or options_of(report).get("shape_histogram")
    if cost is not None and cost.share >= _RANGES_COST and not has_sizes and not _grows(report):
        why = f"fix the shapes: their range costs {percent(cost.share)}"
        yield why, build_line(report, {"opt_shapes": _optimum(report), "min_shapes": None, "max_shapes": None})
    if asked == Precision.FP16 and report.engine is not None:
        yield (
            "try INT8, which stays only where it is faster",
            build_line(report, {"precision": "int8", "calib": samples}),
        )
    yield from _conversions(report)
    if report.engine is not None and report.engine.path and not _has_run(report):
        where = "a GPU" if report.gpu is None else visible(str(report.gpu.get("name")))
        yield f"measure it, on a machine with {where}", shell("trtopt", "profile", report.engine.path)
    kind = [] if asked in (AS_IS, Precision.AUTO) else ["--precision", asked]
    shapes = [
        f"{name}:{'x'.join(map(str, _of_file(report, name, dims)))}"
        for item in _optimum(report)
        for name, dims in item.items()
    ]
    at = ["--shapes", ",".join(shapes)] if shapes else []
    if report.gpu is not None:
        line_ = shell("trtopt", "analyze", *model, *gpu, *kind, *at, "--compile", "--html", "analysis.html")
        yield "see what bounds each layer, and what would change it", line_


def _has_run(report: BuildReport) -> bool:
    return report.accuracy is not None and report.accuracy.verified == "engine"


def _has_classes(report: BuildReport) -> bool:
    found = report.accuracy
    return found is not None and any(item.top1_agreement is not None for item in found.outputs.values())


def _optimum(report: BuildReport) -> list[Mapping[str, list[int]]]:
    """The first profile's shapes as an option has them: the model's fixed axes, whatever ``--io`` made of them; without
    an engine those that would fix the range."""
    cost = report.dynamic_cost
    if report.engine is None and cost is not None and cost.remedy.startswith(_FIXES):
        named = re.findall(r"(.+?):(\d+(?:x\d+)*)(?:,|$)", cost.remedy.removeprefix(_FIXES))
        return [{name: [int(size) for size in sizes.split("x")] for name, sizes in named}]
    profiles = () if report.engine is None else report.engine.profiles
    inputs = () if options_of(report).get("preprocess_in_engine") else report.model.get("inputs", ())
    fixed = {item["name"]: item["shape"] for item in inputs}
    return [
        {name: _of_model(sizes["opt"], fixed.get(name, ())) for name, sizes in profile.items() if "opt" in sizes}
        for profile in profiles[:1]
    ]


def _of_file(report: BuildReport, name: str, sizes: list[int]) -> list[int]:
    """The sizes of an input as the model's file has it, where the engine takes pixels with the channels last."""
    axes: list[int | str | None] = next(
        (item["shape"] for item in report.model.get("inputs", ()) if item["name"] == name), []
    )
    is_turned = len(axes) == len(sizes) == 4 and axes[1] == sizes[3] != axes[3]
    if options_of(report).get("preprocess_in_engine") and is_turned:
        return [sizes[0], sizes[3], sizes[1], sizes[2]]
    return sizes


def _of_model(sizes: Sequence[int], axes: Sequence[int | str | None]) -> list[int]:
    """The sizes, with those of the model's axes that are fixed."""
    if len(sizes) != len(axes):
        return list(sizes)
    return [axis if isinstance(axis, int) else size for size, axis in zip(sizes, axes, strict=True)]


def _conversions(report: BuildReport) -> Iterator[tuple[str, str]]:
    """Inputs that a kernel of their own converts to a narrower type."""
    found = report.analysis
    if found is None or not found.totals.predicted_us:
        return
    half = Precision.BF16 if report.precision.requested == Precision.BF16 else Precision.FP16
    for item in report.model.get("inputs", ()):
        name, ends = item["name"], ("fp16", "bf16")
        casts = {f"trtopt/cast/{name}_{end}" for end in ends}
        us = sum(row.predicted_us for row in found.layers if not row.flop and casts & set(row.onnx_nodes))
        if item["dtype"] == "float32" and us >= _CONVERTS * found.totals.predicted_us:
            is_image = len(item["shape"]) == 4 and item["shape"][1] in (3, 4)
            # ONNX Runtime, which loads the engine of --epcontext, knows no other layout.
            layout = "hwc4" if is_image and not options_of(report).get("epcontext") else "chw"
            why = f"feed {half.upper()}: converting {some_names([name], 1)} takes {time_text(us)}"
            yield why, build_line(report, {"io": [*options_of(report).get("io", ()), f"{name}:{half}:{layout}"]})
