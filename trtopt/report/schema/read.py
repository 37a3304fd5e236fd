"""Reports read back from their JSON files, checked against the records they were written from.

msgspec checks types and converts to dataclasses in one pass and says where a value is wrong; considered were pydantic
(slower, and needs classes of its own), cattrs and dacite (no place in their messages, many times slower).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shlex
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from trtopt.errors import UsageError
from trtopt.hardware.spec import GpuCalibration
from trtopt.report.schema import analysis, build, diff, profile, sensitivity, sweep
from trtopt.report.schema.decisions import CurvePoint, ParetoPoint, SearchRecord, SearchStep, SparsityBudget
from trtopt.report.schema.shipped import AccuracyCost, DynamicCost, PlainCost
from trtopt.report.schema.steps import Cost
from trtopt.support.files import read_file
from trtopt.support.json_text import decoded

LARGEST_BYTES = 256 << 20
"""Of a report: one of 10,000 layers takes about 20 MB."""

_LONGEST_US = 1e12
"""Of a layer: more than a week."""

_MOST_DB = 1e3
"""Of an SQNR: doubles end at 3076 dB."""

Report = (
    build.BuildReport
    | analysis.Analysis
    | profile.ProfileReport
    | sweep.SweepReport
    | sensitivity.Sensitivity
    | diff.DiffReport
)

_KINDS: dict[str, type[Report]] = {
    build.SCHEMA: build.BuildReport,
    analysis.SCHEMA: analysis.Analysis,
    profile.SCHEMA: profile.ProfileReport,
    sweep.SCHEMA: sweep.SweepReport,
    sensitivity.SCHEMA: sensitivity.Sensitivity,
    diff.SCHEMA: diff.DiffReport,
}

_NOT_FINITE: dict[type, float] = {
    build.OutputAccuracy: math.nan,
    build.MetricRecord: math.nan,
    Cost: math.inf,
    PlainCost: math.inf,
    AccuracyCost: math.inf,
    DynamicCost: math.inf,
    SearchStep: math.inf,
    ParetoPoint: math.inf,
    SearchRecord: math.inf,
    CurvePoint: math.inf,
    SparsityBudget: math.inf,
    sensitivity.OutputError: math.inf,
    sensitivity.GrowthStep: math.inf,
}
"""What null stands for in a number of these records: JSON has no word for what is not finite."""

_ROUNDING = 1e-9
"""Share of a sum of many times that their order may change."""

_Rate = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]


@dataclasses.dataclass(frozen=True)
class _Device:
    """What the forms of a profile show of its device, a GPU or a CPU."""

    name: str
    tflops: Annotated[dict[str, _Rate], msgspec.Meta(min_length=1)]
    bandwidth_gbs: _Rate
    calibration: GpuCalibration | None = None


@dataclasses.dataclass(frozen=True)
class _Calibrated:
    """What the forms of a build and an analysis show of their GPU's predictions."""

    calibration: GpuCalibration | None = None


@dataclasses.dataclass(frozen=True)
class _Input:
    name: str
    dtype: str
    shape: list[int | str]


@dataclasses.dataclass(frozen=True)
class _Model:
    """What the forms of a build and an analysis show of its model."""

    path: str | None = None
    target: str | None = None
    inputs: list[_Input] = dataclasses.field(default_factory=list)


_T = TypeVar("_T")


def read_report(path: Path) -> Report:
    """Read what a command wrote with ``--report``: ``trtopt.build/1``, ``analysis``, ``profile``, ``sweep``,
    ``sensitivity`` or ``diff``.

    Raises:
        UsageError: The file cannot be read, is no JSON, is another kind of report, or has a wrong or missing field.
    """
    remedy = "give what `trtopt build`, `analyze`, `profile`, `sensitivity`, `sweep` or `diff` wrote with --report"
    return _read(path, _KINDS, "of another kind", remedy)


