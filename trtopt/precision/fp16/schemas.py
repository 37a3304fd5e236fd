"""What the operators' schemas say about 16-bit floats: which inputs and outputs may have them, and who cannot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import onnx
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.precision.plan import NarrowType

TYPE_ATTRIBUTES = {
    "Cast": "to",
    "EyeLike": "dtype",
    "RandomNormal": "dtype",
    "RandomUniform": "dtype",
    "RandomNormalLike": "dtype",
    "RandomUniformLike": "dtype",
    "Multinomial": "dtype",
    "Bernoulli": "dtype",
    "DequantizeLinear": "output_dtype",
}
"""Operators whose output type an attribute gives, if it is there."""

_FOLLOWED_INPUT = {"DequantizeLinear": 1, "EyeLike": 0, "RandomNormalLike": 0, "RandomUniformLike": 0, "Bernoulli": 0}
"""Operators whose output, without that attribute, has the type of this input though their schema does not say so."""

_NO_16_BIT_FORM = {
    ("BitCast", "fp16"): "it reinterprets the bits of FP32",
    ("BitCast", "bf16"): "it reinterprets the bits of FP32",
} | {
    (op, "bf16"): f"TensorRT for RTX refuses {op} in bf16"
    for op in ("ConvTranspose", "GRU", "HardSwish", "LpNormalization", "LpPool", "Mish")
}

_TYPES_ONLY = (21, 22)
"""From the first to the second of these opsets operators only gained types: BF16 for Conv, pools, recurrent layers and
activations. A model of the first is one of the second as it stands (changelog of ONNX, docs/Changelog.md)."""


class FloatForm:
    """Which inputs and outputs of one node may be narrow."""

    def __init__(self, node: ir.Node, narrow: NarrowType) -> None:
        self._node = node
        self._name = narrow.schema_name
        self._schema = _schema_of(node, narrow)

    def input(self, index: int) -> tuple[str, bool]:
        """The type variable of an input, and whether it may be narrow."""
        return self._parameter(self._schema.inputs if self._schema else [], index)

    def output(self, index: int) -> tuple[str, bool]:
        """The type variable of an output, and whether it may be narrow."""
        variable, fits = self._parameter(self._schema.outputs if self._schema else [], index)
        followed = _FOLLOWED_INPUT.get(self._node.op_type)
        return (variable if followed is None else self.input(followed)[0]), fits

    def _parameter(self, parameters: Sequence[onnx.defs.OpSchema.FormalParameter], index: int) -> tuple[str, bool]:
        if not parameters:
            return "", False
        parameter = parameters[min(index, len(parameters) - 1)]
        return parameter.type_str, self._name in parameter.types


def why_fp32(node: ir.Node, narrow: NarrowType) -> str | None:
    """Why ``node`` has no form in ``narrow``, None when it has one or holds no floats."""
    if node.domain not in ("", "ai.onnx"):
        return f"operator of domain {node.domain}: its 16-bit form is unknown"
    if edit.subgraphs_of(node):
        return "control flow: ranges inside its subgraphs are not observed"
    reason = _NO_16_BIT_FORM.get((node.op_type, narrow.name))
    if reason is not None:
        return reason
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    if any(isinstance(value.type, (ir.SequenceType, ir.OptionalType)) for value in values):
        return "sequences and optional values stay as they are"
    form = FloatForm(node, narrow)
    floats = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    inputs = [
        form.input(index) for index, value in enumerate(node.inputs) if value is not None and value.dtype in floats
    ]
    outputs = [form.output(index) for index, value in enumerate(node.outputs) if value.name and value.dtype in floats]
    if (inputs or outputs) and not any(fits for _, fits in (*inputs, *outputs)):
        return f"{node.op_type} has no {narrow.name} form in ONNX"
    variables = {variable for variable, fits in inputs if fits}
    typed = node.op_type == "ConstantOfShape" or TYPE_ATTRIBUTES.get(node.op_type, "") in node.attributes
    if inputs and not typed and any(fits and variable not in variables for variable, fits in outputs):
        return f"the type of an output of {node.op_type} does not follow from its inputs"
    return None


def _schema_of(node: ir.Node, narrow: NarrowType) -> onnx.defs.OpSchema | None:
    imported = node.graph.opset_imports.get(node.domain) if node.graph is not None else None
    version = node.version or imported or onnx.defs.onnx_opset_version()
    if narrow.name == "bf16" and node.domain in ("", "ai.onnx") and version == _TYPES_ONLY[0]:
        version = _TYPES_ONLY[1]
    return _schema(node.op_type, version, node.domain)


def import_bf16_forms(model: ir.Model) -> None:
    """Raise the opset of ``model``, which is changed, to the one that has the BF16 forms :class:`FloatForm` allows."""
    for graph in edit.all_graphs(model.graph):
        if graph.opset_imports.get("") == _TYPES_ONLY[0]:
            graph.opset_imports[""] = _TYPES_ONLY[1]


@lru_cache(maxsize=512)
def _schema(op_type: str, version: int, domain: str) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None
