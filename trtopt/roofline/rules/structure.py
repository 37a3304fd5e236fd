"""Rules about how the graph is written: layouts, normalization, products that could be one, weights turned round."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

import onnx_ir as ir

from trtopt.graph.edit import constant_tensor_of, input_of, ints_attribute, is_op, maker_of
from trtopt.report.text.format import count, time_text
from trtopt.roofline.rules.subject import (
    POINTWISE,
    Proposal,
    Subject,
    interleaved,
    reads_network_input,
    sinks,
    source,
)
from trtopt.roofline.work import Gemm, Layer, Work
from trtopt.support.precision import ELEMENT_BYTES, Precision

_TO_CHANNELS_LAST = {(0, 2, 3, 1), (0, 2, 3, 4, 1)}
_TO_CHANNELS_FIRST = {(0, 3, 1, 2), (0, 4, 1, 2, 3)}
_SPATIAL = (
    "Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "BatchNormalization",
    "InstanceNormalization", "Resize", "DepthToSpace", "SpaceToDepth",
)  # fmt: skip
_AROUND = POINTWISE - {"BatchNormalization"}
_FEWEST_PRODUCTS = 2
_ACTIVATIONS = frozenset("Relu LeakyRelu Clip Sigmoid Tanh Elu HardSigmoid HardSwish Gelu Softplus".split())
_VISIBLE = 0.01
"""Share of the network's time from which on a kernel is worth a hint."""


def layout_transpose(subject: Subject) -> Iterator[Proposal]:
    """Transposes between channels-first and channels-last around convolutions.

    What:
        A Transpose of a map from [N, C, H, W] to [N, H, W, C] or back, next to a convolution, a
        pool, a resize or the network's image input, that is a kernel of its own.
    Why:
        It computes nothing, and reads and writes the whole map. Convolutions on Tensor Cores work
        channels-last inside, whatever the graph says: the compiler chooses the layout, and a
        Transpose in the graph keeps it from doing so.
    Example:
        A network converted from TensorFlow, with a Transpose before and after each operator that
        kept its layout.
    Remedy:
        Write the graph channels-first throughout: 1x1 convolutions for Linear layers on maps,
        normalization over axis 1. In TensorRT for RTX, ConvNeXt blocks with 1x1 convolutions moved
        40 % fewer bytes. An input that arrives channels-last is better declared so (rule io-layout)
        than transposed. The gain is the predicted time of the Transposes.
    """
    layers = []
    for layer, _ in subject.costed():
        node = subject.main(layer)
        if layer.op == "Transpose" and is_op(node, "Transpose") and _is_layout_change(subject, node):
            layers.append(layer)
    if layers:
        yield Proposal(
            severity="warning",
            message=f"{count(len(layers), 'Transpose')} between channels-first and channels-last",
            remedy="write the graph channels-first throughout (1x1 convolutions for Linear layers on maps)",
            nodes=subject.names(layers),
            gains=subject.us(layers),
        )


def _is_layout_change(subject: Subject, node: ir.Node) -> bool:
    order = ints_attribute(node, "perm")
    if order in _TO_CHANNELS_LAST:
        origin = source(input_of(node, 0), _AROUND)
        maker = maker_of(origin)
        return is_op(maker, *_SPATIAL)
    if order in _TO_CHANNELS_FIRST:
        return any(is_op(user, *_SPATIAL) for user in sinks(node.outputs[0], _AROUND)[0])
    return False


def io_layout(subject: Subject) -> Iterator[Proposal]:
    """An image input that must be turned into channels-last before the first convolution.

    What:
        A network input of four axes that a convolution on Tensor Cores (FP16, BF16, INT8, FP8)
        reads.
    Why:
        Tensor Core convolutions read [N, H, W, C]. An input in [N, C, H, W], in FP32, is cast and
        turned round first, by a kernel that the graph does not show and the sum of the layers does
        not have.
    Example:
        [8, 3, 224, 224] in TensorRT for RTX: three kernels with planes in and out, one with an
        interleaved FP16 input of four channels.
    Remedy:
        Let the network take the image as the camera or decoder delivers it: interleaved, 16-bit or
        UINT8. That is the type and format of the engine's input (`allowed_formats`, trtexec's
        `--inputIOFormats=fp16:hwc8`); it changes what the caller feeds. A Transpose in the graph
        does not help. The message has the predicted time of the kernel; it is no gain, since it is
        in no layer of the graph.
    """
    us, nodes = 0.0, []
    for layer, work in subject.products():
        node = subject.main(layer)
        if (
            work.kind != "conv"
            or work.dtype not in (Precision.FP16, Precision.BF16, Precision.INT8, Precision.FP8)
            or not is_op(node, "Conv")
        ):
            continue
        if node is None or not reads_network_input(node):
            continue
        shape = subject.shape(input_of(node, 0))
        if shape is None or len(shape) != 4:
            continue
        narrow = round(work.read_bytes)
        wide = round(narrow * ELEMENT_BYTES[Precision.FP32] / ELEMENT_BYTES[work.dtype])
        us += subject.predict(Work("layout", 0, wide, 0, narrow, Precision.FP32))
        nodes.append(str(node.name))
    if nodes and us >= _VISIBLE * subject.total_us:
        yield Proposal(
            severity="hint",
            message=f"the first convolution reads channels-last; FP32 planes are turned round first: about"
            f" {time_text(us)}, in no layer above",
            remedy="give the engine's input a channels-last format and the type the network runs in",
            nodes=tuple(nodes),
            act=interleaved(subject, nodes[0]),
        )


