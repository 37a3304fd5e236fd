"""Real files for mutation: what trtopt itself writes for a small model, and what trtexec and TensorRT write."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from engine_files import manifest, rtx_engine, save, tensorrt_engine, tensorrt_manifest
from onnx import TensorProto, helper, numpy_helper
from small_models import samples, save_small
from trtexec_files import CONVOLUTION_10, FOREIGN, GEMM_10, GEMM_11, IO_11, layer_info, profile_text, row, time_record

from trtopt.engine.manifest import Signer
from trtopt.precision.observe.polygraphy import write_inputs, write_outputs
from trtopt.report.schema.manifest import EngineTensor, ShapeRange

CONFIG = """\
[build]
precision = "int8"
gpu = "L4"
max_accuracy_drop = 0.5
builder = ["builder_optimization_level=3"]
recipes = "none"

[analyze]
gpu = "L4"
batch_sweep = "1,2,4"

[gpu.Mine]
base = "L4"
sm = 40
source = "a test"
"""
MATRIX = '[optimize]\nrecipes = "none"\n\n[matrix]\nmodel = ["model.onnx"]\nprecision = ["fp32", "fp16"]\n'
FLEET = """\
[build]
recipes = "none"

[matrix]
model = ["model.onnx"]
precision = ["fp32", "fp16"]

[sweep]
store = "store"
workers = 1

[prices]
L4 = 0.71
"""
GPUS = """\
[gpu."Mine"]
base = "L4"
clock_cuda_mhz = 2000
memory_gb = 16
source = "a test"

[gpu."Yours"]
base = "A100"
tflops = { fp32 = 20.0, tf32 = 156.0 }
source = "a test"
"""
ARGUMENTS = "--shapes\nx:2x3x8x8\n--batch-sweep\n1,2,4\n--latency-budget\n5\n--gpu\nL4\n"
TRT_CACHE = "TRT-100300-EntropyCalibration2\nx: 3c010a14\nr1: 3d010a14\nr2: 3c810a14\nscores: 3c010a14\n"

_QUICK = (
    "analyze model.onnx --report analysis.json",
    "analyze dynamic.onnx --report sweep.json --batch-sweep 1,2,4",
    "profile --layer-info layers.json --layer-profile times.json --times runs.json --gpu A100 --report trtexec.json",
    "profile --layer-info layers.json --layer-profile times.json --gpu A100 --report other.json",
)
_SLOW = (
    "build model.onnx -o m.engine --int8 --calib calib.npz --eval calib.npz --cache-dir cache --report build.json"
    " --sign private.pem",
    "build model.onnx -o fp16.engine --fp16 --recipes none --cache-dir cache --report fp16.json",
    "optimize model.onnx -o qdq.onnx --int8 --calib calib.npz --cache-dir cache --calib-cache stats.calib",
    "optimize model.onnx -o auto.onnx --auto --calib calib.npz --cache-dir cache --max-accuracy-drop 0.1",
    "sensitivity model.onnx --calib calib.npz --cache-dir cache --report sens.json",
    "profile model.onnx --backend onnxruntime --report profile.json",
    "sweep fleet.toml --report fleet.json",
)
_COMMANDS = """import sys
from trtopt.cli.main import main
for line in sys.argv[1:]:
    code = main(line.split())
    if code:
        sys.exit(f"{line}: exit code {code}")
"""


def attention_model() -> onnx.ModelProto:
    """x [B, 4, 8] -> MatMul, Softmax, MatMul, LayerNormalization, If and Constant."""
    weight = np.random.default_rng(2).standard_normal((8, 8)).astype(np.float32)
    text = """<ir_version: 8, opset_import: ["" : 17]>
    attention (float[B, 4, 8] x) => (float[B, 4, 8] y) {
      q = MatMul(x, w)
      k = Transpose<perm = [0, 2, 1]>(x)
      s = MatMul(q, k)
      p = Softmax<axis = -1>(s)
      o = MatMul(p, x)
      one = Constant<value_float = 1.0>()
      c = Cast<to = 9>(one)
      z = If(c) <then_branch = t () => (float[B, 4, 8] a) { a = Relu(o) },
                 else_branch = e () => (float[B, 4, 8] b) { b = Identity(o) }>
      y = LayerNormalization<axis = -1>(z, scale)
    }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.ones(8, np.float32), "scale")]
    )
    return model


