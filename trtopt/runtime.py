"""Graphs run by ONNX Runtime on the CPU: for calibration, references and verification."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import onnx_ir as ir

from trtopt._lazy import require
from trtopt.errors import InvalidModelError

Feeds = Mapping[str, np.ndarray]
"""Arrays by input name: one call's inputs."""

_EXTERNAL_OVER_BYTES = 1 << 30


class OrtSession:
    """A model loaded into ONNX Runtime's CPU provider.

    Args:
        model: The graph; it is not changed.
        outputs: Names of the values to return, which may be intermediate; None for the graph's outputs.
        keep_qdq: Run QuantizeLinear and DequantizeLinear as they stand, instead of fusing them into integer kernels.
        threads: Threads within an operator; 0 lets ONNX Runtime choose.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
        InvalidModelError: ONNX Runtime cannot load the graph.
    """

    def __init__(
        self, model: ir.Model, outputs: Sequence[str] | None = None, *, keep_qdq: bool = False, threads: int = 0
    ) -> None:
        ort = require("onnxruntime", "cpu", "run models on the CPU")
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = threads
        if keep_qdq:
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        try:
            source = self._source(with_outputs(model, outputs) if outputs is not None else model)
            self._session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            self.close()
            raise InvalidModelError(
                f"ONNX Runtime cannot load the model: {_first_lines(error)}",
                where=str(model.graph.name),
                remedy="check the node the message names; operators of custom domains cannot be calibrated or verified",
            ) from error
        self.output_names: tuple[str, ...] = tuple(item.name for item in self._session.get_outputs())

    def _source(self, model: ir.Model) -> bytes | str:
        """The model as bytes, or as a file beside its weights when it is too large for one protobuf."""
        size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
        if size <= _EXTERNAL_OVER_BYTES:
            return ir.to_proto(model).SerializeToString()
        self._folder = tempfile.TemporaryDirectory(prefix="trtopt-")
        path = Path(self._folder.name) / "model.onnx"
        ir.save(model, path, external_data="model.data")
        return str(path)

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Outputs in the order of ``output_names``.

        Raises:
            InvalidModelError: The model fails on these inputs.
        """
        try:
            return list(self._session.run(None, dict(feeds)))
        except Exception as error:
            shapes = ", ".join(f"{name}:{value.dtype}{list(value.shape)}" for name, value in feeds.items())
            raise InvalidModelError(
                f"The model fails on an input: {_first_lines(error)}",
                where=shapes,
                remedy="check the shapes and values of the samples",
            ) from error

    def close(self) -> None:
        """Free the temporary files."""
        self._session = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> OrtSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def with_outputs(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """A clone of ``model`` whose graph outputs are ``names`` (values of the main graph), in that order."""
    clone = model.clone()
    values = {value.name: value for value in clone.graph.inputs}
    values.update((value.name, value) for value in clone.graph.initializers.values())
    values.update((value.name, value) for node in clone.graph for value in node.outputs)
    clone.graph.outputs[:] = [values[name] for name in names]
    return clone


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:600]
