"""Every node of a model timed on the CPU, by ONNX Runtime's own profiler.

The graph runs as it is written (ONNX Runtime's rewriting is off), one node after the other. The profiler cuts times off
to whole microseconds, and they hold part of its own work, which is more than that: about two microseconds a node
(``CpuSpec.profiled_us``). The times are left as they are, and predictions are made for them; an inference without
profiling is timed by itself.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from trtopt.errors import UsageError
from trtopt.graph import cost
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.cpu import available_threads
from trtopt.profiling.measured import MeasuredLayer, Measurement
from trtopt.profiling.ort_layers import MOST_EVENTS, Kernel, NodeLayers, Profile, added_layer, expand, read_profile
from trtopt.profiling.stable import Limits, Samples, spread, timed, until_stable
from trtopt.report.schema.layers import LayerInfo
from trtopt.report.schema.profile import ProfileSource
from trtopt.roofline.work import Work
from trtopt.support._lazy import require
from trtopt.support.files import TEMPORARY
from trtopt.support.ort_session import Feeds, TimedSession

_EVENTS = 100_000
"""Events of the runs that count, about: 70 MB of the profiler's file."""

_LABEL = re.compile(r"n(\d+)(?:_\d+)*")
"""Names of nodes while they are timed: their place in the model, and that of a part in an operator's definition."""

_LIMITS = Limits()

_BUSY = 0.5
"""Cores taken by others from which on a measurement is said to be disturbed."""


def measure(artifact: ModelArtifact, feeds: Feeds, *, threads: int, limits: Limits = _LIMITS) -> Measurement:
    """Time every node of a model, and the model as a whole.

    A node's time is the mean of the middle half of the runs: single runs that the system disturbed do not count, and
    it is finer than the profiler's microseconds where the runs differ. The time of an ``If``, ``Loop`` or ``Scan`` is
    its own; the nodes inside have theirs, over all iterations of an inference. What ran nothing (a ``Constant``, the
    branch not taken) is listed with 0 us. A node that ONNX Runtime added is a layer without nodes, and an operator
    that it runs by the parts of its definition has their sum.

    Args:
        artifact: The model.
        feeds: An array for each input; the control flow and the shapes that depend on data are those of these values.
        threads: Threads within an operator.
        limits: When to stop: for the inferences without profiling, and again for those with it.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
        InvalidModelError: ONNX Runtime cannot load the model, or the model fails on these inputs.
        UsageError: An input is unknown or does not fit, or the inferences run too many nodes.
    """
    shapes = static_shapes(artifact.model, {name: array.shape for name, array in feeds.items()})
    load = os.getloadavg()[0]
    with TimedSession(artifact.model, threads=threads) as session:
        whole = until_stable(timed(lambda: session.run(feeds)), limits)
    profile, profiled = _trace(artifact.model, feeds, threads, limits)
    conditions = {
        "threads": threads,
        "graph_optimizations": "off",
        "load_average": round(load, 2),
        "stable": whole.stable and profiled.stable,
        "input_shapes": {name: list(array.shape) for name, array in feeds.items()},
    }
    source = ProfileSource(
        origin="onnxruntime",
        files={} if artifact.path is None else {"model": str(artifact.path)},
        version=str(require("onnxruntime", "cpu", "run models on the CPU").__version__),
        runs=len(profile.runs),
        launching="profile",
        conditions=conditions,
    )
    return Measurement(
        source=source,
        layers=tuple(_layers(artifact.model, profile, shapes)),
        end_to_end_us=whole.median_us,
        end_to_end_spread_us=whole.spread_us,
        warnings=(*_disturbances(whole, profiled, load + threads - available_threads()), *_unmatched(profile)),
    )


