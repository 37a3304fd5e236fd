"""The only orchestration: the command line, CI and Python callers use these functions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.errors import UsageError
from trtopt.events import OnEvent, ignore
from trtopt.support.clock import Clock
from trtopt.support.files import TEMPORARY

if TYPE_CHECKING:
    import torch

    from trtopt.report.schema.build import BuildReport
    from trtopt.source.pytorch import ExportRecord


def build(
    model: str | Path | onnx.ModelProto | ir.Model | torch.nn.Module,
    config: BuildConfig | None = None,
    *,
    on_event: OnEvent = ignore,
    calib: Any = None,
    eval: Any = None,
    metric: str | Callable[..., Any] | None = None,
    **options: Any,
) -> BuildReport:
    """Make an engine: rewrite, calibrate, write the precision into the graph, verify, compile.

    Args:
        model: An ONNX file or model, or a PyTorch module (then give ``example_inputs``).
        config: The options; ``options`` override its fields by name.
        on_event: Called with progress and warnings.
        calib: Calibration samples: what ``--calib`` takes, or a dict of arrays by input name (first axis = samples;
            an array alone for a model with one input), a loader or another iterable of feeds, pairs with labels or
            arrays (:func:`trtopt.precision.observe.loaders.take`), or a function returning one.
        eval: Samples to verify on, likewise; default: the calibration samples.
        metric: What ``--metric`` takes, or a function called as ``f(run)``; ``run(feeds)`` takes arrays by input name
            and returns the outputs in graph order; higher is better. A search by a function is not resumed.
        **options: Fields of :class:`~trtopt.config.BuildConfig`, and ``example_inputs`` for a PyTorch module.

    Returns:
        The report. When a gate failed (``report.gate_failures``) and ``allow_accuracy_loss`` is off, nothing but the
        report is written.

    Raises:
        TrtoptError: See the subclasses in :mod:`trtopt.errors`.
    """
    return _run(model, config, (calib, eval, metric), options, on_event, make_engine=True)


def optimize(
    model: str | Path | onnx.ModelProto | ir.Model | torch.nn.Module,
    config: BuildConfig | None = None,
    *,
    on_event: OnEvent = ignore,
    calib: Any = None,
    eval: Any = None,
    metric: str | Callable[..., Any] | None = None,
    **options: Any,
) -> BuildReport:
    """Everything :func:`build` does but the engine: writes the optimized ONNX model to ``output``.

    The model keeps the types it has unless ``precision`` is given. Arguments and errors as :func:`build`.
    """
    return _run(model, config, (calib, eval, metric), options, on_event, make_engine=False)


def export(module: Any, path: str | Path, **options: Any) -> ExportRecord:
    """Write a PyTorch module as an ONNX file, checked numerically against PyTorch.

    Arguments and errors: :func:`trtopt.source.pytorch.export`.
    """
    from trtopt.pipeline.host import check_layers
    from trtopt.source.pytorch import export as export_module

    return export_module(module, path, accept=check_layers, **options)


def _run(
    model: Any,
    config: BuildConfig | None,
    given: tuple[Any, Any, Any],
    options: dict[str, Any],
    on_event: OnEvent,
    *,
    make_engine: bool,
) -> BuildReport:
    # The stages are loaded when there is something to build: they take as long as numpy, onnx and onnx_ir together.
    from trtopt.pipeline.session import run_build
    from trtopt.pipeline.settings import DataSources
    from trtopt.source.pytorch import as_file

    calib, check, metric = given
    if metric is not None and not callable(metric):
        options, metric = {**options, "metric": metric}, None
    example_inputs = options.pop("example_inputs", None)
    config = BuildConfig.given(config, options, "build(m, precision=...)")
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        if not isinstance(model, (str, Path)) and config.output is None:
            raise UsageError("A model in memory needs an output file", where="output", remedy="give output=FILE")
        path = as_file(model, Path(folder), config, example_inputs, on_event)
        sources = DataSources(
            config.calib if calib is None else calib,
            config.eval if check is None else check,
            config.metric if metric is None else metric,
        )
        return run_build(path, config, sources, Clock(on_event), make_engine=make_engine)
