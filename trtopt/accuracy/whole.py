"""A model in two parts run as one: an engine (or its twin), then what the host runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.accuracy.compare import Runner
from trtopt.support.ort_session import Feeds, OrtSession


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
    """A runner that is given other samples than the model as loaded.

    Args:
        runner: The runner.
        feeds: Turns a sample of the model as loaded into what ``runner`` takes.
    """

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
