"""What a build decided, as a terminal shows it: recipes, 8-bit regions, an accuracy budget, 2:4, builder options."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.decisions import (
    BuilderTrial,
    CurvePoint,
    GuardRecord,
    ParetoPoint,
    PrunedLayer,
    SearchRecord,
    SearchStep,
    SparsityRecord,
)
from trtopt.report.schema.steps import Cost, RegionRecord
from trtopt.report.text.blocks import Block, Column, Name, Table, line, numbers, pairs, table
from trtopt.report.text.changes import arrow
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
from trtopt.report.text.names import Labels
from trtopt.support.precision import Precision

EIGHT_BIT = (Precision.INT8, Precision.FP8, Precision.AUTO)
"""What is asked for by those who want 8 bits."""

_MOST_ROWS, _MOST_STEPS, _MOST_LAYERS = 12, 24, 16
_NO_PAY = "it does not pay"
_TOO_CLOSE = "too close"


def recipes_section(report: BuildReport, labels: Labels) -> list[Block]:
    """The whole network without and with recipes, and each judged place that was rewritten; refusals stand elsewhere.

    Kernels, bytes and time are those of one place.
    """
    rows = [
        (
            Name(step.name, below=region.choice),
            labels.of(region.nodes[:1], after=_more_of(region.nodes)),
            *_cost_change(region.before, region.after),
        )
        for step in report.steps
        for region in _equal_regions(step.regions)
        if region.kept
    ]
    body: list[Block] = []
    before, after = report.rewriting.before, report.rewriting.after
    if before is not None and after is not None:
        body.append(pairs([("without recipes", _cost_text(before)), ("with recipes", _cost_text(after))]))
        body += _noise(report, before, after.predicted_us)
    if rows:
        columns = (Column("recipe", "name"), Column("where", "name"), *numbers("kernels"), *numbers("bytes", on="wide"))
        body.append(Table((*columns, *numbers("predicted")), tuple(rows), gap=2))
    return body


def _equal_regions(regions: tuple[RegionRecord, ...]) -> list[RegionRecord]:
    """Regions of equal cost and choice as one."""
    groups: dict[tuple[object, ...], RegionRecord] = {}
    for region in regions:
        key = (region.choice, region.kept, region.reason, region.before, region.after)
        known = groups.get(key)
        nodes = region.nodes if known is None else known.nodes + region.nodes
        groups[key] = RegionRecord(nodes, region.choice, region.kept, region.reason, region.before, region.after)
    return list(groups.values())


def _cost_text(cost: Cost) -> str:
    syncs = f" and {count(cost.syncs, 'stream sync')}" if cost.syncs else ""
    return f"{count(cost.kernels, 'kernel')}{syncs}, {bytes_text(cost.bytes)}, {time_text(cost.predicted_us)} predicted"


def _cost_change(before: Cost | None, after: Cost | None) -> tuple[str, str, str]:
    if before is None or after is None:
        return "", "", ""
    return (
        arrow(str(before.kernels), str(after.kernels)),
        arrow(bytes_text(before.bytes), bytes_text(after.bytes)),
        arrow(time_text(before.predicted_us), time_text(after.predicted_us)),
    )


def guard_section(report: BuildReport, labels: Labels) -> list[Block]:
    """How many regions pay, and each kind of region with its verdict; equal ones in one row."""
    if not report.guard:
        return []
    kept = sum(record.kept for record in report.guard)
    rows = [(guarded(report), f"{kept} of {count(len(report.guard), 'region')}")]
    plain = report.sixteen_bit
    noise: list[Block] = []
    if plain is not None:
        whole = f"{count(plain.kernels, 'kernel')}, {bytes_text(plain.bytes)}, {time_text(plain.predicted_us)}"
        rows.append(("in 16-bit", f"{whole} predicted"))
        noise = [] if report.analysis is None else _noise(report, plain, report.analysis.totals.predicted_us)
    groups = _equal_records(report.guard)
    cells = [
        (
            items[0].dtype.upper() if items[0].kept else "16-bit",
            labels.of(items[0].nodes[:1], after=_more_of(items[0].nodes)),
            f"x{len(items)}" if len(items) > 1 else "",
            _guard_change(items[0]),
        )
        for items in groups
    ]
    told = (Column("predicted"),)
    body: list[Block] = [
        pairs(rows),
        *noise,
        Table((Column("type"), Column("such as", "name"), *numbers("x"), *told), tuple(cells[:_MOST_ROWS]), gap=2),
    ]
    return [*body, *_more(len(cells) - _MOST_ROWS)]


def guarded(report: BuildReport) -> str:
    """What the regions of the guard may become: the type of weights alone, where 8 bits were not asked for."""
    stored = [] if report.weights is None else [report.weights.format]
    return ", ".join([*(["8-bit"] if report.precision.requested in EIGHT_BIT or not stored else []), *stored])


def _noise(report: BuildReport, before: Cost, after_us: float) -> list[Block]:
    """A line that says that a gain is smaller than half of the range of the engine's predicted time, as shares.

    What is kept was compared by one model, whose errors are mostly the same on both sides; so it stays."""
    found = report.analysis
    gain_us = before.predicted_us - after_us
    if found is None or not 0 < gain_us < math.inf or not found.totals.predicted_us:
        return []
    totals = found.totals
    if totals.low_us is None or totals.high_us is None:
        return []
    low, high = (bound / totals.predicted_us - 1 for bound in (totals.low_us, totals.high_us))
    gain = gain_us / before.predicted_us
    if gain >= (high - low) / 2:
        return []
    what = f"the gain of {percent(gain)} is inside the model's noise of {100 * low:.0f} to {100 * high:+.0f} %"
    return [line(what, "warn")]


def _equal_records(records: tuple[GuardRecord, ...]) -> list[list[GuardRecord]]:
    """Records of equal verdict and cost together, those that win most first."""
    groups: dict[tuple[object, ...], list[GuardRecord]] = {}
    for record in records:
        reason = same_reason(record.reason)
        key = (record.dtype, reason, *((record.before_us, record.after_us, record.kernels) if record.kept else ()))
        groups.setdefault(key, []).append(record)
    return sorted(groups.values(), key=lambda items: (not items[0].kept, -_saved(items)))


def same_reason(reason: str) -> str:
    """A reason without the figures that tell equal ones apart."""
    return _NO_PAY if reason.startswith(_NO_PAY) else reason


def _more_of(nodes: Sequence[str]) -> str:
    return f" +{len(nodes) - 1}" if len(nodes) > 1 else ""


def _saved(items: list[GuardRecord]) -> float:
    first = items[0]
    return len(items) * (first.before_us - first.after_us) if first.before_us and first.after_us else 0.0


def _guard_change(record: GuardRecord) -> str:
    """What 8-bit changes; else the reason."""
    if not record.kept:
        return same_reason(record.reason)
    parts = []
    if record.before_us is not None and record.after_us is not None:
        parts.append(arrow(time_text(record.before_us), time_text(record.after_us)))
    if record.kernels is not None and record.bytes is not None:
        parts.append(f"{arrow(*map(str, record.kernels))} kernels")
        parts.append(arrow(*map(bytes_text, record.bytes)))
    if not record.reason:
        return ", ".join(parts)
    return "; ".join([record.reason, ", ".join(parts)] if parts else [record.reason])


def builder_section(trials: Sequence[BuilderTrial]) -> list[Block]:
    """A row for each engine; nothing where there was no search."""
    rows = [
        (
            "*" if trial.chosen else "",
            ", ".join(trial.options) or "as asked for",
            "" if trial.median_us is None else time_text(trial.median_us),
            "" if trial.spread_us is None else time_text(trial.spread_us),
            "" if trial.build_seconds is None else seconds_text(trial.build_seconds),
            f"{trial.reason} (remembered)" if trial.remembered else trial.reason,
        )
        for trial in trials
    ]
    return [table(("", "options", "median", "spread", "build", ""), rows, right=range(2, 5))] if rows else []


ACTIONS = {
    "start": "all that pays",
    "alternative": "another start",
    "16-bit": "16-bit only",
    "take back": "taken back",
    "take fewer back": "fewer taken back",
    "win back": "won back",
}
"""What was tried, in the words of the table."""


def search_section(record: SearchRecord | None) -> list[Block]:
    """What was asked for, what was found, and every evaluation."""
    if record is None:
        return []
    rows = [("budget", _budget_text(record)), ("result", _result_text(record)), ("work", _work(record))]
    if record.own_qdq:
        rows.append(("in all points", "the model's own Q/DQ"))
    for name, regions in (("taken back", record.reverted), ("won back", record.won_back)):
        if regions:
            rows.append((name, f"{count(len(regions), 'region')}: {some_names(regions, 4)}"))
    return [pairs(rows), line(), _steps(record), *_more(len(record.steps) - _MOST_STEPS)]


def pareto_section(record: SearchRecord | None) -> list[Block]:
    """The Pareto front, the fastest point first."""
    if record is None or not record.pareto:
        return []
    types = list(dict.fromkeys(dtype for point in record.pareto for dtype in point.flop_share))
    measures = _measures(record)
    headers = (
        *("", "point", "predicted"),
        *(f"{dtype.upper()} of the flop" for dtype in types),
        *measures,
        "budget",
    )
    rows = [
        (
            "*" if point.chosen else "",
            point.name,
            _time(point.predicted_us),
            *(percent(point.flop_share.get(dtype, 0.0)) for dtype in types),
            *(text(point) for text in measures.values()),
            _verdict(point),
        )
        for point in record.pareto
    ]
    numbers = range(2, 3 + len(types) + len(measures))
    legend = "* chosen; no other point is both faster and more accurate"
    if any(_verdict(point) == _TOO_CLOSE for point in record.pareto):
        legend += f"; {_TOO_CLOSE}: within the budget, not within the {record.aim:.2g} that the search aims at"
    return [table(headers, rows, right=numbers), line(legend)]


def _verdict(point: SearchStep | ParetoPoint) -> str:
    if not point.within_budget:
        return "missed"
    return "within" if point.within_aim else _TOO_CLOSE


def miss_text(record: SearchRecord) -> str:
    """The gate's sentence where no point is within the budget."""
    mix = _mix(record)
    budget = f"{record.budget:g}"
    limit = f"the default of {budget}" if record.is_default_budget else f"the {budget} of --max-accuracy-drop"
    bound = f"is within {limit}" if record.budget < math.inf else f"keeps {_least_text(record)}"
    bound = "holds --min-sqnr-db" if _has_sqnr_alone(record) else bound
    return (
        f"accuracy budget: no precision that was tried {bound}; the closest point has {_measured(record)} with {mix}"
        + (f", predicted {_time(record.predicted_us)}" if record.predicted_us < math.inf else "")
    )


