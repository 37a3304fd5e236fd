"""Adapters (LoRA) merged into the weights of a model: ``W + scale * B A``.

An adapter is what PEFT saves: a folder, or its ``adapter_model.safetensors``, with the tensors
``base_model.model.X.lora_A.weight`` ``[rank, K]`` and ``lora_B`` ``[N, rank]`` of the module X (Hu et al. 2021; by the
documentation of PEFT's LoraConfig the scale is ``lora_alpha / rank``, or ``lora_alpha / sqrt(rank)`` with
``use_rslora``). X is looked for among the modules that exporters write into the names of nodes and weights.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from trtopt.errors import UsageError
from trtopt.graph import edit
from trtopt.graph.artifact import InputSpec, ModelArtifact
from trtopt.graph.module_path import module_of_node
from trtopt.graph.shapes import infer_in_place
from trtopt.report.schema.steps import StepRecord
from trtopt.source.safetensors import read_safetensors
from trtopt.support.files import read_file
from trtopt.support.json_text import decoded
from trtopt.support.words import did_you_mean

_FILE, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_MOST_CONFIG_BYTES = 1 << 20
_PRODUCTS = ("MatMul", "Gemm", "Conv")


@dataclass(frozen=True)
class Adapter:
    """A low-rank change of some layers.

    Attributes:
        name: What was asked for, for messages.
        pairs: By module: A ``[rank, K]`` and B ``[N, rank]``, float32, the scale in B.
        notes: What the user should know.
        sha256: Of the file and its scale.
    """

    name: str
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]
    notes: tuple[str, ...]
    sha256: str


def read_adapter(text: str) -> Adapter:
    """Read ``FILE.safetensors``, ``FILE.safetensors:SCALE`` or a folder of PEFT, ``FOLDER`` or ``FOLDER:SCALE``.

    Raises:
        UsageError: There is no such file, it is damaged, or it is no adapter that can be merged.
    """
    file, factor = _parts(text)
    tensors = read_safetensors(file)
    config = _config(file.with_name(_CONFIG))
    found: dict[str, dict[str, np.ndarray]] = {}
    others = []
    for name, array in tensors.items():
        module, part = _part_of(name)
        if part:
            found.setdefault(module, {})[part] = array.astype(np.float32)
        else:
            others.append(name)
    if others or not found:
        what = f"it holds {others[0]}" if others else "it holds no lora_A and lora_B"
        raise _no_adapter(file, what)
    is_said = config or any("alpha" in parts for parts in found.values()) or _split(text)[0] != Path(text)
    notes = [] if is_said else [_without_scale(text, file)]
    pairs = {module: _pair(module, parts, config, factor, file) for module, parts in found.items()}
    digest = hashlib.sha256(repr(factor).encode())
    for module, pair in sorted(pairs.items()):
        digest.update(module.encode() + b"".join(np.ascontiguousarray(array).tobytes() for array in pair))
    return Adapter(text, pairs, tuple(notes), digest.hexdigest())


def adapter_file(text: str) -> Path:
    """The file that ``--lora`` names."""
    return _parts(text)[0]


def _parts(text: str) -> tuple[Path, float]:
    """The file and the scale."""
    path, factor = _split(text)
    return (path / _FILE if path.is_dir() else path), factor


def _split(text: str) -> tuple[Path, float]:
    head, colon, tail = text.rpartition(":")
    if colon and not Path(text).exists():
        try:
            factor = float(tail)
        except ValueError:
            return Path(text), 1.0
        if not math.isfinite(factor):
            raise UsageError("The scale of an adapter is not finite", where=f"--lora {text}", remedy="give a number")
        return Path(head), factor
    return Path(text), 1.0


def _part_of(name: str) -> tuple[str, str]:
    """The module and the part (``A``, ``B``, ``alpha``) that a tensor's name says; no part for other tensors."""
    bare = name.removeprefix(_PREFIX)
    for part, marks in (("A", (".lora_A", ".lora_down")), ("B", (".lora_B", ".lora_up"))):
        for mark in marks:
            module, found, rest = bare.partition(mark)
            if found and re.fullmatch(r"(\.[^.]+)?\.weight", rest):  # PEFT writes the adapter's name there
                return module, part
    return (bare.removesuffix(".alpha"), "alpha") if bare.endswith(".alpha") else (bare, "")


