"""The layers of an engine, their tensors and their nodes: records of ``trtopt.build/1``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeName:
    """What the user calls a node of the graph.

    Attributes:
        module: Path of the PyTorch module it was exported from: ``layer1.0.conv3``.
        op: Its ONNX operator.
    """

    module: str
    op: str


@dataclass(frozen=True)
class TensorInfo:
    """A tensor at the border of an engine layer.

    Attributes:
        name: The name the compiler gave it.
        shape: Its dimensions; -1 where the build left one dynamic.
        dtype: ``Float``, ``Half``, ``BFloat16``, ``Int8``, ``FP8``, ``Int64``... as the compiler says.
        format: The memory format as the compiler says.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    format: str = ""


@dataclass(frozen=True)
class LayerInfo:
    """One layer of an engine, as its compiler reports it.

    Attributes:
        name: The layer's name in the engine.
        type: The compiler's layer type (``correlation``, ``gemm``, ``kgen``, ``signal``, ...).
        onnx_nodes: Names of the ONNX nodes the layer computes, or part of which it computes.
        inputs: Tensors read; one buffer may be listed several times.
        outputs: Tensors written.
        constants: Weights and other constants read.
        tactic: The kernel's name.
        is_kernel: False for stream syncs, loop control, host and bookkeeping layers.
        kind: What kind of kernel: ``conv``, ``gemm``, ``mha``, ``fused`` (made at run time), ``pointwise``, ``other``,
            or ``none`` when it is not a kernel.
    """

    name: str
    type: str
    onnx_nodes: tuple[str, ...]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    constants: tuple[TensorInfo, ...] = ()
    tactic: str = ""
    is_kernel: bool = True
    kind: str = "other"