def drop_text(drop: float) -> str:
    """A drop: four digits behind the point, more where it is smaller than they can say."""
    if not math.isfinite(drop):
        return "not finite"
    return f"{drop:.4f}" if drop == 0 or abs(drop) >= 5e-4 else f"{drop:.1e}"


def _measures(record: SearchRecord) -> dict[str, Callable[[SearchRecord | SearchStep | ParetoPoint], str]]:
    """What the budget bounds, as texts of a point's figures by the name of their column."""
    found: dict[str, Callable[[SearchRecord | SearchStep | ParetoPoint], str]] = {}
    if record.budget < math.inf:
        found["drop"] = lambda point: drop_text(point.drop)
    if record.min_sqnr_db is not None:
        found["SQNR"] = lambda point: sqnr_text(point.error)
    if record.floor_agreement is not None and any(step.disagreement for step in record.steps):
        found["agreement"] = lambda point: percent(1 - point.disagreement)
    if record.floor_sqnr_db is not None and any(step.noise for step in record.steps):
        found["SQNR of other outputs"] = lambda point: sqnr_text(point.noise)
    return found


def _measured(record: SearchRecord) -> str:
    """The result's figures in a sentence."""
    texts = {
        "drop": f"a drop of {drop_text(record.drop)} ({record.metric})",
        "SQNR": f"{sqnr_text(record.error)} SQNR",
        "agreement": f"{percent(1 - record.disagreement)} top-1 agreement",
        "SQNR of other outputs": f"{sqnr_text(record.noise)} SQNR of other outputs",
    }
    return " and ".join(texts[name] for name in _measures(record))


