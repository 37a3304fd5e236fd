"""The judge of each backend; neither speaks for the other's.

TensorRT for RTX: its compiler, and the performance model for the kernels it makes. TensorRT, without a GPU: the fusions
that its documentation names, and the performance model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx_ir as ir

from trtopt.engine.backend import TENSORRT, TENSORRT_RTX, Backend, choose_backend
from trtopt.engine.build import CompilerPool
from trtopt.engine.request import BuildRequest
from trtopt.engine.sizes import sized
from trtopt.engine.work import layers_of_engine, trip_counts
from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import DEFAULT_GPU, GpuSpec, find_gpu, supports
from trtopt.judge.bound import at_least
from trtopt.judge.form import best_shapes, optimum, profile_of
from trtopt.judge.protocol import AT_ONCE, Judge, Priced, PriceFile, Prices
from trtopt.judge.subgraph import named_key
from trtopt.judge.target import nearest_target
from trtopt.precision.decide import decide, wanted_tensors
from trtopt.precision.fp16.network_io import IoRequest
from trtopt.precision.fp16.network_io import formats as io_formats
from trtopt.precision.fp16.states import fp32_outputs, with_states
from trtopt.precision.fp16.to_fp32 import to_fp32
from trtopt.precision.observe.statistics import StatsBuilder, TensorStats
from trtopt.precision.regions import candidate_nodes
from trtopt.precision.write import apply_plan, cast_borders
from trtopt.report.schema.analysis import LayerRow
from trtopt.report.schema.layers import LayerInfo
from trtopt.report.schema.steps import Cost
from trtopt.roofline.layer import predict
from trtopt.roofline.node_work import GraphTypes
from trtopt.roofline.onnx_layers import layers_of_graph
from trtopt.roofline.work import Layer
from trtopt.source.save import write_once
from trtopt.support.precision import Precision
from trtopt.support.temporary import TemporaryFolder


def timed_rows(layers: Sequence[Layer], gpu: GpuSpec) -> tuple[LayerRow, ...]:
    """The kernels whose cost is known: the others cost the same before and after.

    Raises:
        InvalidModelError: None is.
    """
    rows, uncosted = predict(layers, gpu)
    if layers and not rows:
        raise InvalidModelError(
            f"no kernel has a known cost ({', '.join(item.op for item in uncosted)})",
            where=uncosted[0].nodes[0] if uncosted and uncosted[0].nodes else "",
            remedy="fix the condition of an If, or the trip count of a loop, in the model",
        )
    return rows


def priced_layers(
    layers: Sequence[LayerInfo],
    full: Sequence[LayerInfo],
    model: ir.Model,
    shapes: Mapping[str, tuple[int, ...]],
    gpu: GpuSpec,
    *,
    tf32: bool,
) -> Priced:
    """What an engine of TensorRT for RTX costs; kernels of a loop count as often as they run, once where nobody knows.

    Args:
        layers: The layers of one profile.
        full: The same with every size known; those of a static build where nothing tells the sizes.
        model: What was compiled.
        shapes: Static shapes of its values.
        gpu: The GPU whose time is predicted.
        tf32: Whether FP32 products may be TF32.

    Raises:
        InvalidModelError: No kernel has a known cost.
    """
    work = layers_of_engine(full, model, shapes, tf32=tf32 and supports(gpu, Precision.TF32))
    rows = timed_rows(work.layers, gpu)
    total = Cost(
        kernels=sum(trips or 1 for layer, trips in zip(layers, trip_counts(layers), strict=True) if layer.is_kernel),
        syncs=sum(layer.type in ("signal", "wait") for layer in layers),
        bytes=sum(row.bytes for row in rows),
        predicted_us=sum(row.predicted_us for row in rows),
    )
    return Priced(total, kernels_of(rows))


def kernels_of(rows: Sequence[LayerRow]) -> tuple[tuple[frozenset[str], int, float], ...]:
    return tuple((frozenset(row.onnx_nodes), row.bytes, row.predicted_us) for row in rows)


def types_in(model: ir.Model, precision: Precision | None, backend: str) -> GraphTypes:
    """The types a graph runs in once a precision is written into it, before anything was observed.

    ``precision`` None keeps the types the graph has; ``backend`` says whose table sends nodes to 8-bit.
    """
    if precision is None:
        return GraphTypes()
    for dtype in precision.quantized_types[:1]:
        placed = (str(node.name) for node in candidate_nodes(model, backend, dtype)[0])
        return GraphTypes(precision.base, frozenset(placed), dtype)
    return GraphTypes(precision.base)


class ModelJudge:
    """TensorRT without a GPU: its documented fusions, and the time of each fused layer by the performance model."""

    name = "model:tensorrt"

    def __init__(self, gpu: GpuSpec, precision: Precision | None) -> None:
        self._gpu, self._precision = gpu, precision

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        """See :class:`~trtopt.judge.protocol.Judge`; operators without a known cost are left out."""
        types = types_in(model, self._precision, TENSORRT.name)
        layers = layers_of_graph(model, static_shapes(model, best_shapes(model)), types)
        rows = timed_rows(layers, self._gpu)
        total = Cost(len(layers), 0, sum(row.bytes for row in rows), sum(row.predicted_us for row in rows))
        return Priced(total, kernels_of(rows))


_CHANNELS_LAST = "HWC"
"""How TensorRT for RTX keeps feature maps between convolutions."""

_ON_MAPS = frozenset(
    {"Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "BatchNormalization", "Resize"}
)
_ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Relu", "LeakyRelu", "PRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Clip"}
    | {"Elu", "Selu", "Softplus", "Mish", "Gelu", "Concat", "Split", "Slice", "Cast", "Max", "Min", "Erf", "Pad"}
    | {"QuantizeLinear", "DequantizeLinear"}
)
_STEPS_TO_A_CONV = 12
"""An addition, an activation, and a quantizer written as arithmetic."""


class CompilerJudge:
    """TensorRT for RTX: the kernels it really makes, each timed by the performance model.

    ``gpus`` are the one it compiles for, and the one whose time is predicted.
    """

    def __init__(
        self,
        compiler: CompilerPool,
        gpus: tuple[GpuSpec, GpuSpec],
        plugins: tuple[str, ...] = (),
        io: tuple[IoRequest, ...] = (),
        *,
        tf32: bool = False,
    ) -> None:
        self._compiler, self._io, self._tf32 = compiler, io, tf32
        self._target, self._gpu = gpus
        self._plugins = tuple(Path(item) for item in plugins)

    @property
    def name(self) -> str:
        return f"compiler:{TENSORRT_RTX.name} {metadata.version(TENSORRT_RTX.name)}"

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        """See :class:`~trtopt.judge.protocol.Judge`; the kernels of a loop count as often as they run, once where
        nobody knows how often. Those of a model with open axes are compiled for its profile, as in the engine."""
        formats = dict.fromkeys(_maps(model), _CHANNELS_LAST) if inner else io_formats(self._io)
        with TemporaryFolder() as folder:
            path = Path(folder) / "model.onnx"
            weights = write_once(model, path)[1:]
            request = BuildRequest(
                onnx=path,
                backend=TENSORRT_RTX,
                gpu=self._target,
                nodes=tuple(str(node.name) for node in edit.all_nodes(model.graph)),
                tf32=self._tf32,
                plugins=self._plugins,
                formats=formats,
                weights=weights,
                key="" if inner else named_key(model),
            )
            layers, full, shapes = self._compiled(request, model, inner=inner)
        found = priced_layers(layers, full, model, shapes, self._gpu, tf32=self._tf32)
        return replace(found, total=at_least(found.total, model, shapes, self._gpu))

    def _compiled(
        self, request: BuildRequest, model: ir.Model, *, inner: bool
    ) -> tuple[tuple[LayerInfo, ...], tuple[LayerInfo, ...], dict[str, tuple[int, ...]]]:
        """The layers of one model, the same with all sizes, and the shapes of its values that they are for.

        The sizes of a whole network are looked up in its static engine where there is one for the same nodes.
        """
        profile = profile_of(model)
        profiles = () if profile is None else (profile,)
        asked, static = replace(request, profiles=profiles), tuple[LayerInfo, ...]()
        if inner or profile is None:
            layers = self._compiler.layers(asked)
        else:
            layers, static = self._compiler.ranged(asked)
        shapes = static_shapes(model, optimum(profiles))
        known = sized(layers, model, shapes, profiles, static)
        if known is None and profile is not None and not static:
            static = self._compiler.layers(replace(request, profiles=(profile.at_optimum(),)))
            known = sized(layers, model, shapes, profiles, static)
        return layers, known or static or layers, shapes


def _maps(model: ir.Model) -> list[str]:
    """The inputs and outputs that are feature maps: elementwise operators at most lie between them and an operator on
    maps."""
    found = [value for value in model.graph.inputs if _is_near(value, lambda v: [node for node, _ in v.uses()])]
    found += [value for value in model.graph.outputs if _is_near(value, lambda v: [v.producer()])]
    return [str(value.name) for value in found]


def _is_near(value: ir.Value, step: Callable[[ir.Value], Sequence[ir.Node | None]]) -> bool:
    if value.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16) or len(value.shape or ()) != 4:
        return False
    forward = value.producer() is None
    front = [value]
    for _ in range(_STEPS_TO_A_CONV):
        nodes = [node for item in front for node in step(item) if node is not None]
        if any(node.op_type in _ON_MAPS for node in nodes):
            return True
        near = [node for node in nodes if node.op_type in _ELEMENTWISE]
        values = (value for node in near for value in (node.outputs if forward else node.inputs))
        front = list(dict.fromkeys(value for value in values if value is not None))
    return False


class WritingJudge:
    """Writes a precision into each model that it is asked about, as a build does, and asks the judge of the backend."""

    def __init__(
        self, judge: Judge, precision: Precision | None, io: tuple[IoRequest, ...], backend: Backend = TENSORRT_RTX
    ) -> None:
        self._judge, self._precision, self._io, self._backend = judge, precision, io, backend

    @property
    def name(self) -> str:
        return self._judge.name

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        if self._precision is not None:
            ends = () if inner else fp32_outputs(model, self._io)
            model = written(model, self._precision, best_shapes(model), self._backend, ends)
            if inner:
                model = cast_borders(
                    model, ir.DataType.BFLOAT16 if self._precision == Precision.BF16 else ir.DataType.FLOAT16
                )
        return self._judge.price(model if inner else with_states(model, self._io), inner=inner)


def written(
    model: ir.Model,
    precision: Precision,
    shapes: Mapping[str, tuple[int, ...]],
    backend: Backend,
    ends: Collection[str] = (),
) -> ir.Model:
    """Write a precision into a graph without having run it: speed does not depend on the values.

    What needs no statistics is decided as a build decides it: the compiler's INT8 table, operators without a narrow
    form, constants that do not survive, final scores. Every range is taken as harmless (small values where a scale is
    needed), so a build on real samples may keep more nodes in a wider type. ``shapes`` are those of inputs with dynamic
    axes.
    """
    base = to_fp32(model)
    wanted = wanted_tensors(base, precision, backend.name)
    stats = dict.fromkeys(wanted.histogram, _harmless())
    return apply_plan(base, decide(base, precision, backend.name, stats, static_shapes(base, shapes), ends=ends))


def _harmless() -> TensorStats:
    """Evenly spread over -1/16..1/16: sums of a million such terms fit FP16."""
    builder = StatsBuilder(histogram=True)
    builder.update(np.linspace(-1 / 16, 1 / 16, 256, dtype=np.float32))
    return builder.finish()


@contextmanager
def judge_for(
    backend: Backend,
    gpu: GpuSpec | None,
    precision: Precision | None,
    plugins: tuple[str, ...] = (),
    io: tuple[IoRequest, ...] = (),
    prices: Callable[[Sequence[str]], PriceFile] | None = None,
    compiler: CompilerPool | None = None,
) -> Iterator[Judge]:
    """The judge of a backend.

    Args:
        backend: The backend.
        gpu: The GPU; None for every GPU from Ampere on, judged on the default one.
        precision: The precision asked for; None for the types the graph has.
        plugins: Libraries the compiler loads.
        io: Types and layouts of the whole network's inputs and outputs.
        prices: The file of the prices that depend on the judge and what it is asked; None to keep none.
        compiler: Those that are asked, and stay open; None for some of its own.

    Raises:
        MissingDependencyError: TensorRT for RTX is asked for and not installed.
        UsageError: A plugin library cannot be read.
    """
    chip = gpu or find_gpu(DEFAULT_GPU)

    def kept(judge: Judge) -> Judge:
        """With what other runs were told: by what the judge is asked, after its precision is written."""
        if prices is None:
            return judge
        return Prices(judge, prices((judge.name, repr((gpu, precision, io)))), by_name=bool(io))

    if backend != TENSORRT_RTX:
        wide = precision if precision is not None and precision.is_wide else None  # others are written into the graph
        yield WritingJudge(kept(ModelJudge(chip, wide)), precision, io, backend)
        return
    target = nearest_target(chip)
    choose_backend(TENSORRT_RTX.name, target, None)
    with nullcontext(compiler) if compiler is not None else CompilerPool(AT_ONCE) as asked:
        judge = CompilerJudge(asked, (target, chip), plugins, io, tf32=precision == Precision.TF32)
        yield WritingJudge(kept(judge), precision, io)
