"""Who says what a graph costs: the compiler of TensorRT for RTX, or TensorRT's fusions as the performance model knows
them. Neither speaks for the other's backend."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.engine.backend import RTX_TARGETS, TENSORRT_RTX, Backend, choose_backend
from trtopt.engine.build import BuildRequest
from trtopt.engine.compiler import Compiler, CompilerPool
from trtopt.engine.layers import buffer_sizes, constant_bytes, moved_bytes
from trtopt.engine.loops import trip_counts
from trtopt.engine.work import layers_of_engine
from trtopt.errors import InvalidModelError
from trtopt.events import OnEvent
from trtopt.files import TEMPORARY
from trtopt.graph import edit
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import DEFAULT_GPU, GpuSpec, find_gpu, gpus_of, supports
from trtopt.precision.decide import QUANTIZED_TYPES, decide, placed_nodes, wanted_tensors
from trtopt.precision.network_io import IoRequest, apply_io, parse_io
from trtopt.precision.network_io import formats as io_formats
from trtopt.precision.ranges import StatsBuilder, TensorStats
from trtopt.precision.widen import widen
from trtopt.precision.write import apply_plan, narrow_borders
from trtopt.report.analysis import LayerRow
from trtopt.report.records import Cost
from trtopt.rewrite import driver
from trtopt.rewrite.prices import AT_ONCE
from trtopt.rewrite.protocol import Judge, Priced, Target
from trtopt.roofline.layer import predict
from trtopt.roofline.node_work import Precision
from trtopt.roofline.onnx_layers import layers_of_graph
from trtopt.roofline.work import Layer, MathType
from trtopt.source.save import save_model

_BLACKWELL = (10, 0)
_BLACKWELL_TARGET = "12.0"
_OLDEST_PROXY = "8.0"

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

_NARROW = {"bf16": ir.DataType.BFLOAT16}
"""The 16-bit type of a precision, where it is not FP16."""

_BASES: dict[str | None, MathType] = {None: "fp32", "fp32": "fp32", "tf32": "tf32", "bf16": "bf16"}


def rewrite(
    artifact: ModelArtifact,
    backend: Backend,
    gpu: GpuSpec | None,
    precision: str | None,
    shapes: Mapping[str, tuple[int, ...]],
    config: BuildConfig,
    on_event: OnEvent,
) -> driver.Rewritten:
    """Apply the recipes of ``config``, judged for a backend and GPU (see :func:`judge_for`) at these input shapes.

    Raises:
        MissingDependencyError: TensorRT for RTX has to judge and is not installed.
        UsageError: An unknown recipe, or wrong shapes.
        RecipeError: A recipe or a pack failed, with ``strict_recipes``.
    """
    lowered_for = nearest_target(gpu) if gpu is not None and backend == TENSORRT_RTX else gpu
    run = partial(
        driver.run,
        artifact,
        recipes=config.recipes,
        strict=config.strict_recipes,
        target=Target(backend.name, precision, lowered_for.compute_capability if lowered_for is not None else None),
        on_event=on_event,
    )
    if config.recipes == "none":
        return run()
    with judge_for(backend, gpu, precision, config.plugins, parse_io(config.io)) as judge:
        return run(judging=driver.Judging(judge, shapes))


@contextmanager
def judge_for(
    backend: Backend,
    gpu: GpuSpec | None,
    precision: str | None,
    plugins: tuple[str, ...] = (),
    io: tuple[IoRequest, ...] = (),
) -> Iterator[Judge]:
    """The judge of a backend.

    Args:
        backend: The backend.
        gpu: The GPU; None for every GPU from Ampere on, judged on the default one.
        precision: One of ``config.PRECISIONS``; None for the types the graph has.
        plugins: Libraries the compiler loads.
        io: Types and layouts of the whole network's inputs and outputs.

    Raises:
        MissingDependencyError: TensorRT for RTX is asked for and not installed.
    """
    chip = gpu or find_gpu(DEFAULT_GPU)
    if backend != TENSORRT_RTX:
        yield ModelJudge(chip, precision)
        return
    target = nearest_target(chip)
    choose_backend(TENSORRT_RTX.name, target, None)
    with CompilerPool(AT_ONCE) as compiler:
        yield CompilerJudge(compiler, (target, chip), precision, plugins, io)


class CompilerJudge:
    """TensorRT for RTX: the kernels it really makes, each timed by the performance model.

    Args:
        compiler: The compiler's process.
        gpus: The GPU it compiles for, and the one whose time is predicted.
        precision: As in :func:`judge_for`, like the others.
    """

    def __init__(
        self,
        compiler: Compiler | CompilerPool,
        gpus: tuple[GpuSpec, GpuSpec],
        precision: str | None,
        plugins: tuple[str, ...] = (),
        io: tuple[IoRequest, ...] = (),
    ) -> None:
        self._compiler, self._precision, self._io = compiler, precision, io
        self._target, self._gpu = gpus
        self._plugins = tuple(Path(item) for item in plugins)

    @property
    def name(self) -> str:
        """``compiler:`` and what is installed."""
        return f"compiler:{TENSORRT_RTX.name} {metadata.version(TENSORRT_RTX.name)}"

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        """See :class:`~trtopt.rewrite.protocol.Judge`; the kernels of a loop count as often as they run, once where
        nobody knows how often."""
        if self._precision is not None:
            model = written(model, self._precision, {}, TENSORRT_RTX)
            if inner:
                model = narrow_borders(model, _NARROW.get(self._precision, ir.DataType.FLOAT16))
        formats = dict.fromkeys(_maps(model), _CHANNELS_LAST) if inner else {}
        if self._io and not inner:
            model, formats = apply_io(model, self._io), io_formats(self._io)
        tf32 = self._precision == "tf32"
        with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
            path = Path(folder) / "model.onnx"
            save_model(model, path)
            layers = self._compiler.layers(
                BuildRequest(
                    onnx=path,
                    backend=TENSORRT_RTX,
                    gpu=self._target,
                    nodes=tuple(str(node.name) for node in edit.all_nodes(model.graph)),
                    tf32=tf32,
                    plugins=self._plugins,
                    formats=formats,
                )
            )
        work = layers_of_engine(layers, model, static_shapes(model, {}), tf32=tf32 and supports(self._gpu, "tf32"))
        rows = _rows(work.layers, self._gpu)
        sizes = buffer_sizes(layers)
        launched = [(layer, trips or 1) for layer, trips in zip(layers, trip_counts(layers), strict=True)]
        launched = [(layer, trips) for layer, trips in launched if layer.is_kernel]
        total = Cost(
            kernels=sum(trips for _, trips in launched),
            syncs=sum(layer.type in ("signal", "wait") for layer in layers),
            bytes=sum(trips * (moved_bytes(layer, sizes) + constant_bytes(layer)) for layer, trips in launched),
            predicted_us=sum(row.predicted_us for row in rows),
        )
        return Priced(total, _kernels(rows))


class ModelJudge:
    """TensorRT without a GPU: its documented fusions, and the time of each fused layer by the performance model.

    Args:
        gpu: The GPU whose time is predicted.
        precision: As in :func:`judge_for`.
    """

    name = "model:tensorrt"

    def __init__(self, gpu: GpuSpec, precision: str | None) -> None:
        self._gpu, self._precision = gpu, precision

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        """See :class:`~trtopt.rewrite.protocol.Judge`; operators without a known cost are left out."""
        types = Precision(base=_BASES.get(self._precision, "fp16"))
        for dtype in QUANTIZED_TYPES.get(self._precision or "", ())[:1]:
            types = Precision("fp16", placed_nodes(model, "tensorrt", dtype), dtype)
        layers = layers_of_graph(model, static_shapes(model, {}), types)
        rows = _rows(layers, self._gpu)
        total = Cost(len(layers), 0, sum(row.bytes for row in rows), sum(row.predicted_us for row in rows))
        return Priced(total, _kernels(rows))


def _rows(layers: Sequence[Layer], gpu: GpuSpec) -> tuple[LayerRow, ...]:
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


def _kernels(rows: Sequence[LayerRow]) -> tuple[tuple[frozenset[str], int, float], ...]:
    return tuple((frozenset(row.onnx_nodes), row.bytes, row.predicted_us) for row in rows)


def written(model: ir.Model, precision: str, shapes: Mapping[str, tuple[int, ...]], backend: Backend) -> ir.Model:
    """Write a precision into a graph without having run it: speed does not depend on the values.

    What needs no statistics is decided as a build decides it: the compiler's INT8 table, operators without a narrow
    form, constants that do not survive, final scores. Every range is taken as harmless (small values where a
    scale is needed), so a build on real samples may keep more nodes in a wider type.

    Args:
        model: The model; not changed.
        precision: One of ``config.PRECISIONS``.
        shapes: Input shapes, for those with dynamic axes.
        backend: Whose INT8 rules apply.
    """
    base = widen(model)
    wanted = wanted_tensors(base, precision, backend.name)
    stats = dict.fromkeys(wanted.histogram, _harmless())
    return apply_plan(base, decide(base, precision, backend.name, stats, static_shapes(base, shapes)))


def nearest_target(gpu: GpuSpec) -> GpuSpec:
    """The GPU to lower for: ``gpu`` itself where TensorRT for RTX can target it.

    Else one of the highest target from 8.0 on that is not above its compute capability: 8.6 for 8.7, 8.9 for 9.0. Two
    exceptions: Blackwell 10.x and 11.x become 12.0, the same generation, where the compiler knows their types (FP4);
    and what is older than 8.0 becomes 8.0, since 7.5 is lowered unlike all others (no FP32 products, depthwise
    convolutions padded to eight channels). For ResNet-50, MobileNetV2, ViT-B, BERT-base and ConvNeXt-T in FP16 or INT8
    the targets from 8.0 to 12.0 give the same kernels (TensorRT for RTX 1.7.1).
    """
    if gpu.compute_capability in RTX_TARGETS:
        return gpu
    wanted = _version(gpu.compute_capability)
    if wanted >= _BLACKWELL:
        return gpus_of(_BLACKWELL_TARGET)[0]
    below = [target for target in RTX_TARGETS if _version(_OLDEST_PROXY) <= _version(target) <= wanted]
    return gpus_of(max(below, key=_version, default=_OLDEST_PROXY))[0]


def _version(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))


def _harmless() -> TensorStats:
    """Evenly spread over -1/16..1/16: sums of a million such terms fit FP16."""
    builder = StatsBuilder(histogram=True)
    builder.update(np.linspace(-1 / 16, 1 / 16, 256, dtype=np.float32))
    return builder.finish()


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
