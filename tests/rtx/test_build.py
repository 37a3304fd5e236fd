"""Engines built by the real TensorRT for RTX builder, which needs no GPU."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from rtx_nets import (
    CONV_FLOP,
    attention_net,
    batch_profile,
    constant,
    conv_net,
    if_net,
    loop_net,
    lstm_net,
    model,
    names,
    request,
)

from trtopt.engine import build as engine_build
from trtopt.engine import process as engine_process
from trtopt.engine import worker
from trtopt.engine.achieved import achieved_precision
from trtopt.engine.backend import TENSORRT, read_header
from trtopt.engine.build import TASK, Compiler, EngineArtifact, _run, build_engine
from trtopt.engine.cache import TimingCache
from trtopt.engine.option_search import AXES
from trtopt.engine.options import parse_builder_options
from trtopt.engine.request import ShapeProfile
from trtopt.errors import EngineBuildError, TargetError, UsageError
from trtopt.events import Event, ignore
from trtopt.report.schema.build import EngineRecord

pytest.importorskip("tensorrt_rtx")

IGNORED = ("builder_optimization_level", "tiling", "tactic_sources")

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def long_chain(layers: int = 300) -> onnx.ModelProto:
    """A network whose build takes seconds."""
    rng = np.random.default_rng(0)
    weights = [constant(f"w{i}", (rng.standard_normal((32, 32, 3, 3)) * 0.1).astype(np.float32)) for i in range(layers)]
    nodes = []
    for i in range(layers):
        nodes.append(helper.make_node("Conv", [f"v{i}", f"w{i}"], [f"c{i}"], name=f"conv{i}", pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Mish", [f"c{i}"], [f"v{i + 1}"], name=f"mish{i}"))
    return model(nodes, [("v0", np.float32, [1, 32, 16, 16])], [(f"v{layers}", np.float32)], weights)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> EngineArtifact:
    """The engine of ``conv_net()``."""
    return build_engine(request(conv_net(), tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> EngineRecord:
    """``conv_net`` of batches of 1 to 16, 8 at the optimum."""
    wanted = request(conv_net(batch="N"), tmp_path_factory.mktemp("dynamic"), profiles=[batch_profile(1, 8, 16)])
    return build_engine(wanted).record


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> EngineRecord:
    return build_engine(request(attention_net(), tmp_path_factory.mktemp("attention"))).record


@pytest.mark.parametrize(("precision", "math"), [("fp32", "fp32"), ("fp16", "fp16"), ("int8", "int8")])
def test_the_engine_runs_convolutions_at_the_precision_of_the_graph(tmp_path: Path, precision: str, math: str) -> None:
    artifact = build_engine(request(conv_net(precision), tmp_path))
    achieved = achieved_precision(artifact.record.layers, CONV_FLOP)
    assert next(iter(achieved)) == math
    expected = 1.0 if math != "int8" else 1 - CONV_FLOP["gemm"] / sum(CONV_FLOP.values())
    assert achieved[math].flop_share == pytest.approx(expected)
    assert sum(share.layers for share in achieved.values()) == artifact.record.kernels


def test_the_record_describes_the_bytes_that_were_built(plain: EngineArtifact) -> None:
    record = plain.record
    assert record.sha256 == hashlib.sha256(plain.data).hexdigest()
    assert record.bytes == len(plain.data) == read_header(plain.data).bytes
    assert record.compute_capabilities == ("8.9",)
    assert record.backend_version.startswith(read_header(plain.data).version)
    assert record.kernels == 5
    assert record.unclaimed_nodes == ()
    sizes = {"x": 8 * 16 * 256, "r1": 8 * 32 * 256, "r2": 8 * 32 * 64, "y": 8 * 8}
    assert record.activation_bytes == 4 * (3 * sizes["x"] + 2 * sizes["r1"] + 4 * sizes["r2"] + sizes["y"])
    weights = 32 * 16 * 9 + 32 * 32 * 9 + 2048 * 8
    assert 0 <= record.weight_bytes / 4 - weights <= 100
    assert "Layers:" in plain.raw_log


def test_half_precision_moves_half_the_bytes(tmp_path: Path, plain: EngineArtifact) -> None:
    half = build_engine(request(conv_net("fp16"), tmp_path)).record
    assert half.activation_bytes == plain.record.activation_bytes / 2
    assert half.kernels == plain.record.kernels


def test_a_repeated_build_gives_the_same_bytes(tmp_path: Path) -> None:
    wanted = request(conv_net("int8"), tmp_path)
    assert build_engine(wanted).data == build_engine(wanted).data


def test_a_dynamic_batch_counts_bytes_at_the_optimum(dynamic: EngineRecord, plain: EngineArtifact) -> None:
    assert any(-1 in tensor.shape for layer in dynamic.layers for tensor in layer.inputs)
    assert dynamic.activation_bytes == plain.record.activation_bytes
    assert dynamic.profiles == ({"x": {"min": [1, 16, 16, 16], "opt": [8, 16, 16, 16], "max": [16, 16, 16, 16]}},)


def test_a_second_profile_does_not_count_twice(tmp_path: Path, dynamic: EngineRecord) -> None:
    one, profiles = dynamic, [batch_profile(1, 8, 16), batch_profile(32, 32, 64)]
    two = build_engine(request(conv_net(batch="N"), tmp_path, profiles=profiles)).record
    assert len(two.layers) == 2 * len(one.layers)
    assert (two.kernels, two.activation_bytes, two.weight_bytes) == (
        one.kernels,
        one.activation_bytes,
        one.weight_bytes,
    )
    first, second = (achieved_precision(each.layers, CONV_FLOP) for each in (one, two))
    assert first == second


@pytest.mark.parametrize(
    ("net", "claimed"),
    [
        (if_net, {"choice", "matmul_then", "activation_then", "matmul_else", "activation_else"}),
        (loop_net, {"matmul_body", "relu_body"}),
        (lstm_net, {"lstm"}),
    ],
)
def test_control_flow_and_recurrent_networks_are_read_whole(tmp_path: Path, net: object, claimed: set[str]) -> None:
    proto = net()  # type: ignore[operator]
    record = build_engine(request(proto, tmp_path)).record
    found = {name for layer in record.layers for name in layer.onnx_nodes}
    assert claimed <= found
    assert found | set(record.unclaimed_nodes) == set(names(proto.graph))


def test_attention_is_one_kernel_whose_views_are_not_counted_twice(attention: EngineRecord) -> None:
    (kernel,) = [layer for layer in attention.layers if layer.kind == "mha"]
    assert {"scores", "softmax", "context"} <= set(kernel.onnx_nodes)
    one = 2 * 64 * 128 * 2
    assert attention.activation_bytes <= 18 * one


def test_attention_is_read_whole(attention: EngineRecord) -> None:
    found = {name for layer in attention.layers for name in layer.onnx_nodes}
    assert found >= {"scores", "softmax", "context", "proj_q", "proj_o", "residual"}
    assert found | set(attention.unclaimed_nodes) == set(names(attention_net().graph))


def test_names_with_punctuation_and_control_characters_come_back_whole(tmp_path: Path) -> None:
    weird = ["Conv, {α]: [ONNX Layer: x]", "re\nlu", "pool]", "Gemm }], Outputs: [ {"]
    rng = np.random.default_rng(0)
    weights = [
        constant("w", rng.standard_normal((16, 8, 3, 3)).astype(np.float32)),
        constant("v", rng.standard_normal((16, 10)).astype(np.float32)),
    ]
    nodes = [
        helper.make_node("Conv", ["x, [{é", "w"], ["a],b}: c"], name=weird[0]),
        helper.make_node("Relu", ["a],b}: c"], ["d, Dimensions: [1"], name=weird[1]),
        helper.make_node("GlobalAveragePool", ["d, Dimensions: [1"], ["e"], name=weird[2]),
        helper.make_node("Flatten", ["e"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "v"], ["y[0]"], name=weird[3]),
    ]
    proto = model(nodes, [("x, [{é", np.float32, [2, 8, 9, 9])], [("y[0]", np.float32)], weights)
    record = build_engine(request(proto, tmp_path)).record
    assert {name for layer in record.layers for name in layer.onnx_nodes} >= set(weird)
    assert {tensor.name for layer in record.layers for tensor in layer.inputs} >= {"x, [{é"}


def test_a_portable_engine_names_several_generations(tmp_path: Path) -> None:
    record = build_engine(request(conv_net(), tmp_path, gpu=None)).record
    assert {"8.0", "8.6", "8.9", "12.0"} <= set(record.compute_capabilities)


def test_an_engine_for_an_untargetable_gpu_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="H100") as caught:
        build_engine(request(conv_net(), tmp_path, gpu="H100"))
    assert "trtopt optimize" in caught.value.remedy


def test_an_unknown_operator_is_named_with_its_node(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="first"),
        helper.make_node("Foo", ["a"], ["y"], name="mine", domain="my.domain"),
    ]
    proto = model(nodes, [("x", np.float32, [4])], [("y", np.float32)], [])
    proto.opset_import.append(helper.make_opsetid("my.domain", 1))
    with pytest.raises(EngineBuildError, match="Foo") as caught:
        build_engine(request(proto, tmp_path))
    assert "'mine'" in caught.value.where
    assert "INVALID_NODE" in caught.value.where
    assert "--plugins" in caught.value.remedy


@pytest.mark.parametrize(
    "content", [b"", b"hello world\n" * 20, conv_net().SerializeToString()[:700]], ids=["empty", "text", "truncated"]
)
def test_a_file_that_is_no_model_fails_in_the_worker(tmp_path: Path, content: bytes) -> None:
    wanted = request(conv_net(), tmp_path)
    wanted.onnx.write_bytes(content)
    with pytest.raises(EngineBuildError):
        build_engine(wanted)


def test_the_builders_own_words_are_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(EngineBuildError, match=r"(?i)dynamic|profile"):
        build_engine(request(conv_net(batch="N"), tmp_path))


def test_a_failed_build_does_not_poison_the_next(tmp_path: Path, plain: EngineArtifact) -> None:
    with pytest.raises(EngineBuildError):
        build_engine(request(conv_net(), tmp_path, gpu="T4"))
    assert build_engine(request(conv_net(), tmp_path)).data == plain.data


def test_layers_that_do_not_add_up_to_the_graph_are_an_error_with_the_log_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    wanted = request(conv_net(), tmp_path)
    with pytest.raises(EngineBuildError, match="conv2") as caught:
        build_engine(type(wanted)(wanted.onnx, wanted.backend, wanted.gpu, ("conv1", "relu1", "relu2", "flatten")))
    (kept,) = tmp_path.glob("trtopt-layers-*.log")
    assert str(kept) in caught.value.remedy
    assert "Layers:" in kept.read_text(encoding="utf-8")


@needs_proc
def test_a_killed_worker_is_a_build_error_that_names_the_signal(tmp_path: Path) -> None:
    def kill(event: Event) -> None:
        if event.kind == "advance":
            for child in children_of(os.getpid()):
                os.kill(child, signal.SIGKILL)

    with pytest.raises(EngineBuildError, match="SIGKILL") as caught:
        build_engine(request(long_chain(), tmp_path), kill)
    assert caught.value.exit_code == 6


@pytest.mark.long
@needs_proc
def test_the_worker_dies_with_its_parent_and_leaves_nothing(tmp_path: Path) -> None:
    wanted = request(long_chain(), tmp_path)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from trtopt.engine.backend import TENSORRT_RTX\n"
        "from trtopt.engine.build import build_engine\nfrom trtopt.engine.request import BuildRequest\n"
        "from trtopt.hardware.spec import find_gpu\n"
        "request = BuildRequest(Path(sys.argv[1]), TENSORRT_RTX, find_gpu('L4'), ())\n"
        "build_engine(request, lambda event: print(event.kind, flush=True))\n"
    )
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(wanted.onnx)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    while parent.stdout.readline().strip() != "advance":
        assert parent.poll() is None
    (worker,) = children_of(parent.pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while (Path(f"/proc/{worker}").exists() or list(temporary.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()
    assert list(temporary.iterdir()) == []


def test_an_interrupted_build_stops_its_worker(tmp_path: Path) -> None:
    def interrupt(event: Event) -> None:
        if event.kind == "advance":
            raise KeyboardInterrupt

    start = set(children_of(os.getpid()))
    with pytest.raises(KeyboardInterrupt):
        build_engine(request(long_chain(), tmp_path), interrupt)
    assert set(children_of(os.getpid())) <= start


@pytest.mark.parametrize("kept", [True, False], ids=["build", "look"])
def test_a_build_without_progress_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    monkeypatch.setattr(engine_process, "STALL_S", 0.2)
    start = set(children_of(os.getpid()))
    wanted = request(long_chain(), tmp_path)
    with pytest.raises(EngineBuildError, match="no progress for 0.2 seconds"), Compiler() as compiler:  # noqa: RUF043
        build_engine(wanted) if kept else compiler.layers(wanted)
    assert set(children_of(os.getpid())) <= start


def test_progress_is_reported_step_by_step(tmp_path: Path) -> None:
    events: list[Event] = []
    build_engine(request(conv_net(), tmp_path), events.append)
    kinds = [event.kind for event in events if event.task == TASK]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert kinds.count("advance") >= 2


def test_tf32_is_part_of_the_engine(tmp_path: Path, plain: EngineArtifact) -> None:
    assert b"tf32=1" in build_engine(request(conv_net(), tmp_path, tf32=True)).data
    assert b"tf32=1" not in plain.data


def test_ignored_options_are_reported_and_change_nothing(tmp_path: Path, plain: EngineArtifact) -> None:
    options = ("builder_optimization_level=5", "sparsity=true", "tiling=full", "hardware_compatibility=ampere+")
    options += ("tactic_sources=none", "search=8")
    cache = tmp_path / "timing.cache"
    tuned = build_engine(request(conv_net(), tmp_path, builder=options, timing_cache=cache))
    assert tuned.data == plain.data
    assert tuned.record.ignored_options == (*options, f"timing_cache={cache}")
    assert plain.record.ignored_options == ()


def built_with(folder: Path, *items: str) -> bytes:
    """The engine, with the options set on the builder as they would be on TensorRT's."""
    options = parse_builder_options(items, TENSORRT, gpu_present=True)
    return _run(request(conv_net(), folder), options, TimingCache(), ignore).engine


