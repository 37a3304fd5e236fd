"""The file that ONNX Runtime's profiler writes: one event per node that ran, with times in whole microseconds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_EVENTS = 1_000_000
"""Events that ONNX Runtime keeps; it drops the rest without a word."""

_NODE_SUFFIX = "_kernel_time"
_GRAPH = "SequentialExecutor::Execute"
_RUN = "model_run"

Tensor = tuple[str, tuple[int, ...]]
"""ONNX Runtime's name of a type, and a shape."""


@dataclass(frozen=True)
class Kernel:
    """A node that ran, as it was at the first time.

    Attributes:
        op: Its operator.
        is_unnamed: Whether the node has no name: ONNX Runtime then calls it by its operator and a number.
        inputs: The tensors it read; those that were packed beforehand are left out.
        outputs: The tensors it wrote.
    """

    op: str
    is_unnamed: bool
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Run:
    """One inference.

    Attributes:
        own_us: By node in the order they began, what it took without the graphs nested in it, over all its executions.
        executions: By node, how often it ran.
    """

    own_us: Mapping[str, int]
    executions: Mapping[str, int]


@dataclass(frozen=True)
class Profile:
    """The inferences of a session in order; one that is cut off is left out.

    Attributes:
        runs: The inferences.
        kernels: The nodes that ran, by name.
    """

    runs: tuple[Run, ...]
    kernels: Mapping[str, Kernel]


@dataclass
class _Recorder:
    """The events of one inference, in the order in which they end: a nested graph before the node that holds it."""

    own_us: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    executions: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    began: dict[str, tuple[int, int]] = field(default_factory=dict)
    nested: list[tuple[int, int]] = field(default_factory=list)

    def node(self, name: str, at: int, us: int) -> None:
        # The owner of a nested graph begins before it, or in the same microsecond: then the longer one came first.
        self.began.setdefault(name, (at, -us))
        self.executions[name] += 1
        while self.nested and self.nested[-1][0] >= at:
            us -= self.nested.pop()[1]
        self.own_us[name] += max(us, 0)

    def run(self) -> Run:
        ordered = sorted(self.began, key=self.began.__getitem__)
        return Run({name: self.own_us[name] for name in ordered}, dict(self.executions))


def read_profile(path: Path) -> Profile:
    """Read the profile in a file."""
    runs: list[Run] = []
    kernels: dict[str, Kernel] = {}
    recorder = _Recorder()
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            text = line.strip().rstrip(",")
            if not text.startswith("{"):  # the brackets around the list
                continue
            event = json.loads(text)
            name = event["name"]
            if event["cat"] == "Node" and name.endswith(_NODE_SUFFIX):
                name = name.removesuffix(_NODE_SUFFIX)
                if name not in kernels:
                    kernels[name] = _kernel(name, event["args"])
                recorder.node(name, event["ts"], event["dur"])
            elif name == _GRAPH:
                recorder.nested.append((event["ts"], event["dur"]))
            elif name == _RUN:
                runs.append(recorder.run())
                recorder = _Recorder()
    return Profile(tuple(runs), kernels)


def _kernel(name: str, args: Mapping[str, Any]) -> Kernel:
    op = args["op_name"]
    inputs, outputs = (_tensors(args[f"{side}_type_shape"]) for side in ("input", "output"))
    return Kernel(op, name == f"{op}_{args['node_index']}", inputs, outputs)


def _tensors(items: list[dict[str, list[int]]]) -> tuple[Tensor, ...]:
    return tuple((dtype, tuple(shape)) for item in items for dtype, shape in item.items())
