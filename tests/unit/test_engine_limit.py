"""The limit of an engine: the time of its necessary work, and the reasons why kernels take longer."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from test_engine_work import count, host, kernel, parse, tensor

from trtopt.engine.limit import limit_of
from trtopt.hardware.spec import GpuSpec, all_gpus, find_gpu, precisions_of
from trtopt.report.schema.analysis import Limit
from trtopt.report.schema.layers import LayerInfo
from trtopt.report.text.limit import REASONS, limit_text
from trtopt.roofline.constants import constants_for
from trtopt.roofline.layer import layer_times, predict
from trtopt.roofline.necessary import necessary_times
from trtopt.roofline.work import AttentionSizes, Gemm, Window, Work
from trtopt.support.precision import ELEMENT_BYTES, Precision

GPU = find_gpu("A100")


def limit(model: ir.Model, *layers: LayerInfo) -> Limit:
    work = count(model, *layers).layers
    return limit_of(layers, work, predict(work, GPU)[0], model, GPU)


def reasons(found: Limit) -> dict[str, str]:
    return {name: item.reason for item in found.kernels for name in item.layers}


SQUARE = "(float16[64, 64] x) => (float16[64, 64] y) <float16[64, 64] w>"


def product(size: int = 4096) -> ir.Model:
    square = f"float16[{size}, {size}]"
    return parse(f"g ({square} x) => ({square} y) <{square} w> {{ h = MatMul(x, w) y = Relu(h) }}")


def gemm(name: str, nodes: str, reads: str, writes: str, size: int = 4096, dtype: str = "Half") -> LayerInfo:
    x, y, w = (tensor(each, size, size, dtype=dtype) for each in (reads, writes, "w_myl0"))
    return kernel(name, nodes, [x], [y], (w,), kind="gemm")


def relu(reads: str, size: int = 4096) -> LayerInfo:
    return kernel("relu", "y", [tensor(reads, size, size)], [tensor("y", size, size)])


def test_a_large_product_alone_is_near_its_limit() -> None:
    found = limit(product(), gemm("a", "h y", "x", "y"))
    assert found.needed_bytes == 3 * 2 * 4096**2
    assert found.limit_us == pytest.approx(2 * 4096**3 / 312e6, rel=0.01)
    assert 0.8 < found.limit_us / found.predicted_us < 1


def test_what_the_network_does_not_ask_for_is_no_necessary_work() -> None:
    copied = kernel("copy", "", [tensor("x", 4096, 4096)], [tensor("t", 4096, 4096)])
    found = limit(
        product(),
        copied,
        gemm("a", "h", "t", "h"),
        relu("h"),
    )
    alone = limit(product(), gemm("a", "h y", "x", "y"))
    assert found.needed_bytes == alone.needed_bytes
    assert reasons(found)["copy"] == "layout"
    assert reasons(found)["relu"] == "element-wise"
    assert found.predicted_us > 1.1 * alone.predicted_us


def test_excesses_and_limit_add_up_to_the_prediction() -> None:
    found = limit(
        product(64),
        gemm("a", "h", "x", "h", size=64),
        relu("h", 64),
    )
    assert found.limit_us + sum(item.excess_us for item in found.kernels) == pytest.approx(found.predicted_us)
    assert reasons(found)["a"] == "launch"


def test_equal_kernels_are_one_group_the_largest_first() -> None:
    model = parse(f"g {SQUARE} {{ a = MatMul(x, w) b = MatMul(a, w) y = Relu(b) }}")
    found = limit(
        model,
        gemm("one", "a", "x", "a", size=64),
        gemm("two", "b", "a", "b", size=64),
        relu("b", 64),
    )
    assert [(item.layers, item.kernels) for item in found.kernels] == [(("one", "two"), 2), (("relu",), 1)]
    assert found.needed_bytes == 3 * 2 * 64 * 64, "the weight that both read counts once"


def test_a_padding_is_not_necessary_and_a_table_counts_the_rows_that_are_read() -> None:
    model = parse("g (int64[8] i) => (float16[8, 64] y) <float16[1000, 64] t> { y = Gather(t, i) }")
    rows = kernel("rows", "y", [tensor("i", 8, dtype="Int64")], [tensor("y", 8, 64)], (tensor("t", 1000, 64),))
    assert limit(model, rows).needed_bytes == 8 * 8 + 2 * 8 * 64 * 2
    model = parse("g (float16[8, 63] x) => (float16[8, 64] y) <float16[8, 1] z> { y = Concat<axis=1>(x, z) }")
    padding = kernel("pad", "y", [tensor("x", 8, 63)], [tensor("y", 8, 64)], (tensor("z", 8, 1),))
    assert limit(model, padding).needed_bytes == 2 * 8 * 63 + 2 * 8 * 64


def test_tables_of_one_shape_share_the_rows_that_are_read() -> None:
    model = parse(
        "g (int64[8] i) => (float16[8, 64] y) <float16[1000, 64] s, float16[1000, 64] t>"
        " { a = Gather(s, i) b = Gather(t, i) y = Add(a, b) }"
    )
    tables = (tensor("s", 1000, 64), tensor("t", 1000, 64))
    bags = kernel("bags", "a b y", [tensor("i", 8, dtype="Int64")], [tensor("y", 8, 64)], tables)
    work = count(model, bags).layers[0].work
    assert work is not None
    assert work.weight_bytes == 2 * 8 * 64 * 2


def test_fp32_among_narrower_kernels_is_named_and_not_in_an_fp32_engine() -> None:
    model = parse(f"g {SQUARE} {{ h = MatMul(x, w) a = Exp(h) y = Relu(a) }}")
    wide = kernel("e", "a", [tensor("h", 64, 64, dtype="Float")], [tensor("a", 64, 64, dtype="Float")])
    last = kernel("r", "y", [tensor("a", 64, 64, dtype="Float")], [tensor("y", 64, 64)])
    assert reasons(limit(model, gemm("m", "h", "x", "h", size=64), wide, last))["e"] == "fp32"
    first = gemm("m", "h", "x", "h", size=64, dtype="Float")
    assert reasons(limit(model, first, wide, last))["e"] == "element-wise"


def test_syncs_are_counted_one_by_one() -> None:
    found = limit(product(64), gemm("a", "h y", "x", "y", size=64), host("wait", [], ["s"]), host("wait", [], ["t"]))
    assert [item.kernels for item in found.kernels if item.reason == "sync"] == [2]


def test_the_limit_in_words() -> None:
    found = limit(product(), gemm("a", "h y", "x", "y"))
    assert limit_text(found).startswith(f"{found.limit_us:.0f} us of {found.predicted_us:.0f} us (")
    assert {item.reason for item in found.kernels} <= REASONS.keys()


def test_the_mask_of_an_attention_counts() -> None:
    full = AttentionSizes(512, 512, 64, 64, 96, 96)
    causal = AttentionSizes(512, 512, 64, 64, 96, 96, causal=True)
    works = [_attention(full, Precision.FP16), _attention(causal, Precision.FP16)]
    bounds = necessary_times(works, [0, 0], GPU).math
    assert bounds[1] / bounds[0] == pytest.approx(513 / 1024)


def _attention(sizes: AttentionSizes, dtype: Precision) -> Work:
    scores = Gemm(sizes.queries, sizes.keys, sizes.size, sizes.heads)
    element = ELEMENT_BYTES[dtype]
    read = (sizes.heads * sizes.queries * sizes.size + 2 * sizes.kv_heads * sizes.keys * sizes.size) * element
    written = sizes.heads * sizes.queries * sizes.value_size * element
    return Work("attention", 2 * scores.flop, int(read), 0, int(written), dtype, gemm=scores, attention=sizes)


def _random_work(rng: np.random.Generator, types: list[Precision]) -> Work:
    def size(largest: int) -> int:
        return int(np.exp(rng.uniform(0, np.log(largest))))

    dtype = types[rng.integers(len(types))]
    element = ELEMENT_BYTES[dtype]
    m, n, k, batch, steps = size(65536), size(8192), size(8192), size(64), size(200)
    read, weight, written = (int(count * element) for count in (m * k * batch, k * n * batch, m * n * batch))
    gemm = Gemm(m, n, k, batch)
    alignment = 2 ** int(rng.integers(8))
    match rng.integers(6):
        case 0:
            flop = int(gemm.flop * rng.uniform(1, 2))
            return Work("gemm", flop, read, weight, written, dtype, gemm=gemm, alignment_bytes=alignment)
        case 1:
            taps, stride = int(rng.integers(1, 6)), int(rng.integers(1, 4))
            gemm = Gemm(m, n, size(512) * taps**2)
            window = Window((taps, taps), (stride, stride), (1, 1))
            pixels, weight, written = m * stride**2 * gemm.k // taps**2, gemm.k * n, m * n
            moved = [int(count * element) for count in (pixels, weight, written)]
            return Work("conv", gemm.flop, *moved, dtype, gemm=gemm, window=window, alignment_bytes=alignment)
        case 2:
            gemm, window = Gemm(m, 1, 9, n), Window((3, 3), (1, 1), (1, 1), n)
            pixels = int(m * n * element)
            return Work("depthwise", gemm.flop, pixels, 9 * n, pixels, dtype, gemm=gemm, window=window)
        case 3:
            heads, queries = size(128), 1 if rng.random() < 0.3 else size(4096)
            keys, causal = queries + size(4096), bool(rng.random() < 0.5)
            head, value = (int(8 * each) for each in rng.integers(1, 33, 2))
            seen = size(2048) if causal and rng.random() < 0.5 else 0
            group = int(2 ** rng.integers(6))
            return _attention(AttentionSizes(queries, keys, head, value, heads * group, heads, causal, seen), dtype)
        case 4:
            gemm = Gemm(size(64), 4 * k, k)
            weight = int(2 * gemm.n * k * element)
            flop = gemm.flop * steps * 2
            return Work("recurrent", flop, size(10**7), weight, size(10**6), dtype, gemm=gemm, steps=steps)
    return Work("memory", size(10**9), size(10**9), size(10**7), size(10**9), dtype, pooled=bool(rng.integers(2)))


def _in_network(rng: np.random.Generator, work: Work) -> Work:
    """Alone, or in a network that touches 1 MiB to 1 GiB."""
    touched = int(2 ** rng.uniform(20, 30)) if rng.random() < 0.7 else 0
    return dataclasses.replace(work, network_share=float(rng.choice([0, 0.5, 1])), inference_bytes=touched)


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: str(gpu.name))
def test_no_necessary_work_takes_longer_than_predicted(gpu: GpuSpec) -> None:
    rng = np.random.default_rng(23)
    types = [Precision(name) for name in precisions_of(gpu)]
    works = [_in_network(rng, _random_work(rng, types)) for _ in range(200)]
    needed = [int(work.bytes * share) for work, share in zip(works, rng.choice([0, 0.3, 1], len(works)), strict=True)]
    times = layer_times(works, gpu, constants_for(gpu))
    for work, least, time in zip(works, necessary_times(works, needed, gpu).total, times, strict=True):
        assert least <= (time.predicted_us - time.latency_us) * (1 + 1e-9), work


def test_weights_that_a_kernel_before_has_read_are_read_again_and_a_short_stream_misses_the_bandwidth() -> None:
    model = parse(
        "g (float16[8, 4096] x) => (float16[8, 4096] y) <float16[4096, 4096] w> { h = MatMul(x, w) y = MatMul(h, w) }"
    )
    tokens = {name: tensor(name, 8, 4096) for name in ("x", "h", "y")}
    weight = (tensor("w", 4096, 4096),)
    first = kernel("first", "h", [tokens["x"]], [tokens["h"]], weight, kind="gemm")
    second = kernel("second", "y", [tokens["h"]], [tokens["y"]], weight, kind="gemm")
    assert reasons(limit(model, first, second)) == {"first": "bandwidth", "second": "read-again"}


def test_a_product_that_moves_more_than_it_computes_is_bound_by_its_activations() -> None:
    wide, narrow = "float16[262144, 64]", "float16[64, 64]"
    model = parse(f"g ({wide} x) => ({wide} y) <{narrow} w> {{ t = Relu(x) h = MatMul(t, w) y = Relu(h) }}")
    tokens = {name: tensor(name, 262144, 64) for name in ("x", "t", "h", "y")}
    layers = (
        kernel("before", "t", [tokens["x"]], [tokens["t"]]),
        kernel("product", "h", [tokens["t"]], [tokens["h"]], (tensor("w", 64, 64),), kind="gemm"),
        kernel("behind", "y", [tokens["h"]], [tokens["y"]]),
    )
    assert reasons(limit(model, *layers))["product"] == "activations"
