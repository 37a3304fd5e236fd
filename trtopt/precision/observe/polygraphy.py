"""Files of Polygraphy, inputs (``--save-inputs``) and outputs (``--save-outputs``), read and written without it.

Both are JSON, in which an array is an ``.npy`` in base64 and an object names its class under ``polygraphy_class``
(``polygraphy/json/serde.py`` and ``comparator/struct.py`` of Polygraphy 0.53). What Polygraphy's own reader also takes
is refused: tensors of PyTorch, which are unpickled, and the encodings of its early versions. A file is read whole; in a
folder each iteration is a file.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trtopt.errors import UsageError
from trtopt.precision.observe.feeds import MAX_SAMPLE_BYTES, array_in
from trtopt.support.files import atomic_path, read_file
from trtopt.support.json_text import decoded

SUFFIX = ".json"

Arrays = Mapping[str, np.ndarray]
"""The inputs, or the outputs, of one inference, by name."""

_CLASS = "polygraphy_class"


def read_inputs(path: Path) -> list[dict[str, np.ndarray]]:
    """The inputs of each iteration in a file: a list of feeds, or one feed.

    Example:
        >>> read_inputs(Path("inputs.json"))[0]["image"].shape  # doctest: +SKIP
        (1, 3, 224, 224)

    Raises:
        UsageError: The file cannot be read, is larger than 4 GiB, or is none of Polygraphy's inputs.
    """
    data = _read(path)
    feeds = data if isinstance(data, list) else [data]
    return [_arrays(feed, f"{path}, item {index}") for index, feed in enumerate(feeds)]


def read_outputs(path: Path) -> tuple[str, list[dict[str, np.ndarray]]]:
    """The name of a runner, and its outputs in each iteration, of a file or a folder with a file per iteration.

    Raises:
        UsageError: A file cannot be read, is larger than 4 GiB, is none of Polygraphy's outputs, or holds those of
            several runners.
    """
    files = iteration_files(path) if path.is_dir() else [path]
    found = [(runner, outputs) for file in files for runner, outputs in _outputs_in(file)]
    names = sorted({runner for runner, _ in found})
    if len(names) != 1:
        raise UsageError(
            f"The outputs are those of {len(names)} runners, not of one: {', '.join(names) or 'none'}",
            where=str(path),
            remedy="save those of one: polygraphy run model.onnx --onnxrt --save-outputs outputs.json",
        )
    return names[0], [outputs for _, outputs in found]


def iteration_files(folder: Path) -> list[Path]:
    """The files of a folder that Polygraphy wrote, in the order of the iterations."""
    return sorted(item for item in folder.iterdir() if item.suffix == SUFFIX and item.is_file())


def write_inputs(path: Path, feeds: Iterable[Arrays]) -> None:
    """Write inputs for ``--load-inputs``, whole or not at all; memory holds one iteration.

    Raises:
        UsageError: The file cannot be written.
    """
    _write(path, "[", ({name: _encoded(array) for name, array in feed.items()} for feed in feeds), "]")


def write_outputs(path: Path, runner: str, iterations: Iterable[Arrays]) -> None:
    """Write the outputs of one runner for ``--load-outputs``, whole or not at all; memory holds one iteration.

    Args:
        path: The file.
        runner: What Polygraphy calls the runner, for example ``trtopt-engine``.
        iterations: The outputs of each iteration.

    Raises:
        UsageError: The file cannot be written.
    """
    results = (
        {
            "outputs": {name: {"values": _encoded(array), _CLASS: "LazyArray"} for name, array in outputs.items()},
            "runtime": None,
            "runner_name": runner,
            _CLASS: "IterationResult",
        }
        for outputs in iterations
    )
    _write(path, f'{{"lst": [[{json.dumps(runner)}, [', results, f']]], "{_CLASS}": "RunResults"}}')


def _write(path: Path, start: str, items: Iterable[Any], end: str) -> None:
    try:
        with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            file.write(start)
            for index, item in enumerate(items):
                file.write(("," if index else "") + json.dumps(item))
            file.write(end)
            file.flush()
    except OSError as error:
        raise UsageError(
            f"Cannot write: {error.strerror}", where=str(path), remedy="make room, or choose another folder"
        ) from error


def _encoded(array: np.ndarray) -> dict[str, str]:
    stream = io.BytesIO()
    # An .npy has no name for the types of ml_dtypes, which are all exact in FP32.
    np.save(stream, array.astype(np.float32) if array.dtype.kind == "V" else array, allow_pickle=False)
    return {"array": base64.b64encode(stream.getvalue()).decode(), _CLASS: "ndarray"}


def _read(path: Path) -> Any:
    try:
        return decoded(read_file(path, "The file of Polygraphy", MAX_SAMPLE_BYTES))
    except ValueError as error:
        raise _foreign(f"it is no JSON that is read: {error}", str(path)) from error


def _outputs_in(path: Path) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """The runner and the outputs of each iteration of a file."""
    try:
        data = _read(path)["lst"]
        results = [(str(runner), result["outputs"]) for runner, iterations in data for result in iterations]
    except (TypeError, KeyError, ValueError) as error:
        raise _foreign("it holds no outputs", str(path)) from error
    for index, (runner, outputs) in enumerate(results):
        yield runner, _arrays(outputs, f"{path}, iteration {index}")


def _arrays(feed: Any, where: str) -> dict[str, np.ndarray]:
    if not isinstance(feed, dict):
        raise _foreign("an iteration is no dict of arrays by name", where)
    return {name: _array(value, f"{where}, {name}") for name, value in feed.items()}


def _array(value: Any, where: str) -> np.ndarray:
    value = value.get("values", value) if isinstance(value, dict) else value
    text = value.get("array") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise _foreign("it holds something else than arrays of NumPy, such as tensors of PyTorch", where)
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise _foreign(f"an array is not in base64: {error}", where) from error
    return array_in(content, where)


def _foreign(why: str, where: str) -> UsageError:
    return UsageError(
        f"The file is not one of Polygraphy: {why}",
        where=where,
        remedy="give what 'polygraphy run' wrote with --save-inputs or --save-outputs, arrays of NumPy in it",
    )
