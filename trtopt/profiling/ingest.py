"""Measured layers from the files trtexec writes: ``--exportLayerInfo``, ``--exportProfile`` and ``--exportTimes``.

Read are those of TensorRT 7 to 11. 7 writes no layer info; a list of its layers' names does in its place:
``{"Layers": ["conv1", ...]}``. Differences between the versions end here and in :mod:`trtopt.engine.layers`. Nothing
in a file is trusted.
"""

from __future__ import annotations

import gzip
import json
import re
import reprlib
import statistics
import zlib
from collections.abc import Mapping
from decimal import Decimal, DecimalException
from pathlib import Path
from typing import Any, Literal

from trtopt.errors import EngineBuildError, UsageError
from trtopt.profiling.engine_layers import LayerTime, join_times
from trtopt.profiling.measured import Measurement
from trtopt.report.schema.profile import ProfileSource
from trtopt.support.files import open_file
from trtopt.support.json_text import check_count

MAX_BYTES = 256 << 20
"""The most a file may hold, unpacked."""

_LONGEST_MS = 1e9
"""More than any run takes (12 days)."""

_FINE_MS = 1000
"""trtexec writes six digits: from here on, a point in time is known to 10 us, which is more than an enqueue takes."""

_Form = Literal["layer info", "layer profile", "times"]

_OPTIONS: dict[_Form, str] = {
    "layer info": "--exportLayerInfo",
    "layer profile": "--exportProfile",
    "times": "--exportTimes",
}


def ingest(layer_info: Path, layer_profile: Path, times: Path | None = None) -> Measurement:
    """Read the files of one engine; each may be packed with gzip.

    No layer and no time is lost: the measured times add up to those of the file.

    Args:
        layer_info: What ``--exportLayerInfo`` wrote.
        layer_profile: What ``--exportProfile`` wrote.
        times: What ``--exportTimes`` wrote: the whole run, warm-up included, of which the medians are taken.

    Raises:
        UsageError: A file cannot be read, is not what it should be, or they are of different engines.
    """
    data = _load(layer_info, "layer info")
    if not data["Layers"]:
        remedy = "build the engine with --profilingVerbosity=detailed"
        raise UsageError("The layer info lists no layers", where=str(layer_info), remedy=remedy)
    measured, runs = _read_profile(layer_profile)
    try:
        layers, notes = join_times(data["Layers"], measured)
    except EngineBuildError as error:
        raise UsageError(error.what, where=f"{layer_info}: {error.where}", remedy=error.remedy) from error
    files = {"layer-info": layer_info, "layer-profile": layer_profile} | ({} if times is None else {"times": times})
    source = ProfileSource(
        origin="trtexec",
        files={what: str(path) for what, path in files.items()},
        version=_version(data),
        runs=runs,
        launching="single run" if runs == 1 else "profile",
    )
    end_to_end_us, spread_us, host_us = (None, None, None) if times is None else _read_times(times)
    return Measurement(source, layers, end_to_end_us, spread_us, host_us, warnings=notes)


def form_of(path: Path) -> Literal["layer info", "layer profile", "report"]:
    """What a file of measured layers is: one of the two that trtexec writes, or a report of trtopt.

    Raises:
        UsageError: It cannot be read, or is neither.
    """
    data = _data(path, "layer profile")
    if isinstance(data, dict) and isinstance(data.get("schema"), str):
        return "report"
    found = _form_of(data)
    if found is None or found == "times":
        raise UsageError(
            "The file holds no measured layers",
            where=str(path),
            remedy="give what trtexec --exportLayerInfo and --exportProfile or trtopt profile --report wrote",
        )
    return found


def _load(path: Path, form: _Form) -> Any:
    """The JSON of a file that has the form it should have."""
    data = _data(path, form)
    found = _form_of(data)
    if found != form:
        is_what = f"holds the {found}" if found else f"is not what trtexec {_OPTIONS[form]} writes"
        remedy = f"give it as --{found.replace(' ', '-')}" if found else f"export it with {_OPTIONS[form]}=FILE"
        raise UsageError(f"The file given as {form} {is_what}", where=str(path), remedy=remedy)
    return data


def _data(path: Path, form: _Form) -> Any:
    """The JSON of a file."""
    text = _text(path, form)
    try:
        return _parse(text, form)
    except (ValueError, RecursionError, DecimalException) as error:
        at_end = isinstance(error, json.JSONDecodeError) and error.pos >= len(text.rstrip()) - 1
        what = "ends too early" if at_end or "Unterminated" in str(error) else f"is no JSON: {error}"
        raise UsageError(f"The {form} {what}", where=str(path), remedy=f"export it again ({_OPTIONS[form]})") from error


