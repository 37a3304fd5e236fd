"""What a compiler is asked to build, and for which shapes: optimization profiles, from options and observed samples.

And the one shape of each input that a prediction is made at.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trtopt.config.base import ShapeMap
from trtopt.engine.backend import Backend
from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.hardware.spec import GpuSpec
from trtopt.support.words import nearest

_ENDS = ("min", "opt", "max")


@dataclass(frozen=True)
class ShapeProfile:
    """The shapes an engine takes.

    Attributes:
        shapes: Per input, its smallest, optimal and largest shape.
        values: Per input that the compiler reads as a shape (a shape tensor), its smallest, optimal and largest values.
    """

    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    values: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    @property
    def is_static(self) -> bool:
        """Whether every input has one shape only, and every shape tensor one value."""
        return all(low == high for ends in (self.shapes, self.values) for low, _, high in ends.values())

    def at_optimum(self) -> ShapeProfile:
        """The static profile at the optimal shapes."""
        shapes, values = (
            {name: (optimum, optimum, optimum) for name, (_, optimum, _) in ends.items()}
            for ends in (self.shapes, self.values)
        )
        return ShapeProfile(shapes, values)

    def takes(self, shapes: ShapeMap) -> bool:
        """Whether inputs of these shapes are within the profile; inputs it does not name are not looked at."""
        return all(
            len(shape) == len(low) and all(a <= dim <= b for a, dim, b in zip(low, shape, high, strict=True))
            for name, shape in shapes.items()
            if name in self.shapes
            for low, _, high in (self.shapes[name],)
        )

    def to_json_dict(self) -> dict[str, dict[str, list[int]]]:
        """``{input: {"min": [...], "opt": [...], "max": [...]}}``; of a shape tensor also ``min_values`` and so on."""
        found: dict[str, dict[str, list[int]]] = {}
        for ending, ranges in (("", self.shapes), ("_values", self.values)):
            for name, range_ in ranges.items():
                found.setdefault(name, {}).update(
                    zip((f"{end}{ending}" for end in _ENDS), map(list, range_), strict=True)
                )
        return found


_LARGE_BYTES = 1 << 30


@dataclass(frozen=True)
class BuildRequest:
    """What to build.

    Attributes:
        gpu: The target; None for every GPU from Ampere on (TensorRT for RTX only).
        nodes: The names of all nodes of the model, those of subgraphs included; unique.
        profiles: One optimization profile or more; none for a model whose inputs are all static.
        tf32: Whether FP32 layers may use TF32 Tensor Cores.
        timing_cache: A file read before and written after the build; TensorRT for RTX ignores it.
        error_on_timing_cache_miss: Whether the build fails where a kernel's time is not in the timing cache; TensorRT
            for RTX, which times nothing, ignores it.
        name: What errors call the model, if not by its file.
        formats: The compiler's memory format (``HWC``, ...) of inputs and outputs that do not have the usual one.
        weights: The files with external data, all of them: a cached engine is found by their content.
        key: Equal for models of which the compiler lists the same layers; empty where nobody says.
    """

    onnx: Path
    backend: Backend
    gpu: GpuSpec | None
    nodes: tuple[str, ...]
    profiles: tuple[ShapeProfile, ...] = ()
    tf32: bool = False
    builder: tuple[str, ...] = ()
    plugins: tuple[Path, ...] = ()
    timing_cache: Path | None = None
    error_on_timing_cache_miss: bool = False
    name: str = ""
    formats: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[Path, ...] = ()
    key: str = ""

    @property
    def is_large(self) -> bool:
        """Whether the weights hold more than a gigabyte, so that two builds at once need not fit memory."""
        return sum(path.stat().st_size for path in self.weights) > _LARGE_BYTES


BATCH_RANGE = (1, 8, 16)
"""Smallest, optimal and largest first axis when nothing else is known (and what samples widen it to)."""

_ENTRY = re.compile(
    r"\s*(?:'(?P<single>[^']*)'|\"(?P<double>[^\"]*)\"|(?P<plain>[^,]+))\s*:"
    r"\s*(?:\[(?P<list>[\d,\s]*)\]|(?P<dims>\d+(?:[xX]\d+)*)?|(?P<scalar>scalar))\s*(?:,|$)"
)
_LARGEST_DIM = 2**31 - 1
_SHAPE_TYPES = (np.int32, np.int64)
"""What TensorRT takes as shape tensors (documentation of ``ITensor.is_shape_tensor``)."""

Range = tuple[int, int, int]
"""Smallest, optimal, largest."""


@dataclass(frozen=True)
class ProfilePlan:
    """What to build for.

    Attributes:
        notes: What was decided that the user did not say.
    """

    profiles: tuple[ShapeProfile, ...]
    notes: tuple[str, ...]


def parse_shapes(text: str) -> ShapeMap:
    """Read ``name:1x3x224x224,other:1x77`` (trtexec) or ``name:[1,3,224,224]`` (Polygraphy).

    Names that hold ``:`` or ``,`` are quoted. ``name:``, ``name:[]`` and ``name:scalar`` are rank 0.

    Raises:
        UsageError: It has another form, or names an input twice.
    """
    shapes: ShapeMap = {}
    at = 0
    while at < len(text) or not shapes:
        match = _ENTRY.match(text, at)
        if match is None:
            raise UsageError(
                f"Not a shape: {text[at:]!r}",
                where=text,
                remedy="write name:1x3x224x224,other:1x77 (quote names with ':')",
            )
        name = next(part for part in match.group("single", "double", "plain") if part is not None)
        numbers = re.findall(r"\d+", match["list"] or match["dims"] or "")
        dims = tuple(int(number[:20]) for number in numbers)
        if name in shapes or any(dim > _LARGEST_DIM for dim in dims):
            problem = "is given twice" if name in shapes else "has a dimension above 2147483647"
            raise UsageError(f"The input {name!r} {problem}", where=text, remedy="give each input one shape")
        shapes[name] = dims
        at = match.end()
    return shapes


def is_values(item: InputSpec, numbers: Sequence[int]) -> bool:
    """Whether numbers that are given as the shape of an input are its values, as trtexec has it for shape tensors.

    They are where it is a static integer vector or scalar, and there is one number for each element. Of a single
    element a 1 may be either, and is taken as its value; the compiler knows which inputs it reads as shapes, and takes
    values for these only.

    Example:
        >>> is_values(InputSpec("size", np.dtype(np.int64), (2,)), (480, 640))
        True
    """
    is_vector = item.dtype in _SHAPE_TYPES and item.is_static and len(item.shape) <= 1
    return (
        is_vector
        and len(numbers) == math.prod(dim for dim in item.shape if isinstance(dim, int)) > 0
        and (len(numbers) == 1 or tuple(numbers) != item.shape)
    )


def split_values(inputs: Sequence[InputSpec], given: ShapeMap) -> tuple[ShapeMap, ShapeMap]:
    """The shapes, and the values of shape tensors, that one shape option gives."""
    values = {item.name for item in inputs if item.name in given and is_values(item, given[item.name])}
    shapes = {name: numbers for name, numbers in given.items() if name not in values}
    return shapes, {name: numbers for name, numbers in given.items() if name in values}


def plan_profiles(
    inputs: Sequence[InputSpec],
    *,
    min_shapes: Sequence[ShapeMap],
    opt_shapes: Sequence[ShapeMap],
    max_shapes: Sequence[ShapeMap],
    observed: Sequence[ShapeMap],
    growing: Collection[str] = (),
    bounds: Mapping[tuple[str, int], tuple[int, int]] | None = None,
) -> ProfilePlan:
    """Decide the profiles; caches that are ``growing`` may be empty.

    Options give the range of the axes they name, and of the values of shape tensors (:func:`is_values`): the i-th
    minimum, optimum and maximum belong together, and what is left out of a pair or triple is the optimum (with minimum
    and maximum only, the optimum is the maximum). An axis no option names takes the range of another axis with the same
    symbol; else its ``bounds``, by input and axis, widened to the samples; else its range over the observed samples
    (smallest, most common, largest), a first axis widened to at least 1 to 16 with optimum 8; else, on a first axis,
    1 to 16 with optimum 8.

    Raises:
        UsageError: An option names an unknown input, has the wrong rank or another value on a static axis; a range is
            empty; an axis has no range; an observed sample is in no profile.
    """
    options = _option_ranges(inputs, min_shapes, opt_shapes, max_shapes, growing)
    notes: list[str] = []
    profiles = []
    valued = {
        name for maps in (min_shapes, opt_shapes, max_shapes) for each in maps for name in split_values(inputs, each)[1]
    }
    for given in options or [{}]:
        sized = {name: ranges for name, ranges in given.items() if name not in valued}
        axes = _AxisRanges(inputs, sized, observed, bounds or {})
        shapes = {item.name: axes.shapes_of(item) for item in inputs}
        values = {name: _ends(ranges) for name, ranges in given.items() if name in valued}
        profiles.append(ShapeProfile(shapes, values))
        notes += axes.notes
    if options and not min_shapes and not max_shapes and all(profile.is_static for profile in profiles):
        notes.append("only --opt-shapes was given: the engine takes exactly these shapes")
    for shapes_seen in observed:
        if options and not any(profile.takes(_batched(inputs, shapes_seen, profile)) for profile in profiles):
            raise _sample_outside(shapes_seen, profiles)
    if all(item.is_static for item in inputs) and not valued:
        return ProfilePlan((), ())
    return ProfilePlan(tuple(profiles), tuple(dict.fromkeys(notes)))


def _batched(inputs: Sequence[InputSpec], sample: ShapeMap, profile: ShapeProfile) -> ShapeMap:
    """A sample's shapes with dynamic first axes as in the profile: samples are read one by one, engines run batches."""
    shapes = dict(sample)
    for item in inputs:
        if item.name in shapes and item.shape and not isinstance(item.shape[0], int):
            shapes[item.name] = (profile.shapes[item.name][0][0], *sample[item.name][1:])
    return shapes