def normalization(subject: Subject) -> Iterator[Proposal]:
    """A normalization that is a kernel of its own and need not be one.

    What:
        An InstanceNormalization, or a BatchNormalization that is not folded into the layer before
        it, in a kernel with nothing but an activation. Exporters write group normalization as
        an InstanceNormalization between two Reshapes: that is none.
    Why:
        Instance normalization needs the mean and variance of each map before it can scale it, so it
        passes over the data twice; a batch normalization in inference mode is one multiplication
        and one addition, free when folded into the weights of a convolution, and a pass over the
        data when it is not.
    Example:
        A style transfer network: InstanceNorm after each convolution is four kernels in TensorRT
        for RTX, with twice the bytes. A pre-activation ResNet: BatchNorm and ReLU before each
        convolution are two kernels instead of one.
    Remedy:
        InstanceNormalization: train with BatchNormalization or GroupNormalization (one kernel with
        its activation). BatchNormalization: put it after the convolution it belongs to, with
        nothing in between; `trtopt optimize` then folds it. LayerNormalization is one kernel in
        either compiler, also written out in small operators. The gain is the predicted time of
        those layers, which vanish; for InstanceNormalization, when a batch normalization takes its
        place and folds.
    """
    remedies = {
        "InstanceNormalization": "train with BatchNormalization, which folds into a convolution, or GroupNormalization",
        "BatchNormalization": "put it right after a convolution, which it then folds into",
    }
    found: dict[str, list[Layer]] = {op: [] for op in remedies}
    for layer, work in subject.costed():
        ops = {subject.node[name].op_type for name in layer.onnx_nodes if name in subject.node}
        op = next((item for item in remedies if item in ops), None)
        if op is not None and work.kind == "memory" and ops <= {op, *_ACTIVATIONS} and not _is_grouped(layer, subject):
            found[op].append(layer)
    for op, layers in found.items():
        if layers:
            yield Proposal(
                severity="warning",
                message=f"{count(len(layers), op + ' layer')} not fused with a convolution",
                remedy=remedies[op],
                nodes=tuple(name for layer in layers for name in layer.onnx_nodes if is_op(subject.node.get(name), op)),
                gains=subject.us(layers),
            )


def _is_grouped(layer: Layer, subject: Subject) -> bool:
    """Whether an InstanceNormalization of rows that a Reshape makes of several channels is a group normalization."""
    for node in (subject.node[name] for name in layer.onnx_nodes if name in subject.node):
        split = maker_of(node.inputs[0]) if is_op(node, "InstanceNormalization") else None
        if is_op(split, "Reshape"):
            rows, maps = (subject.shapes.get(str(value.name)) for value in (split.outputs[0], split.inputs[0]) if value)
            return rows is not None and maps is not None and len(maps) > 2 and rows[1] < maps[1]
    return False


