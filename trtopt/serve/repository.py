"""Models into a repository of Triton: whole or not at all, and never over another model."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from trtopt.errors import UsageError
from trtopt.serve.triton import CONFIG
from trtopt.support.files import open_file

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
"""Triton leaves out folders of other names."""


@dataclass(frozen=True)
class Entry:
    """A model to write.

    Attributes:
        name: Its name.
        config: Its ``config.pbtxt``.
        files: What its version holds, by path in there: content, or the file to copy. Empty for an ensemble.
    """

    name: str
    config: str
    files: Mapping[str, bytes | Path] = field(default_factory=dict)


def check_name(name: str) -> None:
    """Check the name of a model, which becomes that of a folder.

    Raises:
        UsageError: It is no plain name.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"Not a name for a model: {name!r}",
            where="--name",
            remedy="give one of letters, digits, '_', '-' and '.', which does not begin with '-' or '.'",
        )


def write(repository: Path, entries: Sequence[Entry], version: int | None) -> int:
    """Write models as one version each.

    A new model appears with its version, a new version with its files, in order, when all are written. A model of the
    same name must have the same configuration already.

    Args:
        repository: The folder; it is made if it is not there.
        entries: The models.
        version: The version; None for the one after the latest of them all.

    Returns:
        The version.

    Raises:
        UsageError: A model of that name has another configuration or that version already, a file cannot be read or
            written.
    """
    for entry in entries:
        check_name(entry.name)
    try:
        return _write_all(repository, entries, version)
    except (OSError, ValueError) as error:  # a name may hold what no file system takes
        raise UsageError(
            f"The repository cannot be written: {error.strerror if isinstance(error, OSError) else error}",
            where=repr(str((error.filename if isinstance(error, OSError) else None) or repository))[1:-1],
            remedy="choose a folder that is writable, with room for the model",
        ) from error


def _write_all(repository: Path, entries: Sequence[Entry], version: int | None) -> int:
    for entry in entries:
        _check_config(repository / entry.name, entry.config)
    present = {number for entry in entries for number in _versions(repository / entry.name)}
    number = version if version is not None else max(present, default=0) + 1
    if number in present:
        raise UsageError(
            f"The repository has version {number} already",
            where=str(repository / entries[0].name),
            remedy="give another --version, or leave it out",
        )
    repository.mkdir(parents=True, exist_ok=True)
    with ExitStack() as staged:  # which renames the last one first
        for entry in reversed(entries):
            _write_one(staged, repository, entry, str(number))
    return number


def _check_config(folder: Path, config: str) -> None:
    if not os.path.lexists(folder):
        return
    try:
        with open_file(folder / CONFIG, "The configuration of the model") as file:
            same = file.read(len(config.encode()) + 1) == config.encode()
    except UsageError:
        same = False
    if not same:
        raise UsageError(
            "The repository has a model of this name with another configuration",
            where=str(folder / CONFIG),
            remedy="give the new one another --name, or remove the old one",
        )


def _versions(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if _VERSION.fullmatch(path.name)] if folder.is_dir() else []


def _write_one(staged: ExitStack, repository: Path, entry: Entry, version: str) -> None:
    model = repository / entry.name
    if model.is_dir():
        _fill(staged.enter_context(_staged(model, model / version)), entry)
        return
    folder = staged.enter_context(_staged(repository, model))
    (folder / version).mkdir()
    _fill(folder / version, entry)
    _store(folder / CONFIG, entry.config.encode())


def _fill(folder: Path, entry: Entry) -> None:
    for name, content in entry.files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        _store(place, content)


def _store(place: Path, content: bytes | Path) -> None:
    with open(place, "xb") as file:
        if isinstance(content, Path):
            with open_file(content, "The model's file") as source:
                shutil.copyfileobj(source, file, 1 << 22)
        else:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _staged(parent: Path, target: Path) -> Iterator[Path]:
    """A folder whose name Triton leaves out; on success it becomes ``target``, a new folder, else it goes."""
    folder = parent / f".{target.name}.{secrets.token_hex(8)}.partial"
    folder.mkdir()
    try:
        yield folder
        os.rename(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