@pytest.fixture(scope="module")
def without_options(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return built_with(tmp_path_factory.mktemp("without"))


IGNORED_ITEMS = [f"{key}={value}" for key, values in AXES for value in values if key in IGNORED]
IGNORED_ITEMS += ["l2_limit_for_tiling=1M", "avg_timing_iterations=4", "max_num_tactics=1", "build_route=-a=off"]


@pytest.mark.parametrize("item", IGNORED_ITEMS)
def test_what_is_called_ignored_leaves_the_engine_as_it_is(tmp_path: Path, item: str, without_options: bytes) -> None:
    assert built_with(tmp_path, item) == without_options


def test_a_workspace_too_small_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(EngineBuildError) as caught:
        build_engine(request(conv_net(), tmp_path, builder=("workspace=1K",)))
    assert "workspace" in caught.value.remedy


def test_no_auxiliary_streams_means_no_stream_synchronisation(tmp_path: Path) -> None:
    record = build_engine(request(lstm_net(), tmp_path, builder=("max_aux_streams=0",))).record
    assert not {"signal", "wait"} & {layer.type for layer in record.layers}


def test_weight_streaming_builds(tmp_path: Path) -> None:
    record = build_engine(request(conv_net("fp16"), tmp_path, builder=("weight_streaming=true",))).record
    assert record.kernels == 5


def test_a_plugin_library_that_does_not_load_is_named(tmp_path: Path) -> None:
    library = tmp_path / "libnone.so"
    library.write_bytes(b"not a library")
    with pytest.raises(UsageError, match=r"cannot be loaded: Unable to load library: .*file too short\n") as caught:
        build_engine(request(conv_net(), tmp_path, plugins=(library,)))
    assert str(library) in caught.value.where
    with pytest.raises(UsageError, match="no such plugin library"):
        build_engine(request(conv_net(), tmp_path, plugins=(tmp_path / "missing.so",)))


def test_weights_beside_the_model_are_found_whatever_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: EngineArtifact
) -> None:
    wanted = request(conv_net(), tmp_path)
    onnx.save(conv_net(), wanted.onnx, save_as_external_data=True, location="weights.bin", size_threshold=0)
    monkeypatch.chdir("/")
    assert (tmp_path / "weights.bin").stat().st_size > 0
    assert build_engine(wanted).record.weight_bytes == plain.record.weight_bytes


