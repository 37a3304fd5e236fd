"""The shapes that an engine is built for: those given, those of a list of batches, or buckets of a histogram."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from trtopt.config import BuildConfig, ShapeMap
from trtopt.engine.buckets import Shapes, choose, filled, read_histogram
from trtopt.errors import InvalidModelError, UsageError
from trtopt.graph.artifact import InputSpec, ModelArtifact
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import GpuSpec, find_gpu
from trtopt.roofline.constants import constants_for
from trtopt.roofline.layer import layer_times
from trtopt.roofline.node_work import GraphTypes
from trtopt.roofline.onnx_layers import FusedModel
from trtopt.roofline.work import Work
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision

_FOR_PORTABLE = "L4"
"""The GPU whose times choose buckets of an engine for every GPU."""


@dataclass(frozen=True)
class GivenShapes:
    """Smallest, best and largest shapes, one of each for every profile."""

    least: tuple[ShapeMap, ...]
    best: tuple[ShapeMap, ...]
    most: tuple[ShapeMap, ...]


def given_shapes(
    config: BuildConfig, loaded: ModelArtifact, precision: Precision | None, gpu: GpuSpec | None, clock: Clock
) -> GivenShapes:
    """The shapes that the options say; buckets are chosen in ``precision`` on ``gpu``, which a note tells.

    Raises:
        UsageError: The histogram or the batches do not fit the model.
    """
    if config.shape_histogram is not None:
        base = Precision.FP16 if precision in (None, Precision.AUTO) else precision.base
        times = RequestTimes(loaded.model, base, gpu or find_gpu(_FOR_PORTABLE), config.shape_histogram)
        found = choose(_histogram(config.shape_histogram, loaded.inputs), times)
        clock.note("shapes", found.note)
        high = tuple(item.high for item in found.buckets)
        return GivenShapes(tuple(item.low for item in found.buckets), high, high)
    if config.batches:
        return _of_batches(config.batches, loaded.inputs)
    return GivenShapes(config.min_shapes, config.opt_shapes, config.max_shapes)


def sample_shapes(config: BuildConfig, inputs: Sequence[InputSpec]) -> ShapeMap:
    """The shapes that made-up samples have: of a histogram the most common ones, else the best of the first profile.

    Raises:
        UsageError: The histogram does not fit the model.
    """
    if config.shape_histogram is not None:
        return dict(filled(_histogram(config.shape_histogram, inputs)).most_common(1)[0][0])
    return (config.opt_shapes or config.max_shapes or ({},))[0]


def _histogram(file: str, inputs: Sequence[InputSpec]) -> Counter[Shapes]:
    found = read_histogram(Path(file))
    _check_inputs([dict(shapes) for shapes in found], inputs, file)
    return found


class RequestTimes:
    """Predicted microseconds of a network at input shapes."""

    def __init__(self, model: ir.Model, base: Precision, gpu: GpuSpec, where: str) -> None:
        self._model, self._types, self._gpu, self._where = model, GraphTypes(base=base), gpu, where
        self._known: dict[Work, float] = {}

    def __call__(self, shapes: ShapeMap) -> float:
        try:
            values = static_shapes(self._model, shapes)
        except InvalidModelError as error:
            text = ",".join(f"{name}:{'x'.join(map(str, dims))}" for name, dims in shapes.items())
            raise UsageError(
                f"The model cannot run at the shapes {text}: {error.what}",
                where=self._where,
                remedy="give shapes that requests can have together",
            ) from error
        works = [layer.work for layer in FusedModel(self._model, values, self._types).layers() if layer.work]
        new = [work for work in dict.fromkeys(works) if work not in self._known]
        found = layer_times(new, self._gpu, constants_for(self._gpu))
        self._known.update(zip(new, (time.predicted_us for time in found), strict=True))
        return sum(self._known[work] for work in works)


def _check_inputs(requests: Sequence[ShapeMap], inputs: Sequence[InputSpec], where: str) -> None:
    known = {item.name: item for item in inputs}
    for shapes in requests:
        missing = [item.name for item in inputs if not item.is_static and item.name not in shapes]
        what = f"The histogram has no shape of the input {missing[0]!r}" if missing else ""
        for name, dims in shapes.items():
            text = f"{name}:{'x'.join(map(str, dims))} is no shape of the model"
            if name not in known:
                what = f"{text}, whose inputs are {', '.join(known)}"
            elif len(known[name].shape) != len(dims):
                what = f"{text}: the rank is {len(known[name].shape)}"
            elif any(isinstance(own, int) and own != dim for own, dim in zip(known[name].shape, dims, strict=True)):
                what = f"{text}, which fixes {'x'.join(map(str, known[name].shape))}"
        if what:
            raise UsageError(what, where=where, remedy="give the shape of every dynamic input in every line")


def _of_batches(batches: Sequence[int], inputs: Sequence[InputSpec]) -> GivenShapes:
    """A profile for each batch, from the batch above the one before on; ``batches`` increase."""
    first = next((item.shape[0] for item in inputs if item.shape and not isinstance(item.shape[0], int)), None)
    if first is None:
        raise UsageError(
            "The model has no dynamic batch",
            where="--batches",
            remedy="export it with one, such as trtopt export --dynamic NAME:0=batch",
        )
    other = [(item.name, dim) for item in inputs for dim in item.shape if not isinstance(dim, int) and dim != first]
    if other:
        raise UsageError(
            f"The axis {other[0][1]!r} of the input {other[0][0]!r} is dynamic too",
            where="--batches",
            remedy="give --min-shapes, --opt-shapes and --max-shapes for each profile, or --shape-histogram",
        )

    def at(batch: int) -> ShapeMap:
        return {
            item.name: tuple(batch if not isinstance(dim, int) else dim for dim in item.shape)
            for item in inputs
            if not item.is_static
        }

    lows = [1, *(batch + 1 for batch in batches[:-1])]
    best = tuple(map(at, batches))
    return GivenShapes(tuple(map(at, lows)), best, best)
