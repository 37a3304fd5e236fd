"""The judge of TensorRT for RTX: its compiler, and the performance model for the kernels it makes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import onnx_ir as ir

from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.compiler import Compiler, CompilerPool
from trtopt.engine.layers import buffer_sizes, constant_bytes, moved_bytes
from trtopt.engine.request import BuildRequest
from trtopt.engine.work import layers_of_engine, trip_counts
from trtopt.graph import edit
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import GpuSpec, supports
from trtopt.judge.protocol import Priced
from trtopt.judge.rows import kernels_of, timed_rows
from trtopt.precision.fp16.network_io import IoRequest
from trtopt.precision.fp16.network_io import formats as io_formats
from trtopt.report.schema.steps import Cost
from trtopt.source.save import save_model
from trtopt.support.files import TEMPORARY
from trtopt.support.precision import Precision

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

    Args:
        compiler: The compiler's process.
        gpus: The GPU it compiles for, and the one whose time is predicted.
        plugins: Libraries that the compiler loads.
        io: As in :func:`judge_for`.
        tf32: Whether FP32 products may use TF32.
    """

    def __init__(
        self,
        compiler: Compiler | CompilerPool,
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
        """``compiler:`` and what is installed."""
        return f"compiler:{TENSORRT_RTX.name} {metadata.version(TENSORRT_RTX.name)}"

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        """See :class:`~trtopt.judge.protocol.Judge`; the kernels of a loop count as often as they run, once where
        nobody knows how often."""
        formats = dict.fromkeys(_maps(model), _CHANNELS_LAST) if inner else io_formats(self._io)
        with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
            path = Path(folder) / "model.onnx"
            save_model(model, path)
            layers = self._compiler.layers(
                BuildRequest(
                    onnx=path,
                    backend=TENSORRT_RTX,
                    gpu=self._target,
                    nodes=tuple(str(node.name) for node in edit.all_nodes(model.graph)),
                    tf32=self._tf32,
                    plugins=self._plugins,
                    formats=formats,
                )
            )
        work = layers_of_engine(
            layers, model, static_shapes(model, {}), tf32=self._tf32 and supports(self._gpu, Precision.TF32)
        )
        rows = timed_rows(work.layers, self._gpu)
        sizes = buffer_sizes(layers)
        launched = [(layer, trips or 1) for layer, trips in zip(layers, trip_counts(layers), strict=True)]
        launched = [(layer, trips) for layer, trips in launched if layer.is_kernel]
        total = Cost(
            kernels=sum(trips for _, trips in launched),
            syncs=sum(layer.type in ("signal", "wait") for layer in layers),
            bytes=sum(trips * (moved_bytes(layer, sizes) + constant_bytes(layer)) for layer, trips in launched),
            predicted_us=sum(row.predicted_us for row in rows),
        )
        return Priced(total, kernels_of(rows))


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
