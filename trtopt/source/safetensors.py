"""Files of the format safetensors, read without the package: eight bytes with the length of a JSON header, the header
(type, shape and place of each tensor), the tensors. Nothing in one is code.

Source: the format's README (github.com/huggingface/safetensors): little-endian, ``dtype``, ``shape``, ``data_offsets``
from the end of the header on, ``__metadata__`` apart.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from trtopt.errors import UsageError
from trtopt.support.files import read_file
from trtopt.support.json_text import decoded

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_MOST_BYTES = 4 << 30


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The floating tensors of a file, by name; read-only.

    Raises:
        UsageError: The file is missing, no such file, damaged, larger than 4 GiB, or holds a tensor of another type.
    """
    content = read_file(path, "The adapter", _MOST_BYTES)
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        raise _damaged(path, "its header is cut off")
    try:
        header = decoded(content[8 : 8 + length])
    except ValueError as error:
        raise _damaged(path, f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no table")
    data = memoryview(content)[8 + length :]
    return {name: _tensor(name, item, data, path) for name, item in header.items() if name != "__metadata__"}


def _tensor(name: str, item: Any, data: memoryview, path: Path) -> np.ndarray:
    if not isinstance(item, dict):
        raise _damaged(path, f"{name} has no type and no place")
    kind, shape, place = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if kind not in _DTYPES:
        raise UsageError(
            f"The tensor {name} of an adapter is of type {kind}",
            where=str(path),
            remedy=f"save the adapter in one of {', '.join(_DTYPES)}",
        )
    dtype = np.dtype(_DTYPES[kind])
    if not (_are_counts(shape) and _are_counts(place) and len(place) == 2):
        raise _damaged(path, f"the shape or the place of {name} is wrong")
    start, end = place
    if not (start <= end <= len(data) and end - start == math.prod(shape) * dtype.itemsize):
        raise _damaged(path, f"{name} does not fit its place in the file")
    return np.frombuffer(data[start:end], dtype).reshape(shape)


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(
        f"The file is no whole safetensors file: {why}", where=str(path), remedy="download or save the adapter again"
    )
