"""Measuring which regions cost accuracy in 8 bits: what ``trtopt sensitivity`` and Python callers use."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from trtopt.analysis.sensitivity_stages import SensitivityJob, measure
from trtopt.cache.folder import make_cache_folder
from trtopt.config import SensitivityConfig
from trtopt.config.paths import check_files
from trtopt.engine.backend import backend_of_rules
from trtopt.errors import UsageError
from trtopt.events import OnEvent, ignore
from trtopt.hardware.probe import present_gpu
from trtopt.hardware.spec import choose_gpu
from trtopt.hardware.user import gpu_table
from trtopt.precision.observe.samples import SYNTHETIC, open_samples
from trtopt.report.schema.sensitivity import Sensitivity
from trtopt.report.schema.write import write_report
from trtopt.source.check import weight_files
from trtopt.source.onnx_file import load
from trtopt.source.pytorch import as_file
from trtopt.support.clock import Clock
from trtopt.support.files import TEMPORARY, atomic_write, check_outputs

if TYPE_CHECKING:
    import torch


def sensitivity(
    model: str | Path | onnx.ModelProto | ir.Model | torch.nn.Module,
    config: SensitivityConfig | None = None,
    *,
    on_event: OnEvent = ignore,
    calib: Any = None,
    eval: Any = None,
    **options: Any,
) -> Sensitivity:
    """Measure what each region of a model costs in accuracy when it becomes 8-bit. No GPU is needed.

    Args:
        model: An ONNX file or model, or a PyTorch module (then give ``example_inputs``).
        config: The options; ``options`` override its fields by name.
        on_event: Called with progress and warnings.
        calib: Calibration samples: what ``--calib`` takes, or a dict of arrays by input name (first axis = samples),
            an iterable of feed dicts or a function returning one.
        eval: Samples to measure errors on, likewise; default: the calibration samples.
        **options: Fields of :class:`~trtopt.config.SensitivityConfig`, and ``example_inputs`` for a PyTorch module.

    Raises:
        UsageError: An option, a sample or a GPU is wrong, or a file cannot be read or written.
        InvalidModelError: The model's content is invalid, or none of its nodes can become 8-bit.
        MissingDependencyError: ONNX Runtime is not installed; for ``html``, plotly.
    """
    example_inputs = options.pop("example_inputs", None)
    if config is not None and not isinstance(config, SensitivityConfig):
        raise UsageError(
            "config is not a SensitivityConfig",
            where="config",
            remedy="pass options as keywords: sensitivity(m, precision=...)",
        )
    config = (config or SensitivityConfig()).with_options(options)
    if config.html is not None:
        from trtopt.report.html.page import check_html

        check_html()
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        path = as_file(model, Path(folder), example_inputs)
        found = _run(path, config, calib, eval, Clock(on_event))
        if path.parent == Path(folder):
            found = dataclasses.replace(found, model={**found.model, "path": None})
    if config.html is not None:
        from trtopt.report.html.sensitivity import html

        atomic_write(Path(config.html), html(found))
    if config.report is not None:
        write_report(found, Path(config.report))
    return found


def _run(path: Path, config: SensitivityConfig, calib: Any, eval_samples: Any, clock: Clock) -> Sensitivity:
    check_files(str(path), config, None)
    if config.cache_dir is not None:
        make_cache_folder(config.cache_dir)
    gpu = choose_gpu(config.gpu, gpu_table(config.gpus), present_gpu())
    backend = backend_of_rules(config.backend, gpu).name
    with clock.stage("load"):
        loaded = load(path)
    outputs = {f"the output {name}": Path(name) for name in (config.report, config.html) if name is not None}
    check_outputs(outputs, weight_files(loaded.model))
    given = config.calib if calib is None else calib
    samples = open_samples(SYNTHETIC if given is None else given, loaded.inputs)
    given = config.eval if eval_samples is None else eval_samples
    check = samples if given is None else open_samples(given, loaded.inputs)
    found = measure(SensitivityJob(loaded, backend, samples, check, config), clock)
    seconds = {name: round(value, 4) for name, value in clock.seconds.items()}
    return dataclasses.replace(found, seconds=seconds, warnings=tuple(clock.warnings))