def sqnr_text(error: float) -> str:
    """An error as a ratio of signal to noise."""
    if not math.isfinite(error):
        return "not finite"
    return decibels(-10 * math.log10(error) if error > 0 else math.inf)


def _has_sqnr_alone(record: SearchRecord) -> bool:
    bounds = (record.floor_agreement, record.floor_sqnr_db)
    return record.budget == math.inf and record.min_sqnr_db is not None and bounds == (None, None)


def _least_text(record: SearchRecord) -> str:
    """What outputs have to keep, and the options it is of."""
    bounds = (
        (record.min_sqnr_db, "an SQNR of {:g} dB"),
        (record.floor_agreement, "a top-1 agreement of {:g} (--min-agreement)"),
        (record.floor_sqnr_db, "an SQNR of {:g} dB in outputs without scores (--min-sqnr-db)"),
    )
    return " and ".join(text.format(bound) for bound, text in bounds if bound is not None)


def _budget_text(record: SearchRecord) -> str:
    least = _least_text(record)
    if record.budget == math.inf:
        return least
    default = ", the default" if record.is_default_budget else ""
    aim = f"; the search aims at {record.aim:.2g}, for samples it has not seen" if record.aim < record.budget else ""
    return f"a drop of {record.budget:g} ({record.metric}){default}{aim}" + (f"; and {least}" if least else "")


