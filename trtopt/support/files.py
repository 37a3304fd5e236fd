"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from trtopt.errors import UsageError
from trtopt.support.temporary import TEMPORARY

_DEVICES, _PROCESSES = Path("/dev"), Path("/proc")
"""Folders of the kernel's names: what ``/dev/stdout`` leads to may be a file, but its name is not ours to replace."""

_AT_ONCE = getattr(os, "O_NONBLOCK", 0)
"""Opens a pipe without waiting for its writer."""


_CHUNK_BYTES = 4 << 20

_NAME_START = 32
"""Characters of the output's name in the temporary name, which has to fit where the output's name just fits."""


def check_writable(path: Path) -> None:
    """Raise early, before minutes of work, when ``path`` cannot become an output file.

    Raises:
        UsageError: The folder is missing or not writable, or ``path`` is a folder, a device or a pipe (writing would
            replace it), or a name that the file system does not take.
    """
    folder = path.absolute().parent
    try:
        is_there = path.exists()
    except OSError as error:
        raise UsageError(f"Cannot write: {error.strerror}", where=str(path), remedy="choose another name") from error
    if path.is_dir():
        raise UsageError("The output path is a folder", where=str(path), remedy="name a file")
    place = _real(folder)
    if (is_there and not path.is_file()) or place == _DEVICES or place.is_relative_to(_PROCESSES):
        raise UsageError(
            "The output path is a device or a pipe, not a file", where=str(path), remedy="name a file, or leave it out"
        )
    if not folder.is_dir():
        raise UsageError("The output folder does not exist", where=str(folder), remedy=f"mkdir -p {folder}")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"The output folder is not writable: {error.strerror}", where=str(folder), remedy="choose another folder"
        ) from error


def check_outputs(outputs: Mapping[str, Path], inputs: Mapping[str, Path]) -> None:
    """Raise before any work when an output cannot be written, or would overwrite an input or another output.

    Args:
        outputs: What is written, by what messages call it (``--report``).
        inputs: What is read, likewise (``the model``).

    Raises:
        UsageError: See above.
    """
    taken = {place: what for what, path in inputs.items() for place in (_place(path), _real(path))}
    for what, path in outputs.items():
        check_writable(path)
        place = _place(path)
        if place in taken:
            raise UsageError(
                f"{what} would overwrite {taken[place]}", where=str(path), remedy=f"give {what} another file"
            )
        taken[place] = what


def _place(path: Path) -> Path:
    """The same for every spelling of a file's path; the file itself may be a link, which writing replaces."""
    return _real(path.absolute().parent) / path.name


def _real(path: Path) -> Path:
    """Where links lead; unlike ``Path.resolve``, which raises before Python 3.13, a link to itself is left as it is."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def open_file(path: Path, what: str, at_most: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file for reading: a pipe would block, and a device never ends.

    Args:
        path: The file; a link is followed.
        what: What messages call it.
        at_most: The largest size in bytes; a larger file, which may be a hole on the disk, is not read at all.

    Raises:
        UsageError: It cannot be opened or read, is no regular file, or is too large.
    """
    try:
        opened = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _AT_ONCE))  # noqa: SIM115
    except (OSError, ValueError) as error:  # a name may hold what no file system takes
        raise _unreadable(path, what, error) from error
    with opened as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{what} is not a file", where=str(path), remedy="name a regular file")
        if at_most is not None and status.st_size > at_most:
            raise UsageError(
                f"{what} is too large: {status.st_size} bytes, more than {at_most}",
                where=str(path),
                remedy="check the path",
            )
        try:
            yield file
        except OSError as error:
            raise _unreadable(path, what, error) from error


def hash_file(path: Path, what: str, *, at_most: int | None = None) -> tuple[int, str]:
    """The size of a file in bytes, and the SHA-256 of its content as hex; read in chunks.

    Args:
        what: What messages call it.
        at_most: Bytes after which reading may stop, since the file is another one.

    Raises:
        UsageError: It cannot be read, or is no regular file.
    """
    digest, size = hashlib.sha256(), 0
    with open_file(path, what) as file:
        while (at_most is None or size <= at_most) and (chunk := file.read(_CHUNK_BYTES)):
            size += len(chunk)
            digest.update(chunk)
    return size, digest.hexdigest()


def read_file(path: Path, what: str, at_most: int) -> bytes:
    """The content of a regular file of bounded size.

    Raises:
        UsageError: As of :func:`open_file`; or it is larger than the memory.
    """
    with open_file(path, what, at_most) as file:
        size = os.fstat(file.fileno()).st_size
        with contextlib.suppress(MemoryError):
            return file.read(size)
    raise UsageError(f"{what} has {size} bytes, more than there is memory", where=str(path), remedy="free memory")


def open_shared(path: Path, flags: int) -> int:
    """Open a file in a folder that others write to as well, with flags of :func:`os.open`, and give its descriptor.

    A link there may lead anywhere, and a pipe would block: both are refused.

    Raises:
        OSError: It cannot be opened, is a link, or no regular file.
    """
    handle = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | _AT_ONCE, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


def read_shared(path: Path, at_most: int) -> bytes:
    """The content of a file in a folder that others write to as well (see :func:`open_shared`).

    Raises:
        OSError: As of :func:`open_shared`.
        ValueError: It is larger than ``at_most``.
    """
    with open(open_shared(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > at_most:
            raise ValueError("the file is too large")
        return file.read(size)


def _unreadable(path: Path, what: str, error: OSError | ValueError) -> UsageError:
    reason = error.strerror if isinstance(error, OSError) else error
    return UsageError(f"{what} cannot be read: {reason}", where=repr(str(path))[1:-1], remedy="check the path")


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
        # Not tempfile.mkstemp: its mode is 0600, and reading the umask to correct it changes it for other threads.
        temporary = path.with_name(f".{path.name[:_NAME_START]}.{secrets.token_hex(8)}.partial")
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        mode = stat.S_IMODE(os.fstat(handle).st_mode)
        os.close(handle)
    except OSError as error:
        raise UsageError(
            f"Cannot write: {error.strerror}", where=str(path), remedy="choose a folder that exists and is writable"
        ) from error
    try:
        yield temporary
        os.chmod(temporary, mode)
        if not path.parent.name.startswith(TEMPORARY):  # nobody reads those after a crash
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(path: Path, content: bytes | str) -> None:
    """Write ``content`` to ``path``, whole or not at all (see :func:`atomic_path`).

    Raises:
        UsageError: It cannot be written: the folder is missing or not writable, the disk is full.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise UsageError(
            f"Cannot write: {error.strerror}", where=str(path), remedy="make room, or choose another folder"
        ) from error


def store(place: Path, content: bytes | Path) -> None:
    """Write a new file of this content, or a copy of this file, to the disk.

    Raises:
        OSError: It is there, or cannot be written.
        UsageError: The file to copy cannot be read.
    """
    with open(place, "xb") as file:
        if isinstance(content, Path):
            with open_file(content, f"The file {content.name}") as source:
                shutil.copyfileobj(source, file, _CHUNK_BYTES)
        else:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` whose name begins with a dot; on success it becomes ``target``, else it goes.

    Raises:
        OSError: It cannot be made, or ``target`` is there and not empty.
    """
    folder = target.parent / f".{target.name}.{secrets.token_hex(8)}.partial"
    folder.mkdir()
    try:
        yield folder
        os.rename(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
