"""The FP32 network and quantized ones, run side by side from one quantized node to the next.

A layer that makes up for the noise of the layers before it has to see that noise, so what is changed in one layer has
to be known before the next is looked at. Running the network anew for each layer would cost as many passes as there
are layers. Here all networks are run once, in pieces: memory holds what later nodes read, for a bounded number of
samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.support.ort_session import Feeds, OrtSession

HELD_BYTES = 128 << 20
"""Activations of each network that are held at a time."""

_Held = dict[str, list[np.ndarray]]
"""By the value's name, an array per sample."""


@dataclass
class Stop:
    """A quantized node whose inputs both networks have computed.

    Attributes:
        node: The node, in the FP32 model.
        piece: A model of this node alone, of the FP32 network.
        network: Which of the quantized networks; each has a stop of its own.
        exact: Its data input in the FP32 network, per sample.
        noisy: The same in the quantized network, before its own quantizer.
        outputs: What :meth:`run` found: the node's output in both networks. What the second list holds when the walk
            goes on is what the quantized network goes on with.
    """

    node: ir.Node
    piece: ir.Model
    network: int
    exact: list[np.ndarray]
    noisy: list[np.ndarray]
    _held: tuple[_Held, _Held]
    outputs: tuple[list[np.ndarray], list[np.ndarray]] = field(default=([], []))

    def run(self, quantized: ir.Model) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Run the node in both networks.

        Args:
            quantized: The node as the quantized network has it: :attr:`piece` with Q/DQ.

        Returns:
            Its outputs in the FP32 and in the quantized network, per sample.
        """
        name, (exact, noisy) = str(self.node.outputs[0].name), self._held
        if name not in exact:
            exact.update(_run(self.piece, exact)[0])
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
        piece = _piece(model, [node], exact, [node.outputs[0]])
        for network, held in enumerate(noisy):
            stop = Stop(node, piece, network, exact[data], held[data], (exact, held))
            yield stop
            held[name] = stop.outputs[1]
            del stop
        _release((exact, *noisy), last_use, index)
        wanted.discard(str(node.name))
        if not wanted:
            return


def samples_held(model: ir.Model, shapes: Mapping[str, tuple[int, ...]], limit: int) -> int:
    """How many samples :func:`walk` can hold in ``HELD_BYTES`` a network: at least 4, at most ``limit``.

    Args:
        model: The FP32 model.
        shapes: Static shapes by value name, of one sample; what is missing does not count.
        limit: The most that is wanted.
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
        piece = _piece(model, nodes, held[0], made)
        read = [str(value.name) for value in piece.graph.inputs]
        other = [network for network in held[1:] if any(network[name] is not held[0][name] for name in read)]
        exact, *found = _run(piece, held[0], *other)
        for network in held:
            network.update(exact)
        for network, outputs in zip(other, found, strict=True):
            network.update(outputs)
    _release(held, last_use, end)


def _release(held: Sequence[_Held], last_use: Mapping[str, int], index: int) -> None:
    for network in held:
        for name in [name for name in network if last_use.get(name, -1) <= index]:
            del network[name]


def _run(piece: ir.Model, *networks: _Held) -> list[_Held]:
    """The outputs of a piece in each network, per sample."""
    read = [str(value.name) for value in piece.graph.inputs]
    found = []
    with OrtSession(piece, keep_qdq=True) as session:
        for held in networks:
            count = max(len(arrays) for arrays in held.values())
            done = [session.run({name: held[name][index] for name in read}) for index in range(count if read else 1)]
            done *= 1 if read else count
            names = enumerate(session.output_names)
            found.append({name: [outputs[position] for outputs in done] for position, name in names})
    return found


def _piece(model: ir.Model, nodes: Sequence[ir.Node], held: _Held, outputs: Sequence[ir.Value]) -> ir.Model:
    """Consecutive nodes as a model of their own, which shares the weights."""
    made = {value for node in nodes for value in node.outputs}
    inputs: dict[ir.Value, None] = {}
    weights: dict[ir.Value, None] = {}
    constants: dict[ir.Node, None] = {}
    for node in nodes:
        for value in _read_by(node):
            producer = value.producer()
            if value.is_initializer():
                weights[value] = None
            elif producer is not None and edit.is_op(producer, "Constant"):
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


def _read_by(node: ir.Node) -> list[ir.Value]:
    """What a node reads, the values its nested graphs capture included."""
    values = [value for value in node.inputs if value is not None]
    for nested in edit.subgraphs_of(node):
        graphs = list(edit.all_graphs(nested))
        own = {value for graph in graphs for value in (*graph.inputs, *graph.initializers.values())}
        own |= {value for graph in graphs for inner in graph for value in inner.outputs}
        read = [value for graph in graphs for inner in graph for value in inner.inputs if value is not None]
        read += [value for graph in graphs for value in graph.outputs]
        values += [value for value in read if value not in own]
    return values


def _last_uses(model: ir.Model) -> dict[str, int]:
    """The index of the last node of the main graph that reads a value, by the value's name."""
    found: dict[str, int] = {}
    for index, node in enumerate(model.graph):
        for value in _read_by(node):
            found[str(value.name)] = index
    return found
