"""The only orchestration: the command line, CI and Python callers use these functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.errors import UsageError
from trtopt.events import OnEvent, ignore
from trtopt.support.clock import Clock
from trtopt.support.temporary import TemporaryFolder

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from trtopt.config.keywords import BuildOptions
    from trtopt.report.schema.build import BuildReport
    from trtopt.source.pytorch import ExportOptions, ExportRecord


def build(
    model: str | Path | onnx.ModelProto | ir.Model | torch.nn.Module,
    config: BuildConfig | None = None,
    *,
    on_event: OnEvent = ignore,
    **options: Unpack[BuildOptions],
) -> BuildReport:
    """Make an engine: rewrite, calibrate, write the precision into the graph, verify, compile.

    Args:
        model: An ONNX file or model; a PyTorch module, or its name in code, ``nets.py:resnet`` (then give
            ``example_inputs`` or ``inputs``).
        config: The options; ``options`` override its fields by name.
        on_event: Called with progress and warnings.
        **options: Fields of :class:`~trtopt.config.BuildConfig` and, in place of what ``--calib``, ``--eval`` and
            ``--metric`` take, Python objects (:class:`~trtopt.config.keywords.BuildOptions`): samples are a dict of
            arrays by input name (first axis = samples; an array alone for a model with one input), a loader or
            another iterable of feeds, pairs with labels or arrays (:func:`trtopt.precision.observe.loaders.take`); a
            metric is a function called as ``f(run)``, where ``run(feeds)`` takes arrays by input name and returns the
            outputs in graph order; higher is better. A search by a function is not resumed.

    Returns:
        The report. When a gate failed (``report.gate_failures``) and ``allow_accuracy_loss`` is off, nothing but the
        report is written; ``report.raise_for_gate()`` makes an exception of it.

    Raises:
        TrtoptError: See the subclasses in :mod:`trtopt.errors`.

    Example:
        >>> report = trtopt.build("model.onnx", precision="fp16", calib="samples.npz", output="fast.rtx.engine")
        >>> report.precision.requested, report.engine.path, report.gate_failures
        ('fp16', 'fast.rtx.engine', ())
    """
    return _run(model, config, {**options}, on_event, make_engine=True)


def optimize(
    model: str | Path | onnx.ModelProto | ir.Model | torch.nn.Module,
    config: BuildConfig | None = None,
    *,
    on_event: OnEvent = ignore,
    **options: Unpack[BuildOptions],
) -> BuildReport:
    """Everything :func:`build` does but the engine: writes the optimized ONNX model to ``output``.

    The model keeps the types it has unless ``precision`` is given. Arguments and errors as :func:`build`.

    Example:
        >>> report = trtopt.optimize("model.onnx", output="optimized.onnx", recipes="none")
        >>> report.engine is None
        True
    """
    return _run(model, config, {**options}, on_event, make_engine=False)


def export(
    target: torch.nn.Module | str,
    path: str | Path,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    *,
    inputs: Sequence[str] = (),
    dynamic: Sequence[str] = (),
    on_event: OnEvent = ignore,
    **options: Unpack[ExportOptions],
) -> ExportRecord:
    """Write a PyTorch module as an ONNX file, checked numerically against PyTorch.

    Arguments and errors: :func:`trtopt.source.pytorch.export`.

    Example:
        >>> example = ["input:float32:2x3x8x8"]
        >>> record = trtopt.export("nets.py:net", "net.onnx", inputs=example, dynamic=["input:0=batch"])
        >>> record.inputs[0].shape
        ('batch', 3, 8, 8)
    """
    from trtopt.pipeline.host import check_layers
    from trtopt.source.pytorch import export as export_module

    options.setdefault("accept", check_layers)
    return export_module(target, path, example_inputs, inputs=inputs, dynamic=dynamic, on_event=on_event, **options)


_OBJECTS = ("calib", "eval", "metric")
"""Options that Python callers give as objects, which are no fields of a configuration."""


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, (str, Path))


def _run(
    model: Any,
    config: BuildConfig | None,
    options: dict[str, Any],
    on_event: OnEvent,
    *,
    make_engine: bool,
) -> BuildReport:
    # The stages are loaded when there is something to build: they take as long as numpy, onnx and onnx_ir together.
    from trtopt.pipeline.session import run_build
    from trtopt.pipeline.settings import DataSources
    from trtopt.source.pytorch import as_file

    example_inputs = options.pop("example_inputs", None)
    if "evaluation" in options:
        options["eval"] = options.pop("evaluation")
    given = {name: options.pop(name) for name in _OBJECTS if name in options and not _is_text(options[name])}
    config = BuildConfig.given(config, options, "build(m, precision=...)")
    with TemporaryFolder() as folder:
        if not isinstance(model, (str, Path)) and config.output is None:
            raise UsageError("A model in memory needs an output file", where="output", remedy="give output=FILE")
        path = as_file(model, Path(folder), config, example_inputs, on_event)
        sources = DataSources(*(given.get(name, getattr(config, name)) for name in _OBJECTS))
        target = model if isinstance(model, str) and path.parent == Path(folder) else None
        return run_build(path, config, sources, Clock(on_event), make_engine=make_engine, target=target)
