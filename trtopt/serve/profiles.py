"""Optimization profiles: which one takes a call's shapes, and takes them best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trtopt.errors import IntegrityError, UsageError
from trtopt.report.schema.manifest import EngineTensor, ShapeRange

Profiles = Mapping[str, Sequence[ShapeRange]]
"""By the name of a dynamic input, its range in each optimization profile."""

Shapes = Mapping[str, tuple[int, ...]]
"""By the name of an input, its shape in one call."""


def choose(profiles: Profiles, shapes: Shapes) -> int:
    """The profile whose best shapes are nearest to those of a call, among those that take them.

    Near is measured by the logarithms of the ratios of all sizes; of profiles equally near, it is the first.

    Returns:
        Its number; 0 without profiles.

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


def check(inputs: Sequence[EngineTensor], outputs: Sequence[EngineTensor]) -> None:
    """Check that tensors of a manifest can be those of an engine: another program may have written it.

    Raises:
        IntegrityError: Two have one name, a size is negative or above 2147483647, a profile has not the rank of its
            input, or is upside down, or not all inputs that have profiles have the same number.
    """
    count = max((len(tensor.ranges) for tensor in inputs), default=0)
    for tensors in (inputs, outputs):
        names = [tensor.name for tensor in tensors]
        for tensor in tensors:
            shape = tensor.shape or ()
            sound = all(0 <= dim < 2**31 for dim in shape if isinstance(dim, int)) and names.count(tensor.name) == 1
            if not sound or len(tensor.ranges) not in (0, count) or not all(_fits(one, shape) for one in tensor.ranges):
                raise IntegrityError(
                    "The shapes, profiles or names in the manifest are not those of an engine",
                    where=f"tensor {tensor.name}",
                    remedy="build the engine again",
                )


def _fits(one: ShapeRange, shape: Sequence[int | str]) -> bool:
    sizes = (one.min, one.opt, one.max)
    return all(len(size) == len(shape) for size in sizes) and all(
        0 <= low <= best <= high < 2**31 for low, best, high in zip(*sizes, strict=True)
    )


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
