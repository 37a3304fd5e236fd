"""LSTM, GRU and RNN over a known number of steps."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.edit import all_nodes, constant_of, input_of
from trtopt.graph.recurrent import (
    Cells,
    Lanes,
    Writer,
    initial_of,
    is_recurrent,
    is_used,
    recurrent_of,
    replace_outputs,
    sequence,
    weights_of,
    why_not_unrolled,
)
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class StaticRecurrence:
    """Writes a recurrent layer with a known number of steps as matrix products and element-wise nodes.

    Rewrite:
        One product for what all steps and both directions read of the input, the biases added to it; per step one
        product of the state with the recurrent weights of all directions and the gates. The first step from a state
        of zeros needs no product.
    Requires:
        A static number of steps up to ``max_steps``; the standard activations; constant weights.
    Why faster:
        TensorRT for RTX computes the input's product in every step of a bidirectional layer, and of any layer of up to
        eight steps; the sum of the biases, the copies of the initial state and the loop's counters go away. The
        directions share the kernels of a step.
    Numerics:
        The same products; the biases are added beforehand, in FP64, and rounded once.
    Refuses when:
        The number of steps is dynamic or too large; sequence lengths, peepholes, clipping, other activations, the batch
        as first axis; only one of two initial states; a sum of biases beyond the range of its type; INT8, which would
        quantize each step by itself.
    """

    name: str = "static-recurrence"
    stage: Stage = Stage.FUSE
    lossless: bool = True
    max_steps: int = 64

    def find(self, model: ir.Model, target: Target) -> Findings:
        """LSTM, GRU and RNN nodes."""
        places = []
        for node in all_nodes(model.graph):
            if not is_recurrent(node):
                continue
            reason = why_not_unrolled(node, self.max_steps)
            if target.precision == "int8" and not reason:
                reason = "INT8 would quantize each step by itself"
            places.append((Match((node,)), reason))
        return Findings.of(places)

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Write out the steps of one node."""
        node = match.nodes[0]
        kind, source = recurrent_of(node), node.inputs[0]
        initial, given = initial_of(node), constant_of(input_of(node, 1))
        if source is None or given is None or kind.steps is None or initial is None:
            return Refusal(match.label, "its steps are not known any more")
        steps, reverse, every = kind.steps, kind.reverse, range(len(kind.reverse))
        weights = tuple(weights_of(node, direction) for direction in every)
        write = Writer(model, node, self.name, given.dtype)
        cells = Cells(write, kind, weights)
        columns = cells.projection(every, source, "input")
        rows = [write.split(column, [1] * steps, "input/steps", 0) for column in columns]
        lanes = Lanes(cells, steps, [0] * len(reverse), initial)
        lanes.run(lambda lane, step: rows[lane][steps - 1 - step if reverse[lane] else step])
        news = {1 + index: lanes.final(every, index) for index in (0, 1) if is_used(node, 1 + index)}
        if is_used(node, 0):
            ordered = [outputs[:: -1 if reverse[lane] else 1] for lane, outputs in enumerate(lanes.outputs)]
            news[0] = sequence(write, kind.hidden, ordered)
        replace_outputs(node, news)
        return None
