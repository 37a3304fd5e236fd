"""The only orchestration: the command line, CI and Python callers use these functions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.errors import UsageError
from trtopt.events import Event, OnEvent, ignore
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
    isolate: bool = False,
    **options: Unpack[BuildOptions],
) -> BuildReport:
    """Make an engine: rewrite, calibrate, write the precision into the graph, verify, compile.

    Args:
        model: An ONNX file or model; a PyTorch module, or its name in code, ``nets.py:resnet`` (then give
            ``example_inputs`` or ``inputs``).
        config: The options; ``options`` override its fields by name.
        on_event: Called with progress and warnings.
        isolate: Work in a process of its own, as the command line does: where native code crashes on the model that is
            an exception here. Samples are then files or arrays by input name, and metrics names or
            ``FILE.py:FUNCTION``; what scripts print goes to standard error.
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
    return _run(model, config, {**options}, on_event, make_engine=True, isolate=isolate)


def optimize(
    model: str | Path | onnx.ModelProto | ir.Model | torch.nn.Module,
    config: BuildConfig | None = None,
    *,
    on_event: OnEvent = ignore,
    isolate: bool = False,
    **options: Unpack[BuildOptions],
) -> BuildReport:
    """Everything :func:`build` does but the engine: writes the optimized ONNX model to ``output``.

    The model keeps the types it has unless ``precision`` is given. Arguments and errors as :func:`build`.

    Example:
        >>> report = trtopt.optimize("model.onnx", output="optimized.onnx", recipes="none")
        >>> report.engine is None
        True
    """
    return _run(model, config, {**options}, on_event, make_engine=False, isolate=isolate)


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
    isolate: bool,
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
        if isolate:
            return _run_apart(model, config, given, example_inputs, on_event, Path(folder), make_engine=make_engine)
        path = as_file(model, Path(folder), config, example_inputs, on_event)
        sources = DataSources(*(given.get(name, getattr(config, name)) for name in _OBJECTS))
        target = model if isinstance(model, str) and path.parent == Path(folder) else None
        return run_build(path, config, sources, Clock(on_event), make_engine=make_engine, target=target)


def _run_apart(
    model: Any,
    config: BuildConfig,
    given: dict[str, Any],
    example_inputs: Any,
    on_event: OnEvent,
    folder: Path,
    *,
    make_engine: bool,
) -> BuildReport:
    """A build in a process of its own; ``folder`` is for what goes there and back."""
    from trtopt.report.schema.build import BuildReport
    from trtopt.report.schema.read import read_report
    from trtopt.source.pytorch import as_file
    from trtopt.support.child import call_in_child

    # Modules are exported here: their code, and their tensors, are in this process.
    path = model if isinstance(model, (str, Path)) else as_file(model, folder, config, example_inputs, on_event)
    if not isinstance(model, (str, Path)):
        config = config.with_options({"inputs": (), "dynamic": ()})
    config = config.with_options({name: str(_as_samples(name, value, folder)) for name, value in given.items()})
    report = folder / "report.json"
    arguments = {
        "model": str(path),
        "options": dataclasses.asdict(config),
        "report": str(report),
        "make_engine": make_engine,
    }
    place = f"trtopt.{'build' if make_engine else 'optimize'}({str(model)[:200]!r})"
    call_in_child("trtopt.api:_work_apart", arguments, lambda message: on_event(Event(**message)), place)
    found = read_report(report)
    if not isinstance(found, BuildReport):
        raise TypeError("not the report of a build")
    return found


def _as_samples(name: str, value: Any, folder: Path) -> Path:
    """Samples as a file: arrays by input name, or an array alone.

    Raises:
        UsageError: They are something else, which cannot go to another process.
    """
    from trtopt.precision.observe.loaders import write_arrays

    path = folder / name
    if name != "metric" and isinstance(value, Mapping):
        write_arrays(path.with_suffix(".npz"), {str(key): np.asarray(array) for key, array in value.items()})
        return path.with_suffix(".npz")
    if name != "metric" and isinstance(value, np.ndarray):
        np.save(path.with_suffix(".npy"), value)
        return path.with_suffix(".npy")
    kinds = "a name or FILE.py:FUNCTION" if name == "metric" else "a file, an array or arrays by input name"
    raise UsageError(
        f"A {type(value).__name__} cannot go to another process",
        where=name,
        remedy=f"give {kinds}; or leave isolate out",
    )


def _work_apart(
    model: str, options: dict[str, Any], report: str, make_engine: bool, tell: Callable[[dict[str, Any]], None]
) -> None:
    """What :func:`_run_apart` asks for, in the other process."""
    made = _run(
        model,
        BuildConfig(**options),
        {},
        lambda event: tell(dataclasses.asdict(event)),
        make_engine=make_engine,
        isolate=False,
    )
    Path(report).write_text(json.dumps(made.to_json_dict()), encoding="utf-8")
