"""What an analysis knows beside its rules: the network in INT8, and what to type for this model and GPU."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trtopt.config import Config
from trtopt.config.words import command_words
from trtopt.engine.backend import backend_of_rules
from trtopt.graph import edit
from trtopt.hardware.spec import GpuSpec
from trtopt.report.schema.analysis import Finding
from trtopt.report.text.command import shell
from trtopt.roofline.layer import predict
from trtopt.roofline.node_work import GraphTypes
from trtopt.roofline.onnx_layers import FusedModel
from trtopt.support._script import is_target
from trtopt.support.precision import PRECISIONS, SIXTEEN_BIT_TYPES, Precision

IN_MEMORY = "MODEL.onnx"
"""What lines to type call a model that is in no file."""


def model_words(model: object, path: Path, config: Config) -> tuple[str, ...]:
    """What a line calls a model: its file, ``path``; the code that makes it and its inputs; else a name to fill in."""
    if isinstance(model, str) and is_target(model):
        made = [name for name in ("inputs", "dynamic") if getattr(config, name)]
        return (model, *command_words(vars(config), made))
    return (os.path.abspath(path),) if isinstance(model, (str, Path)) else (IN_MEMORY,)


def int8_times(fused: FusedModel, gpu: GpuSpec) -> dict[str, float]:
    """The predicted microseconds of each layer with INT8 where the table of the GPU's compiler has it.

    Empty where that says nothing: not in 16 bits, quantized already, or on a GPU without INT8.
    """
    types = fused.precision
    is_eight = types.quantized or any(edit.is_op(node, "DequantizeLinear") for node in fused.model.graph)
    if types.base not in SIXTEEN_BIT_TYPES or is_eight or Precision.INT8 not in gpu.tflops:
        return {}
    from trtopt.precision.regions import candidate_nodes

    dtype: Precision = Precision.INT8
    placed = candidate_nodes(fused.model, backend_of_rules("auto", gpu).name, dtype)[0]
    eight = GraphTypes(types.base, frozenset(str(node.name) for node in placed), dtype)
    rows, _ = predict(fused.in_types(eight).layers(), gpu)
    return {row.name: row.predicted_us for row in rows}


@dataclass(frozen=True)
class Target:
    """What the lines of findings are for.

    Attributes:
        model: The words that stand for the model (:func:`model_words`).
        gpu: The GPU's name; empty for a CPU.
        precision: What was asked for.
        shapes: The shapes of inputs with dynamic axes.
        profile: The file of a profile's report.
    """

    model: tuple[str, ...]
    gpu: str
    precision: str | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    profile: str = "profile.json"


def with_line(finding: Finding, target: Target) -> Finding:
    """A finding whose command is a line for a model and a GPU; as it is where it needs something else."""
    name, *words = shlex.split(finding.command) or [""]
    if name == "calibrate-gpu":
        return dataclasses.replace(finding, command=shell("trtopt", name, target.profile))
    if name not in ("build", "analyze"):
        return finding
    has_type = set(words) & {f"--{item}" for item in PRECISIONS}
    given = [] if target.precision is None or has_type else [f"--{target.precision}"]
    gpu = ["--gpu", target.gpu] if target.gpu else []
    texts = ",".join(f"{item}:{'x'.join(map(str, dims))}" for item, dims in target.shapes.items())
    at = ["--shapes" if name == "analyze" else "--opt-shapes", texts] if texts else []
    return dataclasses.replace(finding, command=shell("trtopt", name, *target.model, *gpu, *given, *at, *words))
