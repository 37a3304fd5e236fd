"""A 16-bit plan run on samples, and mended until its outputs are within the bound (see ``precision.repair``)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.accuracy.compare import Accumulator, is_float
from trtopt.accuracy.emulation import fp32_emulation
from trtopt.events import Event, OnEvent, ignore
from trtopt.graph import edit
from trtopt.precision.fp16.repair import Damage, Repaired, repair, smallest_sqnr_db
from trtopt.precision.plan import PrecisionPlan
from trtopt.precision.write import apply_plan
from trtopt.support.ort_session import Feeds, OrtSession

_SELECTIONS = frozenset(
    "ArgMax ArgMin TopK NonMaxSuppression NonZero Unique Multinomial Bernoulli RandomNormal RandomNormalLike "
    "RandomUniform RandomUniformLike".split()
)
"""Operators whose result jumps: two scores that rounding makes equal change places, and what is behind them with it."""

_MOST_SAMPLES = 8
_MOST_BYTES = 1 << 28
"""Of outputs of the reference that are held."""

_SMALLEST_CENTRED = 1e-8
"""Share of a tensor's power that may be left without the mean of its last axis: below, it says nothing."""


@dataclass(frozen=True)
class _Watched:
    """A value that is compared.

    Attributes:
        name: The value's name.
        centred: Compare what is left without the mean of the last axis: scores that are ranked.
        finite_only: Only NaN and infinity count: the value lies behind a selection.
    """

    name: str
    centred: bool = False
    finite_only: bool = False


def repaired(
    base: ir.Model,
    plan: PrecisionPlan,
    samples: Iterable[Feeds],
    *,
    min_sqnr_db: float | None = None,
    on_event: OnEvent = ignore,
) -> Repaired:
    """``plan`` with nodes put back to FP32 until its 16-bit part is within the bound on a few samples.

    Where all is well this costs two sessions and at most eight samples. What the plan quantizes is left out, so that
    one call serves every choice of 8-bit nodes.

    Args:
        base: The widened model.
        plan: Its plan.
        samples: The first eight are used, or as many as give 256 MiB of outputs.
        min_sqnr_db: A higher bound for the outputs than the type's own, in dB.
        on_event: Told of each plan that is run.

    Raises:
        InvalidModelError: ONNX Runtime cannot run the model.
    """
    if plan.narrow is None or not _watched(base):
        return Repaired(plan, Damage(0.0), Damage(0.0))
    bound = max(smallest_sqnr_db(plan.narrow), min_sqnr_db if min_sqnr_db is not None else -math.inf)
    on_event(Event("start", "check precision"))
    found = repair(base, plan, Trial(base, samples, bound, on_event))
    on_event(Event("end", "check precision"))
    return found


class Trial:
    """Runs plans of one model against its FP32 outputs.

    Args:
        base: The widened model.
        samples: See :func:`repaired`.
        bound: Signal to noise that every output must keep, in dB.
        on_event: Told of each plan that is run.
    """

    def __init__(self, base: ir.Model, samples: Iterable[Feeds], bound: float, on_event: OnEvent = ignore) -> None:
        self._base, self._bound, self._on_event = _unquantized(base), bound, on_event
        self._watched = _watched(base)
        self._names = [item.name for item in self._watched]
        self._expected: list[tuple[Feeds, list[np.ndarray]]] = []
        held = 0
        with OrtSession(self._base, self._names) as session:
            for feeds in itertools.islice(samples, _MOST_SAMPLES):
                outputs = session.run(feeds)
                self._expected.append((feeds, outputs))
                held += sum(array.nbytes for array in outputs)
                if held > _MOST_BYTES:
                    break

    def __call__(self, plan: PrecisionPlan) -> Damage:
        """What ``plan`` does to the outputs.

        Raises:
            InvalidModelError: ONNX Runtime cannot run the model.
        """
        sums = [Accumulator() for _ in self._watched]
        with OrtSession(fp32_emulation(apply_plan(self._base, plan)), self._names, keep_qdq=True) as session:
            for feeds, expected in self._expected:
                for item, total, reference, output in zip(
                    self._watched, sums, expected, session.run(feeds), strict=True
                ):
                    _add(item, total, reference, output)
        self._on_event(Event("advance", "check precision"))
        found = [self._damage(item, total) for item, total in zip(self._watched, sums, strict=True)]
        return max(found, key=lambda damage: damage.excess, default=Damage(0.0))

    def _damage(self, item: _Watched, total: Accumulator) -> Damage:
        if total.nonfinite:
            return Damage(math.inf, item.name, math.nan)
        if item.finite_only or total.signal == 0.0 or total.noise == 0.0:
            return Damage(0.0, item.name)
        sqnr = 10 * math.log10(total.signal / total.noise)
        return Damage(10 ** ((self._bound - sqnr) / 10), item.name, sqnr)


def _unquantized(base: ir.Model) -> ir.Model:
    """``base`` without the quantizers it came with.

    Behind them the error of the 16-bit types is drowned: a rounding that moves a value over a border between two levels
    is an error of a whole level (ResNet-20 keeps 59 dB in FP16, and 32 dB with Q/DQ at every convolution).
    """
    if not any(node.op_type == "QuantizeLinear" for node in base.graph):
        return base
    clone = base.clone()
    for node in list(clone.graph):
        quantizer = node.inputs[0].producer() if node.op_type == "DequantizeLinear" and node.inputs[0] else None
        source = quantizer.inputs[0] if quantizer is not None and quantizer.op_type == "QuantizeLinear" else None
        if source is not None and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(source)
            edit.remove_node(node)
    return clone


def _add(item: _Watched, total: Accumulator, reference: np.ndarray, output: np.ndarray) -> None:
    if item.finite_only:
        if is_float(output):
            total.nonfinite += int(np.isnan(output).any() and not np.isnan(reference).any())
        return
    if item.centred and reference.ndim and reference.shape == output.shape:
        exact = reference.astype(np.float64)
        mean = np.where(np.isfinite(exact), exact, 0.0).mean(axis=-1, keepdims=True)
        left = np.nan_to_num(exact - mean, posinf=0.0, neginf=0.0)
        if float(np.square(left).sum()) > _SMALLEST_CENTRED * float(np.square(mean).sum()) * reference.shape[-1]:
            reference, output = exact - mean, output - mean
    total.update(reference, output)


def _watched(base: ir.Model) -> list[_Watched]:
    """What stands for the network's outputs.

    An output behind a selection (the first hundred boxes by score) jumps with the least rounding, however good the
    scores are; the scores are compared instead.
    """
    behind: set[ir.Value] = set()
    ranked: dict[str, _Watched] = {}
    for node in base.graph:
        inputs = [value for value in node.inputs if value is not None]
        if any(value in behind for value in inputs):
            behind.update(node.outputs)
        elif node.op_type in _SELECTIONS:
            behind.update(node.outputs)
            for value in inputs:
                if value.dtype is ir.DataType.FLOAT and value.producer() is not None:
                    ranked[str(value.name)] = _Watched(str(value.name), centred=True)
        elif any(value in behind for graph in edit.subgraphs_of(node) for value in _read(graph)):
            behind.update(node.outputs)
    outputs = [
        _Watched(str(value.name), finite_only=value in behind)
        for value in base.graph.outputs
        if value.producer() is not None
    ]
    named = {item.name for item in outputs if not item.finite_only}
    return [*outputs, *(item for name, item in ranked.items() if name not in named)]


def _read(graph: ir.Graph) -> list[ir.Value]:
    return [value for node in graph.all_nodes() for value in node.inputs if value is not None]
