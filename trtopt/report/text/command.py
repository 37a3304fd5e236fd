"""Lines for a shell that do what a report advises."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trtopt.config.base import checked, field_kinds, options
from trtopt.config.commands import BuildConfig
from trtopt.config.idle import idle
from trtopt.config.words import command_words
from trtopt.errors import UsageError
from trtopt.report.text.format import visible

if TYPE_CHECKING:
    from trtopt.report.schema.build import BuildReport

_CHECKED = ("report", "html", "markdown", "polygraphy", "export_layer_info", "sign")
"""Options that a line to try leaves out: what they write is of the build that was done."""


def shell(*words: object) -> str:
    """A line for a shell: words quoted where they have to be.

    Example:
        >>> shell("trtopt", "analyze", "my model.onnx")
        "trtopt analyze 'my model.onnx'"
    """
    return shlex.join(visible(str(word)) for word in words)


def asked(report: BuildReport) -> dict[str, Any]:
    """The options of a build, of those that the command has today the values that it takes: files may hold others."""
    found: dict[str, Any] = {}
    kinds = field_kinds(BuildConfig)
    for name, option in options(BuildConfig).items():
        value = report.config.get(name)
        is_of_code = name in ("inputs", "dynamic")
        if value is not None and not (is_of_code and not report.model.get("target")):
            with contextlib.suppress(UsageError):
                found[name] = checked(name, option, kinds[name], value)
    return found


def model_name(report: BuildReport) -> str:
    """What a line calls the model: its file, else the code that makes it, ``nets.py:resnet``."""
    return str(report.model.get("path") or report.model.get("target") or "MODEL.onnx")


def made_by(record: Mapping[str, Any], model: object) -> dict[str, Any]:
    """The ``model`` of a report whose file is gone after the run: of code, its name as ``target``, as in a build's."""
    return {**record, "path": None, **({"target": model} if isinstance(model, str) else {})}


def model_words(report: BuildReport) -> list[str]:
    """The model in a line of another command, with the inputs of one that code makes."""
    values = asked(report)
    return [model_name(report), *command_words(values, [name for name in ("inputs", "dynamic") if values.get(name)])]


def build_line(report: BuildReport, changes: Mapping[str, Any]) -> str:
    """The build of a report with other options, by the names of their fields; None leaves one out, and one that nothing
    uses is left out."""
    command = "optimize" if report.engine is None else "build"
    values, default = {**asked(report), **changes}, BuildConfig()
    left_out = {*(set(_CHECKED) - changes.keys()), *(name for name, _ in idle({**vars(default), **values}))}
    names = [
        name
        for name in options(BuildConfig)
        if name not in left_out and values.get(name) not in (None, (), [], False, getattr(default, name))
    ]
    return shell("trtopt", command, model_name(report), *command_words(values, names))
