"""``trtopt build``."""

from __future__ import annotations

from collections.abc import Sequence

from trtopt.cli.run import run_pipeline

_DESCRIPTION = "Make a TensorRT engine from an ONNX model: rewrite, calibrate, verify, compile, and say what was done."
_EPILOG = """\
examples:
  trtopt build model.onnx --int8 --calib samples.npz --eval labelled.npz --metric top1 --max-accuracy-drop 0.01
  trtopt build model.onnx --fp16 --gpu "RTX 4090" --opt-shapes input:8x3x224x224 --report model.json

Options of trtexec such as --onnx, --saveEngine, --minShapes and --timingCacheFile work too: see
docs/migrating-from-tensorrt-10.md.
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    return run_pipeline("build", _DESCRIPTION, _EPILOG, argv)
