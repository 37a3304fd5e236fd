"""A GPU's predictions fitted to layers measured on it: what ``trtopt calibrate-gpu`` uses."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trtopt.config.toml_edit import with_table
from trtopt.config.toml_file import GPUS, load_plain
from trtopt.errors import UsageError
from trtopt.hardware.probe import probe
from trtopt.hardware.spec import GpuCalibration, GpuSpec, choose_gpu, find_gpu, gpu_of, normalized
from trtopt.hardware.user import CALIBRATION, gpu_table
from trtopt.profiling.ingest import form_of, ingest
from trtopt.report.schema.calibration import CalibrationReport
from trtopt.report.schema.profile import ProfileReport
from trtopt.report.schema.read import read_profile
from trtopt.report.schema.write import environment
from trtopt.report.text.format import count, some
from trtopt.roofline.calibrate import LEAST_KERNELS, Kernel, fit_factors, left_out_error, mean_error, merged
from trtopt.roofline.constants import constants_for
from trtopt.roofline.work import Work
from trtopt.support.files import atomic_write, check_outputs, read_file

OUTPUT = "trtopt.toml"
_SOURCE = "trtopt calibrate-gpu"
_LEAST_GAIN = 0.05
"""Share of the error on layers left out that a calibration has to take away: less is the noise of a few layers."""

_MOST_BYTES = 1 << 20
_LARGEST = 2**62
"""More than any size, byte or flop count of a kernel."""


@dataclass(frozen=True)
class _Layers:
    """What files of measured layers hold.

    Attributes:
        kernels: Of the layers that can be used.
        zero_time: Layers that took no time.
        unknown: Layers whose work is not known.
        reports: The profiles among the files, by path.
    """

    kernels: tuple[Kernel, ...]
    zero_time: int
    unknown: int
    reports: Mapping[Path, ProfileReport]


def calibrate_gpu(
    profiles: Sequence[str | Path], *, gpu: str | None = None, name: str | None = None, output: str | Path = OUTPUT
) -> CalibrationReport:
    """Fit the factors of a GPU to layers measured on it, and write them as a table ``[gpu.NAME]``.

    Args:
        profiles: Reports of ``trtopt profile``, and files that trtexec wrote: the n-th ``--exportLayerInfo`` among them
            goes with the n-th ``--exportProfile``.
        gpu: The GPU that was measured; None for the one the reports name, else the one present.
        name: The name of the table; None for that of the GPU, whose predictions it then changes.
        output: The configuration file; its other tables stay as they are.

    Returns:
        What was found. Nothing is written where the factors do not lower the error on layers left out.

    Raises:
        UsageError: A file cannot be read or written, or is no measurement of a GPU; too few layers can be used; the GPU
            is not known, or is another one.
    """
    path, files = Path(output), [Path(each) for each in profiles]
    check_outputs({"-o": path}, {f"the profile {each}": each for each in files})
    text = _text(path)
    tables = load_plain(path, GPUS) if text else {}
    layers = _read(files)
    measured = dataclasses.replace(_gpu(gpu, gpu_table(tables), layers.reports), calibration=None)
    wanted = measured.name if name is None else name
    key = next((each for each in tables if normalized(each) == normalized(wanted)), wanted)
    kernels = _usable(layers, files)
    plain_table = _table(tables, key, measured)
    target = find_gpu(key, gpu_table({**tables, key: plain_table}))
    found = _fitted(kernels, target, measured.name)
    table = {**plain_table, CALIBRATION: dataclasses.asdict(found)}
    gpu_table({**tables, key: table})
    written = found.error_after < (1 - _LEAST_GAIN) * found.error_before
    if written:
        changed = with_table(text, (GPUS, key), table)
        if changed is None:
            raise UsageError(
                "The table is not written in lines of its own, and cannot be replaced",
                where=f"{path}: [{GPUS}.{key}]",
                remedy=f"write it as [{GPUS}.{key}], or choose another --name or --output",
            )
        atomic_write(path, changed)
    return CalibrationReport(
        gpu=measured.name,
        name=key,
        calibration=found,
        kernels=len(kernels),
        zero_time=layers.zero_time,
        unknown=layers.unknown,
        files=tuple(map(str, files)),
        output=str(path),
        written=written,
        environment=environment(),
    )


def _text(path: Path) -> str:
    """The configuration file; empty where there is none."""
    if not path.exists():
        return ""
    load_plain(path, GPUS)  # what is no configuration file is refused
    return read_file(path, "The configuration file", _MOST_BYTES).decode()


def _read(files: Sequence[Path]) -> _Layers:
    forms: dict[str, list[Path]] = {"layer info": [], "layer profile": [], "report": []}
    for path in files:
        forms[form_of(path)].append(path)
    infos, times = forms["layer info"], forms["layer profile"]
    if len(infos) != len(times):
        raise UsageError(
            f"There are {count(len(times), 'layer profile')} and {len(infos)} of the layers' infos",
            where=str((times or infos)[-1]),
            remedy="give both files of each run: trtexec --profilingVerbosity=detailed --separateProfileRun"
            " --exportLayerInfo=layers.json --exportProfile=profile.json",
        )
    reports = {path: read_profile(path) for path in forms["report"]}
    kernels: list[Kernel] = []
    zero = unknown = 0
    for info, profile in zip(infos, times, strict=True):
        measurement = ingest(info, profile)
        for layer in measurement.layers:
            zero += layer.measured_us <= 0
            unknown += layer.measured_us > 0 and layer.work is None
            if layer.work is not None and layer.measured_us > 0:
                kernels.append(Kernel(layer.work, layer.measured_us, measurement.source.launching))
    for path, report in reports.items():
        for index, row in enumerate(report.layers):
            zero += row.measured_us <= 0
            unknown += row.measured_us > 0 and row.work is None
            if row.work is not None and row.measured_us > 0:
                work = _work(row.work, f"{path}: layer {index}")
                kernels.append(Kernel(work, row.measured_us, report.source.launching))
    return _Layers(tuple(kernels), zero, unknown, reports)


def _work(fields: Mapping[str, Any], where: str) -> Work:
    """The work of a layer, as a report holds it."""
    try:
        work = msgspec.convert(fields, Work)
    except (msgspec.ValidationError, RecursionError) as error:
        remedy = "write it again with trtopt profile --report"
        raise UsageError(f"The report has a wrong layer: {error}", where=where, remedy=remedy) from error
    sizes: list[float] = [
        work.flop,
        work.read_bytes,
        work.weight_bytes,
        work.write_bytes,
        work.weight_bits,
        work.scale_block,
        work.network_share,
        work.inference_bytes,
    ]
    least = [work.steps, work.alignment_bytes]
    for part in (work.gemm, work.window, work.attention, work.rows):
        values = () if part is None else dataclasses.astuple(part)
        flat = itertools.chain.from_iterable(each if isinstance(each, tuple) else (each,) for each in values)
        sizes += [each for each in flat if isinstance(each, (int, float))]
    least += [] if work.gemm is None else list(dataclasses.astuple(work.gemm))
    if not all(0 <= size < _LARGEST for size in sizes) or not all(1 <= size < _LARGEST for size in least):
        raise UsageError(
            "The report has a wrong layer: a size is out of range", where=where, remedy="write the report again"
        )
    return work


def _gpu(asked: str | None, table: Sequence[GpuSpec], reports: Mapping[Path, ProfileReport]) -> GpuSpec:
    """The GPU that was measured."""
    for path, report in reports.items():
        if report.source.origin == "onnxruntime":
            remedy = "give profiles of a GPU"
            raise UsageError("The profile was measured on a CPU", where=str(path), remedy=remedy)
    named = {path: str(report.gpu["name"]) for path, report in reports.items()}
    present = probe().gpu
    if asked is None and named:
        first = next(iter(reports))
        known = [each for each in table if normalized(each.name) == normalized(named[first])]
        gpu: GpuSpec | None = known[0] if known else gpu_of(reports[first].gpu, str(first))
    elif asked is None and present is None:
        raise UsageError(
            "The files do not say which GPU they were measured on",
            where="--gpu",
            remedy="name it: --gpu A100; 'trtopt gpu list' names those known",
        )
    else:
        gpu = choose_gpu(asked, table, present)
    if gpu is None:
        raise UsageError("'portable' stands for many GPUs", where="--gpu", remedy="name the one that was measured")
    for path, other in named.items():
        if normalized(other) != normalized(gpu.name):
            remedy = "give profiles of one GPU, and name that one with --gpu or none"
            raise UsageError(f"The profile is of {other}, not of {gpu.name}", where=str(path), remedy=remedy)
    return gpu


def _usable(layers: _Layers, files: Sequence[Path]) -> tuple[Kernel, ...]:
    """Different kernels, if there are enough of them."""
    kernels = merged(layers.kernels)
    if len(kernels) >= LEAST_KERNELS:
        return kernels
    left = f"{count(layers.zero_time, 'layer')} of zero time, {layers.unknown} of unknown work"
    raise UsageError(
        f"There are {count(len(kernels), 'different kernel')} to fit to, fewer than {LEAST_KERNELS} ({left})",
        where=some([str(path) for path in files]),
        remedy="profile a larger network, built with --profilingVerbosity=detailed, and export --exportProfile of it"
        " with it; a report without the work of its layers, of an earlier trtopt, has to be taken again",
    )


def _table(tables: Mapping[str, Mapping[str, Any]], key: str, measured: GpuSpec) -> dict[str, Any]:
    """The table of the GPU without a calibration: what the file has of it already, or what it builds on."""
    own = {normalized(each) for each in tables}
    if normalized(key) == normalized(measured.name) and normalized(key) in own:
        return {field: value for field, value in tables[key].items() if field != CALIBRATION}
    known = {normalized(gpu.name) for gpu in gpu_table(tables)}
    if normalized(measured.name) not in known:
        fields = dataclasses.asdict(measured)
        return {field: value for field, value in fields.items() if field not in ("name", CALIBRATION)}
    if normalized(key) == normalized(measured.name):
        return {"source": _SOURCE}
    return {"base": measured.name, "source": _SOURCE}


def _fitted(kernels: Sequence[Kernel], gpu: GpuSpec, measured: str) -> GpuCalibration:
    constants, present = constants_for(gpu), probe()
    try:
        found = fit_factors(kernels, gpu, constants)
        before, after = mean_error(kernels, gpu, constants, GpuCalibration()), left_out_error(kernels, gpu, constants)
    except UsageError as error:
        remedy = "name the GPU that was measured; 'trtopt gpu list' names those known"
        raise UsageError(f"{error.what}, and the profile has layers in it", where="--gpu", remedy=remedy) from error
    if not math.isfinite(before + after):
        raise UsageError("The layers cannot be predicted", where="PROFILE", remedy="export the profiles again")
    is_present = present.gpu is not None and present.gpu.name == measured
    return dataclasses.replace(
        found,
        layers=sum(kernel.layers for kernel in kernels),
        error_before=round(before, 4),
        error_after=round(after, 4),
        date=datetime.date.today().isoformat(),
        driver=present.driver if is_present else "",
    )