def _config(path: Path) -> Mapping[str, Any]:
    """PEFT's configuration beside an adapter; empty without one."""
    if not path.is_file():
        return {}
    try:
        found = decoded(read_file(path, "The adapter's configuration", _MOST_CONFIG_BYTES))
    except ValueError as error:
        raise UsageError(
            f"The adapter's configuration is no JSON: {error}", where=str(path), remedy="save the adapter again"
        ) from error
    if not isinstance(found, dict):
        raise UsageError("The adapter's configuration is no table", where=str(path), remedy="save the adapter again")
    for key in ("use_dora", "alpha_pattern", "rank_pattern", "modules_to_save"):
        if found.get(key):
            raise _no_adapter(path, f"{key} is set")
    return found


def _pair(
    module: str, parts: Mapping[str, np.ndarray], config: Mapping[str, Any], factor: float, file: Path
) -> tuple[np.ndarray, np.ndarray]:
    """A and B as matrices, the scale in B."""
    down, up = parts.get("A"), parts.get("B")
    if down is None or up is None or down.ndim < 2 or up.ndim < 2:
        raise _no_adapter(file, f"{module} has not both lora_A and lora_B")
    rank = len(down)
    if up.shape[1] != rank or math.prod(up.shape[2:]) != 1 or not rank:
        raise _no_adapter(
            file, f"lora_A {list(down.shape)} and lora_B {list(up.shape)} of {module} do not fit together"
        )
    alpha = config.get("lora_alpha", float(parts["alpha"]) if "alpha" in parts and parts["alpha"].size == 1 else rank)
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool):
        raise _no_adapter(file, "lora_alpha is no number")
    scale = factor * alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    pair = down.reshape(rank, -1), up.reshape(len(up), rank) * np.float32(scale)
    if not all(np.isfinite(array).all() for array in pair):
        raise _no_adapter(file, f"{module} holds numbers that are not finite")
    return pair


def _no_adapter(file: Path, why: str) -> UsageError:
    return UsageError(
        f"The adapter cannot be merged: {why}",
        where=str(file),
        remedy="give a LoRA adapter of linear layers or convolutions as PEFT saves it; or merge it in PyTorch "
        "(merge_and_unload) and export the model",
    )


def _without_scale(text: str, file: Path) -> str:
    return f"{text}: no {_CONFIG} beside {file.name} says its scale, so that B A counts once; give --lora {text}:SCALE"


def merged(artifact: ModelArtifact, adapters: Sequence[Adapter]) -> ModelArtifact:
    """The model with the adapters in its weights, which keep their types.

    Raises:
        UsageError: A layer of an adapter is not in the model, is there more than once, or has another shape.
    """
    began = time.perf_counter()
    model = artifact.model.clone()
    places = _places(model)
    names, details = edit.Names(model), []
    for adapter in adapters:
        for module, pair in adapter.pairs.items():
            for node in _nodes_of(module, places, adapter.name):
                _merge(model, node, pair, names, f"{module} of {adapter.name}")
        details.append(f"{adapter.name}: {len(adapter.pairs)} layers")
    digest = hashlib.sha256(" ".join(adapter.sha256 for adapter in adapters).encode()).hexdigest()
    changes = sum(len(adapter.pairs) for adapter in adapters)
    step = StepRecord(f"lora-{digest[:12]}", "LOAD", changes, time.perf_counter() - began, details=tuple(details))
    return artifact.with_step(model, step)


def as_inputs(artifact: ModelArtifact, adapters: Sequence[Adapter], rank: int, floating: ir.DataType) -> ModelArtifact:
    """The model with two thin products beside each layer that one of the adapters changes, their factors as inputs:
    ``X.lora_A`` ``[K, rank]`` and ``X.lora_B`` ``[rank, N]`` of the module X, in the order in which the products read
    them (:func:`lora_inputs` makes the arrays).

    Args:
        artifact: The model.
        adapters: They say which layers; their numbers are not used.
        rank: That of the inputs.
        floating: Their type.

    Raises:
        UsageError: As of :func:`merged`; or a layer is a convolution, or an adapter's rank is larger.
    """
    began = time.perf_counter()
    model = artifact.model.clone()
    places, names, done = _places(model), edit.Names(model), set[str]()
    for adapter in adapters:
        for module, pair in adapter.pairs.items():
            check_rank(adapter, module, rank)
            nodes = _nodes_of(module, places, adapter.name)
            for node in nodes:
                _check_fits(node, pair, f"{module} of {adapter.name}")
                if edit.is_op(node, "Conv"):
                    what = f"The adapter's layer {module} is a convolution, which has no form with inputs"
                    raise UsageError(what, where=f"--lora {adapter.name}", remedy="merge it: leave --lora-inputs out")
            if module not in done:
                shapes = (pair[0].shape[1], rank), (rank, len(pair[1]))
                _add_inputs(model, nodes, module, shapes, floating, names)
                done.add(module)
    infer_in_place(model)
    seconds = time.perf_counter() - began
    step = StepRecord(f"lora-inputs-{rank}", "LOAD", len(done), seconds, details=tuple(sorted(done)))
    return artifact.with_step(model, step)


