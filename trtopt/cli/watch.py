"""The command's work in a process of its own: a crash of native code there becomes an error message here.

ONNX Runtime, ONNX's checks, protobuf and PyTorch run inside the process that works on a model, and none of them
survives every file. The process of the command is forked before anything heavy is loaded: the child works, the parent
waits. How the child died is read from its status, and what was running from what ``faulthandler`` left in a file
without a name.

Only on Linux: Windows has no fork, and a forked process cannot use all of macOS; there the command runs directly.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trtopt.cli.streams import STOPPED
from trtopt.errors import ResourceError
from trtopt.support.crash import death
from trtopt.support.limits import limit_memory
from trtopt.support.temporary import TEMPORARY

GRACE_S = 10.0
"""From a request to stop to the end by force: native code that does not return cannot be asked."""

_FROM_KERNEL = 0x80
"""``si_code`` of a signal that the terminal sent, to all processes of its foreground group (sigaction(2))."""

_PR_SET_PDEATHSIG = 1
_LONGEST_COMMAND = 300
_SHOW_CURSOR = "\x1b[?25h"


def watched(work: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run ``work`` in a child of this process, and return its exit code.

    The child returns from this function like the parent does, each with the exit code for its ``sys.exit``.

    Raises:
        TrtoptError: In the parent: the child died, which left nothing but what it had written whole. Or it could not be
            started.
    """
    # Who starts the command may ignore its children, and of a child that is ignored there is no status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Of a group in the background of a script, interrupts are ignored, and under nohup the end of the terminal is.
    numbers = {number for number in STOPPED if signal.getsignal(number) != signal.SIG_IGN} | {signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *numbers})
    parent = os.getpid()
    gc.freeze()  # else both collectors write to every object, and the pages are copied: 20 ms
    try:
        trace = os.memfd_create("crash")
        child = os.fork()
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise ResourceError(
            f"The process that works cannot be started: {error.strerror}",
            where="fork",
            remedy="raise the limit of processes (ulimit -u), or free memory",
        ) from error
    if child == 0:
        _die_with(parent)
        faulthandler.enable(trace)
        limit_memory()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return work(arguments)
    status, stopped = _wait(child, numbers)
    code = os.waitstatus_to_exitcode(status)
    if code:  # a child that is interrupted again while it removes its folders ends with a code, and leaves them
        _tidy_up()
    if code >= 0:
        return code
    if stopped or -code in STOPPED:
        exit_code, word = STOPPED[signal.Signals(stopped or -code)]
        with contextlib.suppress(OSError):  # the terminal may be what has gone
            print(word, file=sys.stderr, flush=True)
        return exit_code
    os.lseek(trace, 0, os.SEEK_SET)
    with open(trace, encoding="utf-8", errors="replace") as file:
        raise death(-code, file.read(), shorten_command(arguments))


def shorten_command(arguments: Sequence[str]) -> str:
    """The command as an error shows it."""
    command = shlex.join(["trtopt", *arguments])
    return command if len(command) <= _LONGEST_COMMAND else command[:_LONGEST_COMMAND] + " ..."


def _wait(child: int, numbers: set[signal.Signals]) -> tuple[int, int]:
    """Wait for the child, pass on requests to stop, and end it by force where it does not follow.

    Returns its status, and the first request; 0 without one.
    """
    stopped, deadline = 0, float("inf")
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1], stopped
        wanted = {signal.SIGCHLD, *numbers}
        found = signal.sigwaitinfo(wanted) if left == float("inf") else signal.sigtimedwait(wanted, left)
        if found is not None and found.si_signo != signal.SIGCHLD and not stopped:
            stopped, deadline = found.si_signo, time.monotonic() + GRACE_S
            if found.si_code != _FROM_KERNEL:  # else the child has it too
                os.kill(child, stopped)
        reaped, status = os.waitpid(child, os.WNOHANG)
        if reaped:
            return status, stopped


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends, however it ends (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _tidy_up() -> None:
    """Remove the temporary folders of the child, and give the terminal its cursor back."""
    if sys.stderr.isatty():
        print(_SHOW_CURSOR, file=sys.stderr)
    with contextlib.suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)
