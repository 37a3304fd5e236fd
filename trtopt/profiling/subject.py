"""A measured layer with all that its reasons may depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtopt.hardware.spec import GpuSpec
from trtopt.profiling.measured import MeasuredLayer
from trtopt.report.schema.analysis import LayerRow
from trtopt.report.schema.profile import Launching
from trtopt.roofline.constants import constants_for
from trtopt.roofline.layer import LayerTime, layer_times
from trtopt.roofline.work import Work
from trtopt.support.precision import Precision

NARROW_BYTES: dict[str, int] = {Precision.FP16: 2, Precision.BF16: 2, Precision.INT8: 1, Precision.FP8: 1}
"""Bytes of an element of the types below 32 bits."""

_PRODUCTS = ("gemm", "conv", "attention", "recurrent")


@dataclass(frozen=True)
class Network:
    """What the reasons of one layer depend on beyond it.

    Attributes:
        gpu: What it ran on; None for a CPU.
        launching: How the layers were launched and timed.
        narrow: The type most of the arithmetic of its products is in, where that is one of 8 or 16 bits; else empty.
        made: Names of the tensors that its layers write.
        clock_share: Measured clock over that of the datasheet, at most 1.
    """

    gpu: GpuSpec | None
    launching: Launching = "profile"
    narrow: str = ""
    made: frozenset[str] = frozenset()
    clock_share: float = 1.0


@dataclass(frozen=True)
class Subject:
    """A layer, its prediction (None without one), and the network it is of."""

    layer: MeasuredLayer
    row: LayerRow | None
    network: Network

    @property
    def product(self) -> Work | None:
        """Its work, where that is a matrix product that Tensor Cores could do."""
        work = self.layer.work
        return work if work is not None and work.gemm is not None and work.kind in _PRODUCTS else None

    def time(self, work: Work, launching: Launching) -> LayerTime:
        """The prediction of other work on the same GPU."""
        gpu = self.network.gpu
        if gpu is None:
            raise ValueError("no GPU")
        return layer_times((work,), gpu, constants_for(gpu), timing=launching)[0]

    @property
    def reads_network_input(self) -> bool:
        """Whether it reads a tensor that no layer writes."""
        return any(item.name not in self.network.made for item in self.layer.info.inputs)


def network_of(layers: Sequence[MeasuredLayer], gpu: GpuSpec | None, launching: Launching, clock: float) -> Network:
    """What all layers together say."""
    flop: dict[str, int] = {}
    for layer in layers:
        if layer.work is not None and layer.work.gemm is not None:
            flop[layer.work.dtype] = flop.get(layer.work.dtype, 0) + layer.work.flop
    most = max(flop, key=lambda dtype: flop[dtype], default="")
    made = frozenset(item.name for layer in layers for item in layer.info.outputs)
    return Network(gpu, launching, most if most in NARROW_BYTES else "", made, clock)
