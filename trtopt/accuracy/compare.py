"""Two runs of the same samples compared: SQNR, cosine, largest error, top-1 agreement, streamed over the samples.

Polygraphy's comparator is not used here: it keeps the outputs of every iteration and has no measure pooled over all
samples, which is what a gate needs. Its tolerances are counted beside those.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import onnx_ir as ir

from trtopt.accuracy.scores import least_size
from trtopt.config.budget import Tolerances
from trtopt.errors import InvalidModelError
from trtopt.events import Event, OnEvent, ignore
from trtopt.graph import edit
from trtopt.report.schema.build import OutputAccuracy, ToleranceRecord
from trtopt.support.ort_session import Feeds, OrtSession

CLEAN_DB = 40.0
"""Error below this level does not count as damage: 40 dB is the noise that rounding to INT8 with a well-chosen range
leaves in one tensor (6.02 dB per bit, less about 8 dB for the headroom of a bell-shaped distribution)."""

CLOSE = 0.01
"""Share of a row's range of scores: two best scores that are nearer make a decoder's two tokens equally good."""

_TENSORS_PER_PASS = 48

_CHUNK = 8192
"""Elements summed at a time. What stays in the core's cache is summed ten times faster than a whole feature map (3.6 ns
an element against 53), and from 10,000 elements on OpenBLAS wakes all its threads for a dot product."""


class Runner(Protocol):
    """Anything that runs samples: an :class:`~trtopt.support.ort_session.OrtSession`, an engine."""

    output_names: tuple[str, ...]

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Outputs in the order of ``output_names``."""


