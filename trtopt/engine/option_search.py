"""The builder options of TensorRT that make an engine fastest, found by building and timing a few engines.

Nothing here calls TensorRT: how an engine is built and timed is handed in. Why these options (``IBuilderConfig``,
https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api/infer/Core/BuilderConfig.html):

- ``builder_optimization_level``, 0 to 5, by default 3: higher levels compile kernels (4) and compare them with the
  precompiled ones (5). Lower ones only shorten the build.
- ``tiling_optimization_level``, by default NONE (TensorRT 10.8 and later): tiles across kernels for the L2 cache; the
  levels differ in how long the builder searches.
- ``max_aux_streams``, by default a heuristic's choice: 0 is one stream; more let branches run at once, and cost
  synchronization and memory.
- ``set_tactic_sources``, by default both EDGE_MASK_CONVOLUTIONS and JIT_CONVOLUTIONS. Those of cuBLAS and cuDNN are
  deprecated.
- knobs of a build route (``build_route``, TensorRT 11.1 and later): those that the user names with several values. They
  are the compiler's own, more than two hundred, and differ between versions, so that none is tried unasked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import Generic, TypeVar

from trtopt.engine.cache import EngineCache
from trtopt.errors import EngineBuildError
from trtopt.report.schema.decisions import BuilderTrial
from trtopt.support.json_text import converted

Axes = tuple[tuple[str, tuple[str, ...]], ...]
"""Options and knobs of a build route, and the values beside the builder's default."""

AXES: Axes = (
    ("builder_optimization_level", ("4", "5")),
    ("tiling", ("fast", "moderate", "full")),
    ("max_aux_streams", ("0", "4")),
    ("tactic_sources", ("edge_mask_convolutions", "jit_convolutions")),
)
"""What is varied, in this order, and the values beside the builder's default; costlier builds last."""

NOISE = 0.02
"""Share of the time that a difference has to exceed: medians that stand still agree within it
(:class:`trtopt.profiling.measured.Limits`)."""

Options = tuple[str, ...]
"""``KEY=VALUE`` in the order of the axes; an option that is not there has the builder's default."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class EngineTime:
    """What is known of an engine.

    Attributes:
        spread_us: Median absolute deviation from the median time.
        stable: Whether the median stood still.
    """

    median_us: float
    spread_us: float
    stable: bool
    build_seconds: float
    sha256: str


@dataclass(frozen=True)
class Answer(Generic[_T]):
    """What was measured, and the engine; None where the figures were remembered."""

    measured: EngineTime
    engine: _T | None


@dataclass(frozen=True)
class Found(Generic[_T]):
    """The fastest options, their answer, and every trial in its order."""

    options: Options
    best: Answer[_T]
    trials: tuple[BuilderTrial, ...]


def search_options(
    builds: int, fixed: Collection[str], ask: Callable[[Options], Answer[_T]], axes: Axes = AXES
) -> Found[_T]:
    """Vary one option at a time from the best so far, until nothing helps or ``builds`` engines were asked for.

    An engine is taken where it is faster than the best by more than :data:`NOISE` and more than both spreads together:
    what is within the noise keeps the simpler options. So the result is never slower than the engine as asked for.

    Args:
        builds: Engines to ask for, at most; the first is the one as asked for.
        fixed: Keys that the user set; they are not varied.
        ask: Builds and times the engine of some options.
        axes: What is varied.

    Raises:
        EngineBuildError: The engine as asked for cannot be built. Other options that are refused are left out.
    """
    options: Options = ()
    best = ask(options)
    tried = {options: _trial(options, best, "as asked for")}
    while True:
        before = options
        for key, values in axes:
            for value in (None, *values) if key not in fixed else ():
                candidate = _with(options, key, value, axes)
                if candidate in tried or len(tried) >= builds:
                    continue
                try:
                    answer = ask(candidate)
                except EngineBuildError as error:
                    tried[candidate] = BuilderTrial(candidate, None, None, None, False, False, f"refused: {error.what}")
                    continue
                reason = _verdict(answer.measured, best.measured, options)
                tried[candidate] = _trial(candidate, answer, reason)
                if _is_faster(answer.measured, best.measured):
                    options, best = candidate, answer
        if options == before:
            break
    trials = tuple(replace(trial, chosen=trial.options == options) for trial in tried.values())
    return Found(options, best, trials)


def remembered(
    cache: EngineCache | None, key: str, ask: Callable[[], Answer[_T]], *, refusals: bool = True
) -> Answer[_T]:
    """What is known of an engine, from the cache where an earlier run measured it.

    Args:
        key: What the time depends on: the key of the engine, the GPU, its driver and the runtime.
        refusals: Whether a refusal is kept as well; not that of an engine that there has to be.

    Raises:
        EngineBuildError: It is refused, or was when it was asked for.
    """
    known = None if cache is None else cache.times.load(key, _read)
    if isinstance(known, EngineTime):
        return Answer(known, None)
    if known is not None and refusals:
        raise EngineBuildError(known.refused, where="an earlier run", remedy="see its report")
    try:
        answer = ask()
    except EngineBuildError as error:
        if cache is not None and refusals:
            cache.times.store(key, [json.dumps(asdict(_Refused(error.what))).encode()])
        raise
    if cache is not None:
        cache.times.store(key, [json.dumps(asdict(answer.measured)).encode()])
    return answer


@dataclass(frozen=True)
class _Refused:
    refused: str


def _read(content: memoryview) -> EngineTime | _Refused:
    """What was kept. Raises ValueError: it is something else."""
    data = bytes(content)
    return converted(data, _Refused) if b'"refused"' in data else converted(data, EngineTime)


def _with(options: Options, key: str, value: str | None, axes: Axes) -> Options:
    """``options`` with another value of one of them; None for the builder's default."""
    found = dict(item.split("=", 1) for item in options)
    found.pop(key, None)
    if value is not None:
        found[key] = value
    return tuple(f"{name}={found[name]}" for name, _ in axes if name in found)


def _noise_us(found: EngineTime, best: EngineTime) -> float:
    return max(NOISE * best.median_us, found.spread_us + best.spread_us)


def _is_faster(found: EngineTime, best: EngineTime) -> bool:
    return found.stable and best.median_us - found.median_us > _noise_us(found, best)


def _verdict(found: EngineTime, best: EngineTime, options: Options) -> str:
    than = ", ".join(options) or "as asked for"
    change = found.median_us / best.median_us - 1
    if not found.stable:
        return "its time did not settle"
    if _is_faster(found, best):
        return f"{-change:.1%} faster than {than}"
    if abs(found.median_us - best.median_us) <= _noise_us(found, best):
        return f"within the noise of {than} ({change:+.1%})"
    return f"{change:.1%} slower than {than}"


def _trial(options: Options, answer: Answer[_T], reason: str) -> BuilderTrial:
    found = answer.measured
    return BuilderTrial(
        options, found.build_seconds, found.median_us, found.spread_us, False, answer.engine is None, reason
    )
