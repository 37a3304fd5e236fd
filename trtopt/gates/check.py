"""The gates: what a report must keep, alone and against a baseline. What ``trtopt check`` and Python callers use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from trtopt.accuracy.metric import drop_of
from trtopt.config.budget import DEFAULT_ACCURACY_DROP, ROUNDING
from trtopt.errors import UsageError
from trtopt.gates.facts import EIGHT_BIT, Facts, KernelFacts, ModelIdentity, facts_of
from trtopt.profiling.compare import aligned
from trtopt.report.files import write_forms
from trtopt.report.html.page import check_html
from trtopt.report.schema.check import CheckReport, Gate, LayerChange, Unit
from trtopt.report.schema.read import read_report
from trtopt.report.text.format import count, some
from trtopt.support.files import check_outputs
from trtopt.support.precision import ELEMENT_BYTES
from trtopt.support.words import did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Unpack

BITS: dict[str, int] = {dtype: round(size * 8) for dtype, size in ELEMENT_BYTES.items()}
"""The types a share can be asked of, and their widths."""

DEFAULT_DB_DROP = 1.0
"""Of a metric in dB; of others, see ``DEFAULT_ACCURACY_DROP``."""
DEFAULT_LATENCY_REGRESS = 0.05
DEFAULT_SHARE_LOSS = 0.01
DEFAULT_BYTES_GROWTH = 0.10


class LimitOptions(TypedDict, total=False):
    """The fields of :class:`Limits` as keywords."""

    max_accuracy_drop: float | None
    max_latency_regress: float | None
    min_share: Mapping[str, float]
    max_bytes: int | None
    max_kernels: int | None
    allow_synthetic: bool


@dataclass(frozen=True)
class Limits:
    """What a report must keep. None: against a baseline the default, else nothing.

    Attributes:
        max_accuracy_drop: Largest drop of the metric (or of top-1 agreement or cosine with FP32, where there is none),
            against FP32 and against the baseline.
        max_latency_regress: Largest growth of the predicted or measured time against the baseline, as a share: 0.05 is
            5 %.
        min_share: Smallest share of the arithmetic by type, 0..1.
        max_bytes: Largest engine, in bytes.
        max_kernels: Most kernels.
        allow_synthetic: Whether ranges from random data are fine.

    Raises:
        UsageError: A value is out of range, or a type is unknown.
    """

    max_accuracy_drop: float | None = None
    max_latency_regress: float | None = None
    min_share: Mapping[str, float] = field(default_factory=dict)
    max_bytes: int | None = None
    max_kernels: int | None = None
    allow_synthetic: bool = False

    def __post_init__(self) -> None:
        for name in ("max_accuracy_drop", "max_latency_regress", "max_bytes", "max_kernels"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UsageError(
                    f"{value:g} is no threshold", where=f"--{name.replace('_', '-')}", remedy="give a number from 0 on"
                )
        for dtype, share in self.min_share.items():
            where = f"--min-share {dtype}={share:g}"
            if dtype not in BITS:
                remedy = did_you_mean(dtype.lower(), BITS) or f"choose one of {', '.join(BITS)}"
                raise UsageError(f"{dtype!r} is no type of arithmetic", where=where, remedy=remedy)
            if not 0 <= share <= 1:
                raise UsageError("A share lies between 0 and 1", where=where, remedy="give 0.5 for 50 %")


def comparable(after: Facts, before: Facts) -> tuple[str, ...]:
    """What differs between a report and its baseline and may explain a difference, one sentence each.

    The same model is one with the same inputs and outputs: weights change with every training, files are moved.

    Raises:
        UsageError: They are of other kinds (predicted against measured), models, GPUs or compilers, or hold for other
            input shapes.
    """
    for what, old, new in _identity(after, before):
        if old != new:
            raise UsageError(
                f"The baseline {what.format(old or 'none', new or 'none')}",
                where=f"{before.checked.report}, for {after.checked.report}",
                remedy="give a baseline that was made in the same way, or make it anew on the branch compared with",
            )
    return tuple(_notes(after, before))


def _identity(after: Facts, before: Facts) -> Iterator[tuple[str, str, str]]:
    """What has to be equal: how it differs, in the baseline, in the report. Left out where a side does not say."""
    yield "is a report of another kind, {0}; this one is {1}", before.checked.schema, after.checked.schema
    if before.model is not None and after.model is not None:
        yield "has other inputs: {0} there, {1} here", _inputs(before.model), _inputs(after.model)
    if before.output_names and after.output_names:
        yield "has other outputs: {0} there, {1} here", _names(before), _names(after)
    yield "is for another GPU: {0}; this report is for {1}", before.checked.gpu, after.checked.gpu
    if before.compiler and after.compiler:
        yield "was built by {0}, this by {1}", before.compiler, after.compiler
    if before.shapes and after.shapes:
        yield "is for other shapes: {0} there, {1} here", _shapes(before.shapes), _shapes(after.shapes)


def _inputs(model: ModelIdentity) -> str:
    return ", ".join(
        f"{item.name}: {item.dtype} {'x'.join(str(dim) if isinstance(dim, int) else '?' for dim in item.shape)}"
        for item in model.inputs
    )


def _names(facts: Facts) -> str:
    return ", ".join(sorted(facts.output_names))


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name}:{'x'.join(map(str, dims))}" for name, dims in sorted(shapes.items()))


def _notes(after: Facts, before: Facts) -> Iterator[str]:
    old, new = before.checked, after.checked
    if old.sha256 != new.sha256:
        yield f"the model changed: sha256 {old.sha256[:12]} in the baseline, {new.sha256[:12]} here"
    for what, first, second in (
        ("the precision asked for", old.precision, new.precision),
        ("the compiler", old.backend, new.backend),
        ("the samples of the accuracy", before.accuracy_samples, after.accuracy_samples),
        ("what outputs are compared with", before.reference, after.reference),
    ):
        if first != second:
            yield f"{what} changed: {first or 'none'} in the baseline, {second or 'none'} here"


_LEAST_US = 0.05
"""Differences below the printed digit are none."""


def changes(before: Facts, after: Facts) -> tuple[LayerChange, ...]:
    """Every region whose kernels, types or time changed.

    Raises:
        UsageError: The two have no layer in common: they are of different networks.
    """
    found = list(aligned(before.layers, after.layers, lambda kernel: kernel.signature))
    if before.layers and after.layers and not any(old and new for old, new, _ in found):
        raise UsageError(
            "The report and its baseline have no layer in common",
            where=f"{after.checked.report} ({after.layers[0].name}, ...) and {before.checked.report}"
            f" ({before.layers[0].name}, ...)",
            remedy="give a baseline of the same network",
        )
    return tuple(change for old, new, _ in found if _is_change(change := _change(old, new)))


def _change(before: Sequence[KernelFacts], after: Sequence[KernelFacts]) -> LayerChange:
    nodes = dict.fromkeys(name for kernel in (*after, *before) for name in (kernel.onnx_nodes or (kernel.name,)))
    return LayerChange(
        tuple(sorted(nodes, key=lambda name: name.startswith("trtopt/") or "quantizelinear" in name.lower())),
        (len(before), len(after)),
        (_dtypes(before), _dtypes(after)),
        (_time(before), _time(after)),
    )


def _dtypes(kernels: Sequence[KernelFacts]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(kernel.dtype for kernel in kernels))


def _time(kernels: Sequence[KernelFacts]) -> float | None:
    times = [kernel.us for kernel in kernels if kernel.us is not None]
    return math.fsum(times) if len(times) == len(kernels) else None


def _is_change(change: LayerChange) -> bool:
    return change.kernels[0] != change.kernels[1] or change.dtypes[0] != change.dtypes[1] or slower(change) != 0


def slower(change: LayerChange) -> float:
    """Microseconds that it takes longer than before; 0 where that is not known, or not visible."""
    before, after = change.us
    more = 0.0 if before is None or after is None else after - before
    return more if abs(more) >= _LEAST_US else 0.0


def added(change: LayerChange) -> int:
    """Kernels that it has more than before."""
    return change.kernels[1] - change.kernels[0]


def widened(change: LayerChange) -> int:
    """Bits that its narrowest type has more than before; below 0 where it became narrower."""
    before, after = ([BITS[dtype] for dtype in dtypes if dtype in BITS] for dtypes in change.dtypes)
    return min(after) - min(before) if before and after else 0


_BITS: dict[str, int] = {**BITS, EIGHT_BIT: 8}


@dataclass(frozen=True)
class _Pair:
    """A report, its baseline if there is one, and the layers that changed between them."""

    after: Facts
    before: Facts | None
    changed: tuple[LayerChange, ...]

    def layers(self, by_how_much: Callable[[LayerChange], float]) -> tuple[LayerChange, ...]:
        """The changed layers for which that is above 0, the largest first."""
        return tuple(sorted((item for item in self.changed if by_how_much(item) > 0), key=lambda x: -by_how_much(x)))


def evaluate(after: Facts, before: Facts | None, limits: Limits) -> CheckReport:
    """Judge a report; ``before`` is what its baseline says.

    Every gate has a default against a baseline; a threshold replaces the default of its gate. Without a baseline, only
    thresholds are judged. Always: the gates that the build itself was given, no output that is NaN or infinite, and no
    ranges from random data. A gate that somebody asked for and that cannot be judged has failed.

    Raises:
        UsageError: The two cannot be compared; a threshold needs a baseline, and there is none; or there is no gate.
    """
    if limits.max_latency_regress is not None and before is None:
        raise UsageError(
            "A growth of latency needs a baseline to grow from",
            where="--max-latency-regress",
            remedy="add --baseline BASE.json, or leave it out",
        )
    notes = () if before is None else comparable(after, before)
    pair = _Pair(after, before, () if before is None else changes(before, after))
    gates = [*_own(after, limits), *_accuracy(pair, limits), *_latency(pair, limits), *_shares(pair, limits)]
    gates += [*_bytes(pair, limits), *_kernels(pair, limits)]
    if not gates:
        raise UsageError(
            "There is nothing to judge this report by",
            where=after.checked.report,
            remedy="give --baseline BASE.json, or thresholds such as --max-kernels",
        )
    notes += tuple(f"allowed by --allow-accuracy-loss of the build: {item}" for item in after.allowed)
    if after.synthetic and limits.allow_synthetic:
        notes += ("the 8-bit ranges come from random data: --allow-synthetic",)
    baseline = None if before is None else before.checked
    return CheckReport(after.checked, baseline, tuple(gates), notes, after.names)


def _own(after: Facts, limits: Limits) -> Iterator[Gate]:
    """What needs no figures: the build's own gates, finite outputs, ranges from real samples."""
    if after.own_failures is not None:
        gate = Gate("build", "the gates of the build itself", "passed")
        failures = "; ".join(after.own_failures)
        yield replace(gate, verdict="failed", reason=failures) if failures else gate
    if after.outputs:
        bad = {name: item.nonfinite for name, item in after.outputs.items() if item.nonfinite}
        gate = Gate("finite", "outputs finite where the reference is", "passed")
        reason = "; ".join(f"{name}: {count(number, 'value')} NaN or infinite" for name, number in bad.items())
        yield replace(gate, verdict="failed", reason=reason) if bad else gate
    if after.synthetic is not None:
        gate = Gate("calibration", "8-bit ranges from real samples", "passed")
        reason = "the ranges come from random data: give the build real samples (--calib), or --allow-synthetic here"
        refused = after.synthetic and not limits.allow_synthetic
        yield replace(gate, verdict="failed", reason=reason) if refused else gate


