"""A function in a process of its own: a crash of native code there becomes an exception here.

The process is started anew, not forked: libraries that the caller has used may hold threads, which a fork leaves
behind. What crosses is JSON: the arguments, messages as they come, and an error in its parts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from trtopt import errors
from trtopt.errors import ResourceError, TrtoptError, UsageError
from trtopt.support.crash import death
from trtopt.support.limits import limit_memory
from trtopt.support.temporary import TemporaryFolder
from trtopt.support.version import IMPORT_ROOT

Tell = Callable[[dict[str, Any]], None]
"""Sends a message to the caller."""

_MAIN = (
    "import os, sys; sys.path[:] = {path!r}; os.environ['TMPDIR'] = os.path.dirname(sys.argv[2]); "
    "from trtopt.support.child import main; main(*sys.argv[1:])"
)


def call_in_child(function: str, arguments: Mapping[str, Any], on_message: Tell, where: str) -> None:
    """Call ``function`` with ``arguments`` and a :data:`Tell` in a new process, which ends with this one.

    Its temporary files go with the call, and so does what it started. What it prints goes to standard error.

    Args:
        function: ``module:function``.
        arguments: JSON values by name; paths and the like go as text.
        on_message: Called with what it tells.
        where: What an error calls it.

    Raises:
        TrtoptError: It raised one, which is raised here; or the process died, by the library that crashed.
        RuntimeError: It raised another exception, whose trace is the text.
    """
    path = [*filter(None, sys.path), str(IMPORT_ROOT)]  # not '', the folder that the caller stands in
    with TemporaryFolder("child-") as folder:
        trace = Path(folder, "trace")
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _MAIN.format(path=path), function, str(trace)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                start_new_session=True,
            )
        except OSError as error:
            raise ResourceError(
                f"The process that works cannot be started: {error.strerror}",
                where=where,
                remedy="raise the limit of processes (ulimit -u), or free memory",
            ) from error
        try:
            ended = _talk(process, arguments, on_message)
        finally:
            _kill(process)
        code = process.wait()
        if ended:
            return
        if -code in set(signal.Signals):
            raise death(-code, trace.read_text("utf-8", "replace") if trace.exists() else "", where)
        raise UsageError(
            f"The process that works ended with exit code {code}, and no word",
            where=where,
            remedy="look for what ends the process in the scripts it was given",
        )


def _talk(process: subprocess.Popen[str], arguments: Mapping[str, Any], on_message: Tell) -> bool:
    """Send the arguments and pass on what comes; whether the function has returned."""
    if process.stdin is None or process.stdout is None:
        return False
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(arguments, default=str) + "\n")
        process.stdin.flush()
    for line in process.stdout:
        if not line.endswith("\n"):  # it died in the middle of it
            return False
        message = json.loads(line)
        if "raised" in message:
            raise _error(message["raised"])
        if "ended" in message:
            return True
        on_message(message)
    process.wait()  # by itself: its status says of what
    return False


def _error(raised: dict[str, str]) -> Exception:
    kind = getattr(errors, raised["kind"], None)
    if isinstance(kind, type) and issubclass(kind, TrtoptError):
        return kind(raised["what"], where=raised["where"], remedy=raised["remedy"])
    return RuntimeError(raised["trace"])


def _kill(process: subprocess.Popen[str]) -> None:
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    for end in (process.stdin, process.stdout):
        if end is not None:
            with contextlib.suppress(BrokenPipeError):
                end.close()


def main(function: str, trace: str) -> None:
    """What the process runs."""
    # What scripts and libraries print is no message, and what they read no argument.
    messages, requests = os.fdopen(os.dup(1), "w", encoding="utf-8"), os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    arguments = json.loads(requests.readline())
    threading.Thread(target=_end_with_caller, args=(requests,), daemon=True).start()
    faulthandler.enable(open(trace, "w"))  # noqa: SIM115 - it is written when the process dies
    limit_memory()
    lock = threading.Lock()

    def tell(message: dict[str, Any]) -> None:
        with lock:
            messages.write(json.dumps(message) + "\n")
            messages.flush()

    try:
        resolve_name(function)(**arguments, tell=tell)
    except TrtoptError as error:
        parts = {"what": error.what, "where": error.where, "remedy": error.remedy}
        tell({"raised": {"kind": type(error).__name__, **parts}})
    except MemoryError:
        remedy = "free memory, or give smaller shapes or fewer samples"
        tell({"raised": {"kind": "ResourceError", "what": "Memory ran out", "where": function, "remedy": remedy}})
    except BaseException:  # noqa: BLE001 - of a bug, or of a script: the caller raises it
        tell({"raised": {"kind": "", "trace": traceback.format_exc()}})
    else:
        tell({"ended": True})


def _end_with_caller(requests: Any) -> NoReturn:
    requests.read()
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():  # with what it has started
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
