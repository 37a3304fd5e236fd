"""What ships, held against plain: records of ``trtopt.build/1``."""

from __future__ import annotations

from dataclasses import dataclass

from trtopt.report.schema.steps import Cost


@dataclass(frozen=True)
class PlainCost(Cost):
    """What the plain form of the network costs, compiled with the same profiles.

    Attributes:
        form: ``fp16``, ``bf16``, ``fp32``, ``tf32``, ``as-is``; ``int8`` or ``fp8`` where Q/DQ on every supported
            operator is faster, and as accurate as what ships, or slower than that.
    """

    form: str = "fp16"


@dataclass(frozen=True)
class AccuracyCost:
    """What accuracy costs beyond plain.

    Attributes:
        predicted_us: Microseconds above plain.
        nodes: The nodes in a wider type.
        reason: Why plain does not ship.
        remedy: What would change it.
    """

    predicted_us: float
    nodes: tuple[str, ...]
    reason: str
    remedy: str


@dataclass(frozen=True)
class DynamicCost:
    """What a range of shapes costs at its optimum.

    Attributes:
        fixed: The same network with the optimum written into it.
        kernels: Kernels that the range adds.
        syncs: Stream syncs that it adds.
        share: Time that it adds, as a share of ``fixed``.
        ranges: What varies, in words.
        remedy: The option that fixes it.
    """

    fixed: Cost
    kernels: int
    syncs: int
    share: float
    ranges: str
    remedy: str
