"""The files a job reads, by their content: what is hashed into its key, and shipped to where it runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from trtopt.config import BuildConfig, flag, options
from trtopt.config.paths import source_file
from trtopt.errors import InvalidModelError, UsageError
from trtopt.source.check import check_external_data
from trtopt.support.files import open_file

MODEL = "model"
_CHUNK_BYTES = 4 << 20
_ARRAYS = (".npz", ".npy")


@dataclass(frozen=True)
class InputFile:
    """A file by its name within its folder; ``stamp`` is its size and modification time when it was hashed."""

    name: str
    path: Path
    sha256: str
    stamp: tuple[int, int]


@dataclass(frozen=True)
class Input:
    """What one option names.

    Attributes:
        option: ``model``, or the field of :class:`~trtopt.config.BuildConfig`.
        path: The file or folder.
        function: Of ``script.py:function``; else empty.
        files: Its files: the file itself first, then those that belong to it.
        sha256: Hash of their names and contents.
    """

    option: str
    path: Path
    function: str
    files: tuple[InputFile, ...]
    sha256: str

    def value(self, folder: Path | None = None) -> str:
        """What the option is given: the path here, or where the files lie in ``folder``."""
        path = self.path if folder is None else (folder if self.path.is_dir() else folder / self.files[0].name)
        return f"{path}:{self.function}" if self.function else str(path)


class Hashes:
    """Hashes of files, each read once."""

    def __init__(self) -> None:
        self._known: dict[Path, InputFile] = {}
        self.inputs: dict[tuple[str, str], Input] = {}
        """What options name, by option and value: many jobs share them."""

    def file(self, path: Path, name: str, what: str) -> InputFile:
        """A file and its hash.

        Raises:
            UsageError: It cannot be read.
        """
        if path not in self._known:
            stamp, digest = stamp_of(path, what), hashlib.sha256()
            with open_file(path, what) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
            self._known[path] = InputFile(name, path, digest.hexdigest(), stamp)
        return self._known[path]


def stamp_of(path: Path, what: str) -> tuple[int, int]:
    """Size in bytes and modification time in nanoseconds.

    Raises:
        UsageError: The file is not there.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise UsageError(
            f"{what} cannot be read: {error.strerror}", where=str(path), remedy="check the path"
        ) from error
    return found.st_size, found.st_mtime_ns


def check_unchanged(inputs: Iterable[Input]) -> None:
    """Raise where a file is not the one that was hashed when the sweep was planned.

    Raises:
        UsageError: See above.
    """
    for item in (file for found in inputs for file in found.files):
        if stamp_of(item.path, "An input") != item.stamp:
            raise UsageError(
                "The file changed since the sweep was planned", where=str(item.path), remedy="start the sweep again"
            )


def inputs_of(model: Path, config: BuildConfig, hashes: Hashes) -> tuple[Input, ...]:
    """Everything a job reads: the model with its weights, samples, scripts, plugins.

    Of a script only the file itself is known: modules and data that it reads are not.

    Raises:
        UsageError: A file cannot be read.
    """
    found = [_known(MODEL, str(model), hashes)]
    for name, option in options(BuildConfig).items():
        value = getattr(config, name)
        if (option.path not in ("source", "file") and name != "calib_cache") or not value:
            continue
        for item in (value,) if isinstance(value, str) else value:
            if item not in option.words:
                found.append(_known(name, item, hashes))
    return tuple(found)


def _known(option: str, value: str, hashes: Hashes) -> Input:
    if (option, value) not in hashes.inputs:
        hashes.inputs[option, value] = _input(option, value, hashes)
    return hashes.inputs[option, value]


def _input(option: str, value: str, hashes: Hashes) -> Input:
    what = "The model" if option == MODEL else f"The file of {flag(option)}"
    path = source_file(value).absolute()
    function = value.rpartition(":")[2] if str(path) != str(Path(value).absolute()) else ""
    folder = path if path.is_dir() else path.parent
    paths = _model_files(path) if option == MODEL else _files(path)
    files = tuple(hashes.file(item, str(item.relative_to(folder)), what) for item in paths)
    named = [function, *((file.name, file.sha256) for file in files)]
    return Input(option, path, function, files, hashlib.sha256(json.dumps(named).encode()).hexdigest())


def _files(path: Path) -> list[Path]:
    path = path.absolute()
    if not path.is_dir():
        return [path]
    return sorted(item for item in path.iterdir() if item.suffix in _ARRAYS and item.name[0] != "." and item.is_file())


def _model_files(path: Path) -> list[Path]:
    """The model and the files of its weights; what is wrong with it is for the build to say."""
    path = path.absolute()
    stamp_of(path, "The model")
    try:
        return [path, *check_external_data(onnx.load(path, load_external_data=False), path.parent)]
    except (OSError, DecodeError, InvalidModelError):
        return [path]
