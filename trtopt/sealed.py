"""Files and lines that carry a checksum of themselves, so that damage is seen before their content is used.

A checksum tells damage, not who wrote the file: whoever may write to a cache folder can write an entry that fits.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from trtopt.files import atomic_path

_MAX_HEADER_BYTES = 1024
_CRC = "crc32"


def write_sealed(path: Path, form: str, identity: str, parts: Sequence[bytes]) -> None:
    """Write ``parts`` behind a line with their checksum, whole or not at all.

    Args:
        path: The file.
        form: The name and version of the format.
        identity: What the content was made from, as a hash.
        parts: The content; several, so that large ones need not be copied into one.

    Raises:
        UsageError: The file cannot be created.
        OSError: The disk is full, or fails otherwise.
    """
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(_header(form, identity, parts) + b"\n")
        for part in parts:
            file.write(part)


def read_sealed(path: Path, form: str, max_bytes: int) -> tuple[str, memoryview]:
    """The identity and the content of a sealed file.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read.
        ValueError: It is larger than ``max_bytes``, of another format, or not what was written.
    """
    with _opened(path) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no file")
        size = status.st_size
        if size > max_bytes + _MAX_HEADER_BYTES:
            raise ValueError("the file is too large")
        # Not mapped: a file that another process cuts off would end this one.
        data = memoryview(file.read(size))
    end = bytes(data[:_MAX_HEADER_BYTES]).find(b"\n")
    head, body = bytes(data[: max(end, 0)]), data[end + 1 :]
    header = _read_header(head)
    if header["format"] != form:
        raise ValueError("another format")
    if head != _header(form, header["identity"], [body]):
        raise ValueError("its content is not what was written")
    return header["identity"], body


def format_of(path: Path) -> str:
    """The format that a sealed file says it has; empty for a file that is none.

    Raises:
        OSError: It cannot be read.
    """
    try:
        with _opened(path) as file:
            return _read_header(file.read(_MAX_HEADER_BYTES).partition(b"\n")[0])["format"]
    except ValueError:
        return ""


def _opened(path: Path) -> BinaryIO:
    """The file, opened without waiting for the other end where it is a pipe."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))


def _header(form: str, identity: str, parts: Sequence[bytes | memoryview]) -> bytes:
    """The first line; its checksum is that of format, identity and content."""
    names = {"format": form, "identity": identity}
    digest = hashlib.sha256(json.dumps(names).encode())
    for part in parts:
        digest.update(part)
    return json.dumps({**names, "sha256": digest.hexdigest()}).encode()


def _read_header(head: bytes) -> dict[str, str]:
    try:
        header = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise ValueError("its first line is no header") from error
    names = ("format", "identity", "sha256")
    if not isinstance(header, dict) or tuple(header) != names or not all(isinstance(header[n], str) for n in names):
        raise ValueError("its first line is no header")
    return header


def seal_line(record: Mapping[str, Any]) -> bytes:
    """One line of JSON, its line feed included, that :func:`open_line` takes back."""
    return json.dumps({**record, _CRC: _crc(record)}).encode() + b"\n"


def open_line(line: bytes) -> dict[str, Any]:
    """The record of a line.

    Raises:
        ValueError: It is not a line that :func:`seal_line` wrote, whole.
    """
    try:
        record = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(record, dict) or record.pop(_CRC, None) != _crc(record):
        raise ValueError("not what was written")
    return record


def _crc(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record).encode())
