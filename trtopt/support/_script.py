"""Functions that the user names as ``FILE.py:FUNCTION``."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trtopt.errors import UsageError

DECODE = "decode:"
"""What precedes the file of a decoder's prompts where samples are named."""

_IMPORTS = re.compile(rb"(?:^|[;:])[ \t]*(?:from|import)[ \t]+([^\n#;]+)", re.MULTILINE)
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_WORD = re.compile(r"\w+")


def is_script(text: str) -> bool:
    """Whether ``text`` has the form ``FILE.py:FUNCTION``."""
    return text.rpartition(":")[0].endswith(".py")


def is_target(text: str) -> bool:
    """Whether ``text`` names a PyTorch module in code, ``FILE.py:NAME`` or ``package.module:NAME``, and no file."""
    return not os.path.exists(text) and (is_script(text) or _TARGET.fullmatch(text) is not None)


def load_object(text: str, option: str, kind: str) -> Any:
    """Run the file of ``FILE.py:NAME`` and return what NAME is in it. Modules beside the file can be imported by it.

    Args:
        text: For example ``metric.py:top5``; the path may be relative.
        kind: What NAME should be, for messages.

    Raises:
        UsageError: The file is missing, fails when it is run, or has no such name.
    """
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"{option}: the file does not exist", where=file or text, remedy="give FILE.py:FUNCTION")
    module_name = f"_trtopt_script_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{option}: not a Python file", where=file, remedy="give FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{option}: running the file failed: {type(error).__name__}: {error}",
            where=script_line(error, path),
            remedy=f"python {file} shows the whole error",
        ) from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    if not hasattr(module, name):
        public = ", ".join(key for key, value in vars(module).items() if _can_be_meant(value) and key[0] != "_")
        raise UsageError(f"{option}: the file has no {kind} {name!r}", where=file, remedy=f"it has: {public or 'none'}")
    return getattr(module, name)


def _can_be_meant(value: Any) -> bool:
    return callable(value) or (hasattr(value, "__iter__") and not isinstance(value, str))


def load_function(text: str, option: str) -> Callable[..., Any]:
    """As :func:`load_object`, for a function.

    Raises:
        UsageError: As :func:`load_object`, and when the name is not callable.
    """
    function = load_object(text, option, "function")
    if not callable(function):
        raise UsageError(f"{option}: not a function", where=text, remedy="name a function of the file")
    return function  # type: ignore[no-any-return]


def script_hash(text: str) -> str:
    """A hash, hex, of the file of ``FILE.py:NAME``, of NAME, and of the modules beside FILE.py that it imports.

    What these import from there counts too. Nothing is run.
    """
    file, _, name = text.rpartition(":")
    script = Path(file).resolve()
    left, read = [script], dict[Path, bytes]()
    while left:
        path = left.pop()
        if path not in read and path.is_file():
            read[path] = path.read_bytes()
            left += _imported(read[path], script.parent)
    digest = hashlib.sha256(read.pop(script, b"") + b"\0" + name.encode())
    for path in sorted(read):
        digest.update(f"\0{path.relative_to(script.parent)}\0".encode() + read[path])
    return digest.hexdigest()


def _imported(source: bytes, folder: Path) -> Iterator[Path]:
    """The modules in a folder, and in its folders, whose names are in the import statements of a file."""
    for statement in _IMPORTS.findall(source.replace(b"\\\n", b" ")):
        for word in set(_WORD.findall(statement.decode(errors="replace"))):
            yield folder / f"{word}.py"
            yield from (folder / word).rglob("*.py")


def script_line(error: BaseException, path: Path) -> str:
    """``FILE:LINE`` of the innermost line of ``path`` in the error's traceback; the file alone if it is not there."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).resolve() == path.resolve():
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{path}:{line}" if line else str(path)
