"""Runs of the command line: within the process of the tests, which has loaded all packages, or in one of their own."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from trtopt.cli.build import parse_arguments, pipeline_parser
from trtopt.cli.main import main
from trtopt.cli.options import config_from
from trtopt.cli.streams import STOPPED
from trtopt.config import BuildConfig
from trtopt.hardware.probe import probe

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def parse(command: str, argv: Sequence[str]) -> tuple[argparse.Namespace, BuildConfig]:
    """The arguments of ``build`` or ``optimize``, and the configuration they make without the matrix of its file."""
    args = parse_arguments(pipeline_parser(command, "", ""), argv)
    return args, config_from(args, BuildConfig, command)


def environment_in(home: Path, columns: int = 100) -> dict[str, str]:
    """The environment of a command whose user has the folder ``home`` and a terminal of so many columns."""
    environment = {**os.environ, "HOME": str(home), "COLUMNS": str(columns)}
    environment.pop("XDG_CACHE_HOME", None)
    return environment


def run_process(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """What ``trtopt ARGUMENTS`` does in ``folder``, as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "trtopt", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_here(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """As :func:`run_process`, by a call of ``main`` in this process, which is left as it was.

    Native code and worker processes write to the same streams: the file descriptors are moved, as a shell moves them.
    """
    with _process_state(folder, environment), tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with _streams(out.fileno(), err.fileno()):
            code = _exit_code(arguments)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(io.TextIOWrapper(file, encoding="utf-8").read())
    return subprocess.CompletedProcess(["trtopt", *arguments], code, *texts)


def _exit_code(arguments: Sequence[str]) -> int:
    """The exit code that the interpreter would have, after saying what it would say."""
    try:
        return main(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception as error:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        return 1


@contextlib.contextmanager
def _streams(out: int, err: int) -> Iterator[None]:
    """Move the descriptors 1 and 2, and Python's streams, to those files."""
    named = sys.stdout, sys.stderr
    for stream in named:
        stream.flush()
    saved = [os.dup(number) for number in (1, 2)]
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        with (
            open(1, "w", encoding="utf-8", closefd=False) as stdout,
            open(2, "w", encoding="utf-8", closefd=False, buffering=1, errors="backslashreplace") as stderr,
        ):
            sys.stdout, sys.stderr = stdout, stderr
            yield
    finally:
        sys.stdout, sys.stderr = named
        for number, copy in enumerate(saved, start=1):
            os.dup2(copy, number)
            os.close(copy)


@contextlib.contextmanager
def _process_state(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Give the command its folder and environment, and take back whatever it changes in the process."""
    before_environment, before_folder = dict(os.environ), Path.cwd()
    handlers = {number: signal.getsignal(number) for number in STOPPED}
    hook, finders, path, modules = sys.excepthook, list(sys.meta_path), list(sys.path), set(sys.modules)
    threshold = gc.get_threshold()
    probe.cache_clear()
    importlib.invalidate_caches()
    try:
        _set_environment(environment)
        os.chdir(folder)
        with _interpreters_warnings():
            yield
    finally:
        os.chdir(before_folder)
        _set_environment(before_environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sys.excepthook, sys.meta_path[:], sys.path[:] = hook, finders, path
        _forget_scripts(modules, {folder.resolve(), Path(environment["HOME"]).resolve()})
        gc.set_threshold(*threshold)
        gc.unfreeze()
        probe.cache_clear()


@contextlib.contextmanager
def _interpreters_warnings() -> Iterator[None]:
    """Show those warnings that an interpreter shows, once for each line, where it shows them."""

    def show(message: Warning | str, category: type[Warning], name: str, line: int, *_: object) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, name, line))

    with warnings.catch_warnings():
        warnings.resetwarnings()
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        warnings.showwarning = show
        yield


def _set_environment(environment: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _forget_scripts(before: set[str], folders: set[Path]) -> None:
    """Forget the modules of the user's scripts: the next test has others of the same names."""
    for name in sys.modules.keys() - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and not folders.isdisjoint(Path(file).resolve().parents):
            del sys.modules[name]
