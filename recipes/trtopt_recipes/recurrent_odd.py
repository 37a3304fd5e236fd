"""LSTM, GRU and RNN with an odd number of hidden units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph.edit import all_nodes, constant_of, constant_tensor_of, dims_of, input_of
from trtopt.graph.products import GATES
from trtopt.graph.recurrent import Writer, is_recurrent, is_used, recurrent_of, replace_outputs, why_not_plain
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_STATES = (5, 6)


@dataclass(frozen=True)
class OddRecurrence:
    """Gives a recurrent layer with an odd number of hidden units one more.

    Rewrite:
        A unit whose weights and biases are zero and that starts at zero stays at zero: the new cell content is
        tanh(0) = 0. It is cut off the outputs.
    Requires:
        The standard activations; constant weights; initial states that are constants. The number of steps may be
        dynamic.
    Why faster:
        TensorRT for RTX pads the hidden state before the products in FP16 and BF16, in a kernel of its own per eight
        steps, and once more the input. Where the steps can be written out, ``static-recurrence`` leaves nothing to pad
        and comes first.
    Numerics:
        Exact: terms of zero are added.
    Refuses when:
        Clipping, coupled gates, other activations, peepholes, sequence lengths; weights or states that are not
        constants.
    """

    name: str = "odd-recurrence"
    stage: Stage = Stage.ALIGN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """LSTM, GRU and RNN nodes with an odd number of units, for FP16 and BF16."""
        matches, refusals = [], []
        for node in all_nodes(model.graph) if target.precision not in ("fp32", "tf32") else ():
            weights = constant_tensor_of(input_of(node, 2)) if is_recurrent(node) else None
            if weights is None or len(dims_of(weights)) != 3 or dims_of(weights)[2] % 2 == 0:
                continue
            reason = why_not_plain(node)
            states = [input_of(node, index) for index in _STATES]
            if not reason and any(value is not None and constant_of(value) is None for value in states):
                reason = "its initial state is not a constant"
            if reason:
                refusals.append(Refusal(str(node.name), reason))
            else:
                matches.append(Match((node,)))
        return Findings(tuple(matches), tuple(refusals))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Add one unit to one node."""
        node = match.nodes[0]
        weights = constant_of(input_of(node, 1))
        if weights is None:
            return Refusal(match.label, "its weights are not constants any more")
        gates, hidden = GATES[node.op_type], recurrent_of(node).hidden
        write = Writer(model, node, self.name, weights.dtype)
        inputs = list(node.inputs)
        inputs[1] = write.constant("weight", _with_unit(weights, gates))
        recurrent, bias = constant_of(input_of(node, 2)), constant_of(input_of(node, 3))
        if recurrent is not None:
            inputs[2] = write.constant("recurrent", _pad(_with_unit(recurrent, gates)))
        if bias is not None:
            inputs[3] = write.constant("bias", _with_unit(bias[..., None], 2 * gates)[..., 0])
        for index in _STATES:
            state = constant_of(input_of(node, index))
            if state is not None:
                inputs[index] = write.constant("state", _pad(state))
        attributes = {**node.attributes, "hidden_size": ir.AttrInt64("hidden_size", hidden + 1)}
        wide = write.insert(node.op_type, inputs, "even", len(node.outputs), attributes)
        start, end, axis = (write.integers((number,)) for number in (0, hidden, -1))
        news = {
            index: write.node("Slice", [wide.outputs[index], start, end, axis], "cut")
            for index in range(len(node.outputs))
            if is_used(node, index)
        }
        replace_outputs(node, news)
        return None


def _with_unit(array: np.ndarray, blocks: int) -> np.ndarray:
    """[directions, blocks x hidden, n] with a row of zeros at the end of every block."""
    directions, rows, columns = array.shape
    apart = array.reshape(directions, blocks, rows // blocks, columns)
    return np.pad(apart, ((0, 0), (0, 0), (0, 1), (0, 0))).reshape(directions, rows + blocks, columns)


def _pad(array: np.ndarray) -> np.ndarray:
    """``array`` with a zero at the end of every row."""
    return np.pad(array, ((0, 0),) * (array.ndim - 1) + ((0, 1),))
