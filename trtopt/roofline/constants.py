"""The fitted constants of the performance model, by GPU and by architecture.

The values are in ``constants.toml``, written by ``benchmarks/predictor/fit.py`` together with the data they were fitted
to; nothing here was adjusted by hand.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtopt.hardware.spec import GpuCalibration, GpuSpec, find_gpu

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GENERIC = "generic"
"""The set fitted to all measured GPUs together: for architectures that were never measured."""


@dataclass(frozen=True)
class Constants:
    """How far a GPU stays behind its datasheet. Shares are of the datasheet's figure, times in microseconds.

    Attributes:
        launch_us: Part of a launch that does not depend on the clock.
        launch_cycles: Part of a launch that does.
        profiled_us: What timing each layer by itself adds, averaged over many runs.
        single_run_us: What it adds on top when only one run was timed.
        peak_share: Share of the peak rate that an endless tile would reach.
        half_area: Elements of a tile that reaches half of it.
        fill_bytes: Bytes of k whose time every block spends filling and draining its pipeline.
        step_cycles: Least cycles of one step of a block's main loop, beyond its arithmetic.
        sm_bytes_per_clock: What an SM loads per cycle.
        wave_smoothing: 0: a last, partly filled wave costs a whole one; 1: it costs its share (stream-K, persistent
            kernels).
        split_us: What sharing a tile's sum among blocks costs beyond its traffic.
        split_traffic: Times that the partial sums are moved.
        dram_share: Share of the DRAM bandwidth that a large stream reaches.
        ramp_us: What a stream loses while it starts.
        l2_bytes_per_clock: L2 bytes per cycle and SM.
        l2_share: Share of the L2 cache that stays resident between kernels.
        norm: How sharply the slower of arithmetic and memory dominates (p of the p-norm).
        power: Slow-down of long kernels, per e-fold of their ideal time over ``power_us``.
        power_us: Ideal time at which it sets in.
        misaligned_share: Rate of a product whose rows are no multiples of 16 bytes, of that of one whose rows are.
        conv_share: Rate of a convolution as an implicit product, of that of a product.
        tap_bytes: Bytes of channels that a convolution on Tensor Cores computes per tap at least.
        pointwise_share: Bandwidth of pooling, element-wise and other kernels bound by memory, of that of a product.
        layout_share: Likewise of kernels that change the layout.
        narrow_share: Likewise, of those, when a row is shorter than 16 bytes: images of three channels.
        cuda_core_share: Share of the FP32 peak that arithmetic outside of products reaches.
        winograd_gain: Gain of Winograd's algorithm over a direct 3x3 or 5x5 convolution in FP32.
        replay_us: What timing a CUDA graph of one call adds: the gap between two replays.
        attention_share: Share of the peak that the products of an attention reach with heads of 64, by ``mma.sync``.
        head_loss: How that share falls with the size of a head: the exponent of its inverse.
        softmax_share: Share of the exponentials' time that no product hides.
        block_cycles: Cycles in which a block of queries starts, loads its Q and writes its result.
        lone_block: How many times as slow a block of 64 queries is alone on its SM as beside others.
        decode_cycles: The same as ``block_cycles`` for a block that streams K and V for one query of several heads.
        lone_query_share: The same for one head, over that.
        decode_bytes: Bytes per cycle that such a block streams.
        fp8_us: What is left over of a launch where the time of a kernel is a difference: that of FP8 products with the
            kernels that quantize their input, less that of these.
        fp8_share: Rate of the main loop of a product of FP8 or FP4 operands, of ``peak_share``.
        block_share: Rate of the main loop of FP8 with scales per block of k, of that with a scale per tensor.
        dequant_cycles: Cycles in which an SM turns an element of a narrow weight into 16 bits, in each tile.
        stream_share: Share of the DRAM bandwidth that a large element-wise kernel reaches.
        event_us: What events around a launch outside of a graph add, for each tensor that the operator makes.
        reread_share: Share of the L2 cache that rows in flight may fill before half of what is read again misses it.
        row_cycles: Cycles per row in which a block of a kernel of PyTorch loads nothing: its threads' sums and
            exponentials.
        row_load_cycles: Cycles of a load that the next one waits for.
    """

    launch_us: float
    launch_cycles: float
    profiled_us: float
    single_run_us: float
    peak_share: float
    half_area: float
    fill_bytes: float
    step_cycles: float
    sm_bytes_per_clock: float
    wave_smoothing: float
    split_us: float
    split_traffic: float
    dram_share: float
    ramp_us: float
    l2_bytes_per_clock: float
    l2_share: float
    norm: float
    power: float
    power_us: float
    misaligned_share: float
    conv_share: float
    tap_bytes: float
    pointwise_share: float
    layout_share: float
    narrow_share: float
    cuda_core_share: float
    winograd_gain: float
    replay_us: float
    attention_share: float
    head_loss: float
    softmax_share: float
    block_cycles: float
    lone_block: float
    decode_cycles: float
    lone_query_share: float
    decode_bytes: float
    fp8_us: float
    fp8_share: float
    block_share: float
    dequant_cycles: float
    stream_share: float
    event_us: float
    reread_share: float
    row_cycles: float
    row_load_cycles: float


@dataclass(frozen=True)
class Fit:
    """A set of constants and where it comes from.

    Attributes:
        name: The GPU, or :data:`GENERIC`.
        compute_capability: Of that GPU; empty for the generic set.
        data: What it was fitted to.
        constants: The values.
    """

    name: str
    compute_capability: str
    data: str
    constants: Constants


@dataclass(frozen=True)
class LowPower:
    """What its power limit leaves a card of its clock, in a network that runs without a pause.

    One number per card, for all work: a second one, for how long or how busy a network is, lowers the error on a T4 by
    less than two points (latencies from 2 ms to 1.5 s). Power is averaged over the kernels of a network, so that its
    short ones do not run faster.

    Attributes:
        name: The GPU.
        compute_capability: Of that GPU.
        sustained_share: Share of the datasheet's clock. What counts in cycles slows down with it: arithmetic and the L2
            cache; the DRAM does not, nor does the launch.
        data: What it was fitted to.
    """

    name: str
    compute_capability: str
    sustained_share: float
    data: str


SLOT_POWER_W = 75
"""What a PCI Express slot supplies: cards that need no more have no other supply (PCI Express Card Electromechanical
Specification). They reach the clock of their datasheet only with little to do; T4: Jia et al. 2019,
arXiv:1903.07486, on its throttling."""

_MODULES = ("7.2", "8.7", "11.0")
"""Compute capabilities of Jetson modules. Their power limit is that of a power mode, which sets the clocks too; none
was measured."""


@functools.cache
def all_fits() -> tuple[Fit, ...]:
    """Every set of ``constants.toml``."""
    return tuple(_fit(entry) for entry in _tables()["fit"])


@functools.cache
def low_power() -> tuple[LowPower, ...]:
    """The measured low-power cards of ``constants.toml``."""
    return tuple(LowPower(**entry) for entry in _tables()["low_power"])


@functools.cache
def _tables() -> dict[str, Any]:
    text = importlib.resources.files("trtopt.roofline").joinpath("constants.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _fit(entry: dict[str, Any]) -> Fit:
    names = [field.name for field in dataclasses.fields(Constants)]
    values = Constants(**{name: float(entry[name]) for name in names})
    return Fit(entry["name"], entry["compute_capability"], entry["data"], values)


CARRIED_OVER = {
    "7.2": ("7.0", "the same SM (Volta)"),
    "7.5": (
        GENERIC,
        "between two that were measured: Tensor Cores and GDDR6 as 8.6 has them, no asynchronous copies, as 7.0",
    ),
    "8.7": ("8.6", "an L2 cache of a few MiB and a narrow memory, of the same generation"),
    "8.9": (
        "12.0",
        "GDDR behind an L2 cache of tens of MiB, an SM with as much shared memory and L1, and Tensor Cores of the same "
        "rates, fed by warps (mma.sync)",
    ),
    "10.0": (
        "9.0",
        "HBM behind an L2 cache in two parts, and Tensor Cores that work beside the warps (TMA, wgmma, tcgen05)",
    ),
    "10.3": ("9.0", "as 10.0"),
    "11.0": (
        "9.0",
        "Tensor Cores of 10.0, whose rate per SM is eight times that of 12.0: an SM of another architecture could not "
        "load their operands",
    ),
    "12.1": ("12.0", "the same SM (PTX family sm_120f)"),
}
"""Compute capabilities without a set of their own: the one whose set holds for them, and why (NVIDIA's architecture
white papers, the tables of compute capabilities of the CUDA programming guide, PTX ISA). What carries over is what the
constants describe: how Tensor Cores are fed, how the L2 cache and the memory answer. SMs, clock, bandwidth and size of
the L2 cache are the GPU's own.