def _add_inputs(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    module: str,
    shapes: tuple[tuple[int, int], tuple[int, int]],
    floating: ir.DataType,
    names: edit.Names,
) -> None:
    """Add the two products of one module behind its own, and their factors as inputs."""
    factors = []
    for part, shape in zip("AB", shapes, strict=True):
        name = names.value(f"{module}.lora_{part}")
        factors.append(ir.Value(name=name, type=ir.TensorType(floating), shape=ir.Shape(shape)))
    model.graph.inputs.extend(factors)
    for node in nodes:
        result, value = node.outputs[0], node.inputs[0]

        def made(op_type: str, part: str, *inputs: ir.Value | None, like: ir.Value = result) -> ir.Node:
            output = names.value(f"{module}.lora_{part}")
            new = edit.new_node(op_type, inputs, name=names.node(output), output=output)
            new.outputs[0].type = like.type
            return new

        for factor, part in zip(factors, ("down", "up"), strict=True):
            product = made("MatMul", part, value, factor)
            model.graph.insert_before(node, product)
            value = product.outputs[0]
        edit.chain_behind(result, [made("Add", "sum", result, value)], names, "frozen")
    computed = nodes[0].outputs[0].dtype or floating
    for value in factors if computed is not floating else ():
        edit.cast_for_readers(model.graph, value, computed, names, "cast")


def check_rank(adapter: Adapter, module: str, rank: int) -> None:
    """Raise UsageError where a layer of an adapter has a larger rank than the inputs."""
    own = len(adapter.pairs[module][0])
    if own > rank:
        raise UsageError(
            f"The adapter's layer {module} has the rank {own}, the inputs {rank}",
            where=f"--lora {adapter.name}",
            remedy=f"give --lora-inputs {own}",
        )


def lora_inputs(adapter: str, rank: int) -> dict[str, np.ndarray]:
    """What to feed an engine of ``--lora-inputs RANK`` for one adapter: float32 arrays by input name; zeros stand for
    the layers that it does not change.

    Args:
        adapter: As of ``--lora``: a file or a folder of PEFT, with a scale or not.
        rank: That of the inputs; an adapter of a lower one is filled up with zeros.

    Raises:
        UsageError: The file is no adapter, or its rank is larger.

    Example:
        >>> feeds = {"x": x, **lora_inputs("style/adapter_model.safetensors", 16)}  # doctest: +SKIP
    """
    found, feeds = read_adapter(adapter), dict[str, np.ndarray]()
    for module, (down, up) in found.pairs.items():
        check_rank(found, module, rank)
        missing = rank - len(down)
        feeds[f"{module}.lora_A"] = np.ascontiguousarray(np.pad(down, ((0, missing), (0, 0))).T)
        feeds[f"{module}.lora_B"] = np.ascontiguousarray(np.pad(up, ((0, 0), (0, missing))).T)
    return feeds


def adapter_feeds(inputs: Sequence[InputSpec], adapters: Sequence[str], rank: int) -> list[dict[str, np.ndarray]]:
    """:func:`lora_inputs` of each adapter in the types of the model's inputs, with zeros for the layers of the others.

    Args:
        inputs: Of the model with its adapters as inputs.
        adapters: As of ``--lora``.
        rank: That of the inputs.
    """
    found = [lora_inputs(adapter, rank) for adapter in adapters]
    specs = {spec.name: spec for spec in inputs if any(spec.name in feeds for feeds in found)}
    zeros = {name: np.zeros([int(size) for size in spec.shape], spec.dtype) for name, spec in specs.items()}
    return [{**zeros, **{n: array.astype(specs[n].dtype) for n, array in feeds.items()}} for feeds in found]


def _places(model: ir.Model) -> dict[str, list[ir.Node]]:
    """The products with constant weights by the path of their module: by their weight's name, else their own."""
    found: dict[str, list[ir.Node]] = {}
    for node in model.graph:
        if not edit.is_op(node, *_PRODUCTS) or _read(node) is None:
            continue
        name = str(_source(node).name)
        keys = {module_of_node(node), name.removesuffix(".weight")}
        for key in keys - {""}:
            found.setdefault(key, []).append(node)
    return found


