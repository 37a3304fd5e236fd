"""An optimized model written to its file: checked before it is put in place, and tried in ONNX Runtime."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx
import onnx.checker
import onnx_ir as ir

from trtopt.engine.build import parse_onnx
from trtopt.engine.request import BuildRequest
from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes
from trtopt.precision.qdq.apart import is_fp8_product, loses_its_activation
from trtopt.source.save import save_model
from trtopt.support._lazy import is_available

TRIED_BYTES = 64 << 20
"""Larger models are not tried in ONNX Runtime: it casts FP16 weights when it loads them, some 5 s for 170 MiB."""

LOADS = "ONNX Runtime (CPU) loads it"
"""What is said of a saved model that it loads."""

_LIMIT_S = 60

_TRY = """
import sys
import onnxruntime as ort
options = ort.SessionOptions()
options.log_severity_level = 4
try:
    ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
except Exception as error:
    print(" ".join(str(error).split()))
    sys.exit(3)
"""


def save_checked(model: ir.Model, path: Path, request: BuildRequest | None) -> tuple[Path, ...]:
    """Write ``model`` as :func:`save_model` does, and check the file before it is put in place.

    ONNX's checker and shape inference have to pass, and the compiler's parser where ``request`` asks for it.

    Args:
        request: What the parser is asked, its file apart; None where it took the model in another way.

    Raises:
        InvalidModelError: The checker or shape inference refuses the file.
        EngineBuildError: The parser refuses it.
    """
    return save_model(model, path, check=partial(_check, model, request))


def _check(model: ir.Model, request: BuildRequest | None, file: Path) -> None:
    """The parser runs in a process of its own, beside the checker."""
    with ThreadPoolExecutor(1) as pool:
        parsed = None if request is None else pool.submit(parse_onnx, replace(request, onnx=file))
        _check_onnx(model, file)
        if parsed is not None:
            parsed.result()


def _check_onnx(model: ir.Model, file: Path) -> None:
    remedy = "report it with the model; --recipes none, or another precision, may avoid it"
    try:
        onnx.checker.check_model(os.fspath(file))
    except onnx.checker.ValidationError as error:
        raise InvalidModelError(
            f"The optimized model is not valid ONNX: {' '.join(str(error).split())[:400]}",
            where="the file that was to be written",
            remedy=remedy,
        ) from error
    infer_shapes(model)


def tried_in_onnxruntime(files: Sequence[Path]) -> str:
    """Whether ONNX Runtime (CPU) loads a model, the first of ``files``, with its default optimizations, in one line.

    It is tried in a process of its own, which it may crash.
    """
    if not is_available("onnxruntime"):
        return "not tried in ONNX Runtime, which is not installed"
    if sum(file.stat().st_size for file in files) > TRIED_BYTES:
        return f"not tried in ONNX Runtime: more than {TRIED_BYTES >> 20} MiB"
    command = [sys.executable, "-c", _TRY, os.fspath(files[0])]
    try:
        ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"ONNX Runtime (CPU) does not load it within {_LIMIT_S} s"
    if ended.returncode == 0:
        return LOADS
    if ended.returncode < 0:
        return f"ONNX Runtime (CPU) crashes on it: {signal.Signals(-ended.returncode).name}"
    return f"ONNX Runtime (CPU) does not load it: {(ended.stdout or ended.stderr).strip()[-300:]}"


def computes_wrong(model: ir.Model) -> str:
    """What to know before ONNX Runtime (1.31) runs a model with an FP8 quantizer behind Relu or Clip; else empty.

    Its rewritings take the zero point 0 of FP8 for the lowest of UINT8 and drop the Relu.
    """
    if not any(map(loses_its_activation, edit.all_nodes(model.graph))):
        return ""
    names = "ReluQuantRewrite, ClipQuantRewrite"
    return f"; its outputs are wrong unless disabled_optimizers has {names}: they drop Relu before FP8"


def remedy(model: ir.Model) -> str:
    """How ONNX Runtime (1.31) loads a model with FP8 products that it does not load; else empty.

    It takes a product for one of INT8, and refuses the operator that it makes of it itself: in FP32 always, in FP16
    beside some others (a Softmax of its scores, in a network of the property tests).
    """
    if not any(map(is_fp8_product, edit.all_nodes(model.graph))):
        return ""
    return "; it loads with session.disable_quant_qdq=1: FP8 products are taken for INT8 otherwise"
