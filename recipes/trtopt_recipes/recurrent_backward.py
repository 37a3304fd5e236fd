"""LSTM, GRU and RNN that run backward, or both ways."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.edit import all_nodes, constant_of, input_of, int_attribute, string_attribute
from trtopt.graph.recurrent import Writer, is_recurrent, is_used, replace_outputs, runs_all_steps
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_WEIGHTS = (1, 2, 3, 7)
_LENGTHS = 4
_STATES = (5, 6)
_BEYOND = -(2**63)


@dataclass(frozen=True)
class BackwardRecurrence:
    """Writes a recurrent layer that runs backward as one that runs forward over the reversed sequence.

    Rewrite:
        backward(x) = reversed(forward(reversed(x))); a bidirectional layer becomes two forward ones.
    Requires:
        Constant weights. The number of steps may be dynamic.
    Why faster:
        TensorRT for RTX multiplies the input of a forward layer by its weights once for all steps, that of a backward
        or bidirectional one in every step: for a bidirectional LSTM four kernels a step and twice the bytes. Where the
        steps can be written out, ``static-recurrence`` is faster still and comes first.
    Numerics:
        The same arithmetic.
    Refuses when:
        Weights that are not constants; sequences of different lengths; the batch is the first axis; activations with
        parameters.
    """

    name: str = "backward-recurrence"
    stage: Stage = Stage.FUSE
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """LSTM, GRU and RNN nodes of the reverse or both directions."""
        places = []
        for node in all_nodes(model.graph):
            if not is_recurrent(node) or string_attribute(node, "direction", "forward") == "forward":
                continue
            places.append((Match((node,)), _why_not(node)))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Turn one node round."""
        node = match.nodes[0]
        source, weights = node.inputs[0], constant_of(input_of(node, 1))
        if source is None or weights is None:
            return Refusal(match.label, "its weights are not constants any more")
        write = Writer(model, node, self.name, weights.dtype)
        both = string_attribute(node, "direction", "forward") == "bidirectional"
        ways = (False, True) if both else (True,)
        states = {
            index: write.split(value, [1] * len(ways), "states", 0)
            for index in _STATES
            if (value := input_of(node, index)) is not None
        }
        outputs: list[list[ir.Value]] = []
        for place, backward in enumerate(ways):
            label = "backward" if backward else "forward"
            inputs = list(node.inputs)
            inputs[0] = _reversed(write, source, f"{label}/input") if backward else source
            for index in _WEIGHTS if both else ():
                array = constant_of(input_of(node, index))
                if array is not None:
                    inputs[index] = write.constant(f"{label}/weights", array[place : place + 1])
            if len(inputs) > _LENGTHS:
                inputs[_LENGTHS] = None
            for index, parts in states.items():
                inputs[index] = parts[place]
            attributes = {name: item for name, item in node.attributes.items() if name != "direction"}
            if "activations" in attributes:
                given = attributes["activations"].as_strings()
                each = len(given) // len(ways)
                attributes["activations"] = ir.AttrStrings("activations", given[place * each :][:each])
            made = list(write.insert(node.op_type, inputs, label, len(node.outputs), attributes).outputs)
            if backward and is_used(node, 0):
                made[0] = _reversed(write, made[0], f"{label}/output")
            outputs.append(made)
        axes = (1, 0, 0)
        news = {
            index: write.concat([way[index] for way in outputs], "both", axes[index])
            for index in range(len(node.outputs))
            if is_used(node, index)
        }
        replace_outputs(node, news)
        return None


def _reversed(write: Writer, value: ir.Value, label: str) -> ir.Value:
    """``value`` from the last step to the first."""
    start, end, axis = (write.integers((number,)) for number in (-1, _BEYOND, 0))
    return write.node("Slice", [value, start, end, axis, start], label)


def _why_not(node: ir.Node) -> str:
    given = [input_of(node, index) for index in _WEIGHTS]
    if any(value is not None and constant_of(value) is None for value in given):
        return "its weights are not constants"
    if not runs_all_steps(node):
        return "its sequences may differ in length"
    if int_attribute(node, "layout", 0):
        return "its batch is the first axis"
    if any(name in node.attributes for name in ("activation_alpha", "activation_beta")):
        return "its activations have parameters"
    return ""
