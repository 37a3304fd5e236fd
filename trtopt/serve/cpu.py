"""Models served by ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from trtopt.accuracy.emulation import fp32_emulation
from trtopt.errors import InvalidModelError
from trtopt.graph.edit import all_nodes
from trtopt.hardware.cpu import available_threads
from trtopt.serve.tensors import Arrays, TensorSpec
from trtopt.support._lazy import require
from trtopt.support.ort_session import ServingSession


class CpuRunner:
    """A model in ONNX Runtime; any number of threads may run it at once.

    ONNX Runtime has few BF16 kernels on a CPU: a model with BF16 in it is computed in FP32, and rounded after every
    node as verification does it.

    Args:
        model: The model.
        callers: How many calls run at a time. Each brings a thread, and only cores that these leave help within
            operators.

    Raises:
        InvalidModelError: ONNX Runtime cannot load it, or an input or output is no tensor.
        MissingDependencyError: ONNX Runtime is not installed.
    """

    takes_gpu = False

    def __init__(self, model: ir.Model, callers: int) -> None:
        self.inputs = specs_of(model.graph.inputs)
        self.outputs = specs_of(model.graph.outputs)
        self.runtime = f"onnxruntime {require('onnxruntime', 'cpu', 'serve models on the CPU').__version__} on the CPU"
        threads = max(1, available_threads() - callers + 1)
        self._session = ServingSession(fp32_emulation(model) if _has_bf16(model) else model, threads=threads)
        self._narrow = {spec.name for spec in self.outputs if spec.dtype == ml_dtypes.bfloat16}

    def run(self, context: int, feeds: Arrays) -> Arrays:
        """Outputs by name; BF16 is computed from and to FP32 at the border, without loss."""
        session = self._session
        found = dict(zip(session.output_names, session.run(feeds), strict=True))
        for name in self._narrow:
            found[name] = found[name].astype(ml_dtypes.bfloat16)
        return found

    @property
    def graph_counts(self) -> dict[str, int]:
        """Nothing: there are no CUDA graphs on a CPU."""
        return {}

    def close(self) -> None:
        """Free its memory."""
        self._session.close()


def _has_bf16(model: ir.Model) -> bool:
    """Whether a node reads or writes BF16."""
    return any(
        value is not None and value.dtype is ir.DataType.BFLOAT16
        for node in all_nodes(model.graph)
        for value in (*node.inputs, *node.outputs)
    )


def specs_of(values: Sequence[ir.Value]) -> tuple[TensorSpec, ...]:
    """What the inputs or outputs of a graph are.

    Raises:
        InvalidModelError: One is no tensor, or of a type that numpy has no word for.
    """
    found = []
    for value in values:
        if not isinstance(value.type, ir.TensorType):
            raise InvalidModelError(
                f"{value.name!r} is no tensor: sequences, maps and optional values are not served",
                where=str(value.name),
                remedy="give the model inputs and outputs that are tensors",
            )
        shape = value.shape
        dims = None if shape is None else tuple(dim if isinstance(dim, int) else (dim.value or "?") for dim in shape)
        dtype: np.dtype[Any] = np.dtype(value.type.dtype.numpy())
        found.append(TensorSpec(str(value.name), dtype, dims))
    return tuple(found)
