"""One job where it runs: in a process of its own, on this machine or another. It returns, whatever happens."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from trtopt import api
from trtopt.analysis.profile import profile
from trtopt.config import BuildConfig, ProfileConfig
from trtopt.config.paths import source_file
from trtopt.engine.backend import BACKENDS, TENSORRT_RTX
from trtopt.errors import TrtoptError
from trtopt.fleet.task import CACHE, PROFILE, REPORT, Outcome, Task
from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.sweep import Failure
from trtopt.support._script import is_script

_BUG = 1


def execute(task: Task, folder: Path) -> Outcome:
    """Build into ``folder``, an empty one, and time the engine where that is asked for."""
    began = time.perf_counter()
    failure: Failure | None = None
    try:
        with _inside(folder, task):
            _execute(task)
    except TrtoptError as error:
        failure = Failure(error.what, error.where, error.remedy, error.exit_code)
    except MemoryError:
        failure = Failure("There is not enough memory", platform.node(), "run fewer jobs at once", _BUG)
    except Exception as error:  # noqa: BLE001 - one job's bug must not end the others; it is reported whole
        where = "".join(traceback.format_exception(error)[-2:]).strip()
        what = f"A bug in trtopt: {type(error).__name__}: {error}"
        failure = Failure(what, where, "report it with the output of `trtopt doctor`", _BUG)
    return Outcome(time.perf_counter() - began, platform.node(), failure)


def prepare(task: Task, folder: Path) -> Outcome:
    """Do what of a job needs no GPU: calibration, and the search for a precision.

    What these leave in the cache is found by its content, so the machine with the GPU takes it from there, and a job
    comes to the same whether it was prepared or not.

    The cache is ``folder / CACHE``. Of a job that fails it holds what was done up to there: it fails again, and is
    reported, where it is built.
    """
    began = time.perf_counter()
    config = BuildConfig(**{**task.options, "cache_dir": str(folder / CACHE), "cache_gb": None})  # none is evicted
    with contextlib.suppress(Exception), _inside(folder, task):
        api.optimize(task.model, dataclasses.replace(config, output=str(folder / "model.onnx")))
    return Outcome(time.perf_counter() - began, platform.node())


def _forget(task: Task, before: set[str]) -> None:
    """Drop the modules beside the job's scripts: those of the next job may have the same names."""
    scripts = [value for value in task.options.values() if isinstance(value, str) and is_script(value)]
    folders = {source_file(value).resolve().parent for value in scripts}
    new = sorted(set(sys.modules) - before, reverse=True)  # parts of a package before the package
    for name in new:
        file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None) or ""
        # Beside, not below: an environment may lie there, and its compiled modules are loaded once only.
        beside = Path(file).parent.parent if Path(file).name == "__init__.py" else Path(file).parent
        if file and beside in folders:
            sys.modules.pop(name, None)


def _execute(task: Task) -> None:
    config = BuildConfig(**task.options)
    suffix = (BACKENDS.get(config.backend) or TENSORRT_RTX).suffix
    engine = f"model{suffix}"
    # Relative names, in the folder: what is written says nothing of this machine's folders.
    folder = os.getcwd()
    report = api.build(task.model, dataclasses.replace(config, output=engine, report=REPORT))
    if task.measure and not report.gate_failures:
        os.chdir(folder)  # a script of the job may have left it
        profile(engine, ProfileConfig(report=PROFILE, shapes=_shapes(report), gpus=config.gpus))


def _shapes(report: BuildReport) -> tuple[dict[str, tuple[int, ...]], ...]:
    """The optimum, which times are predicted for too."""
    if report.engine is None or not report.engine.profiles:
        return ()
    return ({name: tuple(shapes["opt"]) for name, shapes in report.engine.profiles[0].items()},)


@contextlib.contextmanager
def _inside(folder: Path, task: Task) -> Iterator[None]:
    """Run a job in a folder; the next one finds neither that folder nor the modules of this one's scripts."""
    before, modules = os.getcwd(), set(sys.modules)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        _forget(task, modules)
