"""The FP32 network and quantized ones, run side by side from one quantized node to the next.

A layer that makes up for the noise of the layers before it has to see that noise, so what is changed in one layer has
to be known before the next is looked at. Running the network anew for each layer would cost as many passes as there
are layers. Here all networks are run once, in subgraphs: memory holds what later nodes read, for a bounded number of
samples.

A quantized layer as a product of matrices: its weight ``[groups, K, N]`` and sampled rows of its input ``[.., K]``.

A convolution is the product of its unfolded input (im2col) with its weight, one per group: a row of the unfolded input
is what one output position reads, ``K = channels per group x taps`` numbers in the order of the weight, and ``N``
output channels per group come of it. Only the rows of the sampled positions are ever unfolded.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.support.ort_session import Feeds, OrtSession


def channels_of(array: np.ndarray, node: ir.Node) -> np.ndarray:
    """A node's output as ``[positions, channels]``: what a bias is added to."""
    if node.op_type in ("Conv", "ConvTranspose"):
        return np.moveaxis(array, 1, -1).reshape(-1, array.shape[1])
    return array.reshape(-1, array.shape[-1])


def spread(bias: np.ndarray, node: ir.Node, rank: int) -> np.ndarray:
    """A bias ``[channels]`` in a shape that broadcasts to the node's output of this rank."""
    return bias.reshape(-1, *[1] * (rank - 2)) if node.op_type in ("Conv", "ConvTranspose") else bias


@dataclass(frozen=True)
class ProductLayer:
    """A Conv, Gemm or MatMul with a constant weight.

    Attributes:
        node: The node, in the FP32 model.
        weight: Its weight, float32, of the shape ONNX gives it.
        groups: Groups of a convolution; 1 for the others.
    """

    node: ir.Node
    weight: np.ndarray
    groups: int

    @property
    def depth(self) -> int:
        """K: how many products are summed for one output element."""
        return math.prod(self.weight.shape[1:]) if self.node.op_type == "Conv" else self.weight.size // self.channels

    @property
    def channels(self) -> int:
        """Output channels of all groups."""
        return int(self.weight.shape[self.channel_axis])

    @property
    def channel_axis(self) -> int:
        """The weight's axis of output channels."""
        return 0 if self.node.op_type == "Conv" or _transposed(self.node, "transB") else 1

    def matrices(self, weight: np.ndarray) -> np.ndarray:
        """A weight (or its INT8 values) as ``[groups, K, N]``."""
        if self.node.op_type == "Conv":
            return weight.reshape(self.groups, -1, self.depth).transpose(0, 2, 1)
        return (weight.T if self.channel_axis == 0 else weight)[None]

    def weight_of(self, matrices: np.ndarray) -> np.ndarray:
        """The inverse of :meth:`matrices`, contiguous."""
        if self.node.op_type == "Conv":
            return np.ascontiguousarray(matrices.transpose(0, 2, 1)).reshape(self.weight.shape)
        return np.ascontiguousarray(matrices[0].T if self.channel_axis == 0 else matrices[0])


def layer_of(node: ir.Node) -> ProductLayer | str:
    """The node as a product of matrices, or why it is none."""
    if node.op_type not in ("Conv", "Gemm", "MatMul"):
        return f"{node.op_type} is no product of rows with a matrix"
    weight = edit.constant_of(edit.input_of(node, 1))
    if weight is None:
        return "its weight is not constant"
    if node.op_type != "Conv" and weight.ndim != 2:
        return f"its weight has {weight.ndim} axes, not 2"
    return ProductLayer(node, np.asarray(weight, np.float32), edit.int_attribute(node, "group", 1))


LARGEST_ROWS = 8192
"""Rows of a layer's input that are sampled, over all samples: few enough for a layer to take seconds."""

ROW_ELEMENTS = 1 << 24
"""Bound on rows times K: 64 MiB for each of the two networks."""

_OUTPUT_SIDE = frozenset({"transB", "alpha", "beta", "kernel_shape"})
"""Attributes that do not change what a node reads."""