def test_inputs_the_profile_does_not_name_keep_their_shape(tmp_path: Path) -> None:
    net = conv_net(batch="N")
    static = ShapeProfile({"x": ((4, 16, 16, 16),) * 3})
    record = build_engine(request(net, tmp_path, profiles=[static])).record
    assert all(-1 not in tensor.shape for layer in record.layers for tensor in layer.inputs)


def test_the_timing_cache_goes_through_the_worker(tmp_path: Path) -> None:
    """TensorRT for RTX has the calls of TensorRT and a timing cache that holds nothing: no kernel is ever timed."""
    wanted = request(conv_net(), tmp_path)
    settings = engine_build.check_options((), (), wanted.backend)
    asked = engine_build.worker_request(wanted, settings)
    asked["flags"]["ERROR_ON_TIMING_CACHE_MISS"] = True
    for named in ("", "times.cache"):
        (tmp_path / worker.REQUEST).write_text(json.dumps({**asked, "timing_cache": named}))
        (tmp_path / worker.TIMING_CACHE).write_bytes(b"")
        assert engine_build._start_worker(tmp_path, lambda event: None) == 0
        assert json.loads((tmp_path / worker.RESULT).read_text())["ok"]
        assert (tmp_path / worker.TIMING_CACHE).read_bytes()
