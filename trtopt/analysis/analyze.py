"""Predicting a model's speed: what ``trtopt analyze`` and Python callers use."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir

from trtopt.analysis.advice import Target, int8_times, model_words, with_line
from trtopt.analysis.links import links_of_graph
from trtopt.config import AnalyzeConfig
from trtopt.config.paths import check_files, files_written
from trtopt.engine.backend import TENSORRT, TENSORRT_RTX, backend_of_rules
from trtopt.engine.request import input_shapes
from trtopt.errors import UsageError
from trtopt.events import Event, OnEvent, ignore
from trtopt.graph import edit
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.module_path import names_of
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.probe import present_gpu
from trtopt.hardware.spec import GpuSpec, choose_gpu, gpu_of, precisions_of
from trtopt.hardware.user import gpu_table
from trtopt.report.html.page import check_html
from trtopt.report.schema.analysis import (
    Analysis,
    BatchSweep,
    Finding,
    LayerRow,
    LevelSummary,
    Sparsity,
    Totals,
    Uncosted,
    rank,
    totals_of,
)
from trtopt.report.text.analysis import view
from trtopt.report.text.blocks import View
from trtopt.report.text.command import made_by
from trtopt.roofline.gap import compare_levels
from trtopt.roofline.layer import predict
from trtopt.roofline.memory import peak_memory
from trtopt.roofline.node_work import GraphTypes
from trtopt.roofline.onnx_layers import FusedModel, layers_of_graph
from trtopt.roofline.peaks import L2_PORT_BYTES
from trtopt.roofline.rules.registry import advise
from trtopt.roofline.rules.subject import Subject
from trtopt.roofline.sweep import BatchAxis, BatchSweeper, batch_axis
from trtopt.roofline.work import Layer
from trtopt.source.check import weight_files
from trtopt.source.onnx_file import load
from trtopt.source.pytorch import as_file
from trtopt.source.torch_call import bounds_of
from trtopt.support.clock import Clock
from trtopt.support.files import check_outputs
from trtopt.support.precision import ONNX_TYPES, Precision
from trtopt.support.temporary import TemporaryFolder

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from trtopt.analysis.compiled import CompiledLevel
    from trtopt.config.keywords import AnalyzeOptions

AS_IS = "as-is"
"""The precision of a model that keeps the 16-bit and quantized types it has."""

_MOST_OPERATORS = 5
"""Operators without a cost that the warning names; the report lists them all."""


def analyze(
    model: str | Path | onnx.ModelProto | ir.Model | torch.nn.Module,
    config: AnalyzeConfig | None = None,
    *,
    on_event: OnEvent = ignore,
    **options: Unpack[AnalyzeOptions],
) -> Analysis:
    """Predict the time of every layer of a model on a GPU, what limits it, and what to change. No GPU is needed.

    Args:
        model: An ONNX file or model; a PyTorch module, or its name in code, ``nets.py:resnet`` (then give
            ``example_inputs`` or ``inputs``).
        config: The options; ``options`` override its fields by name.
        on_event: Called with progress and warnings.
        **options: Fields of :class:`~trtopt.config.AnalyzeConfig`, and ``example_inputs`` for a PyTorch module.

    Raises:
        UsageError: The GPU is not known or lacks the precision, an axis has no size, the batch is fixed in the graph,
            or a file cannot be read or written.
        InvalidModelError: The model's content is invalid, or it cannot run at these shapes.
        MissingDependencyError: ``compile`` needs TensorRT for RTX, ``html`` Jinja2.
        EngineBuildError: The compiler refused the model.

    Example:
        >>> analysis = trtopt.analyze("model.onnx", gpu="L4", precision="int8")
        >>> analysis.gpu["name"], analysis.layers[0].op
        ('L4', 'Conv')
    """
    given = {**options}
    example_inputs = given.pop("example_inputs", None)
    config = AnalyzeConfig.given(config, given, "analyze(m, gpu=...)")
    check_html(config.html)
    with TemporaryFolder() as folder:
        path = as_file(model, Path(folder), config, example_inputs, on_event)
        analysis = _Run(config, Clock(on_event), model_words(model, path, config)).run(path)
        if path.parent == Path(folder):
            analysis = replace(analysis, model=made_by(analysis.model, model))
    if config.html is not None or config.markdown is not None or config.report is not None:
        from trtopt.report.files import write_forms

        write_forms(analysis, html=config.html, markdown=config.markdown, report=config.report)
    return analysis


def view_of(analysis: Analysis) -> View:
    """An analysis, to be shown, with what its GPU's L2 can give."""
    gpu = gpu_of(analysis.gpu, "gpu")
    return view(analysis, gpu, l2_bandwidth_gbs=L2_PORT_BYTES * gpu.sm * gpu.clock_tensor_mhz * 1e6 / 1e9)


@dataclass(frozen=True)
class _Level:
    """One level of the model, predicted."""

    layers: tuple[Layer, ...]
    rows: tuple[LayerRow, ...]
    uncosted: tuple[Uncosted, ...]

    @property
    def totals(self) -> Totals:
        return totals_of(self.rows)