def rows_read(layer: ProductLayer) -> int:
    """How many rows of a layer's input are sampled."""
    return min(LARGEST_ROWS, ROW_ELEMENTS // (layer.depth * layer.groups))


def reading_key(layer: ProductLayer) -> Hashable:
    """Equal for layers that read the same rows of one tensor."""
    node = layer.node
    window = tuple(sorted((name, str(a.value)) for name, a in node.attributes.items() if name not in _OUTPUT_SIDE))
    return node.op_type, window, layer.groups, layer.depth, layer.weight.shape[1:] if node.op_type == "Conv" else ()


def positions(layer: ProductLayer, shape: tuple[int, ...], count: int, rng: np.random.Generator) -> np.ndarray:
    """Output positions of one sample, drawn without repetition; all where there are no more than ``count``.

    ``shape`` is that of the layer's data input. int64 ``[<= count]``: indices into the output's batch and spatial axes,
    flattened; sorted.
    """
    if layer.node.op_type == "Conv":
        total = shape[0] * math.prod(size for size, _ in _window(layer, shape))
    elif layer.node.op_type == "Gemm":
        total = shape[1 if _transposed(layer.node, "transA") else 0]
    else:
        total = math.prod(shape[:-1])
    return np.sort(rng.choice(total, count, replace=False)) if total > count else np.arange(total)


def rows_at(layer: ProductLayer, data: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """What the layer reads for output positions ``chosen`` by :func:`positions`: ``[groups, len(chosen), K]``.

    ``data`` is its input, ``[batch, channels, ...]``, or a matrix or a batch of rows; zeros stand where a convolution
    reads its padding.
    """
    if layer.node.op_type == "Gemm":
        rows: np.ndarray = (data.T if _transposed(layer.node, "transA") else data)[chosen][None]
        return rows
    if layer.node.op_type == "MatMul":
        rows = data.reshape(-1, data.shape[-1])[chosen][None]
        return rows
    window = _window(layer, data.shape)
    batch, *places = np.unravel_index(chosen, (data.shape[0], *(size for size, _ in window)))
    index = np.zeros((len(chosen), 1), np.int64)
    inside = np.ones((len(chosen), 1), bool)
    for place, (_, first), size in zip(places, window, data.shape[2:], strict=True):
        along = first[place]
        index = (index[:, :, None] * size + np.clip(along, 0, size - 1)[:, None]).reshape(len(chosen), -1)
        inside = (inside[:, :, None] & ((along >= 0) & (along < size))[:, None]).reshape(len(chosen), -1)
    flat = data.reshape(*data.shape[:2], -1)
    read: np.ndarray = flat[batch[:, None], :, index] * inside[:, :, None]
    return read.transpose(0, 2, 1).reshape(len(chosen), layer.groups, -1).transpose(1, 0, 2)


def _transposed(node: ir.Node, name: str) -> bool:
    return node.op_type == "Gemm" and edit.int_attribute(node, name, 0) != 0


def _window(layer: ProductLayer, shape: tuple[int, ...]) -> list[tuple[int, np.ndarray]]:
    """Per spatial axis the output's size, and the input index of every tap at every output: int64 ``[out, taps]``.

    As the ONNX specification of Conv defines ``auto_pad``; indices outside of the input lie in the padding.
    """
    node, axes = layer.node, range(layer.weight.ndim - 2)
    strides = edit.ints_attribute(node, "strides") or tuple(1 for _ in axes)
    dilations = edit.ints_attribute(node, "dilations") or tuple(1 for _ in axes)
    pads = edit.ints_attribute(node, "pads") or tuple(0 for axis in (*axes, *axes))
    automatic = edit.string_attribute(node, "auto_pad", "NOTSET")
    found = []
    for axis in axes:
        size, taps = shape[2 + axis], layer.weight.shape[2 + axis]
        extent = (taps - 1) * dilations[axis] + 1
        if automatic in ("SAME_UPPER", "SAME_LOWER"):
            out = -(-size // strides[axis])
            padding = max((out - 1) * strides[axis] + extent - size, 0)
            begin = padding // 2 if automatic == "SAME_UPPER" else -(-padding // 2)
        else:
            begin, end = (0, 0) if automatic == "VALID" else (pads[axis], pads[axis + len(axes)])
            out = (size + begin + end - extent) // strides[axis] + 1
        start = np.arange(out)[:, None] * strides[axis] - begin
        found.append((out, start + np.arange(taps) * dilations[axis]))
    return found


HELD_BYTES = 128 << 20
"""Activations of each network that are held at a time."""

_Held = dict[str, list[np.ndarray]]
"""By the value's name, an array per sample."""


@dataclass
class Stop:
    """A quantized node whose inputs both networks have computed.

    Attributes:
        node: The node, in the FP32 model.
        subgraph: A model of this node alone, of the FP32 network.
        network: Which of the quantized networks; each has a stop of its own.
        exact: Its data input in the FP32 network, per sample.
        noisy: The same in the quantized network, before its own quantizer.
        outputs: What :meth:`run` found: the node's output in both networks. What the second list holds when the walk
            goes on is what the quantized network goes on with.
    """

    node: ir.Node
    subgraph: ir.Model
    network: int
    exact: list[np.ndarray]
    noisy: list[np.ndarray]
    _held: tuple[_Held, _Held]
    outputs: tuple[list[np.ndarray], list[np.ndarray]] = field(default=([], []))

    def run(self, quantized: ir.Model) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Run the node in both networks; ``quantized`` is :attr:`subgraph` with Q/DQ.

        Returns its outputs in the FP32 and in the quantized network, per sample.
        """
        name, (exact, noisy) = str(self.node.outputs[0].name), self._held
        if name not in exact:
            exact.update(_run(self.subgraph, exact)[0])
        self.outputs = (exact[name], _run(quantized, noisy)[0][name])
        return self.outputs


def walk(model: ir.Model, nodes: Sequence[str], samples: Sequence[Feeds], networks: int = 1) -> Iterator[Stop]:
    """Run all networks up to each of ``nodes`` in turn; :meth:`Stop.run` has to be called before going on.

    Args:
        model: The FP32 model, nodes named.
        nodes: The quantized nodes, of the main graph.
        samples: The samples, held throughout.
        networks: How many networks there are beside the FP32 one.

    Raises:
        InvalidModelError: ONNX Runtime cannot run a part of the model.
    """
    inputs = [str(value.name) for value in model.graph.inputs if not value.is_initializer()]
    exact: _Held = {name: [sample[name] for sample in samples] for name in inputs}
    noisy = [dict(exact) for _ in range(networks)]
    last_use = _last_uses(model)
    wanted, between = set(nodes), []
    for index, node in enumerate(model.graph):
        if node.name not in wanted:
            between.append((index, node))
            continue
        _advance(model, between, (exact, *noisy), last_use)
        between = []
        data, name = str(node.inputs[0].name), str(node.outputs[0].name)  # type: ignore[union-attr]
        subgraph = _subgraph(model, [node], exact, [node.outputs[0]])
        for network, held in enumerate(noisy):
            stop = Stop(node, subgraph, network, exact[data], held[data], (exact, held))
            yield stop
            held[name] = stop.outputs[1]
            del stop
        _release((exact, *noisy), last_use, index)
        wanted.discard(str(node.name))
        if not wanted:
            return


def samples_held(model: ir.Model, shapes: Mapping[str, tuple[int, ...]], limit: int) -> int:
    """How many samples :func:`walk` can hold in ``HELD_BYTES`` a network: at least 4, at most ``limit``.

    What is missing in ``shapes``, of one sample by value name, does not count.
    """
    last_use, held, largest = _last_uses(model), 0, 1
    ends: dict[int, int] = {}
    for index, node in enumerate(model.graph):
        for value in node.outputs:
            size = 4 * math.prod(shapes.get(str(value.name), (0,)))
            held += size
            end = max(last_use.get(str(value.name), index), index)
            ends[end] = ends.get(end, 0) + size
        largest = max(largest, held)
        held -= ends.pop(index, 0)
    return max(4, min(limit, HELD_BYTES // largest))


def _advance(
    model: ir.Model, between: list[tuple[int, ir.Node]], held: Sequence[_Held], last_use: Mapping[str, int]
) -> None:
    """Run the nodes between two quantized ones in all networks; once where nothing is quantized before them."""
    nodes = [node for _, node in between if not edit.is_op(node, "Constant")]
    if not nodes:
        return
    end = between[-1][0]
    made = [v for n in nodes for v in n.outputs if last_use.get(str(v.name), -1) > end]
    if made:
        subgraph = _subgraph(model, nodes, held[0], made)
        read = [str(value.name) for value in subgraph.graph.inputs]
        other = [network for network in held[1:] if any(network[name] is not held[0][name] for name in read)]
        exact, *found = _run(subgraph, held[0], *other)
        for network in held:
            network.update(exact)
        for network, outputs in zip(other, found, strict=True):
            network.update(outputs)
    _release(held, last_use, end)


def _release(held: Sequence[_Held], last_use: Mapping[str, int], index: int) -> None:
    for network in held:
        for name in [name for name in network if last_use.get(name, -1) <= index]:
            del network[name]


def _run(subgraph: ir.Model, *networks: _Held) -> list[_Held]:
    """The outputs of a subgraph in each network, per sample."""
    read = [str(value.name) for value in subgraph.graph.inputs]
    found = []
    with OrtSession(subgraph, keep_qdq=True) as session:
        for held in networks:
            count = max(len(arrays) for arrays in held.values())
            done = [session.run({name: held[name][index] for name in read}) for index in range(count if read else 1)]
            done *= 1 if read else count
            names = enumerate(session.output_names)
            found.append({name: [outputs[position] for outputs in done] for position, name in names})
    return found


def _subgraph(model: ir.Model, nodes: Sequence[ir.Node], held: _Held, outputs: Sequence[ir.Value]) -> ir.Model:
    """Consecutive nodes as a model of their own, which shares the weights."""
    made = {value for node in nodes for value in node.outputs}
    inputs: dict[ir.Value, None] = {}
    weights: dict[ir.Value, None] = {}
    constants: dict[ir.Node, None] = {}
    for node in nodes:
        for value in edit.values_read(node):
            producer = value.producer()
            if value.is_initializer():
                weights[value] = None
            elif edit.is_op(producer, "Constant"):
                constants[producer] = None
            elif value not in made:
                inputs[value] = None
    view = ir.GraphView(
        list(inputs),
        list(outputs),
        nodes=[*constants, *nodes],
        initializers=list(weights),
        opset_imports=dict(model.graph.opset_imports),
        name=model.graph.name,
    )
    graph = view.clone()
    for value in graph.inputs:
        # Shapes are those of another batch size, or of none.
        array = held[str(value.name)][0]
        value.shape = None
        value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
    return ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))


def _last_uses(model: ir.Model) -> dict[str, int]:
    """The index of the last node of the main graph that reads a value, by the value's name."""
    found: dict[str, int] = {}
    for index, node in enumerate(model.graph):
        for value in edit.values_read(node):
            found[str(value.name)] = index
    return found
