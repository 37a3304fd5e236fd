"""The stage of a build that puts the preparation of pictures into the model: ``--preprocess-in-engine``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from trtopt.errors import UsageError
from trtopt.graph import edit
from trtopt.graph.artifact import InputSpec, ModelArtifact
from trtopt.images.parse import parse_preprocess, picture_axes
from trtopt.images.preprocess import Preprocess
from trtopt.precision.observe.pictures import sized
from trtopt.report.schema.steps import StepRecord

_WHERE = "--preprocess-in-engine"


def picture_input(inputs: Sequence[InputSpec]) -> InputSpec:
    """The only input that takes pictures.

    Raises:
        UsageError: None does, or several.
    """
    found = []
    for spec in inputs:
        try:
            picture_axes(spec)
        except UsageError as error:
            if len(inputs) == 1:
                raise
            reason = error
        else:
            found.append(spec)
    found = [spec for spec in found if len(spec.shape) == 4] or found
    if len(found) == 1:
        return found[0]
    if not found:
        raise reason
    raise UsageError(
        f"Several inputs take pictures: {', '.join(spec.name for spec in found)}",
        where=_WHERE,
        remedy="leave the option out, and prepare the pictures before the engine",
    )


def shape_before(spec: InputSpec, pixels: Sequence[int]) -> tuple[int, ...]:
    """The shape of an input that takes pictures, by that of the pixels ``[N, H, W, C]`` that will take its place."""
    turned = len(pixels) == len(spec.shape) and picture_axes(spec)[0] == "nchw"
    return (*pixels[:-3], pixels[-1], *pixels[-3:-1]) if turned else tuple(pixels)


def said(text: str, inputs: Sequence[InputSpec], pixels: Sequence[int] = ()) -> Preprocess:
    """What ``--preprocess`` says of the input that takes pictures.

    Args:
        text: The value of ``--preprocess``.
        inputs: Of the model as loaded.
        pixels: The shape ``[N, H, W, C]`` that is asked for, in whose sizes pictures are where nothing else says one.

    Raises:
        UsageError: It does not fit the input; or it is a function, which no engine runs.
    """
    spec = picture_input(inputs)
    how = parse_preprocess(text, spec, sized(spec, {spec.name: shape_before(spec, pixels)}))
    if how.function:
        raise UsageError(
            "A Python function cannot be put into an engine",
            where=f"--preprocess {text}",
            remedy="say it with keys (letterbox=640,scale=255,mean=...), or leave out --preprocess-in-engine",
        )
    return how


def in_model(artifact: ModelArtifact, how: Preprocess) -> tuple[ModelArtifact, Preprocess]:
    """The model with uint8 [N, H, W, C], of red, green and blue, in the place of its pictures; and what is left to do.

    Without N where the network takes one picture. In FP32, as outside: ``pixel * multiplier + offset`` for each
    channel, in the order and layout of the network. The size of a picture is left to the caller, since resizing rounds
    to whole pixels outside: an engine, which would not, gave other numbers.

    Raises:
        UsageError: The input takes bytes already in this order.
    """
    start = time.perf_counter()
    spec = picture_input(artifact.inputs)
    left = replace(
        how,
        layout="nhwc",
        color="gray" if how.color == "gray" else "rgb",
        dtype="uint8",
        scale=1.0,
        mean=(0.0,) * how.channels,
        std=(1.0,) * how.channels,
    )
    if left == how:
        raise UsageError(
            f"The input {spec.name!r} takes uint8 [N, H, W, C] already", where=_WHERE, remedy="leave the option out"
        )
    clone = artifact.model.clone()
    value = next(value for value in clone.graph.inputs if value.name == spec.name)
    changes = _prepare(clone, value, how)
    order = "gray" if how.color == "gray" else "red, green, blue"
    inside = replace(how, letterbox=False, resize=None, crop=False, resample="bilinear", fill=0).describe()
    detail = f"feed {spec.name} uint8 pixels ({order}; channels last): the engine does {inside}"
    sizes = ",".join(part for part in how.describe().split(",") if part.startswith(("letterbox=", "resize=", "crop=")))
    if sizes:
        detail += f"; engines do not resize as Pillow does, which rounds: do {sizes} before, as is done to folders"
    step = StepRecord("pixels", "LAYOUT", changes, time.perf_counter() - start, details=(detail,))
    return artifact.with_step(clone, step), left


def _prepare(model: ir.Model, value: ir.Value, how: Preprocess) -> int:
    """Put the nodes that prepare pixels in front of the readers of an input, which gets another type; their number."""
    graph, names = model.graph, edit.Names(model)
    old_type, shape, uses = value.type, value.shape, list(value.uses())
    if shape is None or old_type is None:
        raise ValueError(f"{value.name} has no type")
    axes = list(shape)
    start, last_axis = len(axes) - 3, len(axes) - 1
    pixels = axes if how.layout == "nhwc" else [*axes[:start], *axes[start + 1 :], axes[start]]
    value.type, value.shape = ir.TensorType(ir.DataType.UINT8), ir.Shape(pixels)
    made: list[ir.Node] = []
    last = value

    def add(
        op_type: str, *inputs: ir.Value, dims: Sequence[int | ir.SymbolicDim], **attributes: int | list[int]
    ) -> None:
        nonlocal last
        name = names.value(f"{value.name}_{op_type.lower()}")
        node = edit.new_node(
            op_type, [last, *inputs], name=names.node(f"trtopt/pixels/{name}"), output=name, attributes=dict(attributes)
        )
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(dims)
        made.append(node)
        last = node.outputs[0]

    def constant(label: str, array: np.ndarray) -> ir.Value:
        return edit.add_initializer(graph, names.value(f"{value.name}_{label}"), array)

    add("Cast", dims=pixels, to=int(ir.DataType.FLOAT))
    if how.color == "bgr":
        add("Gather", constant("bgr", np.array([2, 1, 0])), dims=pixels, axis=last_axis)
    multiplier, offset = (array.astype(np.float32) for array in how.affine())
    if (multiplier != 1).any():
        add("Mul", constant("multiplier", multiplier), dims=pixels)
    if offset.any():
        add("Add", constant("offset", offset), dims=pixels)
    if how.layout == "nchw":
        add("Transpose", dims=axes, perm=[*range(start), last_axis, start, start + 1])
    if old_type.dtype != ir.DataType.FLOAT:
        add("Cast", dims=axes, to=int(old_type.dtype))
        last.type = old_type
    edit.insert_behind(graph, value, made)
    for node, index in uses:
        node.replace_input_with(index, last)
    return len(made)
