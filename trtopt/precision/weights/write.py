"""Which weights of a typed graph can be stored narrow, and how they are written: a DequantizeLinear in front of the
product, which both compilers read as part of its kernel."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.ptq.layer_walk import ProductLayer, layer_of
from trtopt.precision.weights.formats import NVFP4, StoredWeight, WeightFormat
from trtopt.report.schema.steps import Refusal

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

SMALLEST = 1 << 14
"""Elements of the smallest weight that is stored narrow: below, one kernel's launch outweighs all its bytes."""


@dataclass(frozen=True)
class Product:
    """A weight and the products that read it.

    Attributes:
        weight: The weight's name.
        nodes: Their names, in the order of the graph.
        shape: ``(K, N)``.
        floating: The type of the products.
        behind: The operator that makes what they read, by which a compiler may or may not read the weight in their
            kernel; empty for an input of the network.
    """

    weight: str
    nodes: tuple[str, ...]
    shape: tuple[int, int]
    floating: ir.DataType
    behind: str = ""

    @property
    def kind(self) -> str:
        """Its shape and what stands before it: weights of one kind cost the same."""
        return f"{self.shape[0]}x{self.shape[1]}" + f" behind {self.behind}" * bool(self.behind)

    @property
    def bytes(self) -> int:
        """What the weight takes as it is."""
        return self.shape[0] * self.shape[1] * int(self.floating.bitwidth) // 8


@dataclass(frozen=True)
class Products:
    """The products whose weights can be stored narrow, in the order of the graph, and those that cannot, and why."""

    found: tuple[Product, ...]
    refused: tuple[Refusal, ...]


def products_of(model: ir.Model, kind: WeightFormat, block: int) -> Products:
    """The weights of MatMul and Gemm in the main graph of a typed model that ``kind`` can hold.

    What reads a quantized activation is no such product: its weight is not a constant but dequantized already.
    """
    nodes: dict[ir.Value, list[ir.Node]] = {}
    refused, found = [], []
    for node in model.graph:
        value = edit.input_of(node, 1)
        if edit.is_op(node, "MatMul", "Gemm") and value is not None and value.is_initializer():
            nodes.setdefault(value, []).append(node)
    for value, readers in nodes.items():
        reason = _why_not(value, readers, block)
        if reason:
            refused += [Refusal(str(node.name), reason) for node in readers]
            continue
        layer = _layer(readers[0])
        names = tuple(str(node.name) for node in readers)
        shape = (layer.depth, layer.channels)
        maker = edit.maker_of(readers[0].inputs[0])
        behind = "" if maker is None else maker.op_type
        found.append(Product(str(value.name), names, shape, value.dtype or ir.DataType.FLOAT, behind))
    return Products(tuple(found), tuple(refused))


def _why_not(value: ir.Value, readers: list[ir.Node], block: int) -> str:
    if value.dtype not in _FLOATS:
        return "its weight is no floating constant"
    layer = layer_of(readers[0])
    if isinstance(layer, str):
        return layer
    if value.is_graph_output() or len(list(value.uses())) != len(readers):
        return "its weight is read by other operators too"
    if any(_axis(node) != _axis(readers[0]) for node in readers):
        return "its weight is read as it is and transposed"
    if layer.weight.size < SMALLEST:
        return f"its weight has {layer.weight.size} elements, fewer than {SMALLEST}"
    if block and layer.depth % block:
        return f"its sums have {layer.depth} terms, no multiple of the block of {block}"
    return ""


def _layer(node: ir.Node) -> ProductLayer:
    found = layer_of(node)
    if isinstance(found, str):
        raise ValueError(f"{node.name}: {found}")
    return found


def _axis(node: ir.Node) -> int:
    """The weight's axis along which products are summed."""
    return 1 if edit.is_op(node, "Gemm") and edit.int_attribute(node, "transB", 0) else 0


def exact_weight(model: ir.Model, product: Product) -> np.ndarray:
    """The weight as it is, float32 ``[K, N]``."""
    value = model.graph.initializers[product.weight]
    layer = _layer(next(node for node, _ in value.uses()))
    return np.ascontiguousarray(layer.matrices(layer.weight)[0])


def with_stored(model: ir.Model, stored: Mapping[str, StoredWeight], products: Collection[Product]) -> ir.Model:
    """A clone of a typed model with some weights stored narrow.

    Args:
        model: The model, opset 21 or later; not changed.
        stored: By the weight's name.
        products: What reads them; those that are not in ``stored`` stay as they are.
    """
    clone = model.clone()
    names = edit.Names(clone)
    for product in products:
        weight = stored.get(product.weight)
        if weight is not None:
            _write(clone, clone.graph.initializers[product.weight], weight, names)
    opset = max((weight.kind.opset for weight in stored.values()), default=0)
    for graph in edit.all_graphs(clone.graph):
        # Opsets 22 and 23 only give operators more types (changelog of ONNX, docs/Changelog.md).
        graph.opset_imports[""] = max(graph.opset_imports[""], opset)
    return clone


def _write(model: ir.Model, value: ir.Value, weight: StoredWeight, names: edit.Names) -> None:
    """Let the readers of a weight read it dequantized."""
    graph, readers = model.graph, list(value.uses())
    axis, floating = _axis(readers[0][0]), value.dtype or ir.DataType.FLOAT

    def turned(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.T if axis else array)

    def constant(array: np.ndarray, suffix: str) -> ir.Value:
        return edit.add_initializer(graph, names.value(f"{value.name}_{suffix}"), array)

    def node(op_type: str, inputs: list[ir.Value], suffix: str, dtype: ir.DataType, like: ir.Value) -> ir.Node:
        output = names.value(f"{value.name}_{suffix}")
        made = edit.new_node(op_type, inputs, name=names.node(f"trtopt/{op_type}/{output}"), output=output, like=like)
        made.outputs[0].type = ir.TensorType(dtype)
        graph.insert_before(readers[0][0], made)
        return made

    numbers, scales = constant(turned(weight.values), weight.kind.name), weight.scales
    wide = ir.DataType.FLOAT if weight.kind is NVFP4 else floating
    if scales.narrow is not None:
        of_tensor = constant(np.asarray(scales.tensor, np.float32), "tensor_scale")
        narrow = constant(turned(scales.narrow), "block_scale")
        scale = node("DequantizeLinear", [narrow, of_tensor], "scale", wide, narrow).outputs[0]
    elif weight.kind.blocks:
        scale = constant(turned(scales.values).astype(wide.numpy()), "scale")
    else:
        scale = constant(scales.values[0].astype(wide.numpy()), "scale")
    result = node("DequantizeLinear", [numbers, scale], "dequantized", wide, value)
    if weight.kind.blocks:
        result.attributes["axis"] = ir.AttrInt64("axis", axis)
        result.attributes["block_size"] = ir.AttrInt64("block_size", len(weight.values) // len(scales.values))
    else:
        result.attributes["axis"] = ir.AttrInt64("axis", 1 - axis)
    if wide is not floating:
        result = node("Cast", [result.outputs[0]], "dequantized_narrow", floating, value)
        result.attributes["to"] = ir.AttrInt64("to", int(floating))
    for reader, index in readers:
        reader.replace_input_with(index, result.outputs[0])
    del graph.initializers[str(value.name)]
