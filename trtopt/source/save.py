"""ONNX files out: whole or not at all, also when the weights need a file of their own."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from onnx import ModelProto

from trtopt.errors import InvalidModelError, TrtoptError, UsageError
from trtopt.graph.edit import all_graphs, dims_of
from trtopt.graph.skeleton import embed
from trtopt.source.check import all_tensors
from trtopt.source.portable import make_portable
from trtopt.support.files import atomic_path, atomic_write, check_writable

EXTERNAL_OVER_BYTES = 1 << 30
"""Above this sum of weights they go to a file of their own; one protobuf can have 2 GiB."""

_MIN_EXTERNAL_BYTES = 1024
_ALIGNMENT = 4096
"""Tensors begin at page borders, so that readers can map them."""

_CHUNK_BYTES = 1 << 22


def save_model(
    model: ir.Model,
    path: str | os.PathLike[str],
    *,
    check: Callable[[Path], None] | None = None,
) -> tuple[Path, ...]:
    """Write ``model`` to ``path``, in the forms of :mod:`trtopt.source.portable`; it is not changed.

    Weights of more than 1 GiB go to ``NAME.HASH.data`` beside it, HASH being that of their content. A run killed at
    any moment leaves the old model with its own data, or the new one with its own: the data file is complete under
    its new name before the model is put in place, and the data file of the replaced model, if trtopt wrote it, is
    removed after. A model loaded from ``path`` itself must be loaded again after that.

    Args:
        path: The ``.onnx`` file to write or replace.
        check: Gets the new file, its weights beside it, before it is put in place; what it raises leaves the old one.

    Returns:
        The model's file, then those of its weights, if they have any.

    Raises:
        UsageError: The file cannot be written.
        InvalidModelError: The model is too large for one protobuf without its weights.
    """
    target = Path(os.path.abspath(os.fspath(path)))
    check_writable(target)
    replaced = _own_data_files(target)
    clone = model.clone()
    make_portable(clone)
    weights = list(_weights(clone))
    unload = sum(value.const_value.nbytes for value in weights if value.const_value) > EXTERNAL_OVER_BYTES
    if unload:
        _unload(weights, target)
    embed(clone, initializers=not unload)
    proto = ir.to_proto(clone)
    content = _serialized(proto, target)
    data = _locations(proto)
    _put_in_place(target, content, check, data - replaced)
    for name in replaced - data:
        (target.parent / name).unlink(missing_ok=True)
    return (target, *(target.parent / name for name in sorted(data)))


def write_once(model: ir.Model, path: Path, *, notes: bool = True) -> tuple[Path, ...]:
    """Write ``model`` to ``path`` for a compiler to read once; it is not changed.

    As :func:`save_model`, but all larger weights go to ``NAME.data`` beside it, straight from memory: one protobuf with
    them inside takes three copies more. The file is not written whole or not at all.

    Args:
        model: The model.
        path: The file, in a folder that the caller owns and in which nothing else lies.
        notes: Whether to write what computes nothing: doc strings, metadata, the producer, the name of the graph.

    Returns:
        The model's file, then that of its weights, if it has any.

    Raises:
        InvalidModelError: The model is too large for one protobuf without its weights.
        UsageError: The disk is full.
    """
    clone = model.clone()
    make_portable(clone)
    tensors = _by_value(_weights(clone))
    files = (path, path.with_name(f"{path.name}.data")) if tensors else (path,)
    try:
        for file in files[1:]:
            with open(file, "wb") as data:
                data.writelines(_content(_unique(tensors)))
            _point_to(tensors, file)
        embed(clone, initializers=False)
        proto = ir.to_proto(clone)
        if not notes:
            clear_notes(proto)
        path.write_bytes(_serialized(proto, path))
    except OSError as error:
        raise UsageError(
            f"Cannot write: {error.strerror}", where=str(path), remedy="make room in the temporary folder (TMPDIR)"
        ) from error
    return files


def _serialized(proto: ModelProto, target: Path) -> bytes:
    try:
        return bytes(proto.SerializeToString())
    except (ValueError, OSError, RuntimeError) as error:
        raise InvalidModelError(
            f"The model does not fit one protobuf: {error}",
            where=str(target),
            remedy="hold large constants in initializers, not in node attributes",
        ) from error


def _put_in_place(target: Path, content: bytes, check: Callable[[Path], None] | None, new: set[str]) -> None:
    """Write the model's file; where the check refuses it, its ``new`` data files go with it."""
    if check is None:
        atomic_write(target, content)
        return
    with atomic_path(target) as temporary:
        temporary.write_bytes(content)
        try:
            check(temporary)
        except TrtoptError:
            for name in new:
                (target.parent / name).unlink(missing_ok=True)
            raise


