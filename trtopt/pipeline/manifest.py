"""The manifest of an engine, put together from what a build did."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from trtopt.config import BuildConfig, options
from trtopt.config.paths import source_file
from trtopt.engine.backend import BACKENDS, TENSORRT_RTX
from trtopt.engine.options import SEARCH, key_of, parse_builder_options
from trtopt.hardware.spec import PORTABLE
from trtopt.pipeline.imported_ranges import statistics_file
from trtopt.pipeline.lowered import Lowered
from trtopt.precision.observe.samples import Samples
from trtopt.report.schema.build import AccuracyRecord, BuildReport, EngineRecord
from trtopt.report.schema.manifest import (
    EngineTensor,
    FileHash,
    HostFiles,
    Manifest,
    SamplesHash,
    ShapeRange,
    canonical_sha256,
)
from trtopt.source.check import sha256_of
from trtopt.support.files import hash_file
from trtopt.support.json_text import plain
from trtopt.support.version import VERSION

_HARDWARE: dict[str, Literal["ampere+", "same_compute_capability"]] = {
    "AMPERE_PLUS": "ampere+",
    "SAME_COMPUTE_CAPABILITY": "same_compute_capability",
}


@dataclass(frozen=True)
class Files:
    """The files of a build, its report and engine apart.

    Attributes:
        read: What :func:`other_files` gave before the work: they may change meanwhile.
        host: Written: the part for the host, where there is one.
        onnx: Written: the optimized model, where it was asked for.
    """

    read: tuple[FileHash, ...]
    host: tuple[Path, ...]
    onnx: tuple[Path, ...]


def manifest_of(
    report: BuildReport,
    engine: EngineRecord,
    lowered: Lowered,
    config: BuildConfig,
    samples: tuple[Samples, Samples],
    files: Files,
) -> Manifest:
    """The manifest of an engine.

    Args:
        report: What the build did.
        engine: The engine.
        lowered: The model that was compiled.
        config: The options.
        samples: Those it was calibrated on, and those it was verified on.
        files: What it was made from, and what was written beside the engine.

    Raises:
        UsageError: A file that was written is not there any more.
    """
    backend = BACKENDS[engine.backend]
    settings = parse_builder_options(config.builder, backend, gpu_present=True)
    _, hardware = settings.enums.get("hardware_compatibility_level", ("", ""))
    calibration, evaluation = samples
    config = dataclasses.replace(config, builder=builder_of(config.builder, engine))
    chosen, accuracy, part = _understood(config, report, engine), report.accuracy, report.host
    host = tuple(FileHash(path.name, *hash_file(path, "The part of the model for the host")) for path in files.host)
    graph = lowered.artifact.model.graph
    return Manifest(
        trtopt=VERSION,
        engine_bytes=engine.bytes,
        engine_sha256=engine.sha256,
        backend=engine.backend,
        backend_version=engine.backend_version,
        gpu="" if report.gpu is None else str(report.gpu["name"]),
        compute_capabilities=engine.compute_capabilities,
        hardware_compatibility="none" if backend == TENSORRT_RTX else _HARDWARE.get(hardware, "none"),
        version_compatible=settings.flags.get("VERSION_COMPATIBLE", False),
        model_sha256=report.model["sha256"],
        calibration=SamplesHash(calibration.source, calibration.sha256),
        evaluation=SamplesHash(evaluation.source, evaluation.sha256),
        files=files.read,
        options=chosen,
        options_sha256=canonical_sha256(chosen),
        precision=report.precision,
        eight_bit=tuple(sorted(lowered.quantized)),
        inputs=tuple(_tensor(value, report, engine) for value in graph.inputs),
        outputs=tuple(_tensor(value, report, engine) for value in graph.outputs),
        accuracy=None if accuracy is None else _accuracy(accuracy),
        host=None if part is None else HostFiles(host, part.inputs, part.outputs, part.model_outputs),
        onnx_sha256=sha256_of(files.onnx) if files.onnx else "",
    )


_ABOUT_THE_CACHE = ("no_cache", "cache_gb", "error_on_timing_cache_miss")
"""Options that say where an engine is taken from, not what it is."""


def _accuracy(record: AccuracyRecord) -> AccuracyRecord:
    """The record without intermediate tensors, and without the folder of the metric's script."""
    metric, engine_metric = (
        found and dataclasses.replace(found, name=found.name.replace("\\", "/").rpartition("/")[2])
        for found in (record.metric, record.engine_metric)
    )
    return dataclasses.replace(record, tensors=None, first_bad=None, metric=metric, engine_metric=engine_metric)


def chosen_options(config: BuildConfig) -> dict[str, Any]:
    """The options that are no paths, not about the cache and not at their default, and the user's GPUs."""
    found: dict[str, Any] = {"gpus": config.gpus} if config.gpus else {}
    default = BuildConfig()
    for name, option in options(BuildConfig).items():
        value = getattr(config, name)
        if name in _ABOUT_THE_CACHE:
            continue
        if value != getattr(default, name) and (not option.path or value in option.words):
            found[name] = value
    if "," in config.recipes:
        found["recipes"] = ",".join(sorted({item.strip() for item in config.recipes.split(",")} - {""}))
    return dict(sorted(plain(found).items()))


def _understood(config: BuildConfig, report: BuildReport, engine: EngineRecord) -> dict[str, Any]:
    """The chosen options, with those that have several spellings, or a default that others or the machine make, as they
    were understood: the same build asked for in other words is the same."""
    found = {
        "precision": config.precision or report.precision.requested,
        "gpu": PORTABLE if report.gpu is None else str(report.gpu["name"]),
        "backend": engine.backend,
    }
    return dict(sorted({**chosen_options(config), **found}.items()))


def other_files(config: BuildConfig) -> tuple[FileHash, ...]:
    """What is read beside the model and the samples: the metric's script, plugins, a calibration cache of TensorRT.

    Raises:
        UsageError: One of them cannot be read.
    """
    names = list(config.plugins)
    words = options(BuildConfig)["metric"].words
    # Where there is no such script, loading the metric says it better.
    if config.metric is not None and config.metric not in words and source_file(config.metric).is_file():
        names.insert(0, config.metric)
    if config.calib_cache is not None and statistics_file(config) is None:
        names.append(config.calib_cache)
    return tuple(FileHash(Path(name).name, *hash_file(source_file(name), f"The file {name}")) for name in names)


def builder_of(items: Sequence[str], engine: EngineRecord) -> tuple[str, ...]:
    """The builder options of an engine: those asked for, and what a search chose in place of itself."""
    chosen = [item for trial in engine.builder_search if trial.chosen for item in trial.options]
    return (*(item for item in items if key_of(item) != SEARCH), *chosen) if engine.builder_search else tuple(items)


def _tensor(value: ir.Value, report: BuildReport, engine: EngineRecord) -> EngineTensor:
    name, shape = str(value.name), value.shape
    layouts = {item.name: item.layout for item in report.network_io}
    ranges = [ShapeRange(**_tuples(profile[name])) for profile in engine.profiles if name in profile]
    return EngineTensor(
        name=name,
        dtype="" if value.dtype is None else str(value.dtype.numpy()),
        shape=None if shape is None else tuple(dim if isinstance(dim, int) else (dim.value or "?") for dim in shape),
        layout=layouts.get(name, "chw"),
        ranges=tuple(ranges),
    )


def _tuples(profile: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in profile.items()}
