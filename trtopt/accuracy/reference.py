"""The FP32 outputs of the model as loaded: run once for all stages of a run, and kept for later runs."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx_ir as ir

from trtopt.accuracy.compare import MemoizedRunner, Runner, digest
from trtopt.cache.code import entry_key
from trtopt.cache.folder import OUTPUTS, Lines
from trtopt.events import OnEvent
from trtopt.graph.skeleton import content_hash
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.support._lazy import require
from trtopt.support.ort_session import Feeds, OrtSession

_NUMBERS = re.compile("[<|][biuf][1248]")
"""Types of outputs that are kept, as NumPy writes them; NumPy itself reads them as a language."""

_MOST_KEPT_BYTES = 1 << 18
"""Larger outputs of one sample are not kept: a file of lines holds 16 MiB."""


class KeptOutputs:
    """Outputs of one model in a file of the cache, by sample. A line that is not what was written is left out.

    Args:
        model: The model.
        names: The values that are returned.
        folder: Where the cache lies; None for ``~/.cache/trtopt``, which need not be writable.
        on_event: Told why the file is not written.
    """

    def __init__(self, model: ir.Model, names: Sequence[str], folder: str | Path | None, on_event: OnEvent) -> None:
        version = str(require("onnxruntime", "cpu", "run models on the CPU").__version__)
        key = entry_key(__name__, version, content_hash(model), *names)
        self._lines = Lines(OUTPUTS, folder, on_event, key)
        self._count = len(names)
        found = ((str(record.get("sample")), _arrays_of(record)) for record in self._lines.load())
        self._known = {sample: arrays for sample, arrays in found if arrays is not None and len(arrays) == self._count}

    def get(self, feeds: Feeds) -> list[np.ndarray] | None:
        """The outputs for a sample; None where they are not there."""
        return self._known.get(digest(feeds).hex())

    def add(self, feeds: Feeds, outputs: Sequence[np.ndarray]) -> None:
        """Keep the outputs for a sample, where they are small tensors of numbers."""
        is_plain = all(isinstance(array, np.ndarray) and _NUMBERS.fullmatch(array.dtype.str) for array in outputs)
        if is_plain and sum(array.nbytes for array in outputs) <= _MOST_KEPT_BYTES:
            content = [
                [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()] for array in outputs
            ]
            self._lines.add({"sample": digest(feeds).hex(), "outputs": content})


def _arrays_of(record: Mapping[str, Any]) -> list[np.ndarray] | None:
    """The outputs of a line; None for what is none."""
    try:
        return [_array(str(kind), shape, str(content)) for kind, shape, content in record["outputs"]]
    except (KeyError, TypeError, ValueError):
        return None


def _array(kind: str, shape: Sequence[int], content: str) -> np.ndarray:
    if not _NUMBERS.fullmatch(kind):
        raise ValueError(f"{kind} is no type of numbers")
    dtype, data = np.dtype(kind), base64.b64decode(content, validate=True)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("an output is not what its type and shape say")
    return np.frombuffer(data, dtype).reshape(shape)


class Reference:
    """The FP32 outputs of the model as loaded, which all stages of a run share: a sample is run once.

    The session is made for the first sample that is not known, and closed where the last ``with`` ends.

    Args:
        model: The model as loaded.
        watched: Names of the values to return; None for the model's outputs.
        kept: Outputs of earlier runs; None for none.
    """

    def __init__(self, model: ir.Model, watched: Sequence[str] | None = None, kept: KeptOutputs | None = None) -> None:
        self._model, self._watched, self._kept = model, watched, kept
        self.output_names = tuple(watched or (str(value.name) for value in model.graph.outputs))
        self._session: OrtSession | None = None
        self._known, self._users = MemoizedRunner(self), 0

    def __enter__(self) -> Runner:
        self._users += 1
        return self._known

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if self._session is not None and not self._users:
            self._session.close()
            self._session = None

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Run a sample, known or not; see :meth:`~trtopt.support.ort_session.OrtSession.run`."""
        found = None if self._kept is None else self._kept.get(feeds)
        if found is not None:
            return [array.copy() for array in found]
        if self._session is None:
            self._session = OrtSession(to_fp32(self._model), self._watched)
        outputs = self._session.run(feeds)
        if self._kept is not None:
            self._kept.add(feeds, outputs)
        return outputs
