"""Engines of a sweep, taken out of its store under names that people read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from trtopt.config.toml_file import matrix_word
from trtopt.engine.manifest import verify
from trtopt.errors import UsageError
from trtopt.fleet.store import ENTRY
from trtopt.report.schema.sweep import SweepRow
from trtopt.support.files import staged_folder

_STORED = "model"
"""How the store calls every engine."""


def take(rows: Sequence[SweepRow], folder: Path) -> list[Path]:
    """Copy engines, each with its manifest and its report, into a folder of its own: ``resnet-L4-int8/resnet.engine``.

    Args:
        rows: Jobs of a sweep that have an engine, in a store that is a folder.
        folder: Where the folders come; it is made where it is not there.

    Returns:
        The engines that were written, each checked against its manifest.

    Raises:
        UsageError: The store is no folder of this machine, a file cannot be read or written, or is there already.
        IntegrityError: An engine in the store is not what its manifest describes.
    """
    sources = [Path(row.engine) for row in rows]
    targets = [folder / matrix_word(f"{row.model}-{row.gpu}-{row.precision}") for row in rows]
    for row, source, target in zip(rows, sources, targets, strict=True):
        if not source.is_file():
            remedy = "give the report on the machine that has the store; of a URL, copy the store into a folder first"
            raise UsageError("The engine is not there", where=row.engine, remedy=remedy)
        if os.path.lexists(target):
            raise UsageError("The folder is there already", where=str(target), remedy="name another folder for --take")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_copied(*each) for each in zip(rows, sources, targets, strict=True)]
    except OSError as error:
        raise UsageError(
            f"The engines cannot be copied: {error.strerror}", where=str(error.filename or folder), remedy="check both"
        ) from error


def _copied(row: SweepRow, source: Path, target: Path) -> Path:
    name = f"{row.model}{source.name.removeprefix(_STORED)}"
    with staged_folder(target) as folder:
        for file in sorted(source.parent.iterdir()):
            if file.name != ENTRY and file.is_file() and not file.is_symlink():
                own = file.name.removeprefix(source.name)  # the end of the name of the engine, or of its manifest
                shutil.copyfile(file, folder / (file.name if own == file.name else name + own))
        verify(folder / name)
    return target / name
