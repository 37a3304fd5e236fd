"""A model on its way through the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.report.schema.steps import StepRecord


@dataclass(frozen=True)
class InputSpec:
    """A network input.

    Attributes:
        shape: Dimensions: an int, or the symbol's name (``"?"`` when it has none) where dynamic.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int | str, ...]

    @property
    def is_static(self) -> bool:
        """Whether every dimension is known."""
        return all(isinstance(dim, int) for dim in self.shape)


@dataclass(frozen=True)
class ModelArtifact:
    """A model, where it came from, and what was done to it. The model is never edited in place: stages clone it.

    Attributes:
        model: The graph. Large weights stay memory-mapped external tensors.
        path: The file it was loaded from, absolute; None for a model made in memory.
        sha256: Hash of the file and, unless the loader was told otherwise, of the external data it names, hex.
    """

    model: ir.Model
    path: Path | None
    sha256: str
    steps: tuple[StepRecord, ...] = ()

    def with_step(self, model: ir.Model, step: StepRecord) -> ModelArtifact:
        """A new artifact after one more step."""
        return replace(self, model=model, steps=(*self.steps, step))

    @property
    def inputs(self) -> tuple[InputSpec, ...]:
        """The network's inputs in graph order."""
        return tuple(input_spec(value) for value in self.model.graph.inputs)

    def to_json_dict(self) -> dict[str, Any]:
        """The ``model`` of a report."""
        return {
            "path": str(self.path) if self.path else None,
            "sha256": self.sha256,
            "opset": self.model.opset_imports.get(""),
            "inputs": [
                {"name": item.name, "dtype": str(item.dtype), "shape": list(item.shape)} for item in self.inputs
            ],
        }


def input_spec(value: ir.Value) -> InputSpec:
    """Describe a graph input. Raises InvalidModelError: it has no type or no rank, which the loader may not see."""
    dtype = value.dtype
    if dtype is None or value.shape is None:
        raise InvalidModelError(
            "The input has no type or no rank", where=f"input {value.name}", remedy="export the model with both"
        )
    dims = tuple(dim if isinstance(dim, int) else (dim.value or "?") for dim in value.shape)
    return InputSpec(str(value.name), np.dtype(dtype.numpy()), dims)