class _Run:
    """One analysis."""

    def __init__(self, config: AnalyzeConfig, clock: Clock, words: tuple[str, ...]) -> None:
        self.config = config
        self.clock = clock
        self.words = words
        table = gpu_table(config.gpus)
        gpu = choose_gpu(config.gpu, table, present_gpu())
        if gpu is None:
            raise UsageError(
                "'portable' stands for many GPUs; a prediction is about one",
                where="--gpu",
                remedy=f"name one of {', '.join(gpu.name for gpu in table)}",
            )
        self.gpu = gpu
        if config.precision is not None:
            check_type(config.precision, gpu, f"--precision {config.precision}")

    def run(self, path: Path) -> Analysis:
        config, clock, gpu = self.config, self.clock, self.gpu
        check_files(str(path), config, None)
        with self._stage("load"):
            loaded = load(path, hash_weights=False)
        weights = weight_files(loaded.model)
        check_outputs(files_written(config), weights)
        decided = input_shapes(loaded.inputs, config.shapes, bounds_of(config.dynamic))
        for note in decided.notes:
            clock.note("shapes", note)
        with self._stage("shapes"):
            values = static_shapes(loaded.model, decided.shapes)
        job = _Job(loaded, decided.shapes, values, self._precision(loaded.model))
        level = self._onnx_level(job)
        levels = [LevelSummary("onnx", len(level.rows), level.totals)]
        shown, rewritten, links, limit = level, None, None, None
        if config.compile:
            # What compiles is not loaded for a prediction from the graph alone: it doubles the time of a small model.
            from trtopt.analysis.compiled import compile_level, links_of_engine
            from trtopt.engine.limit import limit_of

            compiled = compile_level(loaded, gpu, self._build_precision(job), decided.shapes, clock)
            shown, rewritten = _level(compiled.layers, gpu), compiled.model
            links = links_of_engine(shown.rows, compiled.listed)
            levels.append(LevelSummary("engine", len(shown.rows), shown.totals, compiled.proxy))
            findings = self._with_gaps(self._findings(job, level, self._subject(job, shown, compiled)), compiled)
            limit = limit_of(compiled.listed, compiled.layers, shown.rows, compiled.model, gpu)
        else:
            findings = self._findings(job, level)
        self._warn_uncosted(shown)
        sparsity = self._sparsity(job, level)
        sweep = self._sweep(job)
        target = Target(self.words, gpu.name, config.precision, job.open_shapes)
        model = {**loaded.to_json_dict(), "input_shapes": {name: list(dims) for name, dims in decided.shapes.items()}}
        return Analysis(
            model={**model, "weights_hashed": not weights},
            gpu=dataclasses.asdict(gpu),
            precision=config.precision or (AS_IS if job.precision.base == Precision.FP32 else job.precision.base),
            layers=shown.rows,
            totals=shown.totals,
            findings=tuple(with_line(item, target) for item in findings),
            levels=tuple(levels),
            memory=peak_memory(job.fused, gpu),
            uncosted=shown.uncosted,
            batch_sweep=sweep,
            sparsity=sparsity,
            warnings=tuple(clock.warnings),
            limit=limit,
            names=names_of(loaded.model, rewritten),
            links=links_of_graph(shown.rows, loaded.model) if links is None else links,
        )

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self.clock.listen(Event("start", name))
        with self.clock.stage(name):
            yield
        self.clock.listen(Event("end", name))

    def _precision(self, model: ir.Model) -> GraphTypes:
        """The types to predict: those asked for, else FP16, or the model's own where it carries 16-bit types."""
        asked, own = self.config.precision, _narrow_types(model)
        if asked is None:
            return GraphTypes(base=Precision.FP32 if own else Precision.FP16)
        if own:
            self.clock.warn(
                "precision",
                f"what the model keeps as {', '.join(own)} stays so; {asked} is predicted for its FP32 tensors",
            )
        from trtopt.judge.judges import types_in

        return types_in(model, asked, backend_of_rules("auto", self.gpu).name)

    def _build_precision(self, job: _Job) -> Precision | None:
        """The precision of the engine to compile; None keeps the model's types."""
        if self.config.precision is not None:
            return self.config.precision
        return None if job.precision.base == Precision.FP32 else job.precision.base

    def _onnx_level(self, job: _Job) -> _Level:
        with self._stage("predict"):
            layers = job.fused.layers()
            for dtype, name in {layer.work.dtype: layer.name for layer in layers if layer.work is not None}.items():
                check_type(dtype, self.gpu, f"layer {name}")
            return _level(layers, self.gpu)

    def _findings(self, job: _Job, level: _Level, engine: Subject | None = None) -> tuple[Finding, ...]:
        with self._stage("advise"):
            subject = self._subject(job, level)
            times = int8_times(job.fused, self.gpu)
            return advise(replace(subject, int8_us=times), engine)

    def _subject(self, job: _Job, level: _Level, compiled: CompiledLevel | None = None) -> Subject:
        """A level of the model as the rules see it."""
        model, shapes = (job.loaded.model, job.values) if compiled is None else (compiled.model, compiled.shapes)
        batch = job.axis.size if job.axis is not None else None
        return Subject(model, shapes, level.layers, level.rows, self.gpu, batch)

    def _warn_uncosted(self, level: _Level) -> None:
        missing = sum(len(item.nodes) for item in level.uncosted)
        if missing:
            ops = ", ".join(item.op for item in level.uncosted[:_MOST_OPERATORS])
            more = ", ..." if len(level.uncosted) > _MOST_OPERATORS else ""
            nodes = "1 node has" if missing == 1 else f"{missing} nodes have"
            self.clock.warn("predict", f"{nodes} no cost ({ops}{more}): all totals are without them")

    def _with_gaps(self, findings: tuple[Finding, ...], compiled: CompiledLevel) -> tuple[Finding, ...]:
        """The findings, and where the compiler's layers take longer than the graph's, by gain."""
        base: Precision = Precision.TF32 if self.config.precision == Precision.TF32 else Precision.FP32
        expected = layers_of_graph(compiled.model, compiled.shapes, GraphTypes(base=base))
        gaps = compare_levels(expected, compiled.layers, self.gpu)
        return tuple(sorted((*findings, *gaps), key=rank))

    def _sparsity(self, job: _Job, level: _Level) -> Sparsity | None:
        """What 2:4 is worth in the layers of the ONNX level: to TensorRT, or to the compiler that was asked for."""
        if not self.config.sparse:
            return None
        from trtopt.sparsity.eligibility import eligibility, weights_of  # reads weights: only for those who ask

        backend = TENSORRT_RTX if self.config.compile else TENSORRT
        with self._stage("sparsity"):
            return eligibility(weights_of(job.loaded.model, backend.name), level.layers, self.gpu, backend.name)

    def _sweep(self, job: _Job) -> BatchSweep | None:
        config, axis = self.config, job.axis
        if not config.batch_sweep:
            return None
        if axis is None:
            raise UsageError("No input of the model has a batch axis", where="--batch-sweep", remedy="leave it out")
        if axis.symbol is None:
            self.clock.warn("sweep", f"the batch of this model is {axis.text}")
        sweeper = BatchSweeper(job.loaded.model, axis, job.shapes, job.values, job.precision, self.gpu)
        budget = config.latency_budget_ms
        with self.clock.stage("batch sweep"):
            found = sweeper.sweep(config.batch_sweep, None if budget is None else budget * 1e3, self.clock.listen)
        if not all(point.fits for point in found.points):
            first = next(point.batch for point in found.points if not point.fits)
            self.clock.warn("sweep", f"batch {first} and more do not fit {self.gpu.memory_gb:g} GB of {self.gpu.name}")
        return found


