"""Why a layer takes longer than it could: each reason where it holds, and not where it does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trtopt.engine.achieved import is_sparse, uses_tensor_cores
from trtopt.errors import UsageError
from trtopt.hardware.spec import find_gpu
from trtopt.profiling.explain import FAR, PAGES, REASONS, LayerInNetwork, Network, deviations
from trtopt.profiling.findings import findings_of
from trtopt.profiling.join import Device, join
from trtopt.profiling.measured import MeasuredLayer, Measurement
from trtopt.report.schema.layers import LayerInfo, TensorInfo
from trtopt.report.schema.profile import ProfileSource
from trtopt.roofline.layer import predict
from trtopt.roofline.work import Gemm, Layer, Window, Work

A100 = find_gpu("A100")
HMMA = "sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize64x64x64_stage4_g1_tensor16x8x16"
SGEMM = "ampere_scudnn_128x64_relu_xregs_large_nn_v1"
ROW_MAJOR = "Row major linear FP16 format"


def gemm_work(m: int = 27648, n: int = 1024, k: int = 1024, **changes: Any) -> Work:
    gemm = Gemm(m, n, k)
    work = Work("gemm", gemm.flop, 2 * m * k, 2 * k * n, 2 * m * n, "fp16", gemm=gemm)
    return dataclasses.replace(work, **changes)


def info(
    name: str = "layer", kind: str = "gemm", tactic: str = HMMA, shape: tuple[int, ...] = (8, 64), form: str = ROW_MAJOR
) -> LayerInfo:
    tensors = (TensorInfo("a", shape, "Half", form),), (TensorInfo("b", shape, "Half", form),)
    return LayerInfo(name, kind, (name,), *tensors, tactic=tactic)


def reasons(
    layer: LayerInfo, work: Work | None, measured_us: float | None = None, clock: float = 1.0
) -> dict[str, float]:
    """Microseconds by reason; measured as predicted unless told otherwise."""
    rows, _ = predict([Layer(layer.name, "x", layer.onnx_nodes, work)], A100, timing="profile")
    row = rows[0] if rows else None
    us = measured_us if measured_us is not None else row.predicted_us if row is not None else 1.0
    subject = LayerInNetwork(MeasuredLayer(layer, "x", work, us), row, Network(A100, clock_share=clock))
    return {item.reason: item.us for item in deviations(subject)}


def test_a_kernel_as_fast_as_predicted_has_no_reason() -> None:
    assert reasons(info(), gemm_work()) == {}


def test_a_product_on_cuda_cores_could_win_the_difference_to_tensor_cores() -> None:
    work = gemm_work()
    on_tensor_cores = predict([Layer("x", "x", (), work)], A100, timing="profile")[0][0].predicted_us
    found = reasons(info(tactic=SGEMM), work, 900.0)
    assert found["no-tensor-core"] == pytest.approx(900.0 - on_tensor_cores)


def test_fp32_on_cuda_cores_is_compared_with_tf32() -> None:
    work = gemm_work(dtype="fp32")
    in_tf32 = predict([Layer("x", "x", (), dataclasses.replace(work, dtype="tf32"))], A100, timing="profile")[0][
        0
    ].predicted_us
    assert reasons(info(tactic=SGEMM), work, 2000.0)["no-tensor-core"] == pytest.approx(2000.0 - in_tf32)


def test_a_matrix_by_a_vector_needs_no_tensor_cores() -> None:
    assert "no-tensor-core" not in reasons(info(tactic="cublas_gemvx_f16f16_f32"), gemm_work(m=1), 100.0)


def test_a_hidden_kernel_is_not_said_to_miss_tensor_cores() -> None:
    assert "no-tensor-core" not in reasons(info(tactic=""), gemm_work(), 2000.0)


def test_a_reformat_costs_all_of_its_time() -> None:
    layer = info("Reformatting CopyNode for Input Tensor 0 to Conv_0", "Reformat", "")
    work = Work("layout", 0, 1 << 20, 0, 1 << 20, "fp32")
    assert reasons(layer, work, 80.896)["reformat-copy"] == 80.896


def test_a_reformat_that_is_a_quantizer_counts_as_one() -> None:
    found = reasons(info("QuantizeLinear_2", "Reformat", ""), Work("layout", 0, 1 << 24, 0, 1 << 22, "fp32"), 60.0)
    assert found["unfused-qdq"] == 60.0 and "reformat-copy" not in found


def test_a_quantizer_inside_of_a_product_is_no_kernel_of_its_own() -> None:
    layer = dataclasses.replace(info("conv"), onnx_nodes=("QuantizeLinear_7", "Conv_9"))
    assert "unfused-qdq" not in reasons(layer, gemm_work())


def test_misaligned_rows_cost_what_aligned_ones_would_win() -> None:
    odd, even = gemm_work(n=1021, alignment_bytes=2), gemm_work(n=1021, alignment_bytes=16)
    us = [predict([Layer("x", "x", (), work)], A100)[0][0].predicted_us for work in (odd, even)]
    assert reasons(info(), odd)["misaligned-channels"] == pytest.approx(us[0] - us[1])
    assert "misaligned-channels" not in reasons(info(), even)


def first_conv(channels: int) -> tuple[LayerInfo, Work]:
    gemm = Gemm(32 * 112 * 112, 64, channels * 49)
    window = Window((7, 7), (2, 2), (1, 1))
    work = Work("conv", gemm.flop, 32 * channels * 224 * 224 * 2, gemm.k * 128, gemm.m * 128, "fp16", gemm=gemm)
    work = dataclasses.replace(work, window=window, alignment_bytes=16)
    packed = "Channel major FP16 format where channel % 4 == 0"
    return info("Conv_0", "CaskConvolution", "first_layer_hmma_k64r7s7c4", (32, channels, 224, 224), packed), work


def test_a_first_layer_of_three_channels_computes_four() -> None:
    assert reasons(*first_conv(3))["padded-input"] == 0.0
    assert "padded-input" not in reasons(*first_conv(4))


def test_a_last_wave_costs_at_most_its_empty_slots() -> None:
    work = gemm_work(m=2304, n=1544, k=4096)  # 117 tiles of 256x128 on 108 SMs
    row = predict([Layer("x", "x", (), work)], A100, timing="profile")[0][0]
    assert row.wave_efficiency < 0.8
    assert reasons(info(), work)["tail-wave"] == pytest.approx(row.math_us * (1 / row.wave_efficiency - 1))


def test_a_tiny_kernel_is_bound_by_its_launch_as_in_a_graph() -> None:
    work = Work("memory", 100, 400, 0, 400, "fp32")
    launch = predict([Layer("x", "x", (), work)], A100)[0][0].latency_us
    assert reasons(info(kind="kgen", tactic=""), work)["launch-bound"] == pytest.approx(launch)


def test_a_low_clock_costs_its_share_of_what_is_bound_by_arithmetic() -> None:
    work = gemm_work()
    assert reasons(info(), work, 100.0, clock=0.8)["low-clock"] == pytest.approx(20.0)
    assert "low-clock" not in reasons(info(), work, 100.0, clock=0.96)


def test_what_no_reason_explains_is_slower_than_predicted() -> None:
    predicted = predict([Layer("x", "x", (), gemm_work())], A100, timing="profile")[0][0].predicted_us
    found = reasons(info(), gemm_work(), predicted * 2)
    assert found == {"slower-than-predicted": pytest.approx(predicted)}
    assert reasons(info(), gemm_work(), predicted * (FAR - 0.01)) == {}
    assert reasons(info(), gemm_work(), predicted / 2) == {"faster-than-predicted": 0.0}


def test_what_a_reason_explains_is_not_counted_again() -> None:
    assert set(reasons(info(tactic=SGEMM), gemm_work(), 900.0)) == {"no-tensor-core"}


def test_a_layer_that_ran_nothing_deviates_in_nothing() -> None:
    assert reasons(info("Reformatting CopyNode", "Reformat", ""), None, 0.0) == {}


@pytest.mark.parametrize(
    ("tactic", "expected"),
    [
        (HMMA, True),
        ("ampere_h16816cudnn_128x128_ldg8_relu_exp_stages_64x3_large_nhwc_tn_v1", True),
        ("volta_h884cudnn_256x64_ldg8_relu_exp_interior_nhwc_tn_v1", True),
        ("sm80_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32_nchw_vect_c_32_tensor16x8x32_t1r3s3", True),
        ("trt_turing_cutlass_image_network_first_layer_hmma_fprop_f16f16f32_nhwc_nhwc_k64r7s7c4", True),
        ("volta_hcudnn_128x128_stridedB_splitK_interior_nn_v1", False),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_TNT", True),
        (SGEMM, False),
        ("ampere_fp32_icudnn_int8x4_128x64_relu_medium_nn_v1", False),
        ("cutlass_80_simt_sgemm_128x64_8x5_nn_align1", False),
        ("sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwckcrs_nhwc_tilesize128x64x8_stage3", False),
        ("sm50_xmma_pooling_coalescedC_NHWC_kMAX_3_False", None),
        ("__myl_MulSumAdd_0x8622c45a2ac50005b4481bcb604814ec", None),
        ("", None),
    ],
)
def test_tensor_cores_are_told_from_the_kernels_name(tactic: str, expected: bool | None) -> None:
    assert uses_tensor_cores(tactic) is expected


def test_sparse_kernels_are_told_from_their_names() -> None:
    assert is_sparse("sm80_xmma_fprop_sparse_conv_f16f16_f16f16_f16_nhwckrsc_nhwc_tensor16x8x32") is True
    assert is_sparse(HMMA) is False and is_sparse("") is None


def test_every_reason_has_a_page_with_its_headings() -> None:
    assert set(REASONS) < set(PAGES)
    for text in PAGES.values():
        assert all(f"\n{heading}:" in text for heading in ("What", "Why", "Example", "Remedy"))


def measurement(*layers: MeasuredLayer, end_to_end_us: float | None = None) -> Measurement:
    return Measurement(ProfileSource("trtexec", {}, "", 10, "profile"), layers, end_to_end_us)


def test_findings_gather_layers_by_reason_and_rank_them_by_time() -> None:
    copy = Work("layout", 0, 1 << 20, 0, 1 << 20, "fp32")
    layers = [MeasuredLayer(info(f"Reformat {us}", "Reformat", ""), "Reformat", copy, us) for us in (5.0, 30.0)]
    layers.append(MeasuredLayer(info("fp32", tactic=SGEMM), "MatMul", gemm_work(), 900.0))
    report = join(measurement(*layers), Device(A100))
    first, second, *_ = report.findings
    assert (first.rule, second.rule) == ("no-tensor-core", "reformat-copy")
    assert second.gain_us == 35.0 and second.nodes == ("Reformat 30.0", "Reformat 5.0")
    assert [item.gain_us for item in report.findings] == sorted((f.gain_us for f in report.findings), reverse=True)
    assert findings_of((), Network(A100)) == ()


def test_findings_end_in_a_line_to_type() -> None:
    copy = Work("layout", 0, 1 << 20, 0, 1 << 20, "fp32")
    image = LayerInfo("Reformat", "Reformat", (), (TensorInfo("image", (1, 3, 8, 8), "Float"),), ())
    layers = [MeasuredLayer(image, "Reformat", copy, 30.0)]
    layers.append(MeasuredLayer(info("fp32", tactic=SGEMM), "MatMul", gemm_work(), 900.0))
    found = {item.rule: item.command for item in join(measurement(*layers), Device(A100)).findings}
    assert found["no-tensor-core"] == "build --fp16"
    assert found["reformat-copy"] == "build --fp16 --io image:fp16:hwc4"
    assert all(found.values())


def test_totals_add_up_and_say_what_profiling_adds() -> None:
    known = MeasuredLayer(info("a"), "MatMul", gemm_work(), 100.0)
    silent = MeasuredLayer(info("b", "ForeignNode", ""), "ForeignNode", None, 50.0)
    idle = MeasuredLayer(info("c", "NoOp", ""), "NoOp", None, 0.0)
    report = join(measurement(known, silent, idle, end_to_end_us=120.0), Device(A100))
    totals = report.totals
    assert (totals.measured_us, totals.compared_us, totals.profiling_overhead_us) == (150.0, 100.0, 30.0)
    assert len(report.layers) == 3 and report.layers[1].predicted is None and report.layers[1].ratio is None
    predicted = report.layers[0].predicted_us
    assert predicted is not None and totals.predicted_us == predicted and report.layers[0].ratio == 100.0 / predicted
    assert totals.mean_error == pytest.approx(abs(predicted / 100.0 - 1)) and totals.rank_correlation is None
    assert totals.predicted_end_to_end_us is None  # a layer that ran has no prediction
    in_graph = predict([Layer("a", "x", (), gemm_work())], A100)[0][0].predicted_us
    alone = join(measurement(known, idle), Device(A100)).totals
    assert alone.predicted_end_to_end_us == pytest.approx(in_graph)


def test_fp32_between_narrow_layers_costs_the_bytes_or_what_the_kernel_is_slower() -> None:
    """A pooling in FP32 between INT8 layers, and an INT8 product that writes FP32."""
    shape = (32, 64, 112, 112)
    wide, narrow = TensorInfo("wide", shape, "Float", ""), TensorInfo("narrow", shape, "Int8", "")
    first = LayerInfo("first", "gemm", ("first",), (narrow,), (wide,), tactic=HMMA)
    pool = LayerInfo("pool", "Pooling", ("pool",), (wide,), (wide,), tactic="")
    work = gemm_work(dtype="int8")
    fast = predict([Layer("x", "x", (), work)], A100, timing="profile")[0][0].predicted_us
    elements = 32 * 64 * 112 * 112
    moved = Work("memory", elements, 4 * elements, 0, 4 * elements, "fp32")
    report = join(
        measurement(MeasuredLayer(first, "Conv", work, fast + 200.0), MeasuredLayer(pool, "MaxPool", moved, 150.0)),
        Device(A100),
    )
    found = [{item.reason: item.us for item in layer.deviation} for layer in report.layers]
    assert found[0]["wide-tensors"] == pytest.approx(200.0)
    assert found[1]["wide-tensors"] == pytest.approx(2 * 3 * elements / (A100.bandwidth_gbs * 1e3))
    assert "slower-than-predicted" not in found[0]
    network_input = dataclasses.replace(pool, inputs=(TensorInfo("image", shape, "Float"),), outputs=(narrow,))
    layers = [MeasuredLayer(network_input, "MaxPool", moved, 150.0), MeasuredLayer(info(), "MatMul", work, 100.0)]
    kept = [item.reason for layer in join(measurement(*layers), Device(A100)).layers for item in layer.deviation]
    assert "wide-tensors" not in kept


def test_a_gpu_that_cannot_have_been_so_fast_is_doubted() -> None:
    layer = MeasuredLayer(info(), "MatMul", gemm_work(), 100.0)  # 58 GFLOP
    assert any(
        "is it the GPU that was measured?" in line for line in join(measurement(layer), Device(find_gpu("T4"))).warnings
    )
    slow = MeasuredLayer(info(), "MatMul", gemm_work(), 1000.0)
    assert join(measurement(slow), Device(find_gpu("T4"))).warnings == ()


def test_a_type_that_the_gpu_lacks_blames_the_gpu() -> None:
    layer = MeasuredLayer(info(), "MatMul", gemm_work(dtype="fp8"), 100.0)
    with pytest.raises(UsageError) as caught:
        join(measurement(layer), Device(A100))
    assert caught.value.where == "--gpu" and "fp8" in caught.value.what


def test_a_long_kernel_name_takes_no_time() -> None:
    assert uses_tensor_cores("gemm_" * 40_000) is None


def test_achieved_shares_are_of_the_datasheet() -> None:
    work = gemm_work()
    layer = join(measurement(MeasuredLayer(info(), "MatMul", work, 100.0)), Device(A100)).layers[0]
    assert layer.math_share == pytest.approx(work.flop / 100e-6 / 312e12, rel=1e-3)
    assert layer.bandwidth_share == pytest.approx(work.bytes / 100e-6 / (A100.bandwidth_gbs * 1e9))


def test_the_modules_of_a_layer_come_from_its_nodes() -> None:
    layer = dataclasses.replace(info(), onnx_nodes=("/layer1/layer1.0/conv1/Conv", "/layer1/layer1.0/relu/Relu"))
    found = join(measurement(MeasuredLayer(layer, "Conv", gemm_work(), 100.0)), Device(A100)).layers[0]
    assert found.modules == ("layer1.0.conv1", "layer1.0.relu")