def _nodes_of(module: str, places: Mapping[str, list[ir.Node]], adapter: str) -> list[ir.Node]:
    """The products of a module: of that very path, or of the one path that ends with it or that it ends with."""
    near = [key for key in places if key == module]
    near = near or [key for key in places if key.endswith(f".{module}") or module.endswith(f".{key}")]
    longest = max((len(key) for key in near if module.endswith(key)), default=0)
    near = [key for key in near if not module.endswith(key) or len(key) == longest]
    nodes = list({id(node): node for key in near for node in places[key]}.values())
    weights = {_source(node).name for node in nodes}
    if len(weights) == 1:
        return nodes
    if not nodes:
        what, hint = f"The adapter's layer {module} is not in the model", did_you_mean(module, list(places))
        known = ", ".join(list(places)[:3])
        remedy = hint or (f"the model's layers are {known}, ..." if known else "")
    else:
        what, remedy = f"The adapter's layer {module} is in the model {len(weights)} times", ", ".join(near[:4])
    remedy = f"{remedy}; " if remedy else ""
    raise UsageError(
        what,
        where=f"--lora {adapter}",
        remedy=f"{remedy}export the model that the adapter was trained for, with the names of its modules",
    )


def _chain(node: ir.Node) -> tuple[ir.Value, list[ir.Node]]:
    """Where a product's weight comes from, and what stands between, the first operator first."""
    value, between = node.inputs[1], list[ir.Node]()
    while value is not None and edit.is_op(value.producer(), "Transpose", "Cast", "Identity"):
        maker = value.producer()
        if maker is None:
            break
        between.insert(0, maker)
        value = maker.inputs[0]
    if value is None:
        raise ValueError(f"{node.name} has no weight")
    return value, between


def _source(node: ir.Node) -> ir.Value:
    return _chain(node)[0]


def _read(node: ir.Node) -> np.ndarray | None:
    """The weight as a product reads it, float32; None where it is computed, or no floating matrix or kernel."""
    if edit.input_of(node, 1) is None:
        return None
    value, between = _chain(node)
    array = edit.constant_of(value)
    if array is None or array.ndim < 2 or value.dtype not in (*edit.NARROW_FLOATS, ir.DataType.DOUBLE):
        return None
    for item in between:
        if edit.is_op(item, "Transpose"):
            array = array.transpose(edit.ints_attribute(item, "perm") or tuple(reversed(range(array.ndim))))
    return array.astype(np.float32)


def _merge(model: ir.Model, node: ir.Node, pair: tuple[np.ndarray, np.ndarray], names: edit.Names, what: str) -> None:
    """Let a product read its weight with the change in it."""
    weight, is_rows = _check_fits(node, pair, what)
    value, (down, up) = node.inputs[1], pair
    if value is None:
        raise ValueError(f"{node.name} has no weight")
    change = up @ down
    exact = weight + (change.reshape(weight.shape) if is_rows else change.T)
    dtype = (value.dtype or ir.DataType.FLOAT).numpy()
    name = names.value(f"{_source(node).name}_lora")
    source, between = _chain(node)
    node.replace_input_with(1, edit.add_initializer(model.graph, name, np.ascontiguousarray(exact.astype(dtype))))
    for item in reversed(between):
        if not item.outputs[0].uses() and not item.outputs[0].is_graph_output():
            edit.remove_node(item)
    if source.is_initializer() and not source.uses() and not source.is_graph_output():
        del model.graph.initializers[str(source.name)]


def _check_fits(node: ir.Node, pair: tuple[np.ndarray, np.ndarray], what: str) -> tuple[np.ndarray, bool]:
    """A product's weight, float32 as it reads it, and whether its rows are the outputs.

    Raises UsageError where an adapter's layer, named ``what``, has another shape.
    """
    weight, (down, up) = _read(node), pair
    if weight is None:
        raise ValueError(f"{node.name} has no constant weight")
    is_rows = edit.is_op(node, "Conv") or edit.int_attribute(node, "transB", 0) != 0
    shape = (len(weight), weight[0].size) if is_rows else (weight.shape[-1], weight.shape[-2])
    if (weight.ndim != 2 and not edit.is_op(node, "Conv")) or shape != (len(up), down.shape[1]):
        raise UsageError(
            f"The adapter's layer {what} changes a weight of {len(up)} outputs and {down.shape[1]} inputs; the model's "
            f"has {shape[0]} and {shape[1]}",
            where=f"node {node.name}",
            remedy="export the model that the adapter was trained for",
        )
    return weight, is_rows
