"""Networks that are only numbers, for the tests of the search: what a region saves, and the error it adds."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trtopt.precision.search.space import Evaluation, Mix, RegionOption, SearchRegion, Space
from trtopt.support.precision import Precision

PLAIN_US = 1000.0
Errors = Mapping[tuple[str, Precision], float]


@dataclass
class Numbers:
    """An oracle made of numbers.

    Attributes:
        space: The regions.
        errors: The error of each region in each type.
        pairs: Error that two neighbouring 8-bit regions add together.
        steps: Drops are multiples of 1 / steps, as a metric over so many samples; 0 for a smooth drop.
        noise: Standard deviation of what the drop of each point is off, the same whenever it is asked.
        floor: The error of fp16 and of bf16, which is part of every point's.
        fusion: Times are so many times what the sum of the regions says is saved.
    """

    space: Space
    errors: Errors
    pairs: float = 0.0
    steps: int = 0
    noise: float = 0.0
    floor: Mapping[str, float] = field(default_factory=dict)
    fusion: float = 1.0
    asked: list[tuple[str, Mix]] = field(default_factory=list)
    times: int = 0

    def error(self, mix: Mix) -> float:
        types = mix.types
        found = math.fsum(self.errors[item] for item in mix.quantized)
        names = [region.name for region in self.space.regions]
        beside = sum(a in types and b in types for a, b in itertools.pairwise(names))
        return found + self.pairs * beside + self.floor.get(mix.narrow, 0.0)

    def evaluate(self, mix: Mix) -> Evaluation:
        self.asked.append(("evaluate", mix))
        error = self.error(mix)
        drop = error
        if self.noise and mix.quantized:
            seed = int.from_bytes(hashlib.sha256(repr(mix).encode()).digest()[:8], "little")
            drop += float(np.random.default_rng(seed).normal(0.0, self.noise))
        return Evaluation(round(drop * self.steps) / self.steps if self.steps and math.isfinite(drop) else drop, error)

    def time_us(self, mix: Mix) -> float:
        self.asked.append(("time_us", mix))
        return PLAIN_US - self.fusion * self.space.saved_us(mix)

    def rank(self, mix: Mix) -> dict[str, float]:
        self.asked.append(("rank", mix))
        types, names = mix.types, [region.name for region in self.space.regions]
        found = {name: self.errors[name, dtype] for name, dtype in types.items()}
        for pair in itertools.pairwise(names):
            if types.keys() >= set(pair):
                found.update({name: found[name] + self.pairs for name in pair})
        return found

    def count(self, question: str) -> int:
        return sum(asked == question for asked, _ in self.asked)


def one_type(errors: Sequence[float], saved: Sequence[float], **how: Any) -> Numbers:
    """Regions ``r0``, ``r1``, ... that may become INT8."""
    regions = tuple(SearchRegion(f"r{i}", (RegionOption("int8", us),), flop=100) for i, us in enumerate(saved))
    return Numbers(Space(regions), {(f"r{i}", "int8"): error for i, error in enumerate(errors)}, **how)


def two_types(int8: Sequence[tuple[float, float]], fp8: Sequence[tuple[float, float] | None], **how: Any) -> Numbers:
    """Regions that may become INT8, or FP8 where it is there: (error, microseconds saved) of each."""
    errors: dict[tuple[str, Precision], float] = {}
    regions = []
    for index, (first, second) in enumerate(zip(int8, fp8, strict=True)):
        name = f"r{index}"
        options = [RegionOption("int8", first[1])]
        errors[name, "int8"] = first[0]
        if second is not None:
            options.append(RegionOption("fp8", second[1]))
            errors[name, "fp8"] = second[0]
        regions.append(SearchRegion(name, tuple(options), flop=100))
    return Numbers(Space(tuple(regions)), errors, **how)
