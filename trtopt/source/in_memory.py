"""Models that are no files yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from trtopt.errors import UsageError
from trtopt.source.save import save_model


def as_file(model: Any, folder: Path, example_inputs: Any = None) -> Path:
    """The model as a file: a path as it is; a model in memory is written to ``folder``.

    Args:
        model: A path, an ``onnx.ModelProto``, an ``onnx_ir.Model`` or a PyTorch module.
        folder: A temporary folder.
        example_inputs: What to export a PyTorch module with.

    Raises:
        UsageError: It is something else, or a module without example inputs.
    """
    if isinstance(model, (str, Path)):
        return Path(model)
    path = folder / "model.onnx"
    if isinstance(model, onnx.ModelProto):
        onnx.save(model, path)
    elif isinstance(model, ir.Model):
        save_model(model, path)
    elif hasattr(model, "forward"):
        if example_inputs is None:
            raise UsageError(
                "A PyTorch module needs example inputs to be exported",
                where="example_inputs",
                remedy="pass a tuple of tensors",
            )
        from trtopt.source.pytorch import export

        export(model, path, example_inputs=example_inputs)
    else:
        raise UsageError(
            f"A {type(model).__name__} is no model",
            where="model",
            remedy="give a path, an ONNX model or a module",
        )
    return path