def _result_text(record: SearchRecord) -> str:
    plain = "with the model's own Q/DQ alone" if record.own_qdq else "in 16-bit"
    against = f" against {_time(record.plain_us)} {plain}" if record.types else ""
    held = "" if record.reached else "NOT REACHED; closest: "
    found = ", ".join(f"{name} {text(record)}" for name, text in _measures(record).items())
    return f"{held}{_mix(record)}: {found}, predicted {_time(record.predicted_us)}{against}"


def _mix(record: SearchRecord) -> str:
    """Which share of the regions is 8-bit, in words."""
    types = list(record.types.values())
    parts = [f"{types.count(dtype)} in {dtype.upper()}" for dtype in dict.fromkeys(types)]
    if not parts:
        return "no region in 8-bit but the model's own Q/DQ" if record.own_qdq else "no region in 8-bit"
    return f"{' and '.join(parts)} of {count(record.regions, 'region')}"


def _work(record: SearchRecord) -> str:
    text = f"{count(record.evaluations, 'evaluation')}, {count(record.rankings, 'ranking')}"
    if record.resumed:
        text += f"; {count(record.resumed, 'answer')} from an earlier run"
    return text + ("; stopped at the most evaluations or seconds that it takes" if record.stopped_early else "")


def _steps(record: SearchRecord) -> Table:
    rows = []
    measures = _measures(record)
    for number, step in enumerate(record.steps[:_MOST_STEPS], 1):
        verdict = _verdict(step)
        if step.action in ("take back", "win back") and not step.within_aim:
            verdict += ", went on" if step.kept else ", undone"
        changed = ""
        if step.regions and step.action not in ("start", "alternative"):
            changed = f"{count(len(step.regions), 'region')}: {some_names(step.regions, 1)}"
        figures = [text(step) for text in measures.values()]
        rows.append((str(number), ACTIONS[step.action], step.name, changed, *figures, verdict))
    headers = ("", "tried", "point", "changed", *measures, "budget")
    return table(headers, rows, right=(0, *range(4, 4 + len(measures))))