def qkv(subject: Subject) -> Iterator[Proposal]:
    """Several matrix products of one tensor that could be one.

    What:
        Two or more products with constant weights that read the same tensor, have the same m and k,
        are in one graph (an If runs only one of its branches) and are layers of their own: query,
        key and value of an attention, gate and up of a gated MLP.
    Why:
        One product of three times the width reads the tensor once, is launched once and fills the
        GPU better.
    Example:
        BERT's attention: three products [tokens, 768] x [768, 768] become one of 768 x 2304.
    Remedy:
        Concatenate the weights along their columns and the biases likewise, and split the result:
        exact. The gain is the layers' predicted time less that of the one product.

    TensorRT's compilers often merge them by themselves (TensorRT for RTX does in attention):
    compile to see. In INT8 or FP8 on TensorRT for RTX give a merged product one scale: with scales
    per channel it becomes an FP16 product that only reads 8-bit weights.
    """
    groups: dict[tuple[ir.Value, ir.Graph | ir.Function | None, int, int], list[tuple[Layer, Work]]] = defaultdict(list)
    for layer, work in subject.products():
        node = subject.main(layer)
        if work.kind != "gemm" or work.gemm is None or not is_op(node, "MatMul", "Gemm"):
            continue
        data = input_of(node, 0)
        if data is not None and constant_tensor_of(data) is None and layer.onnx_nodes:
            groups[data, node.graph, work.gemm.m, work.gemm.k].append((layer, work))
    cases: dict[tuple[Gemm, ...], list[tuple[list[Layer], float]]] = defaultdict(list)
    for members in groups.values():
        if len(members) < _FEWEST_PRODUCTS or len({work.dtype for _, work in members}) > 1:
            continue
        layers = [layer for layer, _ in members]
        won = sum(subject.us(layers).values()) - subject.predict(_merged([work for _, work in members]))
        cases[tuple(work.gemm for _, work in members if work.gemm)].append((layers, max(0.0, won)))
    for gemms, found in cases.items():
        width = sum(gemm.n for gemm in gemms)
        places = f" in {len(found)} places" if len(found) > 1 else ""
        yield Proposal(
            severity="warning",
            message=f"{len(gemms)} products of one tensor{places}: {' + '.join(str(gemm.n) for gemm in gemms)} columns",
            remedy=f"one product of {width} columns and a Split, unless the compiler merges them (--compile shows it)",
            nodes=subject.names(layer for layers, _ in found for layer in layers),
            gains={layers[0].name: won for layers, won in found},
        )


def _merged(works: list[Work]) -> Work:
    """One product with the columns of all; the tensor they share is read once."""
    first = works[0]
    gemms = [work.gemm for work in works if work.gemm is not None]
    return dataclasses.replace(
        first,
        gemm=dataclasses.replace(gemms[0], n=sum(gemm.n for gemm in gemms)),
        flop=sum(work.flop for work in works),
        read_bytes=max(work.read_bytes for work in works),
        weight_bytes=sum(work.weight_bytes for work in works),
        write_bytes=sum(work.write_bytes for work in works),
        alignment_bytes=min(work.alignment_bytes for work in works),
    )


def weight_layout(subject: Subject) -> Iterator[Proposal]:
    """A weight that is turned round at run time.

    What:
        A matrix product whose second operand is a Transpose of something that does not depend on
        the data alone: a weight that is a network input, or a quantized weight transposed after its
        DequantizeLinear.
    Why:
        The variants of a product (NN, NT, TN, TT) differ in speed, and the compiler stores a
        constant weight in the best order when it builds. It cannot for a weight it does not have:
        the Transpose runs with each inference. Between DequantizeLinear and the product, it can
        keep the pair from becoming an 8-bit product.
    Example:
        MatMul(x, Transpose(W)) where W is an input of the network, as LoRA weights are.
    Remedy:
        Hand the weight over in the order the product reads, or use Gemm with transB. Transpose a
        quantized weight before it is quantized. The gain is the predicted time of the Transpose
        where it is a layer of its own. A plain constant weight needs nothing, with or without
        transB.
    """
    layers: dict[str, Layer] = {}
    nodes: list[str] = []
    for node in subject.node.values():
        operand = input_of(node, 1) if is_op(node, "MatMul", "Gemm") else None
        turn = maker_of(operand)
        if not is_op(turn, "Transpose") or not _is_weight(input_of(turn, 0)):
            continue
        nodes.append(str(turn.name))
        layer = subject.layer_of.get(str(turn.name))
        if layer is not None and layer.op == "Transpose":
            layers[layer.name] = layer
    if nodes:
        yield Proposal(
            severity="warning",
            message=f"{len(nodes)} weight{'s are' if len(nodes) > 1 else ' is'} transposed at run time",
            remedy="store the weight in the order the product reads",
            nodes=tuple(dict.fromkeys(nodes)),
            gains=subject.us(layers.values()),
        )


def _is_weight(value: ir.Value | None) -> bool:
    """Whether a transposed operand is a weight the compiler cannot turn round: an input of two axes, or dequantized."""
    origin = source(value, frozenset({"Cast", "Identity"}))
    if origin is None:
        return False
    if origin.is_graph_input():
        return origin.shape is not None and len(origin.shape) == 2 and all(isinstance(d, int) for d in origin.shape)
    maker = origin.producer()
    if not is_op(maker, "DequantizeLinear"):
        return False
    quantized = maker.inputs[0]
    made_by = maker_of(quantized)
    if is_op(made_by, "QuantizeLinear"):
        quantized = made_by.inputs[0]
    return constant_tensor_of(quantized) is not None
