"""Convolutions over one axis, and the additions and normalizations between them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import why_not_constant, window_of
from trtopt.graph.dims import Dimensions
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target
from trtopt_recipes.group_norm import as_layer_norm, one_group

_NORMS = ("InstanceNormalization", "LayerNormalization")
_SPATIAL = ("kernel_shape", "strides", "dilations", "output_padding", "output_shape")


@dataclass(frozen=True)
class Conv1d:
    """Computes convolutions over one axis, and what stands between them, as ones over two.

    Rewrite:
        [N, C, L] becomes [N, C, 1, L] where convolutions, transposed ones, normalizations of channels or groups of them
        and element-wise operators make and read it; a kernel of k becomes one of 1 x k, with padding and strides
        likewise. A normalization of all channels becomes LayerNormalization from axis 1 on.
    Requires:
        Constant weights; at least one such normalization, or one addition of two activations, one of which a
        convolution makes. A region that these operators connect is rewritten at once.
    Why faster:
        TensorRT for RTX computes such convolutions over two axes, and fuses an addition into a convolution where both
        have that form: of a vocoder's residual block (64 channels, 2048 samples, batch 8, FP16) 14 kernels of 69.2 MB
        become 13 of 60.8 MB. It has kernels for normalizations over two axes alone: over one it transposes the map
        before and behind (8 groups of 256 x 1000, batch 8, FP16, between convolutions: 218 us -> 148 by a plain
        roofline of an L4; wav2vec 2.0 of three layers, a second of sound: 1758 -> 1547).
    Numerics:
        Exact: the same sums; of a normalization in another order.
    Refuses when:
        The weights of a convolution of the region are computed, or it pads automatically.
    """

    name: str = "conv-1d"
    stage: Stage = Stage.LAYOUT
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Connected regions with a residual addition or a normalization, named after their first convolution."""
        places = []
        norms = _norms(model)
        for graph in edit.all_graphs(model.graph):
            for region in _regions(graph, norms):
                if any(_is_residual(node) or node in norms for node in region):
                    first = next(node for node in region if _is_conv(node))
                    reason = next((reason for node in region if (reason := _why_not(node))), "")
                    places.append((Match((first, *(node for node in region if node is not first))), reason))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Add an axis in front of one region and take it away behind it."""
        nodes, rows = self._with_wide_norms(model, match.nodes)
        region = set(nodes)
        splice = edit.Splice(model, match.nodes[0], self.name)
        axis = splice.ints([2], match.nodes[0].outputs[0], "axis")
        entries: dict[ir.Value, ir.Value] = {}
        for node in nodes:
            for index, value in enumerate(node.inputs):
                if value is None or value.producer() in region or (_is_conv(node) and index == 2):
                    continue
                array = edit.constant_of(value)
                if array is not None:
                    if array.ndim > 1:
                        wide = splice.constant(np.expand_dims(array, -2), node.outputs[0], str(index))
                        node.replace_input_with(index, wide)
                    continue
                if value not in entries:
                    entries[value] = splice.behind(value, "Unsqueeze", axis)
                    entries[value].shape = None
                node.replace_input_with(index, entries[value])
            _widen(node)
            edit.tag(node, self.name)
        for node in nodes:
            output = node.outputs[0]
            if output in rows:
                continue
            splice.restore(output, "Squeeze", region, axis)
            if output.shape is not None:
                output.shape = ir.Shape([*output.shape[:-1], 1, output.shape[-1]])
        return None

    def _with_wide_norms(
        self, model: ir.Model, region: tuple[ir.Node, ...]
    ) -> tuple[tuple[ir.Node, ...], set[ir.Value]]:
        """Write the normalizations of a region so that an axis may be added.

        Returns:
            The nodes of the region then, and what no axis is added to: tensors of rows, and shapes.
        """
        norms, kept, inside = _norms(model), list(region), set()
        found = [norms[node] for node in region if node in norms]
        for rows in dict.fromkeys(each for each in found if each is not None):
            norm = one_group(rows.norm, Dimensions(model)) if rows.groups == 1 and rows.split is not None else None
            if norm is not None:
                new = [as_layer_norm(model, norm, self.name)]
            else:
                new = [] if rows.split is not None else rows.take_apart(model, self.name)
                new += rows.widen(model, self.name)
                inside |= {each.outputs[0] for each in (rows.split, rows.norm, *rows.sizes) if each is not None}
            kept = [*(node for node in kept if node.graph is not None), *new]
        return tuple(kept), inside


@dataclass(eq=False)
class _Rows:
    """An InstanceNormalization ``norm`` of [N, channels, length], as rows of groups between two Reshapes or as it is.

    ``sizes`` are the nodes that compute the shape of ``back``.
    """

    norm: ir.Node
    groups: int
    channels: int
    length: object
    split: ir.Node | None = None
    back: ir.Node | None = None
    sizes: tuple[ir.Node, ...] = ()

    def widen(self, model: ir.Model, recipe: str) -> list[ir.Node]:
        """Say the shapes of both Reshapes so that they hold for two axes; the new nodes.

        The compiler knows the form where the length is a number, or the shape that of the map before; not with -1.
        """
        if self.split is None or self.back is None:
            raise ValueError(f"{self.norm.name} is not between Reshapes")
        splice = edit.Splice(model, self.split, recipe)
        rows = splice.ints([0, self.groups, -1], self.split.outputs[0], "rows")
        if isinstance(self.length, int):
            wide = np.asarray([0, self.channels, 1, self.length], np.int64)
            shape = splice.constant(wide, self.back.outputs[0], "shape")
        else:
            shape = splice.op("Shape", self.split.inputs[0])
            shape.type, shape.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([4])
        maker = shape.producer()
        self.sizes = () if maker is None else (maker,)
        for node, value in ((self.split, rows), (self.back, shape)):
            old = edit.input_of(node, 1)
            node.replace_input_with(1, value)
            node.attributes.pop("allowzero", None)
            before = edit.maker_of(old)
            if edit.is_op(before, "Shape") and not before.outputs[0].uses():
                edit.remove_node(before)
        return list(self.sizes)

    def take_apart(self, model: ir.Model, recipe: str) -> list[ir.Node]:
        """Write rows of one channel, with factors and terms behind them; the new nodes."""
        output, x = self.norm.outputs[0], self.norm.inputs[0]
        scale, bias = (edit.constant_of(edit.input_of(self.norm, index)) for index in (1, 2))
        if x is None or scale is None or bias is None:
            raise ValueError(f"{self.norm.name} has no constant factors")
        splice = edit.Splice(model, self.norm, recipe)

        def constant(array: np.ndarray, suffix: str) -> ir.Value:
            return splice.constant(array, output, suffix)

        same = constant(np.asarray([0, self.channels, -1], np.int64), "rows")
        one, zero = constant(np.ones_like(scale), "ones"), constant(np.zeros_like(bias), "zeros")
        attributes = {"epsilon": edit.float_attribute(self.norm, "epsilon", 1e-5)}
        split = splice.fresh("Reshape", x, same)
        norm = splice.fresh("InstanceNormalization", split, one, zero, attributes=attributes)
        made = [split, norm, splice.op("Reshape", norm, same)]
        for op_type, array, nothing in (("Mul", scale, 1), ("Add", bias, 0)):
            if (array != nothing).any():
                made.append(splice.op(op_type, made[-1], constant(array.reshape(-1, 1), op_type.lower())))
        splice.finish(made[-1])
        new = [maker for each in made if (maker := each.producer()) is not None]
        self.split, self.norm, self.back = new[:3]
        return new


def _norms(model: ir.Model) -> dict[ir.Node, _Rows | None]:
    """Nodes that normalize channels of [N, C, L] together, or are the Reshapes around those; what they do."""
    nodes = [node for node in edit.all_nodes(model.graph) if edit.is_op(node, *_NORMS)]
    known = Dimensions(model) if nodes else None
    found: dict[ir.Node, _Rows | None] = {}
    for node in nodes:
        dims = known.of(node.inputs[0]) if known is not None else None
        if known is None or dims is None or len(dims) != 3 or not isinstance(dims[1], int):
            continue
        if edit.is_op(node, "LayerNormalization"):
            alone = all(not each.uses() and not each.is_graph_output() for each in node.outputs[1:])
            if alone and edit.int_attribute(node, "axis", -1) in (1, -2):
                found[node] = None
            continue
        if any(edit.constant_of(edit.input_of(node, index)) is None for index in (1, 2)):
            continue
        rows = _rows_between(node, dims[1], known) or _Rows(node, dims[1], dims[1], dims[2])
        found.update({each: rows for each in (rows.split, rows.norm, rows.back) if each is not None})
    return found


def _rows_between(node: ir.Node, groups: int, known: Dimensions) -> _Rows | None:
    """The normalization of [N, groups, C L / groups] between two Reshapes that make it of [N, C, L] and that of it."""
    split = edit.maker_of(node.inputs[0])
    back = edit.only_user(node.outputs[0])
    if not edit.is_op(split, "Reshape") or not edit.is_op(back, "Reshape"):
        return None
    dims, rows = known.of(split.inputs[0]), known.of(split.outputs[0])
    if dims is None or rows is None or len(dims) != 3 or not isinstance(dims[1], int) or rows[0] != dims[0]:
        return None
    if edit.only_user(split.outputs[0]) is not node or known.of(back.outputs[0]) != dims:
        return None
    return _Rows(node, groups, dims[1], dims[2], split, back)


def _is_conv(node: ir.Node) -> bool:
    return edit.is_op(node, "Conv", "ConvTranspose")


def _regions(graph: ir.Graph, norms: Collection[ir.Node]) -> Iterator[tuple[ir.Node, ...]]:
    """Connected nodes that keep [N, C, L], those with a convolution, in the order of the graph."""
    member: dict[ir.Node, list[ir.Node]] = {}
    for node in graph:
        if node not in norms and not _belongs(node):
            continue
        joined = [node]
        makers = {value.producer() for value in node.inputs if value is not None}
        for other in {id(member[maker]): member[maker] for maker in makers if maker in member}.values():
            joined = [*other, *joined]
        for each in joined:
            member[each] = joined
    place = {node: index for index, node in enumerate(graph)}
    for region in {id(region): region for region in member.values()}.values():
        if any(_is_conv(node) for node in region):
            yield tuple(sorted(region, key=place.__getitem__))


def _belongs(node: ir.Node) -> bool:
    """Whether a node makes [N, C, L] by a convolution, or element by element of such and constants."""
    output = node.outputs[0] if node.outputs else None
    if output is None or node.domain != "" or output.shape is None or len(output.shape) != 3:
        return False
    if _is_conv(node):
        return True
    if node.op_type not in edit.ELEMENTWISE:
        return False
    operands = [value for value in node.inputs if value is not None and edit.constant_of(value) is None]
    return bool(operands) and all(value.shape is not None and len(value.shape) == 3 for value in operands)


def _is_residual(node: ir.Node) -> bool:
    """Whether a node adds two activations, one of which a convolution makes."""
    if not edit.is_op(node, "Add") or any(edit.constant_of(value) is not None for value in node.inputs):
        return False
    return any(value is not None and edit.is_op(value.producer(), "Conv") for value in node.inputs)


def _why_not(node: ir.Node) -> str:
    if not _is_conv(node):
        return ""
    return why_not_constant(node) or ("" if window_of(node) is not None else f"{node.name} pads automatically")


def _widen(node: ir.Node) -> None:
    """Give a convolution its axis of one element."""
    if not _is_conv(node):
        return
    for name in _SPATIAL:
        values = edit.ints_attribute(node, name)
        if values is not None:
            node.attributes[name] = ir.AttrInt64s(name, [0 if name == "output_padding" else 1, *values])
    pads = edit.ints_attribute(node, "pads")
    if pads is not None:
        node.attributes["pads"] = ir.AttrInt64s("pads", [0, pads[0], 0, pads[1]])