def _accuracy(pair: _Pair, limits: Limits) -> Iterator[Gate]:
    """By the metric, and by output where it was not measured on what was made; against FP32 where a threshold is given,
    and against the baseline."""
    after, before, asked = pair.after, pair.before, limits.max_accuracy_drop
    lost = pair.layers(lambda change: -widened(change))
    if after.metric is not None:
        yield from _by_metric(pair, limits, lost)
        if not after.metric_ran:
            yield from (gate for name in after.outputs or () for gate in _by_output(name, pair, limits, lost))
    elif before is not None and before.metric is not None:
        yield _missing(
            f"accuracy:{before.metric.name}", f"accuracy, {before.metric.name}", asked, "the report has no metric"
        )
    elif after.outputs:
        for name in after.outputs:
            yield from _by_output(name, pair, limits, lost)
    elif asked is not None or (before is not None and before.outputs):
        yield _missing("accuracy", "accuracy", asked, "the report has no accuracy: it was not measured")


def _by_metric(pair: _Pair, limits: Limits, lost: tuple[LayerChange, ...]) -> Iterator[Gate]:
    now, asked = pair.after.metric, limits.max_accuracy_drop
    if now is None:
        return
    unit: Unit = "dB" if now.name == "sqnr" else "metric"
    name, title = f"accuracy:{now.name}", f"accuracy, {now.name}"
    if asked is not None and now.name != "sqnr":
        gate = Gate("accuracy-fp32", f"accuracy, {now.name} against FP32", "passed", unit, now.baseline, now.optimized)
        what = f"{_points(now.baseline, now.optimized)} less accurate than the FP32 model"
        yield _at_least(gate, now.baseline - asked, what, lost)
    if pair.before is None:
        if asked is not None and now.name == "sqnr":
            yield _missing(name, title, asked, "an SQNR is bounded against a baseline; add --baseline")
        return
    old = pair.before.metric
    if old is None or old.name != now.name:
        has = "no metric" if old is None else f"the metric {old.name}"
        yield _missing(name, title, asked, f"the baseline has {has}")
        return
    drop = asked if asked is not None else DEFAULT_DB_DROP if unit == "dB" else DEFAULT_ACCURACY_DROP
    gate = Gate(name, title, "passed", unit, old.optimized, now.optimized, is_default=asked is None)
    what = f"the model is {_points(old.optimized, now.optimized)} less accurate than the baseline"
    if old.baseline - now.baseline > drop:
        what += f"; its FP32 form is {_points(old.baseline, now.baseline)} less accurate too: look at the training"
    yield _at_least(gate, old.optimized - drop, what, lost)


