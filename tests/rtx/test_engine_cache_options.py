"""Every option of a build either changes the key of its engine in the cache or does not, as this table says.

The key is taken where the engine would be built, after everything that an option can change has been done to the model.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import trtopt
from trtopt.cache.checksummed import read_checksummed, write_checksummed
from trtopt.cache.folder import FORMATS
from trtopt.config import BuildConfig
from trtopt.engine.backend import TENSORRT, TENSORRT_RTX
from trtopt.engine.build import cache_key, check_options, worker_request
from trtopt.engine.cache import Compiled, timing_for
from trtopt.engine.request import BuildRequest, ShapeProfile
from trtopt.hardware.spec import find_gpu
from trtopt.pipeline import compile
from trtopt.precision.observe.polygraphy import write_outputs

FAST: dict[str, Any] = {"precision": "fp16", "recipes": "none", "gpu": "L4"}
INT8: dict[str, Any] = {**FAST, "precision": "int8", "keep_all_int8": True}
NET = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[N, 16, 16, 16] x) => (float[N, 32] y) {
    c = Conv <pads = [1, 1, 1, 1]> (x, w1)
    i = Identity (c)
    r = Relu (i)
    p = GlobalAveragePool (r)
    f = Flatten (p)
    y = MatMul (f, w2)
}
"""


@dataclass(frozen=True)
class Row:
    """An option at two values.

    Attributes:
        option: Its name.
        first: One value.
        second: The other.
        changes: Whether the engines differ.
        base: The other options, and the ``model`` where it is another.
    """

    option: str
    first: Any
    second: Any
    changes: bool
    base: dict[str, Any] = field(default_factory=lambda: FAST)


SAMPLES, OTHERS = "samples.npz", "others.npz"
ROWS = (
    Row("gpu", "L4", "A10", True),
    Row("gpu", "L4", "RTX 4090", False),  # both of compute capability 8.9: the compiler is told no more
    Row("gpus", {}, {"L4": {"bandwidth_gbs": 200.0, "source": "a guess"}}, False),
    Row("output", "a.engine", "b.engine", False),
    Row("precision", "fp16", "fp32", True),
    Row("precision", "fp32", "tf32", True),
    Row("calib", SAMPLES, OTHERS, True, INT8),
    Row("calib", SAMPLES, OTHERS, False),  # no range is in an FP16 graph
    Row("calib_method", "max", "mse", True, {**INT8, "calib": SAMPLES}),
    Row("calib_method", "max", "mse", False),
    Row("calib_cache", None, "statistics.calib", False, INT8),
    Row("eval", None, OTHERS, False),
    Row("steps", None, 8.0, False),
    Row("run_limit", None, 600.0, False),
    Row("reference", None, "outputs.json", False, {**FAST, "eval": OTHERS}),
    Row("metric", None, "sqnr", False),
    Row("preprocess", None, "imagenet", False),  # of pictures, and these samples are none
    Row("labels", None, OTHERS, False),
    Row("preprocess_in_engine", False, True, True, {**FAST, "model": "rgb.onnx", "preprocess": "imagenet,crop=16"}),
    Row("skip_bad", False, True, False),
    Row("boxes", None, "yolov8", False),
    Row("max_accuracy_drop", None, 0.9, False, {**FAST, "metric": "agreement"}),
    Row("min_sqnr_db", None, 1.0, False),
    Row("min_agreement", None, 0.1, False),
    Row("atol", (), ("9", "y:8"), False),
    Row("rtol", (), ("9",), False),
    Row("allow_accuracy_loss", False, True, False),
    Row("compare_tensors", False, True, False),
    Row("keep_all_int8", False, True, True, {**INT8, "calib": SAMPLES}),  # too small a network to gain by INT8
    Row("weights", None, "int4", False),  # nor by narrow weights
    Row("weight_block", None, "32", False, {**FAST, "weights": "int4"}),
    Row("keep_all_weights", False, True, False, {**FAST, "weights": "int4"}),  # it has no product whose weight is large
    Row("sparse", False, True, False, {**FAST, "calib": SAMPLES}),  # nor by 2:4
    Row("sparse_all", False, True, True, {**FAST, "calib": SAMPLES, "allow_accuracy_loss": True}),
    Row("lora", (), ("a.safetensors",), True),
    Row("lora", ("a.safetensors",), ("a.safetensors:2",), True),
    Row("lora_inputs", None, 2, True, {**FAST, "lora": ("a.safetensors",)}),
    Row("last_token", False, True, True, {**FAST, "model": "words.onnx"}),
    Row("recipes", "none", "all", True),
    Row("strict_recipes", False, True, False),
    Row("backend", "auto", "tensorrt-rtx", False),
    Row(
        "min_shapes",
        {"x": (1, 16, 16, 16)},
        {"x": (2, 16, 16, 16)},
        True,
        {**FAST, "opt_shapes": {"x": (8, 16, 16, 16)}},
    ),
    Row("opt_shapes", {"x": (8, 16, 16, 16)}, {"x": (4, 16, 16, 16)}, True),
    Row(
        "max_shapes",
        {"x": (8, 16, 16, 16)},
        {"x": (9, 16, 16, 16)},
        True,
        {**FAST, "opt_shapes": {"x": (8, 16, 16, 16)}},
    ),
    Row("batches", (8,), (1, 8), True),
    Row("shape_histogram", None, "requests.txt", True),
    Row("keep_dynamic", False, True, True, {**FAST, "opt_shapes": {"x": (8, 16, 16, 16)}}),
    Row("io", (), ("x:fp16:chw",), True),
    Row("io", ("x:fp16:chw",), ("x:fp16:hwc8",), True),
    Row("builder", (), ("max_aux_streams=0",), True),
    Row("builder", ("workspace=1G",), ("workspace=2G",), True),
    Row("builder", ("workspace=1G",), ("WORKSPACE=1024MiB",), False),
    Row("builder", ("workspace=1G", "max_aux_streams=0"), ("max_aux_streams=0", "workspace=1G"), False),
    Row("builder", (), ("weight_streaming=false",), False),
    Row("builder", (), ("tiling=full", "builder_optimization_level=5", "sparsity=true"), False),  # ignored
    Row("builder", (), ("tactic_sources=none", "search=8"), False),  # ignored
    Row("plugins", ("one.so",), ("two.so",), True),
    Row("plugins", ("one.so",), ("copy/one.so",), False),
    Row("timing_cache", None, "times.cache", False),  # ignored; see the test of TensorRT below
    Row("error_on_timing_cache_miss", False, True, False),
    Row("cache_dir", None, "another-cache", False),
    Row("cache_gb", None, 1.0, False),
    Row("no_cache", False, True, False),
    Row("epcontext", None, "context.onnx", False),
    Row("epcontext_embed", False, True, False, {**FAST, "epcontext": "context.onnx"}),
    Row("sign", None, "key.pem", False),
    Row("polygraphy", None, "kept", False),
    Row("save_onnx", None, "o.onnx", False),
    Row("report", None, "r.json", False),
    Row("html", None, "r.html", False),
    Row("markdown", None, "r.md", False),
    Row("export_layer_info", None, "l.json", False),
)


