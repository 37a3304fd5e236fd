"""A model whose end the compiler refuses, run as one: the engine or its twin, then the host part in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from trtopt.errors import IntegrityError
from trtopt.serve.cpu import CpuRunner
from trtopt.serve.tensors import TensorSpec


class Runner(Protocol):
    """What runs the calls.

    Attributes:
        runtime: What it is, and on what.
        inputs: What a call gives.
        outputs: What it gets.
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


class WholeRunner:
    """A first part, then the part for the host, behind the same call.

    Args:
        first: The engine, or its model.
        host: The part for the host.
        names: Outputs of the whole model in its order; None where they are not known: then all outputs of both parts.

    Raises:
        IntegrityError: The parts do not fit each other.
    """

    takes_gpu = False

    def __init__(self, first: Runner, host: CpuRunner, names: Sequence[str] | None = None) -> None:
        made = {spec.name: spec for spec in first.outputs}
        given = {spec.name: spec for spec in first.inputs}
        own = tuple(spec for spec in host.inputs if spec.name not in made and spec.name not in given)
        outputs = {**made, **{spec.name: spec for spec in host.outputs}}
        for spec in host.inputs:
            source = made.get(spec.name) or given.get(spec.name)
            if source is not None and source.dtype != spec.dtype:
                raise _unfit(f"it takes {spec.name!r} as {spec.dtype}, and the first part has {source.dtype}")
        if not any(spec.name in made for spec in host.inputs):
            raise _unfit("it reads no output of the first part")
        if names is not None and not set(names) <= outputs.keys():
            raise _unfit(f"nothing gives {', '.join(set(names) - outputs.keys())}")
        self.runtime = first.runtime
        self.inputs = (*first.inputs, *own)
        self.outputs = tuple(outputs.values()) if names is None else tuple(outputs[name] for name in names)
        self._first, self._host = first, host
        self._between = tuple(spec.name for spec in host.inputs if spec.name in made)
        self._from_caller = tuple(spec.name for spec in host.inputs if spec.name not in made)
        self._own = frozenset(spec.name for spec in own)

    def run(self, context: int, feeds: dict[str, Any]) -> dict[str, Any]:
        """Outputs of the whole model by name."""
        found = self._first.run(context, {name: array for name, array in feeds.items() if name not in self._own})
        taken = {name: found[name] for name in self._between}
        taken.update((name, feeds[name]) for name in self._from_caller)
        found.update(self._host.run(context, taken))
        return {spec.name: found[spec.name] for spec in self.outputs}

    @property
    def graph_counts(self) -> dict[str, int]:
        """What came of the CUDA graphs of the first part."""
        return self._first.graph_counts

    def close(self) -> None:
        """Free the memory of both."""
        self._first.close()
        self._host.close()


def _unfit(why: str) -> IntegrityError:
    return IntegrityError(
        f"The part of the model for the host does not belong to the first part: {why}",
        where="the host part",
        remedy="build again, or copy both files of one build",
    )