def _more(number: int) -> list[Block]:
    return [line(f"and {number} more, in the JSON report")] if number > 0 else []


def _time(microseconds: float) -> str:
    return time_text(microseconds) if math.isfinite(microseconds) else "unknown"


def sparsity_section(record: SparsityRecord | None, labels: Labels) -> list[Block]:
    """What is 2:4, what it is predicted to gain, and what it costs."""
    if record is None:
        return []
    sparse = [item for item in record.layers if item.sparse]
    rows = [("2:4", f"{len(sparse)} of {count(len(record.layers), 'layer')}; {record.pruned} pruned now")]
    if record.dense_us is not None and record.sparse_us is not None:
        gain = record.dense_us / record.sparse_us if record.sparse_us else 1.0
        times = f"{time_text(record.dense_us)} -> {time_text(record.sparse_us)}"
        rows.append(("predicted", f"{times}, {gain:.2f} times as fast on {record.backend}"))
    rows.append(("but", record.note))
    if record.sparse_kernels is not None:
        ran = some([visible(name) for name in record.sparse_kernels], 4) or "none"
        rows.append(("sparse kernels", f"{count(len(record.sparse_kernels), 'layer')} by tactic: {ran}"))
    rows += [("fitted", line) for line in record.recovery]
    rows += _sparsity_budget(record)
    body: list[Block] = [pairs(rows)]
    if record.pruned:
        body += [line(), _sparse_layers(sparse, labels)]
    body += _more(len(sparse) - _MOST_LAYERS)
    if record.curve:
        body += [line(), _sparsity_curve(record.curve, record.metric)]
    return body


def _sparsity_budget(record: SparsityRecord) -> list[tuple[str, str]]:
    found = record.budget
    if found is None:
        return []
    default = ", the default of --sparse" if found.is_default else ""
    text = f"a drop of {found.largest_drop:g} ({record.metric}){default}: at {drop_text(found.drop)}"
    if math.isinf(found.largest_drop):
        text = f"the SQNR of --min-sqnr-db: at a drop of {drop_text(found.drop)} ({record.metric})"
    rows = [("budget", text)]
    if found.given_back:
        names = some_names(found.given_back, 4)
        rows.append(("left dense for it", f"{count(len(found.given_back), 'layer')}: {names}"))
    return rows


def _sparse_layers(sparse: Sequence[PrunedLayer], labels: Labels) -> Table:
    """The layers that are 2:4, those that gain most first."""
    ordered = sorted(sparse, key=lambda item: item.sparse_us - item.dense_us)
    rows = [
        (
            labels.of(item.nodes[:1], after=_more_of(item.nodes)),
            item.method,
            "" if item.kept_magnitude is None else percent(item.kept_magnitude),
            "" if item.magnitude_sqnr_db is None else decibels(item.magnitude_sqnr_db),
            "" if item.sqnr_db is None else decibels(item.sqnr_db),
            f"{time_text(item.dense_us)} -> {time_text(item.sparse_us)}",
        )
        for item in ordered[:_MOST_LAYERS]
    ]
    return table(("layer", "weights", "keeps of abs(w)", "SQNR", "fitted", "predicted"), rows, right=range(2, 6))


def _sparsity_curve(points: Sequence[CurvePoint], metric: str) -> Table:
    rows = [
        (
            "*" if point.chosen else "",
            str(point.layers),
            "" if point.predicted_us is None else time_text(point.predicted_us),
            drop_text(point.drop),
        )
        for point in points
    ]
    return table(("", "layers 2:4", "predicted", f"drop ({metric})"), rows, right=(1, 2, 3))