Turing: BERT on a T4, FP16 and INT8, its clock fitted to the other network, is predicted to 6.2 and 7.2 % with the mean
of all, 4.9 and 6.1 % with the set of 8.6, 6.3 and 5.7 % with that of 7.0: a point apart, while without a fitted clock
the mean is the nearest of the three, by 4 points and more. The others were chosen by their reasons. What speaks for
them: the sets of 8.6 and 12.0, of warps and GDDR, predict each other's measurements better than that of 9.0 does
(layers of an RTX 3060 Laptop: 15.7 % with the set of 12.0, 17.6 % with that of 9.0; products of an RTX PRO 6000: 14.9 %
with that of 8.6, 16.7 % with that of 9.0). Nothing measured on Ada, Jetson or data-centre Blackwell chose one. Any
other capability gets the mean of all."""


@functools.cache
def fit_for(name: str, compute_capability: str) -> Fit:
    """The constants for a GPU: its own, else those of its architecture, else of the one that carries over
    (:data:`CARRIED_OVER`), else the generic ones."""
    by_name = {fit.name: fit for fit in all_fits()}
    return by_name[name if name in by_name else set_for(compute_capability, all_fits())]


def set_for(compute_capability: str, fits: Sequence[Fit]) -> str:
    """The name of the set, of ``fits``, that holds for GPUs of a compute capability."""
    measured = {fit.compute_capability: fit.name for fit in reversed(fits)}
    source, _ = CARRIED_OVER.get(compute_capability, (GENERIC, ""))
    return measured.get(compute_capability) or measured.get(source, GENERIC)


def constants_for(gpu: GpuSpec) -> Constants:
    """The constants for a GPU (see :func:`fit_for`), as its calibration changes them."""
    constants = fit_for(gpu.name, gpu.compute_capability).constants
    return constants if gpu.calibration is None else calibrated(constants, gpu.calibration)


def calibrated(constants: Constants, found: GpuCalibration) -> Constants:
    """The constants with the factors of a calibration, but for that of the clock (:func:`sustained_share`).

    A share of the bandwidth may then be above 1, for small tensors that a cache holds: what no kernel can beat
    (:attr:`trtopt.roofline.batch.Times.bound`) is not scaled.
    """
    scaled = {name: getattr(constants, name) * found.launch for name in _LAUNCH}
    scaled |= {name: getattr(constants, name) * found.bandwidth for name in _BANDWIDTH}
    scaled["l2_share"] = min(constants.l2_share * found.bandwidth, 1.0)
    scaled["attention_share"] = min(constants.attention_share * found.attention, 1.0)
    return dataclasses.replace(constants, **scaled)


_LAUNCH = ("launch_us", "launch_cycles", "profiled_us", "single_run_us")
"""What a profile of layers cannot tell from one another."""

_BANDWIDTH = ("dram_share", "stream_share")


def sustained_share(gpu: GpuSpec) -> float:
    """Share of its clock that a GPU sustains within its power limit (see :class:`LowPower`).

    Power grows with SMs x clock; what an architecture sustains of that per watt was measured on one card. Others are
    scaled from it, so that a card with few SMs for its power (A2, RTX A2000) keeps its clock; that was measured on
    none of them.

    Returns:
        For a card of at most :data:`SLOT_POWER_W`, what that leaves of its clock, at most 1: by the card measured of
        its architecture, else by the mean of those measured; 1 for any other GPU. Times the factor of its calibration,
        which may be above 1.
    """
    return _uncalibrated_share(gpu) * (1.0 if gpu.calibration is None else gpu.calibration.clock)


def _uncalibrated_share(gpu: GpuSpec) -> float:
    if gpu.tdp_w > SLOT_POWER_W or gpu.compute_capability in _MODULES:
        return 1.0
    per_watt = _sustained_per_watt()
    sustained = per_watt.get(gpu.compute_capability, statistics.fmean(per_watt.values())) * gpu.tdp_w
    return min(1.0, sustained / (gpu.sm * gpu.clock_tensor_mhz))


@functools.cache
def _sustained_per_watt() -> dict[str, float]:
    """SMs x MHz that the measured card of an architecture sustains per watt, by its compute capability."""
    cards = [(entry.sustained_share, find_gpu(entry.name)) for entry in low_power()]
    return {gpu.compute_capability: share * gpu.sm * gpu.clock_tensor_mhz / gpu.tdp_w for share, gpu in cards}
