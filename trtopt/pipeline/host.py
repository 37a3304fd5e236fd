"""The end of a model that the compiler refuses, taken off before anything else and put back for verification."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from trtopt.accuracy.compare import HostPart
from trtopt.engine.backend import TENSORRT, Backend
from trtopt.engine.request import ShapeProfile
from trtopt.engine.unsupported import Unsupported, why_unsupported
from trtopt.errors import InvalidModelError, TrtoptError
from trtopt.graph.artifact import ModelArtifact, input_spec
from trtopt.graph.bags import write_out_bags
from trtopt.graph.module_path import module_of_node
from trtopt.graph.resize import write_out_antialias
from trtopt.graph.shapes import infer_in_place, static_shapes, with_sizes
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.report.schema.build import HostRecord, PassedTensor
from trtopt.report.schema.steps import StepRecord
from trtopt.report.text.format import count, some
from trtopt.rewrite.host_part import NoTailError, Parts, inner_nodes, split
from trtopt.support.clock import Clock
from trtopt.support.nms_plugins import decode_boxes, is_written_out, write_out

_RUN_BY_HOST = ("", "com.microsoft", "ai.onnx.ml")
"""Domains of operators that ONNX Runtime holds."""

_SUFFIX = ".host.onnx"


@dataclass(frozen=True)
class Cut:
    """A model without what its compiler refuses; ``host`` and ``record`` (not yet with its path) are the rest, if
    any."""

    artifact: ModelArtifact
    host: HostPart | None = None
    record: HostRecord | None = None

    def profiles(self, whole: tuple[ShapeProfile, ...]) -> tuple[ShapeProfile, ...]:
        """Profiles of the whole model without the inputs that only the host reads."""
        if self.host is None:
            return whole
        names = [item.name for item in self.artifact.inputs]
        kept = [
            [
                {name: ends for name, ends in ranges.items() if name in names}
                for ranges in (profile.shapes, profile.values)
            ]
            for profile in whole
        ]
        return tuple(ShapeProfile(shapes, values) for shapes, values in kept if shapes)


@dataclass(frozen=True)
class _Refused:
    """A node the compiler refuses, and why; it may be nested in the node of the main graph it is listed under."""

    node: ir.Node
    why: Unsupported


def host_path(main: Path, backend: Backend) -> Path:
    """Where the host's part goes, beside the engine or the optimized model ``main``."""
    name = main.name
    stem = name[: -len(backend.suffix)] if name.endswith(backend.suffix) else main.stem
    return main.with_name(stem + _SUFFIX)


def cut(
    artifact: ModelArtifact,
    backend: Backend,
    shapes: Mapping[str, tuple[int, ...]],
    clock: Clock,
    *,
    plugins: bool = False,
) -> Cut:
    """Take off the end of a model as loaded that ``backend`` refuses; the bytes between are counted at ``shapes``.

    Raises:
        InvalidModelError: The compiler refuses a node that a layer of the network needs, or that the host does not run
            either.
    """
    start = time.perf_counter()
    artifact = _with_bags(artifact, start)
    if not _refused(artifact.model, backend, plugins):
        return Cut(artifact)
    model = with_sizes(artifact.model, {})
    if any(is_written_out(item.node) for item in _refused(model, backend, plugins).values()):
        decode_boxes(model)
        infer_in_place(model)
    written = write_out_antialias(model)
    if written:
        step = StepRecord("antialiased-resize", "FORMS", written, time.perf_counter() - start)
        artifact = artifact.with_step(model, step)
    refused = _refused(model, backend, plugins)
    try:
        sizes = static_shapes(model, shapes)
    except TrtoptError:
        sizes = {}  # what is wrong with the shapes is said where they are needed
    parts = _split(model, refused, sizes)
    seconds = time.perf_counter() - start
    if parts is None:
        return Cut(artifact.with_step(model, StepRecord("host-part", "CUT", 0, seconds)))
    moved = {node.name for node in parts.host.graph}
    causes = [item for node, item in refused.items() if node.name in moved]
    for item in causes:
        if item.node.domain not in _RUN_BY_HOST and not is_written_out(item.node):
            raise _error(item, "and the host runs operators of ONNX only")
    _check_types(parts)
    write_out(parts.host)
    host = HostPart(
        to_fp32(parts.host), parts.between, tuple(str(value.name) for value in artifact.model.graph.outputs)
    )
    record = _record(host, parts.host, causes)
    passed = ", ".join(item.name for item in record.between) or "nothing"
    clock.warn(
        "host",
        f"the model is cut in two: {'; '.join(record.reasons)}. Its end, {count(record.nodes, 'node')}, is left to"
        f" the host; the engine passes {passed}",
    )
    step = StepRecord("host-part", "CUT", record.nodes, seconds, details=record.reasons)
    return Cut(artifact.with_step(parts.engine, step), host, record)


