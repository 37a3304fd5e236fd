"""One job where it runs: in a process of its own, on this machine or another. It returns, whatever happens.

Executors know these functions by their names, ``module:function``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import tempfile
import time
import traceback
from pathlib import Path

from trtopt import api
from trtopt.analysis.profile import profile
from trtopt.cache.folder import files
from trtopt.config import BuildConfig, ProfileConfig
from trtopt.engine.backend import BACKENDS, TENSORRT_RTX
from trtopt.errors import TrtoptError
from trtopt.fleet.prepare import KINDS
from trtopt.fleet.task import PROFILE, REPORT, Outcome, Task, inside
from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.sweep import Failure
from trtopt.support.files import TEMPORARY

_BUG = 1


def execute(task: Task, folder: Path) -> Outcome:
    """Build, and time where that is asked for.

    Args:
        task: The job.
        folder: Gets the engine, its manifest and the report; an empty one.
    """
    began = time.perf_counter()
    failure: Failure | None = None
    try:
        with inside(folder, task):
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


def prepare(task: Task) -> dict[str, bytes]:
    """Do what needs no GPU: calibration, and the search for a precision.

    Returns:
        The files it left in the cache, by ``KIND/NAME``. Of a job that fails those up to there: it fails again, and is
        reported, where it is built.
    """
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name:
        cache = Path(name, "cache")
        config = BuildConfig(**{**task.options, "cache_dir": str(cache), "cache_gb": None})  # none is evicted
        with contextlib.suppress(Exception), inside(Path(name), task):
            api.optimize(task.model, dataclasses.replace(config, output=str(Path(name, "model.onnx"))))
        found = [file.path for file in files(cache) if file.kind in KINDS]
        return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in found}


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