@dataclass(frozen=True)
class _Job:
    """A model at its input shapes and types."""

    loaded: ModelArtifact
    shapes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, tuple[int, ...]]
    precision: GraphTypes

    @functools.cached_property
    def fused(self) -> FusedModel:
        return FusedModel(self.loaded.model, self.values, self.precision)

    @property
    def open_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of inputs with dynamic axes."""
        is_open = {item.name for item in self.loaded.inputs if any(isinstance(dim, str) for dim in item.shape)}
        return {name: dims for name, dims in self.shapes.items() if name in is_open}

    @property
    def axis(self) -> BatchAxis | None:
        return batch_axis(self.loaded.inputs, self.shapes)


def _level(layers: tuple[Layer, ...], gpu: GpuSpec) -> _Level:
    """Predict every layer whose cost is known, and list the others by operator."""
    return _Level(layers, *predict(layers, gpu))


def check_type(dtype: str, gpu: GpuSpec, where: str) -> None:
    """Raise :class:`UsageError` when a GPU has no units for a type; it names the types the GPU has."""
    has = dict.fromkeys((*precisions_of(gpu), *gpu.tflops))
    if dtype not in has:
        raise UsageError(
            f"{gpu.name} (compute capability {gpu.compute_capability}) has no {dtype.upper()} units",
            where=where,
            remedy=f"it has {', '.join(has)}; 'trtopt gpu list' names the others",
        )


def _narrow_types(model: ir.Model) -> list[str]:
    """The 16-bit and 8-bit floats of a model's tensors, in words; integers are those of Q/DQ and say nothing of the
    rest."""
    graphs = list(edit.all_graphs(model.graph))
    values = (v for graph in graphs for v in (*graph.inputs, *graph.initializers.values()))
    outputs = (v for graph in graphs for node in graph for v in node.outputs)
    dtypes = {value.dtype for value in (*values, *outputs)} - {None, ir.DataType.INT8}
    found = {dtype.name for dtype in dtypes if dtype is not None}
    return [known.upper() for name, known in ONNX_TYPES.items() if name in found]