def function_model() -> onnx.ModelProto:
    """x [2, 4] through a function of the model's own."""
    body = [helper.make_node("Relu", ["a"], ["r"]), helper.make_node("Add", ["r", "a"], ["b"])]
    opset = helper.make_opsetid("", 17)
    function = helper.make_function("own", "Twice", ["a"], ["b"], body, [opset])
    nodes = [helper.make_node("Twice", ["x"], ["h"], "f", domain="own"), helper.make_node("Sigmoid", ["h"], ["y"])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    return helper.make_model(
        graph, opset_imports=[opset, helper.make_opsetid("own", 1)], functions=[function], ir_version=8
    )


def named_model() -> onnx.ModelProto:
    """A network with the names of nodes that the layers of ``trtexec_files`` were made from."""
    names = {"conv1/Conv": "Conv", "relu/Relu": "Relu"}
    inputs = (["x", "w"], ["h"])
    nodes = [
        helper.make_node(kind, given, [output], f"/{name}")
        for (name, kind), given, output in zip(names.items(), inputs, "hy", strict=True)
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, 8, 8]) for name in "xy"]
    weight = numpy_helper.from_array(np.ones((4, 4, 1, 1), np.float32), "w")
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def make_quick(folder: Path) -> None:
    """Write seeds into ``folder`` that take seconds: no engine is built, those here have real headers only.

    Raises:
        RuntimeError: A run failed, so that its files would not be seeds.
    """
    _inputs(folder)
    _run(folder, _QUICK)
    data = rtx_engine()
    save(folder, data, manifest(data), signer=Signer(folder / "private.pem"))
    (folder / "bare.engine").write_bytes(data)


def make(folder: Path) -> None:
    """Write all seeds into ``folder``; a minute or two.

    Raises:
        RuntimeError: A run failed, so that its files would not be seeds.
    """
    _inputs(folder)
    _run(folder, (*_QUICK, *_SLOW))
    shutil.rmtree(folder / "cache" / "locks")
    (folder / "bare.engine").write_bytes((folder / "fp16.engine").read_bytes())
    for kind in ("engines", "calibration", "prices", "search", "sensitivity"):
        if not any((folder / "cache" / kind).iterdir()):
            raise RuntimeError(f"the cache has no {kind}")


def _run(folder: Path, lines: Sequence[str]) -> None:
    command = [sys.executable, "-c", _COMMANDS, *lines]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)


def _inputs(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    save_small(folder, batch=2, channels=8)
    save_small(folder, "dynamic.onnx", channels=8)
    onnx.save(attention_model(), folder / "attention.onnx")
    onnx.save(function_model(), folder / "function.onnx")
    onnx.save(named_model(), folder / "named.onnx")
    batch = EngineTensor("x", "float16", ("N", 4), "chw", (ShapeRange((1, 4), (8, 4), (16, 4)),))
    found = tensorrt_manifest(tensorrt_engine(), inputs=(batch,), outputs=(EngineTensor("y", "float32", ("N", 4)),))
    save(folder, tensorrt_engine(), found, name="trt.engine")
    np.savez(folder / "calib.npz", x=samples(2))
    np.savez_compressed(folder / "labels.npz", x=samples(4), __labels__=np.arange(4))
    np.save(folder / "x.npy", samples(2))
    write_inputs(folder / "inputs.json", [{"x": samples(2)}])
    write_outputs(folder / "outputs.json", "another", [{"scores": np.ones((2, 10), np.float32)}])
    (folder / "plain.npz").write_bytes(_stored(folder / "x.npy"))
    tables = {"config.toml": CONFIG, "matrix.toml": MATRIX, "fleet.toml": FLEET, "gpus.toml": GPUS}
    for name, text in {**tables, "args.txt": ARGUMENTS, "trt.cache": TRT_CACHE}.items():
        (folder / name).write_text(text)
    _trtexec(folder)
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    (folder / "private.pem").write_bytes(pem)
    public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    (folder / "public.pem").write_bytes(public)


def _stored(array: Path) -> bytes:
    place = array.with_suffix(".zip")
    with zipfile.ZipFile(place, "w") as archive:
        archive.write(array, "x.npy")
    content = place.read_bytes()
    place.unlink()
    return content


def _trtexec(folder: Path) -> None:
    import json

    layers = [CONVOLUTION_10, GEMM_10, FOREIGN]
    (folder / "layers.json").write_text(json.dumps(layer_info(*layers)))
    (folder / "layers11.json").write_text(json.dumps({"Layers": [GEMM_11], **IO_11}))
    rows = [row(layer["Name"], str(0.25 * place), "0.2") for place, layer in enumerate(layers, 1)]
    (folder / "times.json").write_text(profile_text(rows))
    (folder / "times11.json").write_text(profile_text([row("gemm_myl0_1", "0.1", "0.1")]))
    (folder / "runs.json").write_text(json.dumps([time_record(place, 0.8) for place in range(5)]))
