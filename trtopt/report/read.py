"""Reports read back from their JSON files, checked against the records they were written from.

msgspec checks types and converts to dataclasses in one pass and says where a value is wrong; considered were pydantic
(slower, and needs classes of its own), cattrs and dacite (no place in their messages, many times slower).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trtopt.errors import UsageError
from trtopt.files import open_file
from trtopt.report import profile

LARGEST_BYTES = 256 << 20
"""Of a report: one of 10,000 layers takes about 20 MB."""

_LONGEST_US = 1e12
"""Of a layer: more than a week."""

_T = TypeVar("_T")


def read_profile(path: Path) -> profile.ProfileReport:
    """Read ``trtopt.profile/1``.

    Raises:
        UsageError: The file cannot be read, is no JSON, is another kind of report, or has a wrong or missing field.
    """
    data = read_json(path)
    schema = data.get("schema")
    if schema != profile.SCHEMA:
        raise UsageError(
            f"The report is not a profile: its schema is {schema!r}" if schema else "The file is not a trtopt report",
            where=str(path),
            remedy=f"give a report of schema {profile.SCHEMA}: `trtopt profile ... --report FILE` writes it",
        )
    layers = data.get("layers")
    if isinstance(layers, list):
        data["layers"] = [profile.nested(item) if isinstance(item, dict) else item for item in layers]
    restore_nan(data.get("accuracy"))
    found = _converted(data, profile.ProfileReport, path)
    for index, layer in enumerate(found.layers):
        if not 0 <= layer.measured_us < _LONGEST_US:
            what = f"The report has a wrong field: {layer.measured_us} is no time - at `$.layers[{index}].measured_us`"
            raise UsageError(what, where=str(path), remedy="write it again with --report")
    return found


def restore_nan(outputs: Any) -> None:
    """Put NaN, in place, where a figure of an output's accuracy is null: JSON has no word for what is not finite.

    Args:
        outputs: The accuracy by output name; what is of another form is left for the conversion to refuse.
    """
    for item in outputs.values() if isinstance(outputs, dict) else ():
        for name in ("sqnr_db", "cosine", "max_abs"):
            if isinstance(item, dict) and item.get(name, 0) is None:
                item[name] = math.nan


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size.

    Raises:
        UsageError: See above.
    """
    with open_file(path, "The report") as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise UsageError(
            f"The report is larger than {LARGEST_BYTES >> 20} MiB", where=str(path), remedy="give a trtopt report"
        )
    try:
        data = json.loads(content, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"The report is no JSON, or not whole: {error}", where=str(path), remedy="write it again with --report"
        ) from error
    if not isinstance(data, dict):
        raise UsageError("The file is not a trtopt report", where=str(path), remedy="give a file that --report wrote")
    return data


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _converted(data: dict[str, Any], kind: type[_T], path: Path) -> _T:
    try:
        return msgspec.convert(data, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise UsageError(
            f"The report has a wrong field: {error}", where=str(path), remedy="write it again with --report"
        ) from error