def _trace(model: ir.Model, feeds: Feeds, threads: int, limits: Limits) -> tuple[Profile, Samples]:
    """Profiled inferences of the model, whose nodes are named by their place: ``n0``, ``n1``, ..."""
    clone = model.clone()
    for index, node in enumerate(_nodes(clone)):
        node.name = f"n{index}"
    while True:
        first, _ = _profiled(clone, feeds, threads, replace(limits, warm_up_runs=0, warm_up_seconds=0, max_runs=1))
        silent = {str(node.name) for node in _nodes(clone)} - first.kernels.keys()
        if not _parts(first) or not expand(clone, silent):
            break
    events = sum(first.runs[0].executions.values())
    most = min(limits.max_runs, max(_EVENTS // max(events, 1), 1))
    return _profiled(clone, feeds, threads, replace(limits, max_runs=most))


def _parts(profile: Profile) -> list[str]:
    """Operators of the nodes without a name: ONNX Runtime put them in the place of an operator it has no kernel for."""
    return sorted({kernel.op for kernel in profile.kernels.values() if kernel.is_unnamed})


def _profiled(model: ir.Model, feeds: Feeds, threads: int, limits: Limits) -> tuple[Profile, Samples]:
    """Run until stable, with profiling; the runs that count, and what they took."""
    with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY}profile-") as folder:
        with TimedSession(model, threads=threads, profile=Path(folder) / "runs") as session:
            samples = until_stable(timed(lambda: session.run(feeds)), limits)
            file = session.end_profiling()
        profile = read_profile(file)
    if len(profile.runs) < len(samples.us):
        raise UsageError(
            f"ONNX Runtime keeps the times of {MOST_EVENTS} nodes, and the inferences to be timed run more",
            where=str(model.graph.name),
            remedy="give inputs for which loops run fewer iterations",
        )
    return replace(profile, runs=profile.runs[-len(samples.us) :]), samples


def _nodes(model: ir.Model) -> list[ir.Node]:
    """Every node, the nested ones after their owner."""
    return [node for node, _ in cost.nodes_with_counts(model.graph, {})]


def _layers(model: ir.Model, profile: Profile, shapes: Mapping[str, tuple[int, ...]]) -> list[MeasuredLayer]:
    """The model's nodes and those that ONNX Runtime added, in the order they began; what ran nothing stands behind the
    node before it in the model."""
    names = [str(node.name) for node in _nodes(model)]
    table = _Table.of(profile, names)
    describe = NodeLayers(model.clone(), shapes, table.whole)
    found: list[tuple[int, MeasuredLayer]] = []
    place = -1
    for node in _nodes(model):
        name = str(node.name)
        place = table.places.get(name, place)
        us = table.own_us.get(name)
        work = None if us is None else describe.work(name, table.executions[name])
        found.append((place, _layer(describe.info(name, runs=us is not None), work, us)))
    for name, kernel in table.added.items():
        info, work = added_layer(name, kernel, table.executions[name])
        found.append((table.places[name], _layer(info, work, table.own_us[name])))
    return [layer for _, layer in sorted(found, key=lambda item: item[0])]


def _layer(info: LayerInfo, work: Work | None, us: np.ndarray | None) -> MeasuredLayer:
    """A layer with its times; None for one that did not run."""
    if us is None:
        return MeasuredLayer(info, info.type, None, 0.0)
    ordered = np.sort(us)
    quarter = len(us) // 4
    middle = ordered[quarter : len(us) - quarter]
    return MeasuredLayer(info, info.type, work, float(middle.mean()), float(np.median(us)), spread(us.tolist()))


@dataclass(frozen=True)
class _Table:
    """Profiled inferences by node, under the names of the model.

    Attributes:
        own_us: Microseconds [runs] of the nodes that ran.
        executions: How often each ran in one inference.
        places: Their order; an operator that ran by its parts has the place of the last.
        whole: The nodes of the model that ran as one kernel.
        added: The nodes that are not the model's.
    """

    own_us: Mapping[str, np.ndarray]
    executions: Mapping[str, int]
    places: Mapping[str, int]
    whole: Mapping[str, Kernel]
    added: Mapping[str, Kernel]

    @staticmethod
    def of(profile: Profile, names: Sequence[str]) -> _Table:
        """Gather the runs; node ``n3`` and its parts are ``names[3]``."""
        own: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(profile.runs)))
        executions: dict[str, int] = {}
        whole, added = {}, {}
        taken = set(names)
        called: dict[str, str] = {}
        last = profile.runs[-1]
        for label in last.own_us:
            match = _LABEL.fullmatch(label)
            if match is None:
                called[label] = label if label not in taken else f"{label} #2"
                added[called[label]] = profile.kernels[label]
            else:
                called[label] = names[int(match[1])]
                if match[0] == f"n{match[1]}":
                    whole[called[label]] = profile.kernels[label]
            executions.setdefault(called[label], last.executions[label])
        for index, run in enumerate(profile.runs):
            for label, us in run.own_us.items():
                own[called[label]][index] += us
        places = {name: place for place, name in enumerate(called.values())}
        return _Table(own, executions, places, whole, added)


def _disturbances(whole: Samples, profiled: Samples, excess: float) -> Iterator[str]:
    """What makes the times less certain; ``excess``: load and threads over the cores."""
    for samples, what in ((whole, "without"), (profiled, "with")):
        if not samples.stable:
            share = samples.spread_us / samples.median_us
            yield (
                f"the times {what} profiling still drifted after {len(samples.us)} runs (spread {share:.0%}): "
                "close other programs, or measure for longer"
            )
    if excess >= _BUSY:
        yield f"other processes competed for {excess:.1f} cores before the measurement: its times are longer for it"


def _unmatched(profile: Profile) -> Iterator[str]:
    if _parts(profile):
        yield (
            f"ONNX Runtime has no kernel for some operators and ran {', '.join(_parts(profile))} in their place: these "
            "stand as layers without nodes, and the operators with 0 us"
        )
