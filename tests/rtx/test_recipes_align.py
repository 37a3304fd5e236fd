"""What aligned channels change in engines of TensorRT for RTX: FP16, batch 8, judged by the compiler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from trtopt.engine.backend import TENSORRT, TENSORRT_RTX
from trtopt.hardware.spec import find_gpu
from trtopt.judge.judges import judge_for
from trtopt.judge.protocol import Judge
from trtopt.report.schema.steps import Cost, StepRecord
from trtopt.rewrite.driver import run
from trtopt.rewrite.protocol import Target
from trtopt.rewrite.sweeps import Judging
from trtopt.source.onnx_file import load
from trtopt.support.precision import Precision
from trtopt_recipes.align_channels import MisalignedChannels

pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")

RTX, TRT = Target("tensorrt-rtx", "fp16", "8.9"), Target("tensorrt", "fp16", "8.9")
SAME = "pads = [1, 1, 1, 1]"
Weights = Mapping[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def compiler() -> Iterator[Judge]:
    gpu = find_gpu("L4")
    assert gpu is not None
    with judge_for(TENSORRT_RTX, gpu, Precision.FP16) as judge:
        yield judge


@pytest.fixture(scope="module")
def model_judge() -> Iterator[Judge]:
    gpu = find_gpu("L4")
    assert gpu is not None
    with judge_for(TENSORRT, gpu, Precision.FP16) as judge:
        yield judge


def saved(folder: Path, nodes: str, weights: Weights, shape: str = "8, 64, 28, 28", out: str = "8, 64, H, W") -> Path:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[{shape}] x) => (float[{out}] y) {{ {nodes} }}'
    )
    rng = np.random.default_rng(0)
    for name, dims in weights.items():
        array = (rng.standard_normal(dims) * 0.05).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def judged(path: Path, target: Target, judge: Judge) -> tuple[StepRecord | None, Cost, Cost]:
    """The recipe's step, and the cost of the whole before and after."""
    result = run(load(path), recipes="misaligned-channels", strict=True, target=target, judging=Judging(judge, ()))
    assert result.before is not None and result.after is not None
    step = next((step for step in result.artifact.steps if step.name == "misaligned-channels"), None)
    return step, result.before, result.after


def chain(folder: Path, channels: int) -> Path:
    nodes = f"a = Conv <{SAME}> (x, u) b = Relu(a) c = Conv <{SAME}> (b, v) d = Relu(c) y = Conv <{SAME}> (d, w)"
    weights = {"u": (channels, 64, 3, 3), "v": (channels, channels, 3, 3), "w": (64, channels, 3, 3)}
    return saved(folder, nodes, weights)


def test_a_chain_of_odd_convolutions_loses_its_padding_kernels(compiler: Judge, tmp_path: Path) -> None:
    step, before, after = judged(chain(tmp_path, 61), RTX, compiler)
    assert step is not None and step.changes == 2
    assert after.kernels == before.kernels - 2
    assert after.bytes < 0.8 * before.bytes


def test_even_channels_are_refused_because_more_only_cost_bytes(compiler: Judge, tmp_path: Path) -> None:
    step, before, after = judged(chain(tmp_path, 60), RTX, compiler)
    assert step is not None and not step.changes and len(step.refusals) == 2
    assert all("even already" in refusal.reason for refusal in step.refusals)
    assert after == before
    (tmp_path / "64").mkdir()
    assert judged(chain(tmp_path / "64", 64), RTX, compiler)[1].kernels == before.kernels


def test_the_backends_plan_odd_networks_differently(compiler: Judge, model_judge: Judge, tmp_path: Path) -> None:
    """A product of 3067 rows is padded in the weights by one compiler and slower to load on the other."""
    matches = MisalignedChannels().find(load(chain(tmp_path, 61)).model, TRT).matches
    assert [match.choice for match in matches] == ["64", "64"]
    nodes = "a = MatMul(x, u) b = Relu(a) y = MatMul(b, v)"
    path = saved(tmp_path, nodes, {"u": (768, 3067), "v": (3067, 768)}, "1576, 768", "1576, 768")
    step, _, _ = judged(path, RTX, compiler)
    assert step is not None and not step.changes and "inside their weights" in step.refusals[0].reason
    step, before, after = judged(path, TRT, model_judge)
    assert step is not None and step.changes == 1 and after.predicted_us < before.predicted_us


@pytest.mark.parametrize(
    ("middle", "weights", "padding"),
    [
        pytest.param(
            f"c = Conv <group = 61, {SAME}> (b, v) d = Clip(c)", {"v": (61, 1, 3, 3), "w": (64, 61, 1, 1)}, 1,
            id="depthwise",
        ),
        pytest.param(
            f"c = Conv <group = 2, {SAME}> (b, v) d = Relu(c)",
            {"u": (62, 64, 3, 3), "v": (64, 31, 3, 3), "w": (64, 64, 1, 1)}, 1,
            id="groups",
        ),
        pytest.param(
            "c = ConvTranspose <strides = [2, 2]> (b, v) d = Relu(c)", {"v": (61, 60, 2, 2), "w": (64, 60, 1, 1)}, 2,
            id="transposed",
        ),
        pytest.param(
            f"c = Conv <{SAME}> (b, v) e = Relu(c) d = Concat <axis = 1> (b, e)",
            {"v": (32, 61, 3, 3), "w": (64, 93, 1, 1)}, 2,
            id="concat",
        ),
    ],
)  # fmt: skip
def test_other_convolutions_lose_their_padding_kernels(
    middle: str, weights: Weights, padding: int, compiler: Judge, tmp_path: Path
) -> None:
    nodes = f"a = Conv <{SAME}> (x, u) b = Relu(a) {middle} y = Conv(d, w)"
    step, before, after = judged(saved(tmp_path, nodes, {"u": (61, 64, 3, 3), **weights}), RTX, compiler)
    assert step is not None and step.changes
    assert after.kernels == before.kernels - padding and after.predicted_us < before.predicted_us


def test_a_dense_block_is_left_alone_because_its_concatenations_copy_anyway(compiler: Judge, tmp_path: Path) -> None:
    """Each concatenation is a kernel, and writes the padding on its way."""
    parts = ["x"]
    nodes: list[str] = []
    weights: dict[str, tuple[int, ...]] = {}
    for number in range(3):
        nodes.append(f"k{number} = Concat <axis = 1> ({', '.join(parts)})")
        nodes.append(f"c{number} = Conv <{SAME}> (k{number}, w{number}) p{number} = Relu(c{number})")
        weights[f"w{number}"] = (31, 64 + 31 * number, 3, 3)
        parts.append(f"p{number}")
    nodes.append(f"k = Concat <axis = 1> ({', '.join(parts)}) y = Conv(k, v)")
    path = saved(tmp_path, " ".join(nodes), {**weights, "v": (64, 157, 1, 1)})
    (match,) = MisalignedChannels().find(load(path).model, RTX).matches
    assert match.choice == "32+32+32"
    step, before, after = judged(path, RTX, compiler)
    assert step is not None and not step.changes and "does not pay" in step.refusals[-1].reason
    assert after == before
