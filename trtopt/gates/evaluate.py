"""The gates: what a report must keep, alone and against a baseline. Pure functions of what two reports say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from trtopt.accuracy.metric import drop_of
from trtopt.config.budget import DEFAULT_ACCURACY_DROP, ROUNDING
from trtopt.errors import UsageError
from trtopt.gates import limits as defaults
from trtopt.gates.baseline import added, changes, comparable, slower, widened
from trtopt.gates.facts import EIGHT_BIT, Facts
from trtopt.gates.limits import BITS, Limits
from trtopt.report.schema.check import CheckReport, Gate, LayerChange, Unit
from trtopt.report.text.format import count, some

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
    """Judge a report.

    Every gate has a default against a baseline; a threshold replaces the default of its gate. Without a baseline, only
    thresholds are judged. Always: the gates that the build itself was given, no output that is NaN or infinite, and no
    ranges from random data. A gate that somebody asked for and that cannot be judged has failed.

    Args:
        after: What the report says.
        before: What the baseline says.
        limits: The thresholds.

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
    return CheckReport(after.checked, None if before is None else before.checked, tuple(gates), notes)


def _own(after: Facts, limits: Limits) -> Iterator[Gate]:
    """What needs no figures: the build's own gates, finite outputs, ranges from real samples."""
    if after.own_failures is not None:
        gate = Gate("build", "the gates of the build itself", "passed")
        failures = "; ".join(after.own_failures)
        yield replace(gate, verdict="failed", reason=failures) if failures else gate
    if after.outputs:
        bad = {name: item.nonfinite for name, item in after.outputs.items() if item.nonfinite}
        gate = Gate("finite", "outputs finite where FP32 is", "passed")
        reason = "; ".join(f"{name}: {count(number, 'value')} NaN or infinite" for name, number in bad.items())
        yield replace(gate, verdict="failed", reason=reason) if bad else gate
    if after.synthetic is not None:
        gate = Gate("calibration", "8-bit ranges from real samples", "passed")
        reason = "the ranges come from random data: give --calib to the build, or --allow-synthetic here"
        refused = after.synthetic and not limits.allow_synthetic
        yield replace(gate, verdict="failed", reason=reason) if refused else gate


def _accuracy(pair: _Pair, limits: Limits) -> Iterator[Gate]:
    """By the metric, else by output; against FP32 where a threshold is given, and against the baseline."""
    after, before, asked = pair.after, pair.before, limits.max_accuracy_drop
    lost = pair.layers(lambda change: -widened(change))
    if after.metric is not None:
        yield from _by_metric(pair, limits, lost)
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
        yield _at_least(gate, now.baseline - asked, "less accurate than the FP32 model", lost)
    if pair.before is None:
        if asked is not None and now.name == "sqnr":
            yield _missing(name, title, asked, "an SQNR is bounded against a baseline; add --baseline")
        return
    old = pair.before.metric
    if old is None or old.name != now.name:
        has = "no metric" if old is None else f"the metric {old.name}"
        yield _missing(name, title, asked, f"the baseline has {has}")
        return
    drop = asked if asked is not None else defaults.DEFAULT_DB_DROP if unit == "dB" else DEFAULT_ACCURACY_DROP
    gate = Gate(name, title, "passed", unit, old.optimized, now.optimized, is_default=asked is None)
    what = f"the model is {old.optimized - now.optimized:.4g} less accurate than the baseline"
    if old.baseline - now.baseline > drop:
        what += f"; its FP32 form is {old.baseline - now.baseline:.4g} less accurate too: look at the training"
    yield _at_least(gate, old.optimized - drop, what, lost)


def _by_output(name: str, pair: _Pair, limits: Limits, lost: tuple[LayerChange, ...]) -> Iterator[Gate]:
    asked, now = limits.max_accuracy_drop, (pair.after.outputs or {})[name]
    old = None if pair.before is None else (pair.before.outputs or {}).get(name)
    measure, drop = drop_of(now)
    title = f"{name}: {measure} with FP32"
    if asked is not None:
        gate = Gate(f"accuracy-fp32:{name}", f"{name}: {measure} against FP32", "passed", "metric", 1.0, 1.0 - drop)
        yield _at_least(gate, 1.0 - asked, "further from FP32 than allowed", lost)
    if pair.before is None:
        return
    if old is None or drop_of(old)[0] != measure:
        yield _missing(f"accuracy:{name}", title, asked, f"the baseline has no {measure} of it")
        return
    most = DEFAULT_ACCURACY_DROP if asked is None else asked
    before = 1.0 - drop_of(old)[1]
    gate = Gate(f"accuracy:{name}", title, "passed", "metric", before, 1.0 - drop, is_default=asked is None)
    yield _at_least(gate, before - most, f"{before - 1.0 + drop:.4g} further from FP32 than the baseline", lost)


def _latency(pair: _Pair, limits: Limits) -> Iterator[Gate]:
    if pair.before is None:
        return
    asked, now, old = limits.max_latency_regress, pair.after.times, pair.before.times
    how = next((how for how in now or {} if how in (old or {})), None)
    if now is None or old is None or how is None:
        side = "the report has no time" if not now else "the baseline has no time"
        yield _missing("latency", "latency", asked, f"{side}: no engine was built, or not for one GPU")
        return
    most = defaults.DEFAULT_LATENCY_REGRESS if asked is None else asked
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
        yield _at_least(gate, before - defaults.DEFAULT_SHARE_LOSS, fewer, wider)


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
        yield _at_most(gate, old * (1 + defaults.DEFAULT_BYTES_GROWTH), growth)


def _kernels(pair: _Pair, limits: Limits) -> Iterator[Gate]:
    asked, now = limits.max_kernels, pair.after.kernels
    old = None if pair.before is None else pair.before.kernels
    if now is None:
        if asked is not None or old is not None:
            yield _missing("kernels", "kernels", asked, "the report has no engine")
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
