"""Which regions become 8-bit on a backend: judged by its own judge, with a verdict on each for the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from trtopt.graph.shapes import at_shapes
from trtopt.judge.memo import PriceFile
from trtopt.judge.protocol import OpenJudge
from trtopt.judge.selection import Guard, Guarded, RegionVerdict
from trtopt.judge.target import BuildTarget
from trtopt.pipeline.calibrate import Observer
from trtopt.precision.plan import PrecisionPlan
from trtopt.precision.regions import Candidates, Problem
from trtopt.report.schema.decisions import GuardRecord, SearchRecord


@contextmanager
def guard_of(
    problem: Problem, candidates: Candidates, target: BuildTarget, observer: Observer, open_judge: OpenJudge
) -> Iterator[Guard]:
    """The guard of one model, while its judge is there.

    Args:
        problem: The model and what is known of it.
        candidates: What may become 8-bit.
        target: For whom.
        observer: Whose options and progress these are.
        open_judge: Opens the target's judge.

    Raises:
        MissingDependencyError: TensorRT for RTX has to judge and is not installed.
        UsageError: A plugin library cannot be read.
    """
    config, listen = observer.config, observer.clock.listen
    static = at_shapes(problem.model, target.shapes)
    with open_judge(None, prices=None) as judge:
        file = PriceFile((judge.name, repr(target.gpu)), config.cache_dir, listen, config.plugins)
        yield Guard(problem, candidates, static, judge, listen, file)


def form_price(guard: Guard, target: BuildTarget) -> Callable[[Problem, PrecisionPlan], float]:
    """Prices FP32 forms of the guard's model in microseconds; infinite where nobody can say."""

    def price(problem: Problem, plan: PrecisionPlan) -> float:
        found = guard.form(at_shapes(problem.model, target.shapes), plan)
        return math.inf if found is None else found.predicted_us

    return price


def guard_records(guarded: Guarded) -> tuple[GuardRecord, ...]:
    """The verdicts, for the report."""
    return tuple(_record(verdict) for verdict in guarded.verdicts)


def kept_records(candidates: Candidates, reason: str) -> tuple[GuardRecord, ...]:
    """Every region kept, unjudged, for this reason."""
    return tuple(
        GuardRecord(
            region=region.name,
            nodes=region.nodes,
            kept=True,
            dtype=candidates.all[region.nodes[0]].dtype,
            reason=reason,
        )
        for region in candidates.regions
    )


def with_blocked(
    records: Sequence[GuardRecord], candidates: Candidates, blocked: Mapping[str, str]
) -> tuple[GuardRecord, ...]:
    """The verdicts, with one for each region that the compiler could not build.

    Args:
        records: The verdicts on the regions that are left.
        candidates: What might have become 8-bit, before nodes were taken out.
        blocked: Those nodes, with the reason.
    """
    judged = {record.region: record for record in records}
    found = (
        judged.get(item.name)
        or GuardRecord(region=item.name, nodes=item.nodes, kept=False, reason=blocked.get(item.nodes[0], ""))
        for item in candidates.regions
    )
    return tuple(found)


def searched_records(records: Sequence[GuardRecord], found: SearchRecord) -> tuple[GuardRecord, ...]:
    """The verdicts, with what the accuracy budget took back, or the search found to pay after all."""
    bound = f"of {found.budget:g} ({found.metric})" if found.budget < math.inf else "of --min-sqnr-db"
    taken_back = f"taken back for the accuracy budget {bound}"
    result = []
    for record in records:
        dtype = found.types.get(record.region, "")
        reason = record.reason
        if record.kept != bool(dtype):
            reason = "" if dtype else taken_back
        result.append(replace(record, kept=bool(dtype), dtype=dtype, reason=reason))
    return tuple(result)


def _record(verdict: RegionVerdict) -> GuardRecord:
    dtypes = sorted({op.dtype for op in verdict.kept.values()})
    some = 0 < len(verdict.kept) < len(verdict.region.nodes)
    return GuardRecord(
        region=verdict.region.name,
        nodes=verdict.region.nodes,
        kept=bool(verdict.kept),
        dtype="+".join(dtypes),
        reason=f"only {', '.join(verdict.kept)}" if some else verdict.reason,
        before_us=verdict.before.predicted_us if verdict.before else None,
        after_us=max(verdict.after.predicted_us, 0.0) if verdict.after else None,
        kernels=_change(verdict, "kernels"),
        bytes=_change(verdict, "bytes"),
    )


def _change(verdict: RegionVerdict, name: str) -> tuple[int, int] | None:
    if verdict.before is None or verdict.after is None:
        return None
    # A region that frees its neighbours of more than it costs comes out below nothing.
    return int(getattr(verdict.before, name)), max(int(getattr(verdict.after, name)), 0)