EXPORT = {"inputs", "dynamic"}
"""Options of a PyTorch module that is exported first: they make another model."""


class _ReachedError(Exception):
    """The engine would be built now."""


def write_key(path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(Ed25519PrivateKey.generate().private_bytes(*form))


def save_adapter(path: Path, rng: np.random.Generator) -> None:
    """An adapter of rank 2 of the last product."""
    places = {"w2.lora_A.weight": ([2, 32], [0, 256]), "w2.lora_B.weight": ([32, 2], [256, 512])}
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": at} for name, (shape, at) in places.items()}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + rng.standard_normal(128).astype(np.float32).tobytes())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("options")
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(NET)
    for name, shape in {"w1": (32, 16, 3, 3), "w2": (32, 32)}.items():
        weights = rng.standard_normal(shape).astype(np.float32) / 10
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    onnx.save(proto, path / "net.onnx")
    rgb = onnx.parser.parse_model(NET.replace("N, 16, 16, 16", "N, 3, 16, 16"))
    for name, shape in {"w1": (32, 3, 3, 3), "w2": (32, 32)}.items():
        rgb.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    onnx.save(rgb, path / "rgb.onnx")
    words = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> net (int64[N, 4] ids) => (float[N, 4, 8] y) '
        "<float[8, 1] w = {1, 2, 3, 4, 5, 6, 7, 8}> { e = Gather(w, ids) t = Transpose(w) y = MatMul(e, t) }"
    )
    onnx.save(words, path / "words.onnx")
    np.savez(path / SAMPLES, x=rng.standard_normal((4, 16, 16, 16)).astype(np.float32))
    np.savez(path / OTHERS, x=3 * rng.standard_normal((4, 16, 16, 16)).astype(np.float32))
    (path / "requests.txt").write_text("x:2x16x16x16 5\nx:4x16x16x16\n")
    write_outputs(path / "outputs.json", "another", [{"y": rng.standard_normal((4, 32)).astype(np.float32)}])
    if importlib.util.find_spec("cryptography") is not None:
        write_key(path / "key.pem")
    save_adapter(path / "a.safetensors", rng)
    (path / "copy").mkdir()
    for name, content in {"one.so": b"1", "two.so": b"2", "copy/one.so": b"1"}.items():
        (path / name).write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