def read_profile(path: Path) -> profile.ProfileReport:
    """Read ``trtopt.profile/1``.

    Raises:
        UsageError: The file cannot be read, is no JSON, is another kind of report, or has a wrong or missing field.
    """
    remedy = f"give a report of schema {profile.SCHEMA}: `trtopt profile ... --report FILE` writes it"
    return _read(path, {profile.SCHEMA: profile.ProfileReport}, "not a profile", remedy)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size."""
    content = read_file(path, "The report", LARGEST_BYTES)
    try:
        data = decoded(content)
    except UnicodeDecodeError as error:
        is_model = path.suffix == ".onnx"
        raise UsageError(
            f"The file is {'an ONNX model' if is_model else 'binary'}, not a report",
            where=str(path),
            remedy=f"give what --report wrote: {shlex.join(['trtopt', 'build', str(path), '--report', 'report.json'])}"
            if is_model
            else "give a file that --report wrote",
        ) from error
    except ValueError as error:
        raise UsageError(
            f"The report is no JSON, or not whole: {error}", where=str(path), remedy="write it again with --report"
        ) from error
    if not isinstance(data, dict):
        raise UsageError("The file is not a trtopt report", where=str(path), remedy="give a file that --report wrote")
    return data


def converted(value: Any, kind: type[_T], path: Path) -> _T:
    """A part of a report, JSON values, as a dataclass or another type that msgspec knows.

    Raises:
        UsageError: A field is wrong or missing.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _wrong_field(error, path) from error


def _wrong_field(why: object, path: Path) -> UsageError:
    return UsageError(f"The report has a wrong field: {why}", where=str(path), remedy="write it again with --report")


def _read(path: Path, kinds: Mapping[str, type[_T]], other: str, remedy: str) -> _T:
    """A report of one of ``kinds``, by schema; ``other`` is what one of another schema is."""
    data = _read_json(path)
    schema = data.get("schema")
    kind = kinds.get(schema) if isinstance(schema, str) else None
    if kind is None:
        what = f"The report is {other}: its schema is {schema!r}" if schema else "The file is not a trtopt report"
        raise UsageError(what, where=str(path), remedy=remedy)
    layers = data.get("layers")
    if kind is profile.ProfileReport and isinstance(layers, list):
        data["layers"] = [profile.nested(item) if isinstance(item, dict) else item for item in layers]
    found = converted(with_infinities(data, kind), kind, path)
    if isinstance(found, profile.ProfileReport):
        converted(dict(found.gpu), _Device, path)
        for index, layer in enumerate(found.layers):
            if not 0 <= layer.measured_us < _LONGEST_US:
                raise _wrong_field(f"{layer.measured_us} is no time - at `$.layers[{index}].measured_us`", path)
        _check_rows([layer.predicted for layer in found.layers if layer.predicted is not None], path)
    if isinstance(found, (build.BuildReport, analysis.Analysis, sensitivity.Sensitivity)):
        converted(found.model, _Model, path)
    if isinstance(found, sensitivity.Sensitivity):
        _check_sensitivity(found, path)
    if isinstance(found, (build.BuildReport, analysis.Analysis)) and found.gpu is not None:
        converted(found.gpu, _Calibrated, path)
    if isinstance(found, analysis.Analysis):
        _check_rows(found.layers, path)
        if not all(0 <= first < second < len(found.layers) for first, second in found.links):
            raise _wrong_field("a layer reads from one that is not before it - at `$.links`", path)
        for name, totals in (("totals", found.totals), *((item.level, item.totals) for item in found.levels)):
            if not _is_in_range(totals):
                raise _wrong_field(f"the range of a time does not hold it - at `$.{name}`", path)
    if isinstance(found, sweep.SweepReport):
        _check_sweep(found, path)
    return found


def _check_sweep(report: sweep.SweepReport, path: Path) -> None:
    """Check that the jobs are those of one sweep, and the figures they are compared by."""
    keys: set[str] = set()
    wrong = "" if report.rows else "there is no job - at `$.rows`"
    if not all(price >= 0 for price in report.prices.values()):
        wrong = "a price is negative - at `$.prices`"
    for index, row in enumerate(report.rows):
        here = f" - at `$.rows[{index}]`"
        if row.key in keys or row.varied.keys() != report.rows[0].varied.keys():
            wrong = f"it is no other job of the same sweep{here}"
        elif not (row.status == "failed") == (row.result is None) == (row.failure is not None):
            wrong = f"a job that failed has a failure, any other a result{here}"
        elif not _is_possible(row):
            wrong = f"a figure is negative or too large{here}"
        keys.add(row.key)
    if wrong:
        raise _wrong_field(wrong, path)