@dataclass
class Accumulator:
    """Sums over the samples of one tensor, in FP64. Elements whose reference is not finite are left out.

    Where ``tolerance`` says how far off an element may be, it counts those beyond. Of the answers it counts those whose
    two best reference scores differ by ``close`` of their range and more; the others are ``ties``. Elements whose root
    mean square is below ``least`` are held against that: see :func:`trtopt.accuracy.scores.least_size`.
    """

    signal: float = 0.0
    noise: float = 0.0
    power: float = 0.0
    dot: float = 0.0
    max_abs: float = 0.0
    nonfinite: int = 0
    differs: int = 0
    agree: int = 0
    positions: int = 0
    has_top1: bool | None = None
    tolerance: ToleranceRecord | None = None
    close: float = 0.0
    ties: int = 0
    least: float = 0.0
    count: int = 0
    has_scores: bool = True

    @property
    def size(self) -> float:
        """What the noise is held against: the sum of the reference's squares, at least that of ``least``."""
        return max(self.signal, self.count * self.least**2)

    def update(self, reference: np.ndarray, output: np.ndarray) -> None:
        """Add one sample; the arrays have any numeric or boolean dtype.

        Where their shapes differ nothing can be said of the elements, and so of the tensor over all samples.
        """
        if reference.shape != output.shape:
            self.differs += 1
            self._judge(np.ones(reference.size, bool))
            return
        discrete = not is_float(reference)
        if self.has_top1 is None:
            self.has_top1 = discrete or is_class_like(reference)
        if self.has_top1:
            same = reference == output if discrete else top1(reference) == top1(output)
            if self.close and not discrete:
                clear = ~is_tie(reference, self.close)
                same, self.ties = same[clear], self.ties + same.size - int(np.count_nonzero(clear))
            self.agree += int(np.count_nonzero(same))
            self.positions += same.size
        first, second = reference.ravel(), output.ravel()
        for start in range(0, first.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            self._add(first[part].astype(np.float64), second[part].astype(np.float64))

    def _add(self, ref: np.ndarray, out: np.ndarray) -> None:
        finite = np.isfinite(ref)
        if not finite.all():
            ref, out = ref[finite], out[finite]
        if self.tolerance is not None:
            off = np.abs(out - ref)
            self._judge(~((off <= self.tolerance.atol) | (off <= self.tolerance.rtol * np.abs(ref))))
        broken = int(ref.size - np.count_nonzero(np.isfinite(out)))
        if broken:
            self.nonfinite += broken
            return
        error = out - ref
        self.count += ref.size
        self.signal += float(ref @ ref)
        self.power += float(out @ out)
        self.dot += float(ref @ out)
        self.noise += float(error @ error)
        self.max_abs = max(self.max_abs, float(np.abs(error).max(initial=0.0)))

    def _judge(self, is_beyond: np.ndarray) -> None:
        if self.tolerance is not None:
            beyond = self.tolerance.beyond + int(np.count_nonzero(is_beyond))
            self.tolerance = replace(self.tolerance, beyond=beyond, values=self.tolerance.values + is_beyond.size)

    def result(self) -> OutputAccuracy:
        """The measures over everything added so far."""
        held_against = self.least if self.size > self.signal else None
        return replace(
            self._measures(), tolerance=self.tolerance, held_against=held_against, has_scores=self.has_scores
        )

    def _measures(self) -> OutputAccuracy:
        if self.differs:
            return OutputAccuracy(math.nan, math.nan, math.nan, None, self.nonfinite, self.differs)
        agreement = self.agree / self.positions if self.has_top1 and self.positions else None
        if self.nonfinite:
            return OutputAccuracy(math.nan, math.nan, math.inf, agreement, self.nonfinite)
        if self.noise == 0.0:
            return OutputAccuracy(math.inf, 1.0, 0.0, agreement, ties=self.ties)
        sqnr = 10.0 * math.log10(self.size / self.noise) if self.size else -math.inf
        norm = math.sqrt(self.signal) * math.sqrt(self.power)
        return OutputAccuracy(sqnr, self.dot / norm if norm else 0.0, self.max_abs, agreement, ties=self.ties)


def sums_of(
    tolerances: Tolerances | None,
    states: Collection[str] = (),
    outputs: Iterable[ir.Value] = (),
    ranked: Collection[str] = (),
    values: Collection[str] = (),
) -> Callable[[str], Accumulator]:
    """What adds up each output of a network for :func:`compare`.

    Args:
        tolerances: How far values may be off; None judges none of them by itself.
        states: Outputs that are states. They hold no answers, and where there are some, answers are those of steps:
            ties do not count.
        outputs: Of the reference's graph, for :func:`~trtopt.accuracy.scores.least_size`.
        ranked: Names of what a selection ranks or takes: numbers, and no answers yet.
        values: Outputs that hold no scores (:func:`~trtopt.accuracy.scores.held_by`).
    """
    least = {str(output.name): least_size(output) for output in outputs}

    def made(name: str) -> Accumulator:
        has_top1 = False if name in states or name in ranked else None
        close, has_scores = CLOSE if states else 0.0, name not in values
        sums = Accumulator(close=close, has_top1=has_top1, least=least.get(name, 0.0), has_scores=has_scores)
        if tolerances is not None:
            sums.tolerance = ToleranceRecord(*tolerances.of(name), beyond=0, values=0)
        return sums

    return made


def decibels(error: float) -> float:
    """Signal to noise in dB, of noise power over signal power."""
    return -10 * math.log10(error) if 0 < error < math.inf else math.copysign(math.inf, 0.5 - error)


def is_float(array: np.ndarray) -> bool:
    """Whether ``array`` is floating point; FP16 and the types of ml_dtypes (BF16, FP8) included."""
    return array.dtype.kind not in "biu"


def is_class_like(array: np.ndarray) -> bool:
    """Whether the last axis of an output holds scores of classes.

    The first axis is the batch. Unit axes after it are dropped; what remains is [N, C] or [N, positions, C] with
    C >= 2, in floating point. Higher ranks are feature maps ([N, C, H, W]).
    """
    shape = [dim for dim in array.shape[1:] if dim != 1]
    return is_float(array) and 1 <= len(shape) <= 2 and shape[-1] >= 2


def top1(scores: np.ndarray) -> np.ndarray:
    """Index of the largest of the last axis of size other than 1; NaN counts as no class (-1)."""
    flat = _rows(scores)
    best = flat.argmax(axis=-1)
    return np.where(np.isnan(flat).any(axis=-1), -1, best)


def margins(scores: np.ndarray) -> np.ndarray:
    """How far the best score of a row is ahead of the second, as a share of the row's range; the shape of :func:`top1`.

    Scores of minus infinity, of what is masked, are no part of it. NaN where a row says nothing: of equal scores, or
    with NaN.
    """
    flat = _rows(scores).astype(np.float64)
    least = np.where(np.isneginf(flat), np.inf, flat).min(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(leads(scores) / (flat.max(axis=-1) - least))


def leads(scores: np.ndarray) -> np.ndarray:
    """How far the best score of a row is ahead of the second; the shape of :func:`top1`. NaN with NaN."""
    flat = _rows(scores).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.asarray(flat.max(axis=-1) - np.partition(flat, -2, axis=-1)[..., -2])


def is_tie(scores: np.ndarray, close: float = CLOSE) -> np.ndarray:
    """Whether the two best scores of a row differ by less than ``close`` of the row's range; the shape of :func:`top1`.

    Rows with NaN or infinities are none.
    """
    return np.asarray(margins(scores) < close)


def _rows(scores: np.ndarray) -> np.ndarray:
    """Scores without axes of size 1 after the first."""
    return scores.reshape((scores.shape[0], *(dim for dim in scores.shape[1:] if dim != 1)))


def compare(
    reference: Runner,
    optimized: Runner,
    samples: Iterable[Feeds],
    *,
    advance: Callable[[], object] = lambda: None,
    varying: Collection[str] = (),
    enough: Callable[[Mapping[str, OutputAccuracy]], bool] | None = None,
    sums: Callable[[str], Accumulator] = lambda _: Accumulator(),
) -> dict[str, OutputAccuracy]:
    """Compare the outputs of two runners over ``samples``; memory does not grow with their number.

    Floating-point outputs: see :class:`~trtopt.report.schema.build.OutputAccuracy`. Integer and boolean outputs are
    compared as numbers, and their agreement is the share of equal elements. Elements whose reference is not finite are
    left out.

    Args:
        reference: The FP32 model.
        optimized: The emulation, or the engine; its outputs are matched by name.
        samples: One call's inputs each.
        advance: Called after each sample.
        varying: Outputs whose shape depends on the values (boxes found): a rounding may change it.
        enough: Asked after each sample whether what was found so far is enough; None runs all of them.
        sums: What adds up an output of some name.

    Raises:
        InvalidModelError: The outputs differ in name or shape, are not tensors of numbers, or there is no sample.
    """
    accumulators = {name: sums(name) for name in reference.output_names}
    missing = [name for name in accumulators if name not in optimized.output_names]
    if missing:
        raise InvalidModelError(
            f"The optimized model has no output {', '.join(missing)}",
            where=f"its outputs: {', '.join(optimized.output_names)}",
            remedy="compare models with the same outputs",
        )
    count = 0
    for count, feeds in enumerate(samples, 1):  # noqa: B007 - used after the loop
        expected = zip(reference.output_names, reference.run(feeds), strict=True)
        outputs = dict(zip(optimized.output_names, optimized.run(feeds), strict=True))
        for name, value in expected:
            accumulators[name].update(*checked_arrays(name, value, outputs[name], may_differ=name in varying))
        advance()
        if enough is not None and enough({name: item.result() for name, item in accumulators.items()}):
            break
    if not count:
        raise InvalidModelError("There are no samples to verify on", remedy="give at least one sample with --eval")
    return {name: item.result() for name, item in accumulators.items()}


def checked_arrays(name: str, reference: object, output: object, *, may_differ: bool) -> tuple[np.ndarray, np.ndarray]:
    """One output of both models as arrays.

    Raises InvalidModelError where one is no array of numbers, or the shapes differ and may not.
    """
    for value in (reference, output):
        if not isinstance(value, np.ndarray) or value.dtype.kind in "OSUM":
            raise InvalidModelError(
                f"Output {name} is not a tensor of numbers", where=str(type(value)), remedy="cut it off the graph"
            )
    first, second = np.asarray(reference), np.asarray(output)
    if first.shape != second.shape and not may_differ:
        raise InvalidModelError(
            f"Output {name} has shape {list(second.shape)}, the reference {list(first.shape)}",
            remedy="this is a fault of a rewrite: build with --recipes none and report it",
        )
    return first, second


def common_tensors(reference: ir.Model, optimized: ir.Model) -> tuple[str, ...]:
    """Names of the floating-point node outputs that both main graphs compute, in the order of ``optimized``."""
    known = {value.name for node in reference.graph for value in node.outputs}
    return tuple(
        str(value.name)
        for node in optimized.graph
        if node.op_type != "Constant"
        for value in node.outputs
        if value.name in known and value.dtype is not None and value.dtype.is_floating_point()
    )


def compare_tensors(
    reference: ir.Model,
    optimized: ir.Model,
    samples: Iterable[Feeds],
    *,
    max_samples: int = 8,
    on_event: OnEvent = ignore,
) -> dict[str, OutputAccuracy]:
    """Compare intermediate tensors of the FP32 model and of the optimized model's FP32 emulation.

    A bounded number of tensors is read per pass, and a bounded number of samples, so that memory stays bounded too.

    Args:
        reference: The FP32 graph.
        optimized: What :func:`trtopt.accuracy.emulation.fp32_emulation` made of the optimized graph.
        samples: The first ``max_samples`` of them are used.

    Returns:
        By the name of each tensor of :func:`common_tensors`, in graph order.
    """
    chosen = list(itertools.islice(samples, max_samples))
    names = common_tensors(reference, optimized)
    chunks = [names[start : start + _TENSORS_PER_PASS] for start in range(0, len(names), _TENSORS_PER_PASS)]
    on_event(Event("start", "compare tensors", total=len(chunks)))
    result: dict[str, OutputAccuracy] = {}
    for chunk in chunks:
        with OrtSession(reference, chunk) as first, OrtSession(optimized, chunk, keep_qdq=True) as second:
            result.update(compare(first, second, chosen))
        on_event(Event("advance", "compare tensors"))
    on_event(Event("end", "compare tensors"))
    return result


def first_bad(optimized: ir.Model, tensors: Mapping[str, OutputAccuracy]) -> str | None:
    """The tensor where the error enters; None when nothing falls below :data:`CLEAN_DB`.

    That is the one with the largest fall of SQNR from the worst compared tensor it is computed from. Levels above
    :data:`CLEAN_DB` count as that level, so that the step from an exact input to ordinary quantization noise is no
    fall. A tensor that is not finite comes before all falls, unless every output is clean (a mask of -3.4e38 that
    became -inf does no harm before a softmax).

    Args:
        optimized: The graph whose order and connections count, usually the emulation.
        tensors: What :func:`compare_tensors` returned; the graph's outputs must be among them.
    """
    ends = [tensors[str(value.name)] for value in optimized.graph.outputs if value.name in tensors]
    if not all(end.sqnr_db >= CLEAN_DB for end in ends):
        broken = [name for name, accuracy in tensors.items() if accuracy.nonfinite]
        if broken:
            return broken[0]
    worst_behind: dict[ir.Value, float] = {}
    largest, found = 0.0, None
    for node in optimized.graph:
        level = min((worst_behind.get(value, CLEAN_DB) for value in edit.values_read(node)), default=CLEAN_DB)
        for value in node.outputs:
            accuracy = tensors.get(str(value.name))
            if accuracy is None or accuracy.nonfinite:
                worst_behind[value] = level
                continue
            worst_behind[value] = min(accuracy.sqnr_db, CLEAN_DB)
            if level - worst_behind[value] > largest:
                largest, found = level - worst_behind[value], str(value.name)
    return found


_MOST_BYTES = 1 << 29
"""Of outputs that are held; what is beyond is computed again."""


class MemoizedRunner:
    """Runs each sample once; ``rows`` counts entries along the first axis of all different samples so far."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.output_names = runner.output_names
        self.rows = 0
        self._known: dict[bytes, list[np.ndarray]] = {}
        self._seen: set[bytes] = set()
        self._held = 0

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Copies of the outputs, which the caller may change."""
        key = digest(feeds)
        known = self._known.get(key)
        if known is not None:
            return [array.copy() for array in known]
        outputs = self._runner.run(feeds)
        if key not in self._seen:
            self._seen.add(key)
            self.rows += max((array.shape[0] for array in feeds.values() if np.ndim(array)), default=1)
        size = sum(array.nbytes for array in outputs)
        if self._held + size <= _MOST_BYTES:
            self._known[key], self._held = [array.copy() for array in outputs], self._held + size
        return outputs


def digest(feeds: Feeds) -> bytes:
    """A hash of the names, dtypes, shapes and values of what a network is fed."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(feeds):
        array = np.ascontiguousarray(feeds[name])
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.digest()


@dataclass(frozen=True)
class HostPart:
    """The end of a model that the compiler refuses (see :func:`trtopt.rewrite.host_part.split`).

    Attributes:
        model: What the host runs; FP32 inside.
        between: Names of the tensors it takes from the engine.
        outputs: Names of the outputs of the whole model, in its order.
    """

    model: ir.Model
    between: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def own_outputs(self) -> tuple[str, ...]:
        """Names of the outputs the host computes."""
        return tuple(str(value.name) for value in self.model.graph.outputs)

    @property
    def watched(self) -> tuple[str, ...]:
        """What verification compares: the outputs of the whole, then the tensors between that are none."""
        return tuple(dict.fromkeys((*self.outputs, *self.between)))


class _InTurn:
    """Two runners, the second of which reads what the first gives."""

    def __init__(self, first: Runner, second: Runner, names: Sequence[str]) -> None:
        self._first = first
        self._second = second
        self.output_names = tuple(names)

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        found = dict(zip(self._first.output_names, self._first.run(feeds), strict=True))
        found.update(zip(self._second.output_names, self._second.run({**feeds, **found}), strict=True))
        return [found[name] for name in self.output_names]


class ConvertingRunner:
    """A runner that takes other samples than the model as loaded; ``feeds`` turns one into what it takes."""

    def __init__(self, runner: Runner, feeds: Callable[[Feeds], Feeds]) -> None:
        self._runner, self._feeds = runner, feeds
        self.output_names = runner.output_names

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Outputs in the order of ``output_names``."""
        return self._runner.run(self._feeds(feeds))


class SelectedOutputs:
    """Some outputs of a runner, under their names and in their order."""

    def __init__(self, runner: Runner, names: Sequence[str]) -> None:
        self._runner = runner
        self.output_names = tuple(names)

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Outputs in the order of ``output_names``."""
        found = dict(zip(self._runner.output_names, self._runner.run(feeds), strict=True))
        return [found[name] for name in self.output_names]


@contextlib.contextmanager
def as_whole(engine: Runner, host: HostPart | None) -> Iterator[Runner]:
    """A runner of the whole model, whose outputs are ``host.watched``; ``engine`` itself where nothing was cut off."""
    if host is None:
        yield engine
        return
    with OrtSession(host.model) as session:
        yield _InTurn(engine, session, host.watched)
