"""What runs calls; and calls of fewer rows than an engine takes, filled up and cut out of the outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from trtopt.report.schema.manifest import ShapeRange
from trtopt.serve.tensors import CallInput, GpuTensor, TensorSpec, on_gpu

_BATCH = "batch"


class ServingRunner(Protocol):
    """What runs the calls.

    Attributes:
        takes_gpu: Whether inputs may lie on the GPU; then the outputs do, where the first input does.
    """

    takes_gpu: bool
    runtime: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def run(self, context: int, feeds: dict[str, Any]) -> dict[str, Any]:
        """Outputs by name, computed in a context that no other call holds meanwhile."""

    @property
    def graph_counts(self) -> dict[str, int]:
        """What came of CUDA graphs; empty where there are none."""

    def close(self) -> None:
        """Free its memory; nothing runs any more."""


class FilledRunner:
    """An engine of at least ``rows`` rows, each of them alone, as one of at least one row.

    A call of fewer rows has its last row repeated, which computes nothing that the rows before do not (no NaN from
    zeros), and gets its own rows back. Calls of enough rows pass as they are.

    Args:
        runner: What runs the engine.
        inputs: What a call gives, with the engine's profiles.
        rows: The least batch; the manifest says that the build proved the rows to be alone.
    """

    def __init__(self, runner: ServingRunner, inputs: Sequence[TensorSpec], rows: int) -> None:
        self._runner, self._least = runner, rows
        self._rows = tuple(spec.name for spec in inputs if _least(spec)[:1] == (rows,))
        self.takes_gpu, self.runtime = runner.takes_gpu, runner.runtime
        self.inputs = tuple(_from_one(spec) if spec.name in self._rows else spec for spec in inputs)
        self.outputs = tuple(dataclasses.replace(spec, shape=_open(spec.shape)) for spec in runner.outputs)

    def run(self, context: int, feeds: dict[str, Any]) -> dict[str, Any]:
        count = feeds[self._rows[0]].shape[0]
        if count >= self._least:
            return self._runner.run(context, feeds)
        order = [*range(count), *[count - 1] * (self._least - count)]
        filled = {name: _taken(value, order) if name in self._rows else value for name, value in feeds.items()}
        return {name: value[:count] for name, value in self._runner.run(context, filled).items()}

    @property
    def graph_counts(self) -> dict[str, int]:
        return self._runner.graph_counts

    def close(self) -> None:
        self._runner.close()


def _least(spec: TensorSpec) -> tuple[int | str, ...]:
    """The smallest shape that the engine takes."""
    return min((one.min for one in spec.profiles), default=spec.shape or ())


def _from_one(spec: TensorSpec) -> TensorSpec:
    """The input with a batch that begins at one: what is fixed has one profile from there on."""
    fixed = tuple(dim for dim in spec.shape or () if isinstance(dim, int))
    ranges = spec.profiles or (ShapeRange(fixed, fixed, fixed),)
    least = _least(spec)
    opened = tuple(dataclasses.replace(one, min=(1, *one.min[1:])) if one.min[0] == least[0] else one for one in ranges)
    return dataclasses.replace(spec, shape=_open(spec.shape), profiles=opened)


def _open(shape: tuple[int | str, ...] | None) -> tuple[int | str, ...] | None:
    return shape if not shape or not isinstance(shape[0], int) else (_BATCH, *shape[1:])


def _taken(value: CallInput, order: Sequence[int]) -> CallInput:
    """Rows in this order; numpy, torch and cupy index by a list alike."""
    rows = list(order)
    return on_gpu(value.tensor[rows]) if isinstance(value, GpuTensor) else value[rows]
