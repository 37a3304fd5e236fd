"""``trtopt analyze`` as a user runs it, and the same from Python."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from small_models import save_external, save_small, small_model

import trtopt as package
from trtopt.config import AnalyzeConfig, flag, options
from trtopt.errors import MissingDependencyError, UsageError
from trtopt.events import Event
from trtopt.hardware.spec import GpuSpec, find_gpu
from trtopt.report.schema.analysis import Analysis, BatchPoint, BatchSweep, Finding, LayerRow, Memory, Totals

Run = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "analyze.md").read_text(encoding="utf-8")
MY_GPU = '[gpu."MY-GPU"]\nbase = "L4"\nbandwidth_gbs = 600\nsource = "a test"\n'


def analysis_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_json_has_every_field_of_the_contract_and_nothing_else_is_on_stdout(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    found = analysis_of(trtopt("analyze", "model.onnx", "--gpu", "rtx 4090", "--json", "--report", "r.json"))
    assert found["schema"] == "trtopt.analysis/1"
    assert {"path", "sha256", "opset", "inputs"} <= set(found["model"])
    assert found["gpu"]["name"] == "RTX-4090"
    assert found["precision"] == "fp16"
    assert {"flop", "bytes", "predicted_us"} <= set(found["totals"])
    assert found["layers"] and set(found["layers"][0]) == set(LayerRow.__dataclass_fields__)
    for total in ("flop", "bytes", "predicted_us"):
        assert found["totals"][total] == pytest.approx(sum(layer[total] for layer in found["layers"]))
    assert found["model"]["input_shapes"] == {"x": [8, 3, 8, 8]}
    assert json.loads((tmp_path / "r.json").read_text()) == found


def test_python_and_the_command_find_the_same(trtopt: Run, tmp_path: Path) -> None:
    path = save_small(tmp_path)
    found = analysis_of(trtopt("analyze", "model.onnx", "--gpu", "T4", "--int8", "--batch-sweep", "1..8", "--json"))
    options: dict[str, Any] = {"gpu": "T4", "precision": "int8", "batch_sweep": "1..8"}
    assert package.analyze(path, **options).to_json_dict() == found
    proto = onnx.load(path)
    for model in (proto, ir.from_proto(proto)):
        in_memory = package.analyze(model, **options)
        assert in_memory.model["path"] is None
        assert in_memory.to_json_dict()["layers"] == found["layers"]


def test_the_terminal_names_gpu_precision_and_what_was_assumed(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    done = trtopt("analyze", "model.onnx", "--gpu", "A100")
    assert done.returncode == 0, done.stderr
    assert "A100-SXM4-80GB" in done.stdout and "fp16" in done.stdout
    assert "note: x axis 0 (N) is taken as 8" in done.stderr and "warning" not in done.stderr


def test_without_a_gpu_present_it_is_the_default_one(trtopt: Run, tmp_path: Path) -> None:
    from trtopt.hardware.probe import probe

    save_small(tmp_path)
    found = analysis_of(trtopt("analyze", "model.onnx", "--json"))
    present = probe().gpu
    assert found["gpu"]["name"] == (present.name if present is not None else "L4")


@pytest.mark.parametrize("option", ["--shapes", "--opt-shapes", "--optShapes"])
def test_shapes_are_taken_from_any_spelling(trtopt: Run, tmp_path: Path, option: str) -> None:
    save_small(tmp_path)
    found = analysis_of(trtopt("analyze", "model.onnx", "--gpu", "L4", option, "x:3x3x8x8", "--json"))
    assert found["model"]["input_shapes"] == {"x": [3, 3, 8, 8]}
    assert found["warnings"] == []


@pytest.mark.parametrize("option", ["--shapes", "--opt-shapes", "--optShapes"])
def test_errors_name_the_option_as_it_was_typed(trtopt: Run, tmp_path: Path, option: str) -> None:
    save_small(tmp_path)
    done = trtopt("analyze", "model.onnx", f"{option}=y:3x3x8x8")
    assert done.returncode == 2
    assert f"where:  {option}\n" in done.stderr


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16", "int8"])
def test_each_precision_has_two_spellings(trtopt: Run, tmp_path: Path, precision: str) -> None:
    save_small(tmp_path, batch=4)
    short = analysis_of(trtopt("analyze", "model.onnx", "--gpu", "A100", f"--{precision}", "--json"))
    long = analysis_of(trtopt("analyze", "model.onnx", "--gpu", "A100", "--precision", precision, "--json"))
    assert short == long
    assert short["precision"] == precision
    assert precision in {layer["dtype"] for layer in short["layers"]}


def test_a_16_bit_model_keeps_its_types(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"], "half"), helper.make_node("Cast", ["h"], ["y"], "cast", to=1)],
        "half",
        [helper.make_tensor_value_info("x", TensorProto.BFLOAT16, [16, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [16, 64])],
        [helper.make_tensor("w", TensorProto.BFLOAT16, [64, 64], bytes(64 * 64 * 2), raw=True)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    found = package.analyze(model, gpu="L4")
    assert found.precision == "as-is"
    assert "bf16" in {row.dtype for row in found.layers}
    with pytest.raises(UsageError, match="no BF16 units"):
        package.analyze(model, gpu="T4")
    warned = package.analyze(model, gpu="L4", precision="fp16")
    assert any("BF16" in text for text in warned.warnings)


def test_int8_is_predicted_for_the_nodes_the_compilers_table_names(tmp_path: Path) -> None:
    found = package.analyze(save_small(tmp_path, batch=4), gpu="L4", precision="int8")
    types = {node: row.dtype for row in found.layers for node in row.onnx_nodes}
    assert types["conv1"] == types["conv2"] == types["head"] == "int8"
    assert types["pool"] != "int8"


def test_a_sweep_with_a_budget_names_a_batch_that_meets_it(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path, batch=1)
    done = trtopt("analyze", "model.onnx", "--gpu", "L4", "--batch-sweep", "1..64", "--latency-budget", "1", "--json")
    sweep = analysis_of(done)["batch_sweep"]
    points = {point["batch"]: point for point in sweep["points"]}
    assert min(points) == 1 and max(points) == 64 and len(points) > 16
    assert points[sweep["best_within_budget"]]["predicted_us"] <= sweep["budget_us"] == 1000
    assert "the batch of this model is fixed to 1 (axis 0 of x)" in done.stderr


def test_the_users_gpu_is_used_by_analyze_and_shown_by_gpu(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    (tmp_path / "trtopt.toml").write_text(MY_GPU + '[analyze]\ngpu = "my gpu"\nbatch_sweep = [1, 2]\n')
    found = analysis_of(trtopt("analyze", "model.onnx", "--config", "trtopt.toml", "--json"))
    assert found["gpu"]["name"] == "MY-GPU"
    assert found["gpu"]["bandwidth_gbs"] == 600
    assert len(found["batch_sweep"]["points"]) == 2
    (shown,) = analysis_of(trtopt("gpu", "show", "my-gpu", "--config", "trtopt.toml", "--json"))["gpus"]
    assert shown["bandwidth_gbs"] == 600
    assert "MY-GPU" in trtopt("gpu", "list", "--config", "trtopt.toml").stdout
    known = package.analyze(tmp_path / "model.onnx", gpu="L4").totals.predicted_us
    assert found["totals"]["predicted_us"] < known


def test_gpu_show_prints_units_and_ridge_points(trtopt: Run) -> None:
    text = trtopt("gpu", "show", "V100").stdout
    (row,) = [line.split() for line in text.splitlines() if line.startswith("FP16 ")]
    assert row == ["FP16", "125", "512", "138.9"]
    assert "FP16 products summed in FP16: 512" in trtopt("gpu", "show", "RTX-3090").stdout


def test_the_html_is_one_file(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    done = trtopt("analyze", "model.onnx", "--gpu", "L4", "--html", "m.html")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.html", "model.onnx"]
    assert (tmp_path / "m.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html")


def test_weights_in_another_file_are_not_read(trtopt: Run, tmp_path: Path) -> None:
    save_external(tmp_path)
    before = analysis_of(trtopt("analyze", "model.onnx", "--gpu", "L4", "--json"))
    (tmp_path / "weights.bin").write_bytes(bytes((tmp_path / "weights.bin").stat().st_size))
    after = analysis_of(trtopt("analyze", "model.onnx", "--gpu", "L4", "--json"))
    assert after == before
    assert after["model"]["weights_hashed"] is False
    save_small(tmp_path)
    assert analysis_of(trtopt("analyze", "model.onnx", "--gpu", "L4", "--json"))["layers"] == before["layers"]


@pytest.mark.parametrize(
    ("arguments", "what", "remedy"),
    [
        (["--gpu", "RTX 4099"], "No GPU is called 'RTX 4099'", "did you mean RTX-4090"),
        (["--gpu", "portable"], "stands for many GPUs", "name one of"),
        (["--gpu", "V100", "--bf16"], "V100-SXM2-16GB (compute capability 7.0) has no BF16 units", "fp32, fp16;"),
        (["--gpu", "V100", "--precision", "tf32"], "has no TF32 units", "it has fp32, fp16;"),
        (["--gpu", "V100", "--int8"], "has no INT8 units", "it has fp32, fp16;"),
        (["--gpu", "T4", "--tf32"], "T4 (compute capability 7.5) has no TF32 units", "fp32, fp16, int8;"),
        (["--precision", "fp61"], "'fp61' is not one of", "analyze --help"),
        (["--bf16", "--int8"], "not allowed with", "trtopt analyze --help"),
        (["--shapes", "y:1x3x8x8"], "no input 'y'", "Its inputs: x"),
        (["--shapes", "x:1x4x8x8"], "not 1x4x8x8", "static dimensions"),
        (["--shapes", "x=1x3"], "Not a shape", "name:1x3x224x224"),
        (["--batch-sweep", "0,1"], "batch size 0 is out of range", "from 1 to 65536"),
        (["--batch-sweep", "1..99999"], "batch size 99999 is out of range", "from 1 to 65536"),
        (["--batch-sweep", "one"], "Not a batch size", "write 1,2,4 or 1..256"),
        (["--latency-budget", "5"], "needs batch sizes", "--batch-sweep 1..256"),
        (["--html", "missing/m.html"], "output folder does not exist", "mkdir"),
        (["--html", "model.onnx"], "would overwrite the model", "another file"),
        (["--html", "a", "--report", "a"], "would overwrite --report", "another file"),
        (["--report", "."], "is a folder", "name a file"),
        (["--config", "none.toml"], "No such file", "check the path"),
        (["--compil"], "no option --compil", "did you mean --compile?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_message_with_a_remedy_and_code_2(
    trtopt: Run, tmp_path: Path, arguments: list[str], what: str, remedy: str
) -> None:
    save_small(tmp_path)
    done = trtopt("analyze", "model.onnx", *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert what in done.stderr
    assert remedy in done.stderr.partition("remedy: ")[2]
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_dynamic_axis_without_a_size_is_named_with_the_option(trtopt: Run, tmp_path: Path) -> None:
    model = small_model()
    for dim, symbol in zip(model.graph.input[0].type.tensor_type.shape.dim, ("N", "", "H", "W"), strict=True):
        if symbol:
            dim.dim_param = symbol
    onnx.save(model, tmp_path / "model.onnx")
    done = trtopt("analyze", "model.onnx")
    assert done.returncode == 2
    assert "axis 2 (H) and 3 (W) of the input 'x'" in done.stderr
    assert "--shapes x:8x3xHxW" in done.stderr
    assert trtopt("analyze", "model.onnx", "--shapes", "x:1x3x9x9").returncode == 0


@pytest.mark.parametrize(
    ("content", "code", "what"),
    [(None, 2, "does not exist"), (b"", 3, "is empty"), (b"\x08\x0agarbage" * 9, 3, "not an ONNX model")],
)
def test_a_missing_or_broken_model_is_an_error(
    trtopt: Run, tmp_path: Path, content: bytes | None, code: int, what: str
) -> None:
    if content is not None:
        (tmp_path / "model.onnx").write_bytes(content)
    done = trtopt("analyze", "model.onnx", "--html", "m.html")
    assert done.returncode == code
    assert what in done.stderr and "remedy: " in done.stderr
    assert not (tmp_path / "m.html").exists()


def test_an_output_never_overwrites_the_models_weights(trtopt: Run, tmp_path: Path) -> None:
    save_external(tmp_path)
    before = (tmp_path / "weights.bin").read_bytes()
    done = trtopt("analyze", "model.onnx", "--html", "weights.bin")
    assert done.returncode == 2
    assert "would overwrite the weights" in done.stderr
    assert (tmp_path / "weights.bin").read_bytes() == before


def test_the_name_of_an_open_stream_is_no_output(trtopt: Run, tmp_path: Path) -> None:
    script = (
        "from pathlib import Path\nfrom trtopt.errors import UsageError\n"
        "from trtopt.support.files import check_writable\n"
        "for name in ('/dev/stdout', '/dev/new', '/dev/fd/1', '/proc/self/fd/1'):\n"
        "    try:\n        check_writable(Path(name))\n"
        "    except UsageError as error:\n        assert 'device' in error.what, error\n"
        "    else:\n        raise SystemExit(f'{name} would be replaced')\n"
    )
    with open(tmp_path / "out.txt", "w") as stdout:
        done = subprocess.run([sys.executable, "-c", script], stdout=stdout, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("arguments", [["--json"], []])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is full")
def test_a_full_disk_behind_stdout_is_an_error_not_a_bug(tmp_path: Path, arguments: list[str]) -> None:
    save_small(tmp_path, batch=1)
    command = [sys.executable, "-m", "trtopt", "analyze", "model.onnx", "--gpu", "L4", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Cannot write the report" in done.stderr and "Traceback" not in done.stderr


def test_what_has_no_cost_is_a_warning() -> None:
    nodes = [
        helper.make_node("Mystery", ["x"], ["h"], "mystery", domain="my.own"),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 64]) for name in "xy"]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my.own", 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:]), opset_imports=opsets, ir_version=8)
    found = package.analyze(model, gpu="L4")
    missing = sum(len(item.nodes) for item in found.uncosted)
    assert "mystery" in {node for item in found.uncosted for node in item.nodes}
    (text,) = found.warnings
    assert text.startswith(f"{missing} node") and "no cost (Mystery" in text


def test_the_page_shows_the_roof_of_the_l2(tmp_path: Path) -> None:
    package.analyze(save_small(tmp_path, batch=4), gpu="L4", html=tmp_path / "m.html")
    gpu = find_gpu("L4")
    rate = 64 * gpu.sm * gpu.clock_tensor_mhz * 1e6 / 1e9
    assert f"L2: {rate:,.0f} GB" in (tmp_path / "m.html").read_text(encoding="utf-8")


def test_without_jinja_the_page_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_small(tmp_path, batch=4)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    seen: list[Event] = []
    with pytest.raises(MissingDependencyError) as caught:
        package.analyze(path, gpu="L4", html=tmp_path / "m.html", on_event=seen.append)
    assert caught.value.exit_code == 4 and seen == []


def test_the_options_of_another_command_are_refused() -> None:
    with pytest.raises(UsageError, match="no option 'calib'"):
        package.analyze("model.onnx", calib="synthetic")
    with pytest.raises(UsageError, match="not an AnalyzeConfig"):
        package.analyze("model.onnx", package.BuildConfig())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is no model"):
        package.analyze(7)  # type: ignore[arg-type]


def test_the_page_has_each_option_once() -> None:
    rows = re.findall(r"^\| `(--[\w-]+)[^`]*` \|", PAGE, flags=re.MULTILINE)
    names = [flag(name) for name in options(AnalyzeConfig)] + ["--config", "--json", "--verbose", "--quiet"]
    assert sorted(rows) == sorted(names)


def test_the_page_names_every_field_of_the_report() -> None:
    for record in (Analysis, LayerRow, Totals, Finding, Memory, BatchPoint, BatchSweep):
        for name in record.__dataclass_fields__:
            assert f"`{name}`" in PAGE or name == "schema", (record, name)


def test_the_gpus_of_the_page_are_valid(trtopt: Run, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
    examples = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "trtopt.toml").write_text("\n".join(examples))
    done = trtopt("gpu", "show", "RTX 4090 D", "--config", "trtopt.toml")
    assert done.returncode == 0, done.stderr
    assert "1008 GB/s" in done.stdout and "425 W" in done.stdout
    for name in GpuSpec.__dataclass_fields__:
        assert f"`{name}`" in page or name == "name"


def test_an_analysis_does_not_import_what_it_does_not_need(tmp_path: Path) -> None:
    save_small(tmp_path)
    script = (
        "import sys\nfrom trtopt.cli.main import main\n"
        "assert main(['analyze', 'model.onnx', '--gpu', 'L4']) == 0\n"
        "loaded = {'sympy.core', 'onnxruntime', 'torch', 'tensorrt_rtx', 'onnx.reference'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "import onnx_ir\nassert (onnx_ir.SymbolicDim('N') + 1).evaluate({'N': 2}) == 3\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