def _points(before: float, after: float) -> str:
    """How much a metric fell: in points of 0.01 where it is a share."""
    if 0 <= min(before, after) <= max(before, after) <= 1:
        return f"{100 * (before - after):.3g} points"
    return f"{before - after:.4g}"


def _by_output(name: str, pair: _Pair, limits: Limits, lost: tuple[LayerChange, ...]) -> Iterator[Gate]:
    asked, now = limits.max_accuracy_drop, (pair.after.outputs or {})[name]
    old = None if pair.before is None else (pair.before.outputs or {}).get(name)
    if old is not None:  # a report from before this was known
        old = replace(old, has_scores=now.has_scores)
    measure, drop = drop_of(now)
    reference = pair.after.reference
    title = f"{name}: {measure} with {reference}"
    if asked is not None:
        gate = Gate(f"accuracy-fp32:{name}", title, "passed", "metric", 1.0, 1.0 - drop)
        yield _at_least(gate, max(1.0 - asked, 0.0), f"further from {reference} than allowed", lost)
    if pair.before is None:
        return
    if old is None or drop_of(old)[0] != measure:
        yield _missing(f"accuracy:{name}", title, asked, f"the baseline has no {measure} of it")
        return
    most = DEFAULT_ACCURACY_DROP if asked is None else asked
    before = 1.0 - drop_of(old)[1]
    gate = Gate(f"accuracy:{name}", title, "passed", "metric", before, 1.0 - drop, is_default=asked is None)
    said = f"{before - 1.0 + drop:.4g} further from {reference} than the baseline"
    yield _at_least(gate, max(before - most, 0.0), said, lost)


