"""8-bit products that end a network: they write its FP32 outputs themselves.

A kernel of its own casts a 16-bit product to FP32. An 8-bit one with one scale per weight and no bias writes FP32 where
its scales are FP32 (TensorRT for RTX 1.7.1; with a bias or scales per channel these are a kernel of their own that FP32
makes dearer; another kernel transposes a convolution's result, and casts it as well).
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.qdq.canonicalize import quantizer_of


def ends_network(node: ir.Node, ends: Collection[str]) -> bool:
    """Whether ``node`` is a product without a bias that computes one of the outputs ``ends``, and nothing else reads
    it."""
    value = node.outputs[0]
    return edit.is_op(node, "Gemm", "MatMul") and len(node.inputs) == 2 and value.name in ends and not value.uses()


def ending_products(model: ir.Model, ends: Collection[str]) -> frozenset[str]:
    """The products of dequantized tensors, one scale each, that compute the FP32 outputs ``ends``."""
    last = (node for value in model.graph.outputs if (node := value.producer()) is not None)
    return frozenset(str(node.name) for node in last if ends_network(node, ends) and _has_two_scales(node))


def _has_two_scales(node: ir.Node) -> bool:
    hows = [quantizer_of(maker) if (maker := _dequantizer(value)) is not None else None for value in node.inputs]
    return all(how is not None and how.scale.size == 1 for how in hows)


def _dequantizer(value: ir.Value | None) -> ir.Node | None:
    maker = edit.maker_of(value)
    return maker if edit.is_op(maker, "DequantizeLinear") else None


def dequantized_apart(model: ir.Model, products: Collection[str]) -> tuple[ir.Model, frozenset[str]]:
    """A model in which nothing else reads what ``products`` do, and the names of these products and of their
    dequantizers.

    A dequantizer that others read too is written a second time; ``model`` stays as it is.
    """
    if not products:
        return model, frozenset()
    clone, found = model.clone(), set(products)
    names = edit.Names(clone)
    nodes = [node for node in clone.graph if node.name in products]
    second: dict[ir.Value, ir.Value] = {}
    for node in nodes:
        for index, value in enumerate(node.inputs):
            maker = _dequantizer(value)
            if value is None or maker is None:
                continue
            if any(user.name not in products for user, _ in value.uses()):
                if value not in second:
                    second[value] = _written_again(clone, maker, names)
                node.replace_input_with(index, second[value])
            found.add(str(_dequantizer(node.inputs[index]).name))  # type: ignore[union-attr]
    return clone, frozenset(found)


def _written_again(model: ir.Model, node: ir.Node, names: edit.Names) -> ir.Value:
    value = node.outputs[0]
    name, output = names.node(f"{node.name}_wide"), names.value(f"{value.name}_wide")
    copy = edit.new_node(node.op_type, [item for item in node.inputs if item], name=name, output=output, like=value)
    copy.attributes.update(node.attributes)
    model.graph.insert_after(node, copy)
    return copy.outputs[0]
