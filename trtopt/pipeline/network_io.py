"""The stage of a build that changes what the caller feeds and gets: ``--io``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from trtopt.accuracy.compare import HostPart
from trtopt.engine.request import ShapeProfile
from trtopt.errors import UsageError
from trtopt.graph.artifact import ModelArtifact
from trtopt.judge.target import BuildTarget
from trtopt.precision.fp16.network_io import DTYPES, IoRequest, apply_io, check_io, describe, fed_as_before, feeds_for
from trtopt.precision.fp16.states import check_states, state_requests
from trtopt.precision.observe.stream import Samples
from trtopt.precision.qdq.apart import apart
from trtopt.report.schema.build import NetworkIo
from trtopt.report.schema.steps import StepRecord
from trtopt.support.ort_session import Feeds

_LARGEST = 255


@dataclass(frozen=True)
class FinalModel:
    """A model with the inputs and outputs that were asked for.

    Attributes:
        artifact: The model.
        profiles: Its profiles, with the channels it has now.
        compared: The same with the inputs of the model as loaded: what verification runs.
        records: What the caller feeds and gets, for the report.
        feeds: Turns a sample into what the engine takes; None when it takes samples as they are.
    """

    artifact: ModelArtifact
    profiles: tuple[ShapeProfile, ...]
    compared: ir.Model
    records: tuple[NetworkIo, ...] = ()
    feeds: Callable[[Feeds], Feeds] | None = None


def check(model: ir.Model, requests: Sequence[IoRequest], *samples: Samples) -> None:
    """Check what is asked for against the model, and samples against it: an input of uint8 needs whole numbers.

    Raises:
        UsageError: It does not fit.
    """
    check_io(model, requests)
    floats = {str(value.name) for value in model.graph.inputs if value.dtype is not DTYPES["uint8"]}
    for request in requests:
        if request.dtype == "uint8" and request.name in floats:
            for source in dict.fromkeys(samples):
                _check_whole(request, source)


def _check_whole(request: IoRequest, samples: Samples) -> None:
    for sample in samples:
        array = sample[request.name]
        if not (
            np.array_equal(array, np.rint(array)) and array.min(initial=0) >= 0 and array.max(initial=0) <= _LARGEST
        ):
            what = "synthetic samples" if samples.source == "synthetic" else f"samples ({samples.where})"
            raise UsageError(
                f"The {what} of {request.name!r} are not whole numbers from 0 to 255, and uint8 holds no others",
                where=request.where,
                remedy="give samples of pixels with --calib, and put their normalization into the model; or feed fp16",
            )


def change(
    artifact: ModelArtifact,
    target: BuildTarget,
    requests: Sequence[IoRequest],
    original: ir.Model,
    host: HostPart | None,
) -> FinalModel:
    """Give a model lowered for ``target`` the inputs and outputs of ``requests``, which were checked, its states the
    type it computes them in, and FP8 the form that ONNX Runtime takes too.

    ``original`` is the model as loaded.

    Raises:
        UsageError: An output is the host's, or channels cannot be filled up.
        InvalidModelError: A state that is to be updated in place is no input.
    """
    start = time.perf_counter()
    before, profiles = apart(artifact.model, target.backend.name), target.profiles
    artifact = replace(artifact, model=before)
    passed = set() if host is None else {str(value.name) for value in host.model.graph.inputs}
    states = state_requests(before, {*passed, *(request.name for request in requests)})
    requests = (*requests, *states)
    if not requests:
        check_states(before)
        return FinalModel(artifact, profiles, before)
    own = {str(value.name) for value in (*before.graph.inputs, *before.graph.outputs)}
    for request in requests:
        if request.name not in own or request.name in passed:
            raise UsageError(
                f"{request.name!r} is a tensor of the part that the host runs, which keeps its type and layout",
                where=request.where,
                remedy="leave the option out",
            )
    model = apply_io(before, requests)
    check_states(model)
    step = StepRecord("network-io", "LAYOUT", len(requests), time.perf_counter() - start)
    return FinalModel(
        artifact.with_step(model, step),
        tuple(_profile(profile, before, model) for profile in profiles),
        fed_as_before(model, original, requests),
        describe(original, model, requests, {item.name for item in states}),
        lambda feeds: feeds_for(feeds, model, requests),
    )


def _profile(profile: ShapeProfile, before: ir.Model, after: ir.Model) -> ShapeProfile:
    """The shapes of a profile with the channels the inputs have now."""
    channels = {
        str(new.name): new.shape[1]
        for old, new in zip(before.graph.inputs, after.graph.inputs, strict=True)
        if old.shape is not None and new.shape is not None and old.shape != new.shape
    }
    shapes = {}
    for name, (low, best, high) in profile.shapes.items():
        count = channels.get(name)
        if isinstance(count, int):
            low, best, high = ((shape[0], count, *shape[2:]) for shape in (low, best, high))
        shapes[name] = (low, best, high)
    return ShapeProfile(shapes, profile.values)
