"""Profiles of hand-made networks, for the tests of how they are shown.

Predictions are those of the real model; measured times are those by known factors.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

import numpy as np
from analysis_samples import GPU, HOSTILE, elementwise, product, resnet50_layers

from trtopt.graph.module_path import module_of
from trtopt.report.schema.analysis import Finding, LayerRow
from trtopt.report.schema.build import OutputAccuracy
from trtopt.report.schema.layers import TensorInfo
from trtopt.report.schema.profile import Deviation, ProfileLayer, ProfileReport, ProfileSource, ProfileTotals
from trtopt.roofline.layer import predict
from trtopt.roofline.work import Layer
from trtopt.support.precision import Precision

FACTORS = (1.04, 0.93, 1.3, 0.7, 1.1, 2.6)
"""Measured over predicted time, in turns."""
TACTICS = (
    "sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize64x64x64_stage4_tensor16x8x16",
    "ampere_scudnn_128x64_relu_small_nn_v1",
    "",
)

Reads = Mapping[int, Sequence[int]]
"""By index of a layer, those it reads from, where that is not just the one before."""


def small_profile() -> ProfileReport:
    """ResNet-50 at batch 8, its residuals fused into the last convolution of each block; every part filled in."""
    layers = resnet50_layers(8)
    report = profile_of(layers, _residuals(layers))
    reformat = ProfileLayer(
        name="Reformatting CopyNode for Input Tensor 0 to /conv1",
        type="Reformat",
        onnx_nodes=(),
        modules=(),
        inputs=(TensorInfo("input", (8, 3, 224, 224), "Float", "Row major linear FP32"),),
        outputs=(TensorInfo("t_in", (8, 3, 224, 224), "Half", "Channel major FP16 format"),),
        constants=(),
        tactic="",
        tensor_core=None,
        sparse=None,
        measured_us=0.0,
    )
    slow = max(report.layers, key=lambda layer: layer.measured_us)
    finding = Finding("low-clock", "warning", slow.onnx_nodes, "1.1 of 2.0 GHz", "lock the clocks", 21.0)
    return dataclasses.replace(
        report,
        layers=(reformat, *report.layers),
        findings=(*report.findings, finding),
        accuracy={"output": OutputAccuracy(52.4, 0.999997, 0.031, 1.0)},
        warnings=("the engine was built for an L40S, these layers ran on an L4",),
    )


def large_profile() -> ProfileReport:
    """1,500 layers: blocks of seven with a residual and three products side by side."""
    layers: list[Layer] = [elementwise("/embeddings/add", 1 << 16)]
    reads: dict[int, list[int]] = {}
    while len(layers) + 7 <= 1499:
        last, block = len(layers) - 1, len(layers) // 7
        name, width = f"/encoder/layer.{block}", 256 + 64 * (block % 9)
        rows = 128 * (1 + block % 4)
        layers += [product(f"{name}/attention/{part}/MatMul", rows, width, width) for part in ("query", "key", "value")]
        layers.append(product(f"{name}/attention/MatMul", rows, rows, width))
        layers.append(elementwise(f"{name}/attention/output/Add", rows * width))
        dtype: Precision = Precision.INT8 if block % 3 else "fp16"
        layers.append(product(f"{name}/intermediate/MatMul", rows, 4 * width, width, dtype=dtype))
        layers.append(elementwise(f"{name}/output/LayerNormalization", 4 * rows * width, op="LayerNormalization"))
        reads |= {last + 1: [last], last + 2: [last], last + 3: [last], last + 4: [last + 1, last + 2, last + 3]}
        reads |= {last + 5: [last + 4, last], last + 6: [last + 5], last + 7: [last + 6, last + 5]}
    layers += [elementwise(f"/head/{index}", 1 << 12) for index in range(1500 - len(layers))]
    return profile_of(layers, reads)


def hostile_profile() -> ProfileReport:
    """Texts that may harm a page, in every place where a file can put one."""
    layers = [product(name, 64, 256, 128 * (1 + index)) for index, name in enumerate(HOSTILE)]
    layers = [dataclasses.replace(layer, op=layer.name[:60], onnx_nodes=(layer.name,)) for layer in layers]
    report = profile_of(layers)
    spread = tuple(
        dataclasses.replace(
            layer,
            type=name,
            modules=(name,),
            tactic=name,
            inputs=(TensorInfo(name, (1,), name, name),),
            outputs=(TensorInfo(name, (1,), name, name),),
            constants=(TensorInfo(name, (1,), name, name),),
            deviation=(Deviation("slower-than-predicted", 1.0, name),),
        )
        for layer, name in zip(report.layers, HOSTILE, strict=True)
    )
    return dataclasses.replace(
        report,
        gpu={**report.gpu, "name": HOSTILE[0]},
        source=dataclasses.replace(
            report.source, files={"engine": HOSTILE[1]}, version=HOSTILE[0], conditions={HOSTILE[0]: HOSTILE[1]}
        ),
        layers=spread,
        findings=tuple(Finding("r", "warning", (name,), name, name, 1.0) for name in HOSTILE),
        accuracy={HOSTILE[0]: OutputAccuracy(1.0, 1.0, 1.0, None)},
        warnings=HOSTILE,
        environment={HOSTILE[0]: HOSTILE[1]},
    )


def bare_profile() -> ProfileReport:
    """Names and times only, as older exports have them: no tensors, no predictions, no end to end time."""
    layers = tuple(
        ProfileLayer(f"conv_{index} + relu_{index}", "", (), (), (), (), (), "", None, None, 3.0 + index)
        for index in range(12)
    )
    total = sum(layer.measured_us for layer in layers)
    source = ProfileSource("trtexec", {"layer-profile": "old.profile.json"}, "", None, "profile")
    return ProfileReport(dataclasses.asdict(GPU), source, layers, ProfileTotals(total, 0.0, 0.0), ())


def profile_of(layers: Sequence[Layer], reads: Reads | None = None) -> ProfileReport:
    """A profile of layers.

    Args:
        layers: They, in order.
        reads: See :data:`Reads`.
    """
    reads = reads or {}
    rows, _ = predict(layers, GPU, timing="profile")
    noise = random.Random(7)
    measured = tuple(
        _layer(index, row, reads.get(index, [index - 1]), FACTORS[index % len(FACTORS)] * noise.uniform(0.95, 1.05))
        for index, row in enumerate(rows)
    )
    total = sum(layer.measured_us for layer in measured)
    times = np.array([(layer.measured_us, row.predicted_us) for layer, row in zip(measured, rows, strict=True)])
    ranks = times.argsort(axis=0).argsort(axis=0)
    totals = ProfileTotals(
        measured_us=total,
        predicted_us=float(times[:, 1].sum()),
        compared_us=total,
        end_to_end_us=0.87 * total,
        end_to_end_spread_us=0.004 * total,
        host_us=2.1 * len(layers),
        profiling_overhead_us=0.13 * total,
        predicted_end_to_end_us=0.8 * total,
        mean_error=float(np.abs(times[:, 1] / times[:, 0] - 1).mean()),
        rank_correlation=float(np.corrcoef(ranks.T)[0, 1]) if len(layers) > 2 else None,
    )
    findings = tuple(
        Finding(item.reason, "warning", layer.onnx_nodes, item.message, "see the explanation", item.us)
        for layer in sorted(measured, key=lambda layer: -layer.measured_us)[:40]
        for item in layer.deviation
    )
    conditions = {"sm clock, MHz": 1980, "temperature, C": 61}
    source = ProfileSource("tensorrt", {"engine": "models/network.engine"}, "10.9.0", 100, "profile", conditions)
    return ProfileReport(dataclasses.asdict(GPU), source, measured, totals, findings)


def _layer(index: int, row: LayerRow, reads: Sequence[int], factor: float) -> ProfileLayer:
    us = factor * row.predicted_us
    deviation = []
    if factor > 1.2:
        reason = Deviation("tail-wave", us / 4, f"{row.tiles} tiles leave slots of the last wave idle")
        more = Deviation("slower-than-predicted", us / 9, f"{us / row.predicted_us:.2f} times the prediction")
        deviation = [reason, more] if row.gemm else [more]
    tactic = TACTICS[index % len(TACTICS)] if row.gemm else ""
    return ProfileLayer(
        name=row.name,
        type="CaskConvolution" if row.op == "Conv" else "Myelin",
        onnx_nodes=row.onnx_nodes,
        modules=tuple(dict.fromkeys(path for node in row.onnx_nodes if (path := module_of(node)))),
        inputs=tuple(_tensor(source, row) for source in reads),
        outputs=(_tensor(index, row),),
        constants=(TensorInfo(f"{row.name}.weight", (64, 64, 3, 3), "Half"),) if row.gemm else (),
        tactic=tactic,
        tensor_core="tensor" in tactic if tactic else None,
        sparse=False if tactic else None,
        measured_us=us,
        median_us=0.99 * us,
        spread_us=0.01 * us,
        predicted=row,
        ratio=factor,
        math_share=row.math_us / us if row.math_us else 0.0,
        bandwidth_share=row.memory_us / us,
        deviation=tuple(deviation),
    )


def _tensor(index: int, row: LayerRow) -> TensorInfo:
    dtype = "Int8" if row.dtype == "int8" else "Half"
    return TensorInfo(f"t{index}" if index >= 0 else "t_in", (8, 64, 56, 56), dtype, "Channel major FP16 format")


def _residuals(layers: Sequence[Layer]) -> dict[int, list[int]]:
    """Who reads from whom in ResNet-50: the last convolution of a block also reads what the block reads, or its
    downsampling."""
    reads: dict[int, list[int]] = {}
    block = last = 0
    shortcut = 0
    for index, layer in enumerate(layers):
        part = layer.name.rsplit("/", 1)[-1]
        if part == "conv1" and index:
            block = shortcut = index - 1
        elif part.startswith("downsample"):
            reads[index], shortcut, last = [block], index, index - 1
        elif part == "conv3":
            reads[index] = [last if shortcut == index - 1 else index - 1, shortcut]
    return reads