def _with_bags(artifact: ModelArtifact, start: float) -> ModelArtifact:
    """The model with bags of one length reduced at once."""
    if not any(node.op_type == "Loop" for node in artifact.model.graph):
        return artifact
    model = with_sizes(artifact.model, {})
    written = write_out_bags(model)
    if not written:
        return artifact
    infer_in_place(model)
    return artifact.with_step(model, StepRecord("embedding-bag", "FORMS", written, time.perf_counter() - start))


def check_layers(model: ir.Model) -> None:
    """Look for layers that no compiler runs, before a model is written at all; plugins are taken to be there.

    Raises:
        InvalidModelError: There is one.
    """
    if _refused(model, TENSORRT, plugins=True):
        model = with_sizes(model, {})
        write_out_bags(model)
        _split(model, _refused(model, TENSORRT, plugins=True), {})


def _split(model: ir.Model, refused: Mapping[ir.Node, _Refused], sizes: Mapping[str, tuple[int, ...]]) -> Parts | None:
    try:
        return split(model, refused, sizes)
    except NoTailError as error:
        needs = "and nothing before it is left to compile"
        if error.layer is not None:
            needs = f"and the layer {error.layer.name} ({error.layer.op_type}) needs it"
            if error.layer is error.node:
                needs = "and it is a layer of the network, not an end that the host could run"
        raise _error(refused[error.node], needs) from None


def at_path(record: HostRecord | None, path: Path | None) -> HostRecord | None:
    """The record of the host's part with the file that was written."""
    return None if record is None else dataclasses.replace(record, path=None if path is None else str(path))


def _refused(model: ir.Model, backend: Backend, plugins: bool) -> dict[ir.Node, _Refused]:
    """By node of the main graph: the first node in it that the compiler refuses."""
    found: dict[ir.Node, _Refused] = {}
    for node in model.graph:
        for inner in inner_nodes(node):
            why = why_unsupported(inner, backend, plugins=plugins)
            if why is not None:
                found[node] = _Refused(inner, why)
                break
    return found


def _check_types(parts: Parts) -> None:
    for value in parts.host.graph.inputs:
        if value.dtype is None or value.shape is None:
            raise InvalidModelError(
                f"The model is cut at the tensor {value.name}, and its type or rank is not known",
                where=f"tensor {value.name}",
                remedy="declare its type in the model's value_info",
            )


def _record(host: HostPart, part: ir.Model, refused: Iterable[_Refused]) -> HostRecord:
    operators: dict[str, list[str]] = {}
    for item in refused:
        operators.setdefault(item.why.reason, []).append(str(item.node.name))
    values = {str(value.name): input_spec(value) for value in part.graph.inputs}
    return HostRecord(
        path=None,
        reasons=tuple(f"{reason} ({some(nodes)})" for reason, nodes in operators.items()),
        nodes=sum(1 for _ in part.graph),
        inputs=tuple(values),
        outputs=host.own_outputs,
        between=tuple(PassedTensor(name, str(values[name].dtype), values[name].shape) for name in host.between),
        model_outputs=host.outputs,
    )


def _error(item: _Refused, needs: str) -> InvalidModelError:
    node = item.node
    module = module_of_node(node)
    return InvalidModelError(
        f"{item.why.reason}, {needs}",
        where=f"node {node.name} ({node.op_type})" + (f", of the module {module}" if module else ""),
        remedy=item.why.remedy,
    )
