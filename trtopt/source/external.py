"""Weights stored beside the model: where they may lie, whether they are whole, and the hash of it all."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from pathlib import Path

import onnx
import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.source.check import all_tensors
from trtopt.support.files import hash_file


def check_external_data(proto: onnx.ModelProto, folder: Path) -> list[Path]:
    """Check every tensor whose data lies in another file.

    Args:
        proto: The parsed model.
        folder: The model's folder, absolute: the only place such files may lie.

    Returns:
        The files, each once, sorted.

    Raises:
        InvalidModelError: A file is missing, lies outside the folder (by its name or by a symbolic link), or is
            shorter than the tensor needs.
    """
    sizes: dict[str, int] = {}
    files: set[Path] = set()
    for tensor, owner in all_tensors(proto):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {item.key: item.value for item in tensor.external_data}
        location = entries.get("location", "")
        if location not in sizes:
            path = _resolve(location, folder, owner)
            files.add(path)
            sizes[location] = path.stat().st_size
        _check_range(tensor, entries, sizes[location], owner)
    return sorted(files)


def weight_files(model: ir.Model) -> dict[str, Path]:
    """The files that hold the model's external weights, by what messages call them."""
    values = [value for graph in edit.all_graphs(model.graph) for value in graph.initializers.values()]
    tensors = [value.const_value for value in values if isinstance(value.const_value, ir.ExternalTensor)]
    return {f"the weights of the model ({Path(item.path).name})": Path(item.path) for item in tensors}


def sha256_of(files: Iterable[Path]) -> str:
    """SHA-256, hex: of the only file, or of the concatenated hashes of several."""
    hashes = [hash_file(path, "The model")[1] for path in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256(bytes.fromhex("".join(hashes))).hexdigest()


def _resolve(location: str, folder: Path, owner: str) -> Path:
    what = f"{owner}: {location}"
    if not location or "\0" in location:
        raise InvalidModelError("External data has no file name", where=what, remedy="save the model again")
    outside = (
        "keep the weights in the model's folder: onnx.save(model, path, save_as_external_data=True) writes them there"
    )
    if os.path.isabs(location) or "\\" in location or ":" in location:
        raise InvalidModelError("External data has an absolute or non-portable path", where=what, remedy=outside)
    path = Path(os.path.normpath(folder / location))
    if folder not in path.parents:
        raise InvalidModelError("External data lies outside the model's folder", where=what, remedy=outside)
    real = Path(os.path.realpath(path))  # not Path.resolve, to which a link to itself is an error before Python 3.13
    if Path(os.path.realpath(folder)) not in real.parents:
        raise InvalidModelError(
            "External data is a symbolic link out of the model's folder",
            where=f"{what} -> {real}",
            remedy="copy the file to where the link is (cp --dereference)",
        )
    if not path.is_file():
        raise InvalidModelError(
            "External data is missing", where=f"{owner}: {path}", remedy="put the weight file beside the model"
        )
    if not os.access(path, os.R_OK):
        raise InvalidModelError("External data cannot be read", where=f"{owner}: {path}", remedy=f"chmod +r {path}")
    if path.stat().st_nlink > 1:
        raise InvalidModelError(
            "External data has several hard links, so it may be a file from outside the folder",
            where=f"{owner}: {path}",
            remedy="replace it by a copy of its own (cp, then mv)",
        )
    return path


def _check_range(tensor: onnx.TensorProto, entries: dict[str, str], size: int, owner: str) -> None:
    dtype = ir.DataType(tensor.data_type)
    if dtype == ir.DataType.STRING:
        raise InvalidModelError("Strings cannot be external data", where=owner, remedy="save the model again")
    needed = -(-math.prod(tensor.dims) * dtype.bitwidth // 8)
    try:
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", str(needed)))
    except ValueError as error:
        raise InvalidModelError(
            f"Offset or length of external data is not a number: {error}", where=owner, remedy="save the model again"
        ) from error
    if offset < 0 or length < 0 or length != needed:
        raise InvalidModelError(
            f"External data has offset {offset} and length {length}; shape {list(tensor.dims)} and type {dtype.name} "
            f"need {needed} bytes",
            where=owner,
            remedy="save the model again",
        )
    if offset + needed > size:
        raise InvalidModelError(
            f"External data is too short: bytes {offset} to {offset + needed} of a file of {size}",
            where=f"{owner}: {entries['location']}",
            remedy="the weight file is incomplete: copy or download it again",
        )
