"""Mutations of ONNX models, arrays and sealed files, and which mutation is for which format."""

from __future__ import annotations

import io
import json
import lzma
import random
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError
from mutate_text import (
    STRINGS,
    Mutation,
    mutate_arguments,
    mutate_bytes,
    mutate_json,
    mutate_lines,
    mutate_manifest,
    mutate_toml,
    mutate_value,
)
from onnx import helper

from trtopt.cache.checksummed import _header as sealed_header

_OPERATORS = (
    "Relu", "Conv", "MatMul", "Gemm", "Reshape", "Transpose", "Slice", "Range", "Tile", "Expand", "Resize", "Loop",
    "If",
    "Scan", "ConstantOfShape", "Split", "Concat", "Gather", "GatherND", "TopK", "NonMaxSuppression", "Einsum",
    "Softmax",
    "QuantizeLinear", "DequantizeLinear", "Pad", "LSTM", "BatchNormalization", "LayerNormalization", "CumSum", "Cast",
    "Squeeze", "Unsqueeze", "Where", "DepthToSpace", "ConvTranspose", "MaxPool", "AveragePool", "Shape", "Identity",
    "SequenceConstruct", "StringNormalizer", "Nope", "", "Attention", "Trilu", "OneHot", "ScatterND", "Mod", "Div",
)  # fmt: skip
_INTEGERS = (0, 1, -1, 2, 3, 7, 8, 64, 1000, 2**31, 2**31 - 1, 2**40, 2**62, -(2**31), -(2**63), 2**63 - 1)
_DIMENSIONS = (0, 1, 2, 3, 8, -1, -2, 1 << 20, 2**31, 2**40, 2**62, 2**63 - 1)
_DTYPES = ("<f4", "<f8", "<i8", "|O", "<U5", "|S3", "<M8[ns]", "|b1", "<c8", ">f4", "<f2", "|V4", "<q9", "")


