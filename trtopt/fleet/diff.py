"""``trtopt diff``: one model under two compilers, or two reports of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trtopt.config import BuildConfig, flag, options
from trtopt.config.paths import source_file
from trtopt.config.words import given
from trtopt.errors import UsageError
from trtopt.events import Event, OnEvent, ignore
from trtopt.fleet.compilers import build_in, check_compiler, python_of
from trtopt.fleet.task import Task
from trtopt.gates.diff import diff_of, side_of
from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.diff import DiffReport, DiffSide
from trtopt.report.schema.read import read_report
from trtopt.report.schema.sweep import Failure
from trtopt.source.check import sha256_of


def diff(
    model: str | Path | None,
    compilers: Sequence[str],
    config: BuildConfig | None = None,
    *,
    max_slowdown: float | None = None,
    on_event: OnEvent = ignore,
) -> DiffReport:
    """What changed between two compilers, by the ONNX nodes of a model.

    Args:
        model: The ONNX file; None where both ``compilers`` are reports.
        compilers: Two of ``tensorrt-rtx==1.6``, ``installed``, and files of reports of ``trtopt build``.
        config: The options of the builds; files that they would write are refused.
        max_slowdown: How much slower, as a share, the second may be; only :attr:`DiffReport.is_failed` asks for it.
        on_event: Called with progress.

    Returns:
        The comparison; a model that a compiler refuses is in it, as that side's failure.

    Raises:
        UsageError: An option is wrong, a report cannot be read, or the two are not of one model, GPU and shape.
        MissingDependencyError: A compiler cannot be installed.

    Example:
        >>> trtopt.diff(None, ["report.json", "report.json"], max_slowdown=0.05).is_failed
        False
    """
    config = config or BuildConfig()
    if len(compilers) != 2:
        raise UsageError("Two compilers are compared", where="--compiler", remedy="give --compiler twice")
    for name in compilers:
        if not _is_report(name):
            check_compiler(name)
    _check(model, compilers, config)
    found = [_result(model, name, config, on_event) for name in compilers]
    names = (compilers[0], compilers[1])
    first, second = found
    if isinstance(first, BuildReport) and isinstance(second, BuildReport):
        return diff_of(first, second, names, max_slowdown)
    sides = [
        side_of(item, name) if isinstance(item, BuildReport) else DiffSide(name, failure=item)
        for item, name in zip(found, names, strict=True)
    ]
    about = {"path": str(model or ""), "sha256": "" if model is None else sha256_of([Path(model)])}
    return DiffReport(
        about, config.gpu or "", config.precision or "fp16", sides[0], sides[1], max_slowdown=max_slowdown
    )


def _is_report(name: str) -> bool:
    return name.endswith(".json")


def _check(model: str | Path | None, compilers: Sequence[str], config: BuildConfig) -> None:
    builds = [name for name in compilers if not _is_report(name)]
    if builds and model is None:
        raise UsageError("There is no model to build", where="trtopt diff", remedy="give MODEL, or two reports")
    if builds and not Path(str(model)).is_file():
        raise UsageError("The model file does not exist", where=str(model), remedy="check the path")
    known = options(BuildConfig)
    for name in given(config):
        if known[name].path == "output" or name in ("sign", "polygraphy", "epcontext_embed"):
            remedy = "leave it out: the engines of a comparison are not kept"
            raise UsageError("A comparison does not write that", where=flag(name), remedy=remedy)
        if not builds:
            raise UsageError("Two reports need no options", where=flag(name), remedy="leave it out")
    if config.backend == "tensorrt":
        remedy = "give the reports of two builds, which were made where TensorRT runs"
        raise UsageError("Compilers of TensorRT need their GPU", where="--backend tensorrt", remedy=remedy)


def _result(model: str | Path | None, name: str, config: BuildConfig, on_event: OnEvent) -> BuildReport | Failure:
    if _is_report(name):
        report = read_report(Path(name))
        if not isinstance(report, BuildReport) or report.engine is None:
            remedy = "give what `trtopt build --report` wrote"
            raise UsageError("The report is not of a build of an engine", where=name, remedy=remedy)
        return report
    python = python_of(name, config.cache_dir, on_event)
    on_event(Event("start", f"build with {name}"))
    found = build_in(python, Task(os.path.abspath(str(model)), _task_options(config)))
    on_event(Event("end", f"build with {name}"))
    return found


def _task_options(config: BuildConfig) -> dict[str, Any]:
    """The options as JSON values, with paths that hold in any folder."""
    known = options(BuildConfig)
    found = asdict(replace(config, backend="tensorrt-rtx"))
    for name, option in known.items():
        value = found[name]
        if isinstance(value, tuple):
            found[name] = [_absolute(item) if option.is_path(item) else item for item in value]
        elif value is not None and option.is_path(value):
            found[name] = _absolute(value)
    return found


def _absolute(value: str) -> str:
    """A path, or ``FILE.py:FUNCTION``."""
    file = str(source_file(value))
    return os.path.abspath(file) + value[len(file) :]