def _text(path: Path, form: _Form) -> str:
    with open_file(path, f"The {form}", MAX_BYTES) as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        try:
            content = (gzip.GzipFile(fileobj=file) if packed else file).read(MAX_BYTES + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            remedy = "check that it is whole"
            raise UsageError(f"The {form} cannot be unpacked: {error}", where=str(path), remedy=remedy) from error
    if len(content) > MAX_BYTES:
        raise UsageError(
            f"The {form} is larger than {MAX_BYTES >> 20} MiB", where=str(path), remedy="export a shorter run"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"The {form} is no text: {error}", where=str(path), remedy="give the JSON file") from error


def _parse(text: str, form: _Form) -> Any:
    """Times of layers are decimal numbers, so that their sum is exact.

    trtexec writes the names of a profile as they are: a quote or a backslash in one makes its JSON invalid.
    """
    exact = Decimal if form == "layer profile" else float
    check_count(text)
    try:
        return json.loads(text, strict=False, parse_float=exact)
    except json.JSONDecodeError:
        if form != "layer profile":
            raise
        escaped = _ROW_NAME.sub(lambda found: f"{found[1]}{json.dumps(found[2])}{found[3]}", text)
        return json.loads(escaped, strict=False, parse_float=exact)


_ROW_NAME = re.compile(r'^([ ,{]*"name" : )"(.*)"(, "timeMs" : )', re.MULTILINE)


def _form_of(data: Any) -> _Form | None:
    if isinstance(data, dict):
        return "layer info" if isinstance(data.get("Layers"), list) else None
    records = [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []
    if any("averageMs" in item for item in records):
        return "layer profile"
    return "times" if any("computeMs" in item for item in records) else None


def _read_profile(path: Path) -> tuple[list[LayerTime], int | None]:
    """The times of a layer profile, and the inferences behind each (a record ``{count: N}``)."""
    rows: list[LayerTime] = []
    runs = None
    for number, record in enumerate(_load(path, "layer profile")):
        where = f"{path}: record {number}"
        if not isinstance(record, dict):
            raise UsageError("A record of the layer profile is no object", where=where, remedy="export it again")
        if "name" not in record and "count" in record:
            runs = _runs(record, where)
            continue
        name = record.get("name")
        if not isinstance(name, str):
            raise UsageError("A record of the layer profile has no name", where=where, remedy="export it again")
        median = _number(record, "medianMs", where) * 1000 if "medianMs" in record else None
        rows.append(LayerTime(name, _number(record, "averageMs", where) * 1000, median))
    return rows, runs


def _runs(record: Mapping[str, Any], where: str) -> int:
    runs = _number(record, "count", where)
    if runs < 1 or runs != int(runs):
        raise UsageError(f"count is {runs}, not a number of runs", where=where, remedy="export it again")
    return int(runs)


def _number(record: Mapping[str, Any], key: str, where: str) -> Decimal:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)) or not 0 <= value <= _LONGEST_MS:
        raise UsageError(f"{key} is {reprlib.repr(value)}, not a time", where=where, remedy="export it again")
    return Decimal(str(value))


def _version(data: Mapping[str, Any]) -> str:
    """The versions of TensorRT that write this form; empty where it does not tell."""
    entries = [entry for entry in data["Layers"] if isinstance(entry, dict)]
    if not entries or any(entry["LayerType"] == "runtime_fusion" for entry in entries):
        return ""  # names only, or TensorRT for RTX, which counts its versions by itself
    if "I/O Tensors" in data:
        return "11"
    return "8.6 to 10" if any("Metadata" in entry for entry in entries) else "8.2 to 8.5"


def _read_times(path: Path) -> tuple[float, float, float | None]:
    """Medians of a run, microseconds: GPU time, its deviation, and the time on the host to enqueue, which TensorRT 7.0
    does not write."""
    compute: list[Decimal] = []
    enqueue: list[tuple[Decimal, Decimal]] = []
    for number, record in enumerate(_load(path, "times")):
        where = f"{path}: record {number}"
        if not isinstance(record, dict):
            raise UsageError("A record of the times is no object", where=where, remedy="export it again")
        compute.append(_number(record, "computeMs", where) * 1000)
        if "startEnqMs" in record:
            start, end = (_number(record, key, where) for key in ("startEnqMs", "endEnqMs"))
            if end < start:
                raise UsageError("An enqueue ends before it starts", where=where, remedy="export it again")
            enqueue.append((start, (end - start) * 1000))
    middle = statistics.median(compute)
    spread = statistics.median(abs(value - middle) for value in compute)
    fine = [taken for start, taken in enqueue if start < _FINE_MS] or [taken for _, taken in enqueue]
    return float(middle), float(spread), float(statistics.median(fine)) if fine else None
