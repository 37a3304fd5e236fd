"""A report with every part filled in, for the tests of its renderings."""

from __future__ import annotations

import dataclasses
from typing import Any

from trtopt.config import BuildConfig
from trtopt.report.schema.build import (
    AccuracyRecord,
    Achieved,
    BuildReport,
    CalibrationRecord,
    EngineRecord,
    KeptNode,
    MetricRecord,
    OutputAccuracy,
    PrecisionRecord,
)
from trtopt.report.schema.layers import LayerInfo, TensorInfo
from trtopt.report.schema.steps import Refusal, StepRecord

LAYER = LayerInfo(
    name="conv1",
    type="correlation",
    onnx_nodes=("/conv1/Conv", "/relu1/Relu"),
    inputs=(TensorInfo("x", (-1, 3, 32, 32), "Half", "NHWC"),),
    outputs=(TensorInfo("y", (-1, 16, 32, 32), "Half", "NHWC"),),
    constants=(TensorInfo("w", (16, 3, 3, 3), "Half"),),
    tactic="conv_kernel",
    kind="conv",
)
ENGINE = EngineRecord(
    path="model.rtx.engine",
    sha256="ab" * 32,
    bytes=2_612_345,
    backend="tensorrt-rtx",
    backend_version="1.7.1.116",
    compute_capabilities=("8.9",),
    runtime="TensorRT for RTX",
    kernels=23,
    activation_bytes=1_234_567,
    weight_bytes=2_345_678,
    build_seconds=0.41,
    layers=(LAYER,),
    unclaimed_nodes=("/Shape", "/Gather"),
    ignored_options=("timing_cache",),
    profiles=({"x": {"min": [1, 3, 32, 32], "opt": [8, 3, 32, 32], "max": [16, 3, 32, 32]}},),
)
ACCURACY = AccuracyRecord(
    samples=360,
    source="eval",
    verified="onnx-only",
    outputs={
        "logits": OutputAccuracy(31.234, 0.99987, 0.123, 0.9944),
        "boxes": OutputAccuracy(float("inf"), 1.0, 0.0, None),
        "broken": OutputAccuracy(float("nan"), float("nan"), float("inf"), None, nonfinite=7),
    },
    metric=MetricRecord("top1", 0.9889, 0.9861, 0.0028),
    tensors={f"conv{index}": OutputAccuracy(60.0 - 9 * index, 0.999, 0.1, None) for index in range(6)},
    first_bad="conv4",
)


def full_report(**changes: Any) -> BuildReport:
    """A report of an INT8 build, with other values of the named fields."""
    report = BuildReport(
        model={"path": "model.onnx", "sha256": "cd" * 32, "opset": 21, "inputs": []},
        gpu={"name": "L4", "compute_capability": "8.9"},
        steps=(
            StepRecord("constant-expression", "FOLD", 12, 0.03, details=("largest difference 0",)),
            StepRecord("dead-node", "CLEAN", 0, 0.01),
            StepRecord(
                "precision-int8",
                "PRECISION",
                19,
                1.2,
                (Refusal("/dw1", "depthwise"), Refusal("/dw2", "depthwise"), Refusal("/head", "reads [0] of x")),
            ),
        ),
        calibration=CalibrationRecord("user", "auto", 64, 1.5, 345_000_000),
        precision=PrecisionRecord(
            "int8",
            {"int8": Achieved(9, 0.62), "fp16": Achieved(13, 0.38)},
            0.931,
            tuple(KeptNode(f"/node{index}", "fp32", "1e-12 is 0 in FP16") for index in range(5)),
        ),
        accuracy=ACCURACY,
        judge="compiler:tensorrt-rtx 1.7.1",
        warnings=("the profile was widened",),
        engine=ENGINE,
        config=dataclasses.asdict(
            BuildConfig(precision="int8", report="model.json", save_onnx="model.int8.onnx", opt_shapes={"x": (8, 3)})
        ),
        environment={"trtopt": "0.1.0"},
        seconds={"calibrate": 1.5, "verify": 0.7, "build engine": 0.9},
    )
    return dataclasses.replace(report, **changes)
