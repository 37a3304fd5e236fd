"""Products over a vocabulary of an odd size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_VOCABULARY = 2048
"""Columns from which on a product is one over a vocabulary."""

_MULTIPLE = 8
"""Columns of 16 bits that rows aligned to 16 bytes have a multiple of."""


@dataclass(frozen=True)
class PaddedVocabulary:
    """Gives a product over a vocabulary of an odd size a multiple of 8 columns, and cuts the scores off behind it.

    Rewrite:
        x W = (x [W 0])[..., :n], with columns of zeros up to a multiple of 8.
    Requires:
        MatMul or Gemm with constants, an embedding's transposed table among them, of an odd number of columns, 2048 or
        more; TensorRT for RTX, not in FP32.
    Why faster:
        The compiler pads by itself, but then writes the padded scores in the type of the output, FP32 as a rule, and
        cuts them off by a copy of that: with columns of zeros the scores are 16-bit until one kernel cuts and casts
        them. GPT-2's 50257 at 64 tokens on an L4, FP16: 39 MB of activations become 26, 428 us 381 by prediction. In
        INT8 nothing changes (241 us), and an even size is one kernel as it is (BERT's 30522: 206 us, padded 232), so
        that it is not tried. Judged.
    Numerics:
        Exact: every score is the same sum.
    Refuses when:
        Nothing; products that are not like this do not match.
    """

    name: str = "padded-vocabulary"
    stage: Stage = Stage.ALIGN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Products of 2048 columns and more, an odd number, with constants."""
        if target.backend == "tensorrt" or target.precision in ("fp32", "tf32"):
            return Findings()
        return Findings(tuple(Match((node,)) for node in edit.all_nodes(model.graph) if _size(node)))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Pad the constants of one product."""
        (node,) = match.nodes
        size = 0 if node.graph is None else _size(node)
        if not size:
            return Refusal(match.label, "it was changed by a rewrite before")
        output, splice, more = node.outputs[0], edit.Splice(model, node, self.name), -size % _MULTIPLE
        is_turned = edit.int_attribute(node, "transB", 0)
        constants = []
        for value in node.inputs[1:]:
            array = _constant(value)
            if value is not None and array is not None:
                axis = 0 if value is node.inputs[1] and is_turned else array.ndim - 1
                if array.ndim and array.shape[axis] == size:
                    array = np.pad(array, [(0, more if each == axis else 0) for each in range(array.ndim)])
                constants.append(splice.constant(array, value, "padded"))
        kept = {name: attribute.value for name, attribute in node.attributes.items()}
        scores = splice.op(node.op_type, node.inputs[0], *constants, attributes=kept)
        if output.shape is not None:
            scores.shape = ir.Shape([*tuple(output.shape)[:-1], size + more])
        start, end, last = (
            splice.ints([each], output, name) for name, each in (("from", 0), ("to", size), ("axis", -1))
        )
        splice.replace(node, "Slice", [scores, start, end, last])
        return None


def _size(node: ir.Node) -> int:
    """The columns of a product over a vocabulary of an odd size; 0 for other nodes."""
    if not edit.is_op(node, "MatMul", "Gemm") or any(attribute.is_ref() for attribute in node.attributes.values()):
        return 0
    weight, dims = edit.input_of(node, 1), edit.static_shape(edit.input_of(node, 1))
    if weight is None or weight.dtype not in edit.NARROW_FLOATS or dims is None or len(dims) != 2:
        return 0
    size = dims[0 if edit.int_attribute(node, "transB", 0) else 1]
    if size < _VOCABULARY or size % 2 == 0 or edit.constant_tensor_of(edit.input_of(node, 0)) is not None:
        return 0
    return size if all(value is None or _constant(value) is not None for value in node.inputs[1:]) else 0


def _constant(value: ir.Value | None) -> np.ndarray | None:
    """A constant, or one that is transposed: the embedding that a product is tied to."""
    found = edit.constant_of(value)
    producer = edit.maker_of(value)
    if found is not None or not edit.is_op(producer, "Transpose"):
        return found
    table = edit.constant_of(producer.inputs[0])
    return None if table is None or table.ndim != 2 or edit.ints_attribute(producer, "perm") == (0, 1) else table.T