def _option_ranges(
    inputs: Sequence[InputSpec],
    min_shapes: Sequence[ShapeMap],
    opt_shapes: Sequence[ShapeMap],
    max_shapes: Sequence[ShapeMap],
    growing: Collection[str],
) -> list[dict[str, list[Range]]]:
    """Per profile, the ranges of every axis of the inputs the options name."""
    lists = {"--min-shapes": min_shapes, "--opt-shapes": opt_shapes, "--max-shapes": max_shapes}
    counts = {len(maps) for maps in lists.values() if maps}
    if not counts:
        return []
    if len(counts) > 1:
        raise UsageError(
            "The shape options are given different numbers of times: "
            + ", ".join(f"{name} {len(maps)}" for name, maps in lists.items()),
            where=", ".join(lists),
            remedy="give each of them once per profile",
        )
    if not opt_shapes and not (min_shapes and max_shapes):
        missing = "--max-shapes" if min_shapes else "--min-shapes"
        raise UsageError("The profile has no optimum", where=missing, remedy=f"add --opt-shapes or {missing}")
    by_name = {item.name: item for item in inputs}
    for option, maps in lists.items():
        for shapes in maps:
            for name, shape in split_values(inputs, shapes)[0].items():
                check_shape(by_name, name, shape, option, may_be_empty=name in growing)
    return [
        _ranges_of_profile(*(maps[index] if maps else {} for maps in lists.values())) for index in range(counts.pop())
    ]


