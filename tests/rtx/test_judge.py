"""The two judges, on networks where TensorRT for RTX and TensorRT ask for different things."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.config import BuildConfig
from trtopt.engine.backend import TENSORRT, TENSORRT_RTX
from trtopt.engine.build import Compiler
from trtopt.engine.request import BuildRequest
from trtopt.errors import EngineBuildError
from trtopt.events import ignore
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.edit import all_nodes
from trtopt.graph.shapes import infer_shapes
from trtopt.hardware.spec import find_gpu
from trtopt.judge.judges import judge_for
from trtopt.judge.protocol import PriceFile
from trtopt.judge.target import BuildTarget
from trtopt.pipeline.guard import rewrite
from trtopt.report.schema.layers import LayerInfo
from trtopt.report.schema.steps import Cost, StepRecord
from trtopt.source.onnx_file import load
from trtopt.support.precision import Precision

pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")

L4 = find_gpu("L4")


def network(path: Path, graph: str, **weights: tuple[int, ...]) -> ir.Model:
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>' + graph)
    rng = np.random.default_rng(0)
    for name, shape in weights.items():
        array = rng.standard_normal(shape, dtype=np.float32) * 0.05
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, path)
    return infer_shapes(load(path).model)


def convs(tmp_path: Path, channels: int) -> ir.Model:
    return network(
        tmp_path / f"{channels}.onnx",
        "g (float[8, 64, 28, 28] x) => (float[8, 64, 28, 28] y) {"
        "a = Conv<pads = [1, 1, 1, 1]>(x, v) b = Relu(a) y = Conv<pads = [1, 1, 1, 1]>(b, w) }",
        v=(channels, 64, 3, 3),
        w=(64, channels, 3, 3),
    )


def products(tmp_path: Path, width: int) -> ir.Model:
    return network(
        tmp_path / f"{width}.onnx",
        "g (float[1576, 768] x) => (float[1576, 768] y) { a = MatMul(x, v) b = Relu(a) y = MatMul(b, w) }",
        v=(768, width),
        w=(width, 768),
    )


def costs(tmp_path: Path, precision: str, *channels: int) -> list[Cost]:
    with judge_for(TENSORRT_RTX, L4, Precision(precision)) as judge:
        return [judge.price(convs(tmp_path, count), inner=True).total for count in channels]


def test_the_compiler_inserts_a_padding_kernel_for_odd_channels(tmp_path: Path) -> None:
    odd, even, aligned = costs(tmp_path, "fp16", 61, 62, 64)
    assert odd.kernels == even.kernels + 1 == aligned.kernels + 1
    assert even.bytes < aligned.bytes < odd.bytes and even.predicted_us < odd.predicted_us


def test_an_inner_piece_has_no_casts_at_its_borders(tmp_path: Path) -> None:
    with judge_for(TENSORRT_RTX, L4, Precision.FP16) as judge:
        model = convs(tmp_path, 64)
        assert judge.price(model, inner=True).total.bytes < judge.price(model, inner=False).total.bytes
        assert all(value.dtype is ir.DataType.FLOAT for value in (*model.graph.inputs, *model.graph.outputs))


def test_the_judges_disagree_about_products_with_odd_sizes(tmp_path: Path) -> None:
    """TensorRT for RTX pads the weights beforehand; by the performance model misaligned rows are slower to load."""
    odd, aligned = products(tmp_path, 3067), products(tmp_path, 3072)
    with judge_for(TENSORRT, L4, Precision.FP16) as judge:
        assert judge.name == "model:tensorrt"
        assert (
            judge.price(aligned, inner=True).total.predicted_us < 0.98 * judge.price(odd, inner=True).total.predicted_us
        )
    with judge_for(TENSORRT_RTX, L4, Precision.FP16) as judge:
        assert judge.price(aligned, inner=True).total.kernels == judge.price(odd, inner=True).total.kernels


def test_the_judge_names_its_compiler() -> None:
    with judge_for(TENSORRT_RTX, L4, Precision.FP16) as judge:
        assert judge.name.startswith("compiler:tensorrt-rtx 1.")


def test_a_refused_graph_is_an_error_and_the_next_one_is_compiled(tmp_path: Path) -> None:
    good = convs(tmp_path, 64)
    bad = good.clone()
    for node in list(all_nodes(bad.graph))[1:2]:
        node.op_type = "Det"
    with judge_for(TENSORRT_RTX, L4, None) as judge:
        first = judge.price(good, inner=True)
        with pytest.raises(EngineBuildError):
            judge.price(bad, inner=True)
        assert judge.price(good, inner=True) == first


def test_one_process_builds_all_and_ends_with_the_compiler(tmp_path: Path) -> None:
    model = convs(tmp_path, 64)
    path = tmp_path / "m.onnx"
    ir.save(model, path)
    request = BuildRequest(path, TENSORRT_RTX, L4, tuple(str(node.name) for node in model.graph))
    with Compiler() as compiler:
        first, process = compiler.layers(request), compiler._process
        assert compiler.layers(request) == first and compiler._process is process
    assert process is not None and process.returncode is not None


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="page faults are read from /proc")
def test_a_build_uses_the_memory_of_the_one_before(tmp_path: Path) -> None:
    """Given back, it would be 17000 pages that each build lets the kernel clear anew."""

    def faults() -> int:
        assert compiler._process is not None
        stat = Path(f"/proc/{compiler._process.pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[7])  # minflt, proc(5)

    path = tmp_path / "m.onnx"
    model = convs(tmp_path, 64)
    ir.save(model, path)
    request = BuildRequest(path, TENSORRT_RTX, L4, tuple(str(node.name) for node in model.graph))
    found = []
    with Compiler() as compiler:
        for _ in range(4):
            compiler.layers(request)
            found.append(faults())
    assert found[-1] - found[-2] < 2000


def test_a_worker_that_dies_is_an_error_and_started_again(tmp_path: Path) -> None:
    model = convs(tmp_path, 64)
    path = tmp_path / "m.onnx"
    ir.save(model, path)
    request = BuildRequest(path, TENSORRT_RTX, L4, tuple(str(node.name) for node in model.graph))
    with Compiler() as compiler:
        first = compiler.layers(request)
        assert compiler._process is not None
        compiler._process.kill()
        compiler._process.wait()
        with pytest.raises(EngineBuildError):
            compiler.layers(request)
        assert compiler.layers(request) == first


DEPTHWISE = (
    "g (float[8, 64, 56, 56] x) => (float[8, 64, 56, 56] y) { a = Conv(x, v) b = Relu(a) "
    "c = Conv<pads = [1, 1, 1, 1], group = 61>(b, d) e = Relu(c) y = Conv(e, w) }"
)


def plans(model: ir.Model, path: Path) -> dict[str, list[str]]:
    """The sizes each backend pads to, in FP16."""
    found = {}
    for backend in (TENSORRT_RTX, TENSORRT):
        config = BuildConfig(recipes="misaligned-channels")
        artifact = ModelArtifact(model, path, "")
        gpu = find_gpu("A100")
        open_judge = partial(judge_for, backend, gpu)
        rewritten = rewrite(artifact, BuildTarget(backend, gpu), Precision.FP16, config, open_judge, {}, ignore)
        regions = [region for step in rewritten.artifact.steps for region in step.regions]
        found[backend.name] = [region.choice for region in regions if region.kept]
    return found


def test_an_odd_width_network_is_planned_differently_for_the_two(tmp_path: Path) -> None:
    assert plans(convs(tmp_path, 61), tmp_path) == {"tensorrt-rtx": ["62"], "tensorrt": ["64"]}
    assert plans(products(tmp_path, 3067), tmp_path) == {"tensorrt-rtx": [], "tensorrt": ["3072"]}


def test_a_depthwise_network_is_planned_differently_for_the_two(tmp_path: Path) -> None:
    """Its kernels move bytes and little else: by the performance model more channels cost more."""
    weights = {"v": (61, 64, 1, 1), "d": (61, 1, 3, 3), "w": (64, 61, 1, 1)}
    assert plans(network(tmp_path / "m.onnx", DEPTHWISE, **weights), tmp_path) == {
        "tensorrt-rtx": ["62"],
        "tensorrt": [],
    }


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BuildRequest]:
    """What the compiler was asked."""
    found: list[BuildRequest] = []
    layers = Compiler.layers

    def listed(compiler: Compiler, request: BuildRequest) -> tuple[LayerInfo, ...]:
        found.append(request)
        return layers(compiler, request)

    monkeypatch.setattr(Compiler, "layers", listed)
    return found


def test_a_second_run_of_the_recipes_asks_the_compiler_for_nothing(tmp_path: Path, asked: list[BuildRequest]) -> None:
    def steps(precision: str, scale: float = 1.0, io: tuple[str, ...] = ()) -> tuple[tuple[StepRecord, ...], int]:
        asked.clear()
        model = convs(tmp_path, 61)
        for value in model.graph.initializers.values():
            assert value.const_value is not None
            value.const_value = ir.tensor(value.const_value.numpy() * np.float32(scale), name=value.name)
        config = BuildConfig(cache_dir=str(tmp_path / "cache"), io=io)
        prices = partial(PriceFile, folder=config.cache_dir, on_event=ignore)
        open_judge = partial(judge_for, TENSORRT_RTX, L4, prices=prices)
        artifact, target = ModelArtifact(model, tmp_path, ""), BuildTarget(TENSORRT_RTX, L4)
        found = rewrite(artifact, target, Precision(precision), config, open_judge, {}, ignore)
        return tuple(replace(step, seconds=0.0) for step in found.artifact.steps), len(asked)

    first, count = steps("fp16")
    assert count > 1 and steps("fp16") == (first, 0) and steps("fp16", 0.5) == (first, 0)
    assert steps("fp16", 1e-7)[1] > 0, "weights that FP16 does not hold stay FP32"
    assert steps("fp32")[1] > 0 == steps("fp32")[1]
    assert steps("fp16", io=("x:fp16:hwc8",))[1] > 0 == steps("fp16", io=("x:fp16:hwc8",))[1]
