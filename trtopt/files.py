"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trtopt.errors import UsageError


def check_writable(path: Path) -> None:
    """Raise early, before minutes of work, when ``path`` cannot become an output file.

    Raises:
        UsageError: The folder is missing or not writable, or ``path`` is a folder.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise UsageError("The output path is a folder", where=str(path), remedy="name a file")
    if not folder.is_dir():
        raise UsageError("The output folder does not exist", where=str(folder), remedy=f"mkdir -p {folder}")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"The output folder is not writable: {error.strerror}", where=str(folder), remedy="choose another folder"
        ) from error


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it replaces ``path``, else it is removed.

    The temporary name starts with a dot and ends in ``.partial``, so that what a killed run leaves behind is
    never taken for an output.

    Raises:
        UsageError: The file cannot be written.
    """
    path = path.absolute()
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise UsageError(
            f"Cannot write: {error.strerror}", where=str(path), remedy="choose a folder that exists and is writable"
        ) from error
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(path: Path, content: bytes | str) -> None:
    """Write ``content`` to ``path``, whole or not at all (see :func:`atomic_path`)."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)
