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
from dataclasses import dataclass
from typing import Any

from trtopt.hardware.spec import GpuSpec

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


@functools.cache
def fit_for(name: str, compute_capability: str) -> Fit:
    """The constants for a GPU: its own, else those of its architecture, else the generic ones."""
    by_name = {fit.name: fit for fit in all_fits()}
    if name in by_name:
        return by_name[name]
    architecture = _ARCHITECTURE.get(compute_capability, compute_capability)
    same = [fit for fit in all_fits() if fit.compute_capability == architecture]
    return same[0] if same else by_name[GENERIC]


_ARCHITECTURE = {"8.7": "8.6", "10.0": "9.0", "12.1": "12.0"}
"""Compute capabilities that were never measured, and the measured one of the same family."""


def constants_for(gpu: GpuSpec) -> Constants:
    """The constants for a GPU (see :func:`fit_for`)."""
    return fit_for(gpu.name, gpu.compute_capability).constants


def sustained_share(gpu: GpuSpec) -> float:
    """Share of its clock that a GPU sustains within its power limit (see :class:`LowPower`).

    Returns:
        For a card of at most :data:`SLOT_POWER_W`, what was measured on one of its architecture, else the mean of what
        was measured; 1 for any other GPU.
    """
    if gpu.tdp_w > SLOT_POWER_W or gpu.compute_capability in _MODULES:
        return 1.0
    shares = {entry.compute_capability: entry.sustained_share for entry in low_power()}
    return shares.get(gpu.compute_capability, statistics.fmean(shares.values()))
