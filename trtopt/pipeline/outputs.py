"""The files of a build, in an order in which a run killed between them leaves no mixture that passes for whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.engine.build import EngineArtifact
from trtopt.engine.manifest import Signer, write_manifest
from trtopt.pipeline.lowered import Lowered
from trtopt.pipeline.manifest import Files, manifest_of
from trtopt.precision.observe.samples import Samples
from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.manifest import FileHash
from trtopt.report.schema.write import write_layers, write_report
from trtopt.source.save import save_model
from trtopt.support.files import atomic_write


@dataclass(frozen=True)
class Results:
    """What a run made.

    Attributes:
        report: The report.
        engine: The engine; None where none was asked for, or a gate failed before it was built.
        lowered: The optimized model.
        host: The part for the host, where there is one.
        samples: Those the model was calibrated on, and those it was verified on.
        files: What else was read (:func:`~trtopt.pipeline.manifest.other_files`).
    """

    report: BuildReport
    engine: EngineArtifact | None
    lowered: Lowered
    host: ir.Model | None
    samples: tuple[Samples, Samples]
    files: tuple[FileHash, ...]


def write(results: Results, outputs: Mapping[str, Path], config: BuildConfig, signer: Signer | None) -> None:
    """Write the outputs; after a failed gate, the report only."""
    report, engine = results.report, results.engine
    if not report.gate_failures or config.allow_accuracy_loss:
        host = () if results.host is None else save_model(results.host, outputs["host"])
        onnx = save_model(results.lowered.artifact.model, outputs["onnx"]) if "onnx" in outputs else ()
        if engine is not None:
            files = Files(results.files, host, onnx)
            manifest = manifest_of(report, engine.record, results.lowered, config, results.samples, files)
            atomic_write(outputs["engine"], engine.data)
            write_manifest(outputs["engine"], manifest, signer)
            if "layers" in outputs:
                write_layers(engine.record, outputs["layers"])
    if "report" in outputs:
        if engine is not None:
            atomic_write(outputs["report"].with_suffix(".build.log"), engine.raw_log)
        write_report(report, outputs["report"])