def _weights(model: ir.Model) -> Iterator[ir.Value]:
    """Initializers that may go to a data file: small ones (shapes, axes) stay where every reader finds them."""
    for graph in all_graphs(model.graph):
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.dtype == ir.DataType.STRING:
                continue
            if tensor.nbytes >= _MIN_EXTERNAL_BYTES or isinstance(tensor, ir.ExternalTensor):
                yield value


def _unload(values: list[ir.Value], target: Path) -> None:
    """Write the tensors of ``values`` to a data file beside ``target``, and make the values point there."""
    tensors = _by_value(values)
    digest = hashlib.sha256()
    for chunk in _content(_unique(tensors)):
        digest.update(chunk)
    place = target.parent / f"{target.name}.{digest.hexdigest()[:16]}.data"
    with atomic_path(place) as temporary, open(temporary, "wb") as file:
        file.writelines(_content(_unique(tensors)))
    _point_to(tensors, place)


def _by_value(values: Iterable[ir.Value]) -> dict[ir.Value, ir.TensorProtocol]:
    return {value: value.const_value for value in values if value.const_value is not None}


def _unique(tensors: Mapping[ir.Value, ir.TensorProtocol]) -> list[ir.TensorProtocol]:
    return list({id(tensor): tensor for tensor in tensors.values()}.values())


def _point_to(tensors: Mapping[ir.Value, ir.TensorProtocol], place: Path) -> None:
    """Make values point to their tensors in a data file."""
    unique = _unique(tensors)
    ends = itertools.accumulate((_padded(tensor.nbytes) for tensor in unique), initial=0)
    offsets = dict(zip(map(id, unique), ends, strict=False))
    for value, tensor in tensors.items():
        value.const_value = ir.ExternalTensor(
            place.name,
            offsets[id(tensor)],
            tensor.nbytes,
            tensor.dtype,
            shape=ir.Shape(dims_of(tensor)),
            name=str(value.name),
            base_dir=str(place.parent),
        )


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _content(tensors: list[ir.TensorProtocol]) -> Iterator[bytes | memoryview]:
    """The data file in chunks. Tensors in files are read, not mapped: mapped pages would count as memory in use."""
    for tensor in tensors:
        if isinstance(tensor, ir.ExternalTensor):
            yield from _file_chunks(tensor)
        elif tensor.dtype.bitwidth < 8:
            yield tensor.tobytes()
        else:
            array = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
            for start in range(0, array.size, _CHUNK_BYTES):
                yield array[start : start + _CHUNK_BYTES].data
        yield bytes(_padded(tensor.nbytes) - tensor.nbytes)


def _file_chunks(tensor: ir.ExternalTensor) -> Iterator[bytes]:
    left = tensor.nbytes
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset or 0)
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise InvalidModelError(
                    "External data became shorter since the model was loaded",
                    where=tensor.path,
                    remedy="load the model again; do not change its files meanwhile",
                )
            left -= len(chunk)
            yield chunk


def _locations(proto: onnx.ModelProto) -> set[str]:
    return {
        entry.value for tensor, _ in all_tensors(proto) for entry in tensor.external_data if entry.key == "location"
    }


def _own_data_files(target: Path) -> set[str]:
    """Data files that the model now at ``target`` names and that trtopt wrote for it."""
    try:
        if not target.is_file() or target.stat().st_size > EXTERNAL_OVER_BYTES:
            return set()
        proto = onnx.ModelProto()
        proto.ParseFromString(target.read_bytes())
    except (DecodeError, OSError):
        # What is replaced need not be a model.
        return set()
    own = re.compile(re.escape(target.name) + r"\.[0-9a-f]{16}\.data")
    return {name for name in _locations(proto) if own.fullmatch(name)}


_NAME = "graph"
_NOTES = ("doc_string", "metadata_props", "denotation")
_OF_THE_MODEL = ("producer_name", "producer_version", "domain", "model_version")


def clear_notes(proto: ModelProto) -> None:
    """Take doc strings, metadata and denotations out of ``proto``, subgraphs and functions included; its producer too.

    The main graph gets a fixed name, since a graph has to have one. Names of nodes and values stay: layers of an engine
    are called by them.
    """
    for name in _OF_THE_MODEL:
        proto.ClearField(name)
    _clear(proto)
    proto.graph.name = _NAME


def _clear(message: Message) -> None:
    for field, value in message.ListFields():
        if field.name in _NOTES:
            message.ClearField(field.name)
        elif field.message_type is None:
            continue
        elif isinstance(value, Message):
            _clear(value)
        else:
            for item in value:
                _clear(item)
