"""The manifest of an engine, and the files of a build."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import onnx
import onnx_ir as ir

from trtopt.config import BuildConfig, options
from trtopt.config.paths import source_file
from trtopt.engine.backend import BACKENDS, TENSORRT_RTX, Backend
from trtopt.engine.build import EngineArtifact
from trtopt.engine.epcontext import context_model
from trtopt.engine.manifest import Signer, write_manifest
from trtopt.engine.options import parse_builder_options, with_found
from trtopt.engine.request import BuildRequest
from trtopt.graph.rows import are_alone
from trtopt.graph.shapes import at_shapes
from trtopt.graph.states import find_states
from trtopt.hardware.spec import PORTABLE
from trtopt.pipeline.saved import LOADS, computes_wrong, remedy, save_checked, tried_in_onnxruntime
from trtopt.precision.observe.stream import Samples
from trtopt.precision.observe.trt_cache import statistics_file
from trtopt.report.files import write_forms
from trtopt.report.schema.build import AccuracyRecord, BuildReport, EngineRecord
from trtopt.report.schema.manifest import (
    EngineTensor,
    FileHash,
    HostFiles,
    Manifest,
    SamplesHash,
    ShapeRange,
    canonical_sha256,
    content_hash,
)
from trtopt.report.schema.write import write_layers, write_report
from trtopt.source.check import sha256_of
from trtopt.source.lora import adapter_file
from trtopt.source.save import save_model
from trtopt.support.files import atomic_write, hash_file
from trtopt.support.json_text import plain
from trtopt.support.version import VERSION

_HARDWARE: dict[str, Literal["ampere+", "same_compute_capability"]] = {
    "AMPERE_PLUS": "ampere+",
    "SAME_COMPUTE_CAPABILITY": "same_compute_capability",
}


@dataclass(frozen=True)
class Results:
    """What a run made.

    Attributes:
        report: The report.
        engine: The engine; None where none was asked for, or a gate failed before it was built.
        model: The optimized model.
        eight_bit: The names of its 8-bit nodes.
        host: The part for the host, where there is one.
        samples: Those the model was calibrated on, and those it was verified on.
        files: What :func:`other_files` gave before the work: they may change meanwhile.
        backend: The target's compiler.
    """

    report: BuildReport
    engine: EngineArtifact | None
    model: ir.Model
    eight_bit: Collection[str]
    host: ir.Model | None
    samples: tuple[Samples, Samples]
    files: tuple[FileHash, ...]
    backend: Backend


def manifest_of(
    results: Results, engine: EngineRecord, config: BuildConfig, host: tuple[Path, ...], onnx: tuple[Path, ...]
) -> Manifest:
    """The manifest of an engine.

    Args:
        results: What the engine was made from, and what the build did.
        engine: The engine.
        config: The options.
        host: Written beside it: the part for the host, where there is one.
        onnx: Written beside it: the optimized model, where it was asked for.

    Raises:
        UsageError: A file that was written is not there any more.
    """
    report, (calibration, evaluation) = results.report, results.samples
    backend = BACKENDS[engine.backend]
    settings = parse_builder_options(config.builder, backend, gpu_present=True)
    _, hardware = settings.enums.get("hardware_compatibility_level", ("", ""))
    config = dataclasses.replace(config, builder=builder_of(config.builder, engine))
    chosen, accuracy, part = _understood(config, report, engine), report.accuracy, report.host
    hashes = tuple(FileHash(path.name, *hash_file(path, "The part of the model for the host")) for path in host)
    graph = results.model.graph
    states = {str(item.input.name): str(item.output.name) for item in find_states(results.model)}
    inputs = tuple(
        dataclasses.replace(_tensor(value, report, engine), state=states.get(str(value.name), ""))
        for value in graph.inputs
    )
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
        files=results.files,
        options=chosen,
        options_sha256=canonical_sha256(chosen),
        precision=report.precision,
        eight_bit=tuple(sorted(results.eight_bit)),
        inputs=inputs,
        outputs=tuple(_tensor(value, report, engine) for value in graph.outputs),
        accuracy=None if accuracy is None else _accuracy(accuracy),
        host=None if part is None else HostFiles(hashes, part.inputs, part.outputs, part.model_outputs),
        onnx_sha256=sha256_of(onnx) if onnx else "",
        filled_rows=0 if part is not None else _filled_rows(results.model, inputs),
    )


def _filled_rows(model: ir.Model, inputs: Sequence[EngineTensor]) -> int:
    """The least batch, where a call of fewer rows gets the same when it is filled up to that; else 0.

    Only the batch may be dynamic: the proof is made at the smallest shapes, and would not hold for others. Inputs have
    one batch: of two with a size each, one may have fewer rows than the other, and no output says whose rows it has.
    """
    least = {item.name: min((one.min for one in item.ranges), default=item.shape or ()) for item in inputs}
    sizes = {name: tuple(dim for dim in shape if isinstance(dim, int)) for name, shape in least.items()}
    rows = next((shape[0] for shape in sizes.values() if shape), 1)
    others = {(item.name, end[1:]) for item in inputs for one in item.ranges for end in (one.min, one.max)}
    batches = {item.shape[0] for item in inputs if item.shape and least[item.name][0] == rows}  # of one name
    if rows < 2 or len(batches) > 1 or sizes != least or len(others) != sum(bool(item.ranges) for item in inputs):
        return 0
    return rows if are_alone(at_shapes(model, sizes), rows) else 0


_ABOUT_THE_CACHE = ("no_cache", "cache_gb", "error_on_timing_cache_miss")
"""Options that say where an engine is taken from, not what it is."""


def _accuracy(record: AccuracyRecord) -> AccuracyRecord:
    """The record without intermediate tensors, and without the folder of the metric's script."""
    metrics = {
        field: found and dataclasses.replace(found, name=found.name.replace("\\", "/").rpartition("/")[2])
        for field in ("metric", "engine_metric", "saved_metric")
        for found in [getattr(record, field)]
    }
    return dataclasses.replace(record, tensors=None, first_bad=None, **metrics)