def _ranges_of_profile(low: ShapeMap, optimum: ShapeMap, high: ShapeMap) -> dict[str, list[Range]]:
    ranges: dict[str, list[Range]] = {}
    for name in dict.fromkeys((*low, *optimum, *high)):
        if name not in optimum and not (name in low and name in high):
            what, given, missing = ("minimum", "min", "max") if name in low else ("maximum", "max", "min")
            raise UsageError(
                f"Only the {what} of the input {name!r} is given",
                where=f"--{given}-shapes",
                remedy=f"add --{missing}-shapes for it",
            )
        best = optimum[name] if name in optimum else high[name]
        smallest, largest = low.get(name, best), high.get(name, best)
        for axis, (a, b, c) in enumerate(zip(smallest, best, largest, strict=True)):
            if not a <= b <= c:
                raise UsageError(
                    f"Axis {axis} of the input {name!r} has minimum {a}, optimum {b}, maximum {c}",
                    where="--min-shapes, --opt-shapes, --max-shapes",
                    remedy="give minimum <= optimum <= maximum",
                )
        ranges[name] = list(zip(smallest, best, largest, strict=True))
    return ranges


def check_shape(
    by_name: Mapping[str, InputSpec], name: str, shape: tuple[int, ...], option: str, *, may_be_empty: bool = False
) -> None:
    """Raise UsageError when a shape given with ``option`` does not fit the input ``name``."""
    if name not in by_name:
        near = nearest(name, by_name)
        hint = f"did you mean {near!r}? " if near else ""
        raise UsageError(
            f"The model has no input {name!r}", where=option, remedy=f"{hint}Its inputs: {', '.join(by_name)}"
        )
    wanted = by_name[name].shape
    fits = len(shape) == len(wanted) and all(
        not isinstance(dim, int) or dim == given for dim, given in zip(wanted, shape, strict=True)
    )
    if not fits:
        raise UsageError(
            f"The input {name!r} has shape {_text(wanted)}, not {_text(shape)}",
            where=f"{option} {name}:{_text(shape)}",
            remedy="static dimensions stay as they are; give one number per axis, "
            f"such as {option} {name}:{_text(_usual(wanted))}",
        )
    if (
        option != "--min-shapes"
        and not (may_be_empty and shape[0])
        and any(given == 0 and not isinstance(dim, int) for dim, given in zip(wanted, shape, strict=True))
    ):
        raise UsageError(
            f"The input {name!r} of shape {_text(shape)} has no elements",
            where=option,
            remedy="give each dynamic axis at least 1",
        )