@pytest.fixture(scope="module")
def key(folder: Path) -> Callable[[dict[str, Any]], str]:
    """The key of the engine that these options would build; each set of options is run once."""
    found: dict[str, str] = {}

    def capture(request: BuildRequest, *arguments: object) -> None:
        raise _ReachedError(cache_key(request, "1.0"))

    def of(options: dict[str, Any]) -> str:
        name = repr(sorted(options.items()))
        if name not in found:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(_ReachedError) as reached:
                patch.setattr(compile, "build_engine", capture)
                others = dict(options)
                trtopt.build(others.pop("model", "net.onnx"), **others)
            found[name] = str(reached.value)
        return found[name]

    return of


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.option}-{'changes' if row.changes else 'keeps'}")
def test_an_option_changes_the_key_or_not(key: Callable[[dict[str, Any]], str], row: Row) -> None:
    if row.option == "sign":
        pytest.importorskip("cryptography")
    first, second = (
        key({name: each for name, each in {**row.base, row.option: value}.items() if each is not None})
        for value in (row.first, row.second)
    )
    assert (first != second) == row.changes


def test_no_option_is_left_out() -> None:
    assert {row.option for row in ROWS} | EXPORT == set(vars(BuildConfig()))


def test_the_file_of_the_model_does_not_matter_but_its_content(
    folder: Path, key: Callable[[dict[str, Any]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = onnx.load("net.onnx")
    plain = key(FAST)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    onnx.save(content, "net.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    assert key({**FAST, "report": "elsewhere.json"}) == plain
    weights = onnx.numpy_helper.to_array(onnx.load("net.onnx").graph.initializer[0]).copy()
    weights.flat[0] += 1.0
    content.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weights, "w1"))
    onnx.save(content, "net.onnx")
    assert key({**FAST, "report": "changed.json"}) != plain


def noted(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same network, with a word wherever ONNX has room for one."""
    found = onnx.ModelProto()
    found.CopyFrom(proto)
    found.producer_name, found.producer_version, found.domain, found.model_version = "maker", "9", "a.b", 7
    found.graph.name = "another"
    graph = found.graph
    for item in (found, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        item.doc_string = "made on Monday"
        item.metadata_props.add(key="when", value="Monday")
    for node in graph.node:
        for attribute in node.attribute:
            attribute.doc_string = "an attribute"
    graph.input[0].type.denotation = "IMAGE"
    return found


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_what_a_model_says_about_itself_changes_neither_key_nor_engine(
    tmp_path: Path, folder: Path, precision: str
) -> None:
    proto = onnx.load(folder / "net.onnx")
    found, options = [], {"precision": precision, "gpu": "L4", "recipes": "none", "cache_dir": str(tmp_path / "cache")}
    for name, model in {"plain": proto, "noted": noted(proto)}.items():
        onnx.save(model, tmp_path / f"{name}.onnx")
        report = trtopt.build(tmp_path / f"{name}.onnx", **options, output=str(tmp_path / f"{name}.engine"))
        assert report.engine is not None
        found.append((report.engine.cached, report.engine.layers, (tmp_path / f"{name}.engine").read_bytes()))
    assert [cached for cached, _, _ in found] == [False, True]
    assert found[0][1:] == found[1][1:] and {node for layer in found[0][1] for node in layer.onnx_nodes}
    fresh = trtopt.build(tmp_path / "noted.onnx", **options, no_cache=True, output=str(tmp_path / "fresh.engine"))
    assert fresh.engine is not None and (tmp_path / "fresh.engine").read_bytes() == found[0][2]


@pytest.fixture
def request_of(tmp_path: Path) -> BuildRequest:
    (tmp_path / "m.onnx").write_bytes(b"model")
    (tmp_path / "w.data").write_bytes(b"weights")
    (tmp_path / "p.so").write_bytes(b"plugin")
    return BuildRequest(tmp_path / "m.onnx", TENSORRT, find_gpu("L4"), ("node",), weights=(tmp_path / "w.data",))


def test_what_changes_engines_of_tensorrt_is_in_the_key(request_of: BuildRequest, tmp_path: Path) -> None:
    of = functools.partial(cache_key, version="10.13")
    plain = of(request_of)
    same = replace(
        request_of, nodes=("other",), name="another name", builder=("refit=false",), timing_cache=tmp_path / "t"
    )
    assert of(same) == plain
    moved = {name: tmp_path / f"moved-{name}" for name in ("m.onnx", "w.data")}
    for name, path in moved.items():
        path.write_bytes((tmp_path / name).read_bytes())
    assert of(replace(request_of, onnx=moved["m.onnx"], weights=(moved["w.data"],))) == plain
    changed = [
        plain,
        of(request_of, version="10.14"),
        of(request_of, timing="a file"),
        of(replace(request_of, error_on_timing_cache_miss=True)),
        of(replace(request_of, tf32=True)),
        of(replace(request_of, weights=())),
        of(replace(request_of, plugins=(tmp_path / "p.so",))),
        of(replace(request_of, formats={"x": "HWC8"})),
        *(
            of(replace(request_of, builder=(item,)))
            for item in ("sparsity=true", "tiling=full", "refit=true", "tactic_sources=none", "tactic_sources=all")
        ),
    ]
    assert len(set(changed)) == len(changed)


def test_what_a_build_adds_to_a_timing_cache_changes_the_key_only_where_it_must_not_be_missed(
    request_of: BuildRequest, tmp_path: Path
) -> None:
    file = tmp_path / "times"

    def keys(**options: Any) -> list[str]:
        found = []
        for content in (b"", b"times", b"times and more"):
            file.write_bytes(content)
            asked = replace(request_of, timing_cache=file, **options)
            found.append(cache_key(asked, "10.13", timing_for(asked, "10.13", None).decides))
        return found

    assert len(set(keys())) == 1
    # Without a file the entry holds no timing cache to write where the file is missing.
    assert keys()[0] != cache_key(request_of, "10.13", timing_for(request_of, "10.13", None).decides)
    assert len(set(keys(error_on_timing_cache_miss=True))) == 3


def test_what_a_dynamic_build_is_asked_for_its_sizes_is_in_the_key(
    request_of: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    dynamic = ShapeProfile({"x": ((1, 3), (4, 3), (8, 3))})
    asked = replace(request_of, backend=TENSORRT_RTX, profiles=(dynamic,))
    before = cache_key(asked, "1.0")
    monkeypatch.setattr(ShapeProfile, "at_optimum", lambda profile: ShapeProfile({"x": ((8, 3), (8, 3), (8, 3))}))
    assert cache_key(asked, "1.0") != before


def test_how_the_process_of_the_compiler_starts_is_in_the_key(
    request_of: BuildRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cache_key(request_of, "10.13")
    monkeypatch.setattr("trtopt.engine.cache.START", "import os; os.environ.clear(); ")
    assert cache_key(request_of, "10.13") != before


def test_an_entry_whose_layers_are_not_understood_leaves_no_log(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    options = {**FAST, "cache_dir": str(tmp_path / "cache"), "output": str(tmp_path / "net.engine")}
    trtopt.build(folder / "net.onnx", **options)
    (entry,) = (tmp_path / "cache" / "engines").glob("*.entry")
    content = read_checksummed(entry, FORMATS["engines"], entry.stem, 1 << 30)
    compiled = replace(Compiled.from_content(content), layers="Layers:\nnot a layer\n")
    write_checksummed(entry, FORMATS["engines"], entry.stem, compiled.to_parts())
    again = trtopt.build(folder / "net.onnx", **options)
    assert again.engine is not None and not again.engine.cached
    assert any("it is built anew" in text for text in again.warnings)
    assert list((tmp_path / "temporary").glob("trtopt-layers-*")) == []


def test_the_flag_of_a_timing_cache_that_must_not_be_missed_reaches_tensorrt_only(request_of: BuildRequest) -> None:
    strict = replace(request_of, error_on_timing_cache_miss=True)
    flags = [
        worker_request(item, check_options((), (), item.backend))["flags"]
        for item in (request_of, strict, replace(strict, backend=TENSORRT_RTX))
    ]
    assert [found.get("ERROR_ON_TIMING_CACHE_MISS") for found in flags] == [None, True, None]