def chosen_options(config: BuildConfig) -> dict[str, Any]:
    """The options that are no paths, not about the cache and not at their default, and the user's GPUs."""
    found: dict[str, Any] = {"gpus": config.gpus} if config.gpus else {}
    default = BuildConfig()
    for name, option in options(BuildConfig).items():
        value = getattr(config, name)
        if name in _ABOUT_THE_CACHE:
            continue
        if value != getattr(default, name) and not option.is_path(value):
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
    """What is read beside the model and the samples: scripts of the metric and for pictures, plugins, adapters, a
    calibration cache of TensorRT.

    Raises:
        UsageError: One of them cannot be read.
    """
    names = [*config.plugins, *(str(adapter_file(text)) for text in config.lora)]
    known = options(BuildConfig)
    for name in ("preprocess", "metric"):
        script = getattr(config, name)
        # Where there is no such script, loading it says it better.
        if script is not None and known[name].is_path(script) and source_file(script).is_file():
            names.insert(0, script)
    if config.calib_cache is not None and statistics_file(config) is None:
        names.append(config.calib_cache)
    return tuple(FileHash(Path(name).name, *hash_file(source_file(name), f"The file {name}")) for name in names)


def builder_of(items: Sequence[str], engine: EngineRecord) -> tuple[str, ...]:
    """The builder options of an engine: those asked for, and what a search chose in place of itself."""
    chosen = [item for trial in engine.builder_search if trial.chosen for item in trial.options]
    return with_found(items, chosen) if engine.builder_search else tuple(items)


def _tensor(value: ir.Value, report: BuildReport, engine: EngineRecord) -> EngineTensor:
    name, shape = str(value.name), value.shape
    layouts = {item.name: item.layout for item in report.network_io}
    ranges = [
        ShapeRange(*(tuple(profile[name][end]) for end in ("min", "opt", "max")))
        for profile in engine.profiles
        if name in profile
    ]
    return EngineTensor(
        name=name,
        dtype="" if value.dtype is None else str(value.dtype.numpy()),
        shape=None if shape is None else tuple(dim if isinstance(dim, int) else (dim.value or "?") for dim in shape),
        layout=layouts.get(name, "chw"),
        ranges=tuple(ranges),
    )


def write(results: Results, outputs: Mapping[str, Path], config: BuildConfig, signer: Signer | None) -> BuildReport:
    """Write the outputs; after a failed gate, the report only. The report, with what is known of the saved model."""
    report, engine = results.report, results.engine
    if not report.gate_failures or config.allow_accuracy_loss:
        host = () if results.host is None else save_model(results.host, outputs["host"])
        onnx: tuple[Path, ...] = ()
        if "onnx" in outputs:
            onnx = save_checked(results.model, outputs["onnx"], _parse_request(results, config))
            saved = tried_in_onnxruntime(onnx)
            saved += computes_wrong(results.model) + ("" if saved == LOADS else remedy(results.model))
            report = replace(report, saved=saved)
        if engine is not None:
            manifest = manifest_of(results, engine.record, config, host, onnx)
            context = None
            if "epcontext" in outputs:
                context = _context(engine.data, manifest, host, outputs["engine"], embed=config.epcontext_embed)
                manifest = dataclasses.replace(manifest, epcontext=content_hash(outputs["epcontext"].name, context))
            atomic_write(outputs["engine"], engine.data)
            write_manifest(outputs["engine"], manifest, signer)
            if context is not None:
                atomic_write(outputs["epcontext"], context)
                write_manifest(outputs["epcontext"], manifest, signer)
            if "layers" in outputs:
                write_layers(engine.record, outputs["layers"])
    if "report" in outputs:
        if engine is not None:
            atomic_write(outputs["report"].with_suffix(".build.log"), engine.raw_log)
        write_report(report, outputs["report"])
    write_forms(report, html=outputs.get("html"), markdown=outputs.get("markdown"))
    return report


def _context(data: bytes, manifest: Manifest, host: tuple[Path, ...], engine: Path, *, embed: bool) -> bytes:
    """The ONNX model that ONNX Runtime loads an engine from, with the part for the host that was written."""
    part = onnx.load(host[0], load_external_data=False) if host else None
    return context_model(data, manifest, part, file=None if embed else engine.name)


def _parse_request(results: Results, config: BuildConfig) -> BuildRequest | None:
    """What the parser is asked about a saved model; None where it took the same graph for the engine."""
    if results.engine is not None:
        return None
    plugins = tuple(Path(item) for item in config.plugins)
    return BuildRequest(Path(), results.backend, None, (), (), plugins=plugins, name="the optimized model")