def _latency(pair: _Pair, limits: Limits) -> Iterator[Gate]:
    if pair.before is None:
        return
    asked, now, old = limits.max_latency_regress, pair.after.times, pair.before.times
    how = next((how for how in now or {} if how in (old or {})), None)
    if now is None or old is None or how is None:
        side = "the report has no time" if not now else "the baseline has no time"
        yield _missing("latency", "latency", asked, f"{side}: no engine was built, or not for one GPU")
        return
    most = DEFAULT_LATENCY_REGRESS if asked is None else asked
    gate = Gate("latency", f"latency, {how}", "passed", "us", old[how], now[how], is_default=asked is None)
    growth = f"{100 * (now[how] / old[how] - 1):.3g} % slower than the baseline" if old[how] > 0 else "slower"
    yield _at_most(gate, old[how] * (1 + most), growth, pair.layers(slower))


def _shares(pair: _Pair, limits: Limits) -> Iterator[Gate]:
    """By type where thresholds are given; else against the baseline: 8 bits or fewer, 16 bits or fewer."""
    now, of = pair.after.shares, pair.after.share_of
    old = None if pair.before is None or pair.before.share_of != of else pair.before.shares
    wider = pair.layers(widened)
    for dtype, least in limits.min_share.items():
        name, title = f"share:{dtype}", f"{dtype} share of the {of}"
        if now is None or (not pair.after.all_shares and dtype not in now):
            yield _missing(name, title, least, "the report does not say how much runs in this type")
            continue
        gate = Gate(name, title, "passed", "share", None if old is None else old.get(dtype, 0.0), now.get(dtype, 0.0))
        yield _at_least(gate, least, "a smaller share than asked for", wider)
    if limits.min_share or pair.before is None:
        return
    for bits in (8, 16):
        name, title = f"share:{bits}-bit", f"{bits} bits or fewer, share of the {of}"
        if now is None or old is None:
            yield _missing(name, title, None, "the types of the arithmetic are not known on both sides")
            return
        if bits == 16 and not pair.after.all_shares:
            return
        before, after = (_narrow(shares, bits) for shares in (old, now))
        gate = Gate(name, title, "passed", "share", before, after, is_default=True)
        fewer = f"{100 * (before - after):.3g} points less than the baseline"
        yield _at_least(gate, max(before - DEFAULT_SHARE_LOSS, 0.0), fewer, wider)


