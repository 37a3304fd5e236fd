"""Which optimization profile of an engine takes a call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trtopt.errors import UsageError
from trtopt.report.schema.manifest import ShapeRange

Profiles = Mapping[str, Sequence[ShapeRange]]
"""By the name of a dynamic input, its range in each optimization profile."""

Shapes = Mapping[str, tuple[int, ...]]
"""By the name of an input, its shape in one call."""


def choose(profiles: Profiles, shapes: Shapes) -> int:
    """The number of the profile whose best shapes are nearest to those of a call, among those that take them.

    Near is measured by the logarithms of the ratios of all sizes; of profiles equally near, it is the first. It is 0
    without profiles.

    Raises:
        UsageError: None takes them.
    """
    count = max((len(ranges) for ranges in profiles.values()), default=0)
    if not count:
        return 0
    fitting = [
        index
        for index in range(count)
        if all(_inside(shapes[name], ranges[index]) for name, ranges in profiles.items())
    ]
    if not fitting:
        raise _outside(profiles, shapes)
    return min(fitting, key=lambda index: sum(_distance(shapes[n], r[index].opt) for n, r in profiles.items()))


def _inside(shape: tuple[int, ...], one: ShapeRange) -> bool:
    return len(shape) == len(one.min) and all(
        low <= size <= high for low, size, high in zip(one.min, shape, one.max, strict=True)
    )


def _distance(shape: tuple[int, ...], best: tuple[int, ...]) -> float:
    return sum(abs(math.log(max(size, 1) / max(other, 1))) for size, other in zip(shape, best, strict=True))


def _outside(profiles: Profiles, shapes: Shapes) -> UsageError:
    alone = (name for name, ranges in profiles.items() if not any(_inside(shapes[name], one) for one in ranges))
    name = next(alone, next(iter(profiles)))
    ranges = "; ".join(f"{list(one.min)} to {list(one.max)}" for one in profiles[name])
    return UsageError(
        f"The shape {list(shapes[name])} of the input {name!r} is outside of what the engine was built for: {ranges}",
        where=", ".join(f"{name}{list(shape)}" for name, shape in shapes.items()),
        remedy="build with wider --min-shapes and --max-shapes, or give smaller batches",
    )