def _check_sensitivity(report: sensitivity.Sensitivity, path: Path) -> None:
    """Check what shares and bars are computed of."""
    for place, item in [("together", report.together), *((f"regions[{i}]", r) for i, r in enumerate(report.regions))]:
        if (place != "together" and not item.nodes) or not item.outputs:
            raise _wrong_field(f"a region has no node or no output - at `$.{place}`", path)
        if not all(found.noise_to_signal >= 0 for found in item.outputs.values()):
            raise _wrong_field(f"the power of noise is negative - at `$.{place}`", path)
    for index, step in enumerate(report.growth):
        if any(_MOST_DB < abs(value) < math.inf for value in (step.input_sqnr_db, step.output_sqnr_db)):
            raise _wrong_field(f"a figure is too large - at `$.growth[{index}]`", path)


def _is_possible(row: sweep.SweepRow) -> bool:
    found = row.result
    figures = [row.cost or 0.0]
    if found is not None:
        figures += [found.latency_us or 0.0, found.engine_bytes, found.kernels, found.batch - 1, abs(found.drop or 0.0)]
    return all(0 <= figure < _LONGEST_US for figure in figures)


def _is_in_range(found: analysis.LayerRow | analysis.Totals) -> bool:
    low = found.predicted_us if found.low_us is None else found.low_us
    high = found.predicted_us if found.high_us is None else found.high_us
    return 0 <= low <= found.predicted_us * (1 + _ROUNDING) and found.predicted_us * (1 - _ROUNDING) <= high < math.inf


def _check_rows(rows: Sequence[analysis.LayerRow], path: Path) -> None:
    """Check the figures of layers, which are drawn on logarithmic axes."""
    for index, row in enumerate(rows):
        figures = (row.math_us, row.memory_us, row.latency_us, row.predicted_us, row.arithmetic_intensity)
        if min(row.flop, row.bytes) < 0 or not all(0 <= figure < _LONGEST_US for figure in figures):
            raise _wrong_field(f"a figure is negative or too large - at `$.layers[{index}]`", path)
        if not _is_in_range(row):
            raise _wrong_field(f"the range of a time does not hold it - at `$.layers[{index}]`", path)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def with_infinities(value: Any, kind: Any) -> Any:
    """JSON values with what is not finite where null stands for it.

    What does not fit ``kind``, the dataclass they are of, is left for the conversion to refuse.
    """
    if isinstance(value, dict) and isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        found = {key: with_infinities(item, hints.get(key)) for key, item in value.items()}
        if kind in _NOT_FINITE:
            lost = {key: _NOT_FINITE[kind] for key, item in found.items() if item is None and hints.get(key) is float}
            if kind is build.OutputAccuracy and "sqnr_db" in lost and found.get("max_abs") == 0:
                lost["sqnr_db"] = math.inf  # equal
            if kind is sensitivity.OutputError and "sqnr_db" in lost and found.get("noise_to_signal") is None:
                lost["sqnr_db"] = -math.inf
            if kind is sensitivity.GrowthStep and "added" in lost and "output_sqnr_db" in lost:
                lost["output_sqnr_db"] = -math.inf  # what it adds would be finite if it were equal
            found.update(lost)
        return found
    arguments = [item for item in typing.get_args(kind) if item not in (type(None), ...)]
    if not arguments or value is None:
        return value
    if typing.get_origin(kind) not in (tuple, dict, Mapping):
        return with_infinities(value, arguments[0])  # X | None
    if isinstance(value, list):
        return [with_infinities(item, arguments[0]) for item in value]
    if isinstance(value, dict):
        return {key: with_infinities(item, arguments[-1]) for key, item in value.items()}
    return value
