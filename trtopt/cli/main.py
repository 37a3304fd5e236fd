"""The command ``trtopt``: find the command, run it, print its errors, return its exit code."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from trtopt.cli.parser import Parser
from trtopt.cli.streams import STOPPED, open_streams, print_error
from trtopt.errors import ResourceError, TrtoptError, UsageError
from trtopt.support.version import VERSION
from trtopt.support.words import did_you_mean

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType, TracebackType

_DEFERRED = frozenset({"sympy", "onnx_ir._symbolic_shapes"})
"""onnx_ir imports sympy, half of its start-up, for arithmetic with symbolic dimensions, which trtopt does not do."""


class _Finder:
    """Finds the modules as the other finders do; they are loaded when they are first used."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _DEFERRED:
            return None
        from importlib.util import LazyLoader

        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


def _defer_imports() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


COMMANDS = {
    "build": "make a TensorRT engine from an ONNX model",
    "optimize": "make an optimized ONNX model: build without the engine",
    "analyze": "predict each layer's time, what limits it and what to change",
    "sensitivity": "measure which regions cost accuracy in 8 bits",
    "profile": "put each layer's measured time beside its prediction",
    "report": "show a stored report, or what changed between two",
    "sweep": "build models x GPUs x precisions x shapes, and find the best",
    "check": "judge a report by thresholds and a baseline, for CI",
    "export": "make an ONNX model from a PyTorch module",
    "triton": "write an engine or a model into a repository of Triton Inference Server",
    "diff": "say what two compilers make of a model, node by node",
    "bundle": "put an engine and all that belongs to it into one folder",
    "cache": "list, prune and verify what earlier runs kept",
    "recipe": "list and explain the graph rewrites",
    "explain": "explain a rule of analyze",
    "gpu": "list and show the GPUs an engine can be built for",
    "calibrate-gpu": "fit the predictions for a GPU to layers measured on it",
    "doctor": "say what this installation can do, and test it",
    "completion": "print the script that completes command lines in a shell",
}
_ELSEWHERE = {"trtexec": "trtopt build and trtopt profile take its options: see docs/migrating-from-tensorrt-10.md"}
WATCHED = ("build", "optimize", "analyze", "sensitivity", "profile", "export", "doctor")
"""Commands that run native code on files; the others are Python alone."""

_BROKEN_PIPE = 141
_COLLECT_AFTER = (20_000, 20, 20)
"""Objects made, and collections of each generation, before the next is looked at: Python's 700, 10, 10 cost a build of
230 nodes 6 % of its time, as graphs are many small objects that live long; memory grows by a twentieth."""
_DESCRIPTION = "Turns a trained PyTorch or ONNX model into a fast TensorRT engine, and says why it is as fast as it is."
_EPILOG = """\
example:
  trtopt build model.onnx --int8 --calib samples.npz

exit codes:
  0 done   1 a bug   2 options, files, samples or shapes   3 the model   4 a package, device or target is missing
  5 a recipe failed under --strict-recipes   6 the engine build failed   7 a gate failed

'trtopt COMMAND --help', or 'trtopt help COMMAND', lists the options of a command.
"""


def entry() -> int:
    """Run the command line as the process of the command: where native code works on files, that is done in a child,
    whose crash becomes an error here (see :mod:`trtopt.cli.watch`).

    Products of numpy's matrices are computed in one thread, unless the caller says otherwise: they are small, and
    threads that spin between them cost more than they gain (a Cholesky factor of 576 inputs 4 ms of one core in one
    thread, 30 to 160 ms in two).

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:]
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(*_COLLECT_AFTER)
    open_streams()
    if sys.platform != "linux" or not arguments or arguments[0] not in WATCHED:
        return main(arguments)
    from trtopt.cli.watch import watched

    try:
        return watched(main, arguments)
    except TrtoptError as error:
        print_error(error)
        return error.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line in this process; returns the exit code."""
    sys.excepthook = _report_bug
    _defer_imports()
    for number in STOPPED:
        if number == signal.SIGTERM or signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _stop)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except TrtoptError as error:
        print_error(error)
        return error.exit_code
    except MemoryError:
        remedy = "free memory, or give smaller shapes or fewer samples"
        print_error(ResourceError("Memory ran out", where=f"trtopt {' '.join(argv or ())[:300]}", remedy=remedy))
        return ResourceError.exit_code
    except (KeyboardInterrupt, _Stopped) as error:
        code, word = STOPPED[error.number if isinstance(error, _Stopped) else signal.SIGINT]
        with contextlib.suppress(OSError):  # the terminal may be what has gone
            print(word, file=sys.stderr, flush=True)
        return code
    except BrokenPipeError:
        # The reader of our output has gone; the interpreter's own flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


class _Stopped(BaseException):
    """A signal asked to stop. Not a SystemExit, which a user's script may raise and we would report as its failure."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End like an exception does, so that temporary files are removed; a second request does not break that off.

    Who sends a signal to a process and to its group sends it twice.
    """
    for each in STOPPED:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt if number == signal.SIGINT else _Stopped(signal.Signals(number))


def _run(argv: list[str]) -> int:
    if not argv:
        _top_parser().print_help(sys.stderr)
        return UsageError.exit_code
    if argv[0] == "help":
        argv = [*argv[1:], "--help"]
    if argv[0] in ("-h", "--help", "-V", "--version"):
        _top_parser().parse_args(argv)
    if argv[0].startswith("-"):
        import shlex

        command = next((word for word in argv if word in COMMANDS), "build")
        line = shlex.join(["trtopt", command, *(word for word in argv if word != command)])
        raise UsageError("Options stand behind the command", where=argv[0], remedy=line)
    name = argv[0]
    if name not in COMMANDS:
        raise UsageError(
            f"There is no command {name!r}",
            where="trtopt",
            remedy=_ELSEWHERE.get(name) or did_you_mean(name, COMMANDS) or f"choose one of {', '.join(COMMANDS)}",
        )
    return int(importlib.import_module(f"trtopt.cli.{name.replace('-', '_')}").run(argv[1:]))


def _top_parser() -> Parser:
    width = max(len(name) for name in COMMANDS) + 2
    commands = "\n".join(f"  {name:{width}}{summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        "trtopt",
        "COMMAND [options]",
        _DESCRIPTION,
        f"commands:\n{commands}\n\n{_EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"trtopt {VERSION}")
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def _report_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What the interpreter does with an error that nobody expected; the exit code is 1."""
    import traceback

    traceback.print_exception(kind, error, trace)
    print(
        f"\nThis is a bug in trtopt {VERSION}. Please report it with the lines above and the output of"
        " 'trtopt doctor'.",
        file=sys.stderr,
    )