def _narrow(shares: Mapping[str, float], bits: int) -> float:
    """The share of the types of at most so many bits."""
    return sum(share for dtype, share in shares.items() if _BITS.get(dtype, 32) <= bits)


def _bytes(pair: _Pair, limits: Limits) -> Iterator[Gate]:
    asked, now = limits.max_bytes, pair.after.bytes
    old = None if pair.before is None else pair.before.bytes
    if now is None:
        if asked is not None or old is not None:
            yield _missing("bytes", "engine size", asked, "the report has no engine")
        return
    gate = Gate("bytes", "engine size", "passed", "bytes", old, now, is_default=asked is None)
    if asked is not None:
        yield _at_most(gate, asked, "a larger engine than allowed")
    elif old is not None:
        growth = f"{100 * (now / old - 1):.3g} % larger than the baseline" if old > 0 else "larger than the baseline"
        yield _at_most(gate, old * (1 + DEFAULT_BYTES_GROWTH), growth)


def _kernels(pair: _Pair, limits: Limits) -> Iterator[Gate]:
    asked, now = limits.max_kernels, pair.after.kernels
    old = None if pair.before is None else pair.before.kernels
    if now is None:
        if asked is not None or old is not None:
            yield _missing("kernels", "kernels", asked, "the report has no engine, or not its layers")
        return
    gate = Gate("kernels", "kernels", "passed", "kernels", old, now, is_default=asked is None)
    most = pair.layers(added)
    where = f", at {some(most[0].nodes, 2)}" if most else ""
    if asked is not None:
        yield _at_most(gate, asked, f"{count(now - asked, 'kernel')} more than allowed{where}", most)
    elif old is not None:
        yield _at_most(gate, old, f"{count(now - old, 'kernel')} more than the baseline{where}", most)


def _at_least(gate: Gate, limit: float, reason: str, layers: tuple[LayerChange, ...] = ()) -> Gate:
    gate = replace(gate, bound="at least", limit=limit)
    good = gate.after is not None and gate.after >= limit - ROUNDING
    return gate if good else replace(gate, verdict="failed", reason=reason, layers=layers)


def _at_most(gate: Gate, limit: float, reason: str, layers: tuple[LayerChange, ...] = ()) -> Gate:
    gate = replace(gate, bound="at most", limit=limit)
    good = gate.after is not None and gate.after <= limit * (1 + ROUNDING)
    return gate if good else replace(gate, verdict="failed", reason=reason, layers=layers)


def _missing(name: str, title: str, asked: float | None, why: str) -> Gate:
    """A gate without the figures it needs: failed where somebody asked for it."""
    return Gate(name, title, "not judged" if asked is None else "failed", reason=why, is_default=asked is None)


def check(
    report: str | Path,
    *,
    baseline: str | Path | None = None,
    limits: Limits | None = None,
    html: str | Path | None = None,
    markdown: str | Path | None = None,
    junit: str | Path | None = None,
    **options: Unpack[LimitOptions],
) -> CheckReport:
    """Judge a report of a build, an analysis or a profile.

    Args:
        report: The JSON file that ``--report`` wrote.
        baseline: One of the same kind, for the same model, GPU and compiler, to compare with.
        limits: The thresholds; ``options`` override its fields by name.
        html: Write the result as one HTML file.
        markdown: Write the result as Markdown.
        junit: Write the result as JUnit XML.
        **options: Fields of :class:`~trtopt.gates.check.Limits`.

    Returns:
        All gates; ``.failed`` are those that failed.

    Raises:
        UsageError: A file cannot be read or written or has a wrong field, a threshold is wrong, or the two reports
            cannot be compared.
        MissingDependencyError: ``html`` needs Jinja2.

    Example:
        >>> result = trtopt.check("report.json", max_kernels=100, allow_synthetic=True)
        >>> [gate.name for gate in result.failed]
        []
    """
    inputs = {"the report": Path(report)} | ({"the baseline": Path(baseline)} if baseline is not None else {})
    forms = {"html": html, "markdown": markdown, "junit": junit}
    check_outputs({f"--{name}": Path(path) for name, path in forms.items() if path is not None}, inputs)
    check_html(html)
    known = [item.name for item in fields(Limits)]
    for name in options:
        if name not in known:
            remedy = did_you_mean(name, known) or "see docs/check.md"
            raise UsageError(f"There is no threshold {name!r}", where=name, remedy=remedy)
    limits = replace(limits or Limits(), **options)
    found = evaluate(_facts(report), None if baseline is None else _facts(baseline), limits)
    write_forms(found, **forms)
    return found


def _facts(path: str | Path) -> Facts:
    return facts_of(read_report(Path(path)), Path(path))
