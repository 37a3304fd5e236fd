"""Engines served on their GPU.

It has not been run on a GPU yet, see :mod:`trtopt.serve.lane`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from trtopt.engine.manifest import VerifiedEngine
from trtopt.engine.run import Cuda, LoadedEngine, guarded, why_not_run
from trtopt.errors import TargetError
from trtopt.hardware.probe import probe
from trtopt.report.schema.manifest import ShapeRange
from trtopt.serve.graphs import GraphCounts
from trtopt.serve.lane import Lane
from trtopt.serve.profiles import choose
from trtopt.serve.tensors import Given, TensorSpec, spec_of
from trtopt.support._lazy import require


class GpuRunner:
    """An engine on its GPU, with as many execution contexts and streams as calls run at a time.

    Args:
        engine: The engine, which was checked to run here.
        contexts: How many calls run at a time.
        graphs: How many shapes have a CUDA graph, in each context.

    Raises:
        TargetError: It cannot run here, or the runtime refuses the engine.
        EngineBuildError: The runtime fails.
    """

    takes_gpu = True

    def __init__(self, engine: VerifiedEngine, contexts: int, graphs: int) -> None:
        backend = engine.backend
        reason = why_not_run(backend, engine.data)
        if reason:
            raise TargetError(f"The engine cannot run here: {reason}", where=backend.runtime, remedy=backend.install)
        trt = require(backend.module, "gpu", "run engines")
        self._cuda = Cuda()
        with self._cuda.first_gpu(), contextlib.ExitStack() as stack:
            loaded = guarded(lambda: LoadedEngine(trt, engine.data))
            self._lanes = guarded(lambda: [Lane(loaded, stack, graphs) for _ in range(contexts)])
            self._stack = stack.pop_all()
        self.runtime = f"{backend.name} {trt.__version__} on {probe().name}"
        manifest = engine.manifest
        if manifest is None:
            self.inputs = guarded(lambda: tuple(_spec(loaded, name) for name in loaded.inputs))
            self.outputs = guarded(lambda: tuple(_spec(loaded, name) for name in loaded.outputs))
        else:
            self.inputs = tuple(map(spec_of, manifest.inputs))
            self.outputs = tuple(map(spec_of, manifest.outputs))
        self._profiles = {spec.name: spec.profiles for spec in self.inputs if spec.profiles}

    def run(self, context: int, feeds: Mapping[str, Given]) -> dict[str, Any]:
        """Outputs by name, on the GPU where the first input is."""
        profile = choose(self._profiles, {name: tuple(feeds[name].shape) for name in self._profiles})
        with self._cuda.first_gpu():
            return guarded(lambda: self._lanes[context].run(profile, feeds))

    def close(self) -> None:
        """Free the GPU's memory."""
        with self._cuda.first_gpu():
            self._lanes = []
            self._stack.close()

    @property
    def graph_counts(self) -> dict[str, int]:
        """What came of the CUDA graphs of all contexts."""
        every = [dataclasses.asdict(lane.counts) for lane in self._lanes]
        return {field.name: sum(counts[field.name] for counts in every) for field in dataclasses.fields(GraphCounts)}


def _spec(loaded: LoadedEngine, name: str) -> TensorSpec:
    """A tensor as the engine itself tells, without names of dimensions."""
    engine = loaded.engine
    dims = tuple("?" if dim < 0 else int(dim) for dim in engine.get_tensor_shape(name))
    ranges: list[ShapeRange] = []
    if name in loaded.inputs and "?" in dims:
        for index in range(engine.num_optimization_profiles):
            low, best, high = (tuple(map(int, shape)) for shape in engine.get_tensor_profile_shape(name, index))
            ranges.append(ShapeRange(low, best, high))
    return TensorSpec(name, loaded.dtypes[name], dims, tuple(ranges))