def _ends(ranges: Sequence[Range]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The smallest, optimal and largest sizes of all axes."""
    low, optimum, high = (tuple(each[index] for each in ranges) for index in range(3))
    return low, optimum, high


class _AxisRanges:
    """The range of every axis of one profile."""

    def __init__(
        self,
        inputs: Sequence[InputSpec],
        given: Mapping[str, list[Range]],
        observed: Sequence[ShapeMap],
        bounds: Mapping[tuple[str, int], tuple[int, int]],
    ) -> None:
        self.given = given
        self._bounds: dict[str, tuple[int, int]] = {}
        self.notes: list[str] = []
        self._by_symbol: dict[str, Range] = {}
        self._first: set[str] = set()
        self._seen: dict[str, Counter[int]] = {}
        for item in inputs:
            for axis, dim in enumerate(item.shape):
                if isinstance(dim, int):
                    continue
                key = axis_key(item, axis)
                self._seen.setdefault(key, Counter()).update(
                    shapes[item.name][axis] for shapes in observed if item.name in shapes
                )
                if axis == 0:
                    self._first.add(key)
                if (item.name, axis) in bounds:
                    self._bounds.setdefault(key, bounds[item.name, axis])
                if item.name in given:
                    self._by_symbol.setdefault(key, given[item.name][axis])

    def shapes_of(self, item: InputSpec) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        ranges = self.given.get(item.name) or [
            (dim, dim, dim) if isinstance(dim, int) else self._range(item, axis) for axis, dim in enumerate(item.shape)
        ]
        return _ends(ranges)

    def _range(self, item: InputSpec, axis: int) -> Range:
        key = axis_key(item, axis)
        if key in self._by_symbol:
            return self._by_symbol[key]
        seen = self._seen[key]
        if not seen and key not in self._first and key not in self._bounds:
            raise UsageError(
                f"Axis {axis} ({item.shape[axis]}) of the input {item.name!r} is dynamic and nothing says its range",
                where=f"input {item.name}: {_text(item.shape)}",
                remedy="give --min-shapes, --opt-shapes and --max-shapes (or only --opt-shapes for a fixed shape), "
                "or --calib samples to take the range from",
            )
        found = self._derived(seen, key)
        self._by_symbol[key] = found
        source = "the samples" if seen else "the default for a first axis"
        if seen and key in self._first:
            source = "the samples and the default for a first axis"
        if key in self._bounds:
            source = "--dynamic"
        self.notes.append(
            f"{item.name} axis {axis} ({item.shape[axis]}): {found[0]} to {found[2]}, optimum {found[1]}, from {source}"
        )
        return found

    def _derived(self, seen: Counter[int], key: str) -> Range:
        if key in self._bounds:
            low, high = self._bounds[key]
            if key in self._first:
                return low, _best_batch(low, high), high
            optimum = max(seen or {high: 1}, key=lambda dim: (seen[dim], dim))
            return min(low, *seen, low), optimum, max(high, *seen, high)
        if key in self._first:
            low, optimum, high = BATCH_RANGE
            return min(low, *seen, low), optimum, max(high, *seen, high)
        return min(seen), max(seen, key=lambda dim: (seen[dim], dim)), max(seen)


def fixed_sizes(inputs: Sequence[InputSpec], profiles: Sequence[ShapeProfile]) -> dict[str, dict[int, int]]:
    """By input and axis, the size of dynamic axes that have the same one in every profile; inputs without are left
    out."""
    found: dict[str, dict[int, int]] = {}
    for item in inputs if profiles else ():
        for axis, dim in enumerate(item.shape):
            sizes = {shape[axis] for profile in profiles for shape in profile.shapes[item.name]}
            if not isinstance(dim, int) and len(sizes) == 1:
                found.setdefault(item.name, {})[axis] = sizes.pop()
    return found


def _best_batch(low: int, high: int) -> int:
    """The optimum of a first axis, within its bounds."""
    return min(max(low, BATCH_RANGE[1]), high)


def axis_key(item: InputSpec, axis: int) -> str:
    """What identifies an axis: its symbol, or itself where it has none."""
    symbol = item.shape[axis]
    return f"symbol {symbol}" if symbol != "?" else f"axis {axis} of {item.name}"


def _sample_outside(shapes: ShapeMap, profiles: Iterable[ShapeProfile]) -> UsageError:
    ranges = "; ".join(
        ", ".join(f"{name}: {_text(low)} to {_text(high)}" for name, (low, _, high) in profile.shapes.items())
        for profile in profiles
    )
    return UsageError(
        "A sample is outside of every profile: "
        + ", ".join(f"{name}: {_text(shape)}" for name, shape in shapes.items()),
        where=f"profiles: {ranges}",
        remedy="widen --min-shapes and --max-shapes, or leave samples of that shape out (a decoder: fewer --steps)",
    )


def _text(shape: Iterable[int | str]) -> str:
    return "x".join(str(dim) for dim in shape) or "scalar"


def _usual(shape: Sequence[int | str]) -> list[int]:
    """The shape with numbers for an example: a usual length for a dynamic axis, the default batch for the first."""
    return [dim if isinstance(dim, int) else _LENGTH if axis else BATCH_RANGE[1] for axis, dim in enumerate(shape)]


_OPTION = "--shapes"
_LENGTH = 128
"""Of a sequence, in an example: also a size that images of most networks may have."""


@dataclass(frozen=True)
class InputShapes:
    """A shape for every input, and what was decided that the user did not say."""

    shapes: ShapeMap
    notes: tuple[str, ...]


def input_shapes(
    inputs: Sequence[InputSpec],
    given: Sequence[ShapeMap],
    bounds: Mapping[tuple[str, int], tuple[int, int]] | None = None,
) -> InputShapes:
    """Decide every input's shape.

    A dynamic axis takes the size the user gave it, or gave another axis of the same symbol; else a first axis, and one
    with ``bounds`` by input and axis, takes the optimum that a build takes without samples, and so does every axis of
    its symbol.

    Raises:
        UsageError: A shape is given for an unknown input, twice, or does not fit; or an axis has no size.
    """
    asked = _merged(given)
    for name, shape in asked.items():
        check_shape({item.name: item for item in inputs}, name, shape, _OPTION)
    sizes: dict[str, int] = {}
    for item in inputs:
        for axis, size in enumerate(asked.get(item.name, ())):
            if not isinstance(item.shape[axis], int) and sizes.setdefault(axis_key(item, axis), size) != size:
                raise UsageError(
                    f"The axis {item.shape[axis]} has two sizes: {sizes[axis_key(item, axis)]} and {size}",
                    where=_OPTION,
                    remedy="give it the same size in every input",
                )
    notes = []
    for (name, axis), (low, high) in (bounds or {}).items():
        for item in inputs:
            if item.name != name or isinstance(item.shape[axis], int) or axis_key(item, axis) in sizes:
                continue
            best = _best_batch(low, high) if axis == 0 else high
            sizes[axis_key(item, axis)] = best
            notes.append(
                f"{name} axis {axis} ({item.shape[axis]}) is taken as {best}, from --dynamic; {_OPTION} sets another"
            )
    for item in inputs:
        if item.shape and not isinstance(item.shape[0], int) and axis_key(item, 0) not in sizes:
            sizes[axis_key(item, 0)] = BATCH_RANGE[1]
            notes.append(
                f"{item.name} axis 0 ({item.shape[0]}) is taken as {BATCH_RANGE[1]}, the default of a dynamic first "
                f"axis; {_OPTION} sets another"
            )
    return InputShapes({item.name: _sized(item, sizes) for item in inputs}, tuple(notes))


def _merged(given: Sequence[ShapeMap]) -> ShapeMap:
    merged: ShapeMap = {}
    for shapes in given:
        for name, shape in shapes.items():
            if merged.setdefault(name, shape) != shape:
                raise UsageError(
                    f"The input {name!r} has two shapes", where=_OPTION, remedy="give each input one shape"
                )
    return merged


def _sized(item: InputSpec, sizes: dict[str, int]) -> tuple[int, ...]:
    dims = [
        dim if isinstance(dim, int) else sizes.get(axis_key(item, axis), dim) for axis, dim in enumerate(item.shape)
    ]
    missing = {axis: dim for axis, dim in enumerate(dims) if not isinstance(dim, int)}
    if missing:
        axes = " and ".join(f"{axis} ({dim})" for axis, dim in missing.items())
        raise UsageError(
            f"No size is known for the dynamic axis {axes} of the input {item.name!r}",
            where=f"input {item.name}: {'x'.join(str(dim) for dim in item.shape)}",
            remedy=f"give {_OPTION} {item.name}:{'x'.join(str(dim) for dim in dims)} "
            f"with a number for {' and '.join(dict.fromkeys(str(dim) for dim in missing.values()))}, "
            f"such as {item.name}:{_text(_usual(dims))}",
        )
    return tuple(dim for dim in dims if isinstance(dim, int))