def mutate_onnx(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """One to three fields of the model changed, or its bytes."""
    if dice.random() < 0.12:
        return mutate_bytes(data, other, dice)
    try:
        model = onnx.ModelProto.FromString(data)
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            _one_field(model, dice)
        return bytes(model.SerializeToString())
    except (DecodeError, EncodeError, ValueError, TypeError, IndexError, RecursionError):
        return mutate_bytes(data, other, dice)


def _text(dice: random.Random) -> str:
    return dice.choice(STRINGS).encode("utf-8", "replace").decode()


def _one_field(model: onnx.ModelProto, dice: random.Random) -> None:
    graph, kind = model.graph, dice.randrange(16)
    values = [*graph.input, *graph.output, *graph.value_info]
    names = [name for node in graph.node for name in (*node.input, *node.output)]
    if kind <= 1 and graph.node:
        dice.choice(graph.node).op_type = dice.choice(_OPERATORS)
    elif kind <= 4 and graph.node:
        _attribute(dice.choice(graph.node), dice)
    elif kind <= 6 and graph.node:
        node = dice.choice(graph.node)
        ends = dice.choice((node.input, node.output))
        if len(ends) and dice.random() < 0.8:
            ends[dice.randrange(len(ends))] = dice.choice((*names, "", _text(dice)))
        else:
            ends.append(dice.choice((*names, "")))
    elif kind == 7 and graph.initializer:
        _initializer(dice.choice(graph.initializer), dice)
    elif kind <= 10 and values:
        _value(dice.choice(values), dice)
    elif kind == 11:
        _model_field(model, dice)
    elif kind == 12 and graph.node:
        del graph.node[dice.randrange(len(graph.node))]
    elif kind == 13 and graph.node:
        node = graph.node.add()
        node.CopyFrom(dice.choice(graph.node))
        if dice.random() < 0.7:
            for place in range(len(node.output)):
                node.output[place] += "_again"
    elif kind == 14 and graph.node:
        dice.choice(graph.node).name = dice.choice((_text(dice), graph.node[0].name))
        dice.choice(graph.node).domain = dice.choice(("", "ai.onnx", "com.microsoft", "own", _text(dice)))
    elif graph.node:
        _nest(model, dice)


def _attribute(node: onnx.NodeProto, dice: random.Random) -> None:
    if not node.attribute or dice.random() < 0.3:
        name = dice.choice(("axis", "axes", "perm", "pads", "strides", "kernel_shape", "group", "to", "alpha", "mode",
                            "dilations", "epsilon", "equation", "direction", "hidden_size", "value",
                            "keepdims"))  # fmt: skip
        given: Any = dice.choice(
            (dice.choice(_INTEGERS), [dice.choice(_INTEGERS) for _ in range(dice.randrange(1, 5))], 0.5, _text(dice))
        )
        if given != []:
            node.attribute.append(helper.make_attribute(name, given))
        return
    found = dice.choice(node.attribute)
    if len(found.ints) and dice.random() < 0.8:
        found.ints[dice.randrange(len(found.ints))] = dice.choice(_INTEGERS)
    elif len(found.ints):
        found.ints.extend(found.ints)
    elif found.type == onnx.AttributeProto.INT:
        found.i = dice.choice(_INTEGERS)
    elif found.type == onnx.AttributeProto.FLOAT:
        found.f = dice.choice((0.0, -1.0, float("nan"), float("inf"), 1e-45))
    elif found.HasField("t"):
        _initializer(found.t, dice)
    else:
        found.type = dice.randrange(16)  # type: ignore[assignment]


def _initializer(tensor: onnx.TensorProto, dice: random.Random) -> None:
    kind = dice.randrange(7)
    if kind == 0 and tensor.dims:
        tensor.dims[dice.randrange(len(tensor.dims))] = dice.choice(_DIMENSIONS)
    elif kind == 1:
        tensor.raw_data = mutate_bytes(tensor.raw_data, tensor.raw_data, dice)
    elif kind == 2:
        tensor.data_type = dice.randrange(30)
    elif kind == 3:
        tensor.name = _text(dice)
    elif kind == 4:
        bad = dice.choice((b"\xff\xff\xff\x7f", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f"))
        tensor.raw_data = bad + tensor.raw_data[4:]
    elif kind == 5:
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", dice.choice(("w.bin", "model.onnx", "../x", "/dev/zero", ""))),
                           ("offset", dice.choice(("0", "-1", "9" * 25, "a"))), ("length", "4")):  # fmt: skip
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value
    else:
        del tensor.dims[:]


def _value(value: onnx.ValueInfoProto, dice: random.Random) -> None:
    kind, tensor = dice.randrange(6), value.type.tensor_type
    if kind <= 2 and tensor.shape.dim:
        dim = dice.choice(tensor.shape.dim)
        if dice.random() < 0.7:
            dim.dim_value = dice.choice(_DIMENSIONS)
        else:
            dim.dim_param = dice.choice(("N", "", "a b", "-1", "N*2", _text(dice)))
    elif kind == 3:
        tensor.elem_type = dice.randrange(30)
    elif kind == 4:
        value.name = dice.choice(("x", _text(dice)))
    elif dice.random() < 0.5:
        value.ClearField("type")
    else:
        tensor.shape.dim.add().dim_value = dice.choice(_DIMENSIONS)


def _model_field(model: onnx.ModelProto, dice: random.Random) -> None:
    kind = dice.randrange(5)
    if kind == 0 and model.opset_import:
        model.opset_import[0].version = dice.choice((0, -1, 6, 7, 11, 13, 21, 24, 99, 2**62))
    elif kind == 1:
        model.opset_import.add().domain = dice.choice(("", "own", _text(dice)))
    elif kind == 2:
        model.ir_version = dice.choice((0, 3, 4, 12, 99, 2**62))
    elif kind == 3:
        model.graph.name = _text(dice)
        entry = model.metadata_props.add()
        entry.key, entry.value = _text(dice), _text(dice)
    else:
        model.graph.ClearField(dice.choice(("input", "output", "initializer", "node")))


def _nest(model: onnx.ModelProto, dice: random.Random) -> None:
    """The whole graph in branches of branches."""
    depth = dice.choice((1, 3, 30, 90))
    node = dice.choice(model.graph.node)
    inner = helper.make_graph(
        [helper.make_node("Identity", [node.input[0] if node.input else ""], ["deep"])], "b", [],
        [helper.make_tensor_value_info("deep", 1, None)],
    )  # fmt: skip
    for level in range(depth):
        outer = helper.make_node("If", ["c"], [f"deep{level}"], then_branch=inner, else_branch=inner)
        if level < 6:  # two branches each: twice as large at each level
            inner = helper.make_graph([outer], "b", [], [helper.make_tensor_value_info(f"deep{level}", 1, None)])
        else:
            outer = helper.make_node("Loop", ["", "c"], [f"deep{level}"], body=inner)
            inner = helper.make_graph([outer], "b", [], [helper.make_tensor_value_info(f"deep{level}", 1, None)])
    last = inner.node[0]
    model.graph.node.append(last)


def _npy(shape: str, dtype: str, body: bytes, fortran: str = "False", version: int = 1) -> bytes:
    header = (
        f"{{'descr': '{dtype}', 'fortran_order': {fortran}, 'shape': {shape}, }}".encode("utf-8", "replace") + b"\n"
    )
    return b"\x93NUMPY" + bytes((version, 0)) + len(header).to_bytes(2 if version == 1 else 4, "little") + header + body


def _odd_array(dice: random.Random) -> bytes:
    kind = dice.randrange(4)
    if kind == 0:
        shape = dice.choice(("(2, 3, 8, 8)", "(1000000000000, 3, 8, 8)", "(0, 3, 8, 8)", "()", "(-1, 3, 8, 8)",
        "(2,) * 9",
                             "(2, 3.5)", "(2, 3, 8, 8", "(" * 300, f"({'9' * 5000},)", "(True, 3, 8, 8)",
                             "None"))  # fmt: skip
        return _npy(shape, dice.choice(_DTYPES), dice.randbytes(dice.choice((0, 16, 1536))), version=dice.randrange(5))
    stream = io.BytesIO()
    x = np.random.default_rng(dice.randrange(100)).standard_normal((2, 3, 8, 8)).astype(np.float32)
    if kind == 1:
        x[0, 0, 0, 0] = dice.choice((np.nan, np.inf, -np.inf, 3e38, 1e-45))
    elif kind == 2:
        with np.errstate(all="ignore"):
            x = dice.choice((x.astype(np.float64), x.astype(np.int8), x[:0], x[0], x.T, x.astype(np.complex64), x > 0))
    else:
        x = np.array([{"a": 1}, "x"], dtype=object)
    np.save(stream, x, allow_pickle=True)
    return stream.getvalue()


def mutate_arrays(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """Other arrays, other members, archives that grow, or bytes changed."""
    kind = dice.randrange(7)
    if not data.startswith(b"PK"):
        return _odd_array(dice) if kind < 4 else mutate_bytes(data, other, dice)
    if kind < 2:
        return mutate_bytes(data, other, dice)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()[:20]}
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, ValueError, EOFError, RuntimeError):
        return mutate_bytes(data, other, dice)
    name = dice.choice((*members, "x.npy"))
    if kind in (2, 3):
        members[name] = _odd_array(dice)
    elif kind == 4:
        members[dice.choice(("y.npy", "__labels__.npy", "../x.npy", "x", "", "x.npy/", "a\x1bb.npy"))] = _odd_array(
            dice
        )
    elif kind == 5:
        members[name] = _npy("(3000, 3, 8, 8)", "<f4", bytes(3000 * 768))
    else:
        members[name] = mutate_bytes(members.get(name, b""), other, dice)
    stream = io.BytesIO()
    with zipfile.ZipFile(
        stream, "w", dice.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    ) as archive:
        for member, content in members.items():
            archive.writestr(zipfile.ZipInfo(member), content, archive.compression)
    return stream.getvalue()


def mutate_cache(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """A file of the cache as somebody would forge it: the checksum fits. Sometimes it does not."""
    head, _, body = data.partition(b"\n")
    try:
        header = json.loads(head)
    except ValueError:
        header = None
    if not isinstance(header, dict) or "format" not in header:
        return mutate_lines(data, other, dice)
    if dice.random() < 0.3:
        return mutate_bytes(data, other, dice)
    try:
        body = _body(body, other, dice)
        identity = header["identity"] if dice.random() < 0.95 else dice.choice(STRINGS)
        return sealed_header(header["format"], identity, [body]) + b"\n" + body
    except (ValueError, KeyError, TypeError):
        return mutate_bytes(data, other, dice)


def _body(body: bytes, other: bytes, dice: random.Random) -> bytes:
    """The content of an entry: of an engine (a length, JSON, parts), of statistics (a count, an archive), or JSON."""
    if body[2:4] == b"PK" or b"\nPK" in body[:24]:
        count, _, archive = body.partition(b"\n")
        if dice.random() < 0.2:
            return dice.choice((b"0", b"-1", b"x", b"9" * 5000)) + b"\n" + archive
        return count + b"\n" + _statistics(archive, other, dice)
    if body[:1] in (b"{", b"["):
        return mutate_json(body, other, dice)
    length = int.from_bytes(body[:8], "little")
    if length > len(body):
        return mutate_bytes(body, other, dice)
    parts = body[8 + length :]
    if dice.random() < 0.3:
        parts = mutate_bytes(parts, other, dice)
        return body[: 8 + length] + parts
    head = json.dumps(mutate_value(json.loads(body[8 : 8 + length]), None, dice)).encode()
    return len(head).to_bytes(8, "little") + head + parts


def _statistics(archive: bytes, other: bytes, dice: random.Random) -> bytes:
    try:
        with np.load(io.BytesIO(archive), allow_pickle=False) as found:
            arrays = dict(found)
        header = json.loads(arrays["header"].tobytes())
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error):
        return mutate_bytes(archive, other, dice)
    if dice.random() < 0.7:
        text = json.dumps(mutate_value(header, None, dice)).encode()
        arrays["header"] = np.frombuffer(text, np.uint8)
    else:
        name = dice.choice(("bins", "counts"))
        arrays[name] = dice.choice(
            (arrays[name][:1], -arrays[name], arrays[name].astype(float) * np.nan, arrays[name] * 0)
        )
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


MUTATIONS: Mapping[str, Mutation] = {
    "onnx": mutate_onnx,
    "report": mutate_json,
    "trtexec": mutate_json,
    "manifest": mutate_manifest,
    "toml": mutate_toml,
    "arrays": mutate_arrays,
    "cache": mutate_cache,
    "engine": mutate_bytes,
    "arguments": mutate_arguments,
    "text": mutate_bytes,
    "key": mutate_bytes,
}
"""The mutation of each format."""
