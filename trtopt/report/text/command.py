"""Lines for a shell that do what a report advises."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from typing import Any

from trtopt.config.base import checked, field_kinds, flag, options
from trtopt.config.commands import BuildConfig
from trtopt.errors import UsageError
from trtopt.report.schema.build import BuildReport
from trtopt.report.text.format import visible

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
        if value is not None:
            with contextlib.suppress(UsageError):
                found[name] = checked(name, option, kinds[name], value)
    return found


def build_line(report: BuildReport, changes: Mapping[str, Any]) -> str:
    """The build of a report with other options, by the names of their fields; None leaves one out."""
    command = "optimize" if report.engine is None else "build"
    kinds, known, values_of = field_kinds(BuildConfig), options(BuildConfig), {**asked(report), **changes}
    words = ["trtopt", command, report.model.get("path") or "MODEL.onnx"]
    default = BuildConfig()
    for name in known:
        value = values_of.get(name)
        is_unasked = name in _CHECKED and name not in changes
        if is_unasked or value in (None, (), [], False) or value == getattr(default, name):
            continue
        if name == "precision":
            words.append(f"--{value}")
        elif kinds[name] == "flag":
            words.append(flag(name))
        elif kinds[name] == "shapes":
            words += [word for shapes in value for word in (flag(name), _shapes(shapes))]
        else:
            values = value if isinstance(value, (list, tuple)) else [value]
            words += [
                word for item in values for word in (flag(name), f"{item:g}" if isinstance(item, float) else item)
            ]
    return shell(*words)


def _shapes(shapes: Mapping[str, Any]) -> str:
    """``name:8x3x224x224,other:8x77``; names with a colon in quotes."""
    names = {name: f"'{name}'" if ":" in name else name for name in shapes}
    return ",".join(f"{names[name]}:{'x'.join(map(str, dims))}" for name, dims in shapes.items())
