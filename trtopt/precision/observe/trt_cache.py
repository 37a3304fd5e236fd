"""Calibration caches of TensorRT (up to version 10) read as INT8 ranges.

The file is text: ``TRT-8601-EntropyCalibration2`` (version and calibrator), then a line ``NAME: 3c010a14`` per tensor.
The eight hexadecimal digits are the bits of an FP32 number, the tensor's INT8 scale: its largest magnitude over 127.
Names are those of the ONNX model and may hold colons and spaces; TensorRT's own tensors are called
``(Unnamed Layer* 12) [Shuffle]_output`` and stand for nothing in the model.

A build takes them over from there, and from the Q/DQ that the model came with.
"""

from __future__ import annotations

import math
import re
import struct
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.errors import UsageError
from trtopt.graph import edit
from trtopt.precision.observe.calibrate import check_own
from trtopt.precision.observe.ranges import LEVELS
from trtopt.precision.observe.stream import Samples
from trtopt.precision.qdq.existing import existing_ranges
from trtopt.report.schema.steps import StepRecord
from trtopt.report.text.format import some
from trtopt.support.clock import Clock
from trtopt.support.files import open_file, read_file
from trtopt.support.precision import Precision

SMALLEST_SHARE = 0.5
"""Share of a cache's named tensors that the model must have. Of the model's own cache few are missing (constants that
the exporter shares); another model has the conventional names of inputs and outputs, and some numbered ones."""

_BOM = b"\xef\xbb\xbf"
"""A mark that some editors put before UTF-8."""
_START = b"TRT-"
_HEADER = re.compile(r"TRT-[0-9A-Za-z.]+-[0-9A-Za-z]+")
_DIGITS = re.compile(r"[0-9a-fA-F]{8}")
_INTERNAL = ("(Unnamed Layer*", "ONNXTRT_")
_MAX_BYTES = 64 << 20
"""Some 500,000 tensors."""

_COPIES = frozenset("Reshape Transpose Squeeze Unsqueeze Flatten Identity Dropout DepthToSpace SpaceToDepth".split())
"""Operators whose output has the values of their input, all of them: both have one range."""

_SHOWN = 5
_REMEDY = "copy the cache again, or leave --calib-cache out and give the samples with --calib"


@dataclass(frozen=True)
class TrtCache:
    """A calibration cache as read.

    Attributes:
        path: The file.
        header: Its first line.
        scales: FP32 scale (largest magnitude / 127) by tensor name; TensorRT's own tensors left out.
        internal: How many of those there were.
    """

    path: Path
    header: str
    scales: Mapping[str, float]
    internal: int


@dataclass(frozen=True)
class ImportedRanges:
    """The ranges of a cache, for one model.

    Attributes:
        amax: Largest magnitude by tensor name, of those whose range is wanted. The INT8 scale is ``amax / 127``.
        missing: Tensors whose range is wanted and not in the cache.
        details: What was used and what was not, in words, for the report.
    """

    amax: Mapping[str, float]
    missing: tuple[str, ...]
    details: tuple[str, ...]

    def unknown(self, path: Path) -> dict[str, str]:
        """Why the missing tensors have no range when there are no samples either, by tensor name."""
        reason = f"has no range in the calibration cache {path.name}, and there are no samples (--calib)"
        return {name: f"{name} {reason}" for name in self.missing}


def is_trt_cache(path: Path) -> bool:
    """Whether a file starts like a calibration cache of TensorRT. False for a file that cannot be read."""
    try:
        with open_file(path, "The calibration cache") as file:
            return file.read(len(_BOM) + len(_START)).removeprefix(_BOM).startswith(_START)
    except UsageError:
        return False


def read_trt_cache(path: Path) -> TrtCache:
    """Read a calibration cache of TensorRT; the file is not changed.

    Raises:
        UsageError: The file cannot be read, is too large, or a line of it is damaged; the message names the line.
    """
    lines = _lines(path)
    header = next(lines)
    if not _HEADER.fullmatch(header):
        raise _damaged(path, 1, f"the first line is {header[:60]!r}, not TRT-VERSION-CALIBRATOR")
    scales: dict[str, float] = {}
    first: dict[str, int] = {}
    internal = 0
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        name, separator, digits = line.rpartition(": ")
        if not separator or not name or not _DIGITS.fullmatch(digits):
            raise _damaged(path, number, f"{line[:80]!r} is not NAME: and 8 hexadecimal digits")
        if name.startswith(_INTERNAL):
            internal += 1
            continue
        if name in first:
            raise _damaged(path, number, f"the tensor {name!r} has a scale on line {first[name]} already")
        first[name] = number
        scales[name] = _scale(path, number, name, digits)
    if not scales:
        raise UsageError("The calibration cache names no tensor of a model", where=str(path), remedy=_REMEDY)
    return TrtCache(path, header, scales, internal)


def tensor_names(model: ir.Model) -> frozenset[str]:
    """Every tensor of a model by name, constants and those of subgraphs included."""
    found: set[str] = set()
    for graph in edit.all_graphs(model.graph):
        found.update(str(value.name) for value in graph.inputs)
        found.update(graph.initializers)
        found.update(str(value.name) for node in graph for value in node.outputs)
    return frozenset(found)


def check_belongs(cache: TrtCache, names: Collection[str]) -> None:
    """Raise UsageError where fewer than :data:`SMALLEST_SHARE` of the cache's tensors are among the model's
    ``names``."""
    strange = [name for name in cache.scales if name not in names]
    if len(strange) > (1 - SMALLEST_SHARE) * len(cache.scales):
        raise UsageError(
            f"It is a calibration cache of another model: {len(strange)} of its {len(cache.scales)} tensors are not in "
            f"this one ({some(strange, _SHOWN)})",
            where=str(cache.path),
            remedy="give the cache that was made from this ONNX file, or leave --calib-cache out and give samples "
            "with --calib",
        )


def imported_ranges(cache: TrtCache, names: Collection[str], base: ir.Model, wanted: Collection[str]) -> ImportedRanges:
    """The ranges that a cache has for the tensors INT8 needs.

    A tensor that only copies another (Reshape, Transpose, ...) takes the other's range where it has none itself. The
    cache names the tensors ``names`` of the model as loaded; ``wanted`` are tensors of ``base``, after all rewrites.
    """
    values = {str(value.name): value for value in _values(base)}
    amax, used = {}, set()
    for name in wanted:
        source = _source(values.get(name), cache.scales)
        if source is not None:
            used.add(source)
            amax[name] = cache.scales[source] * LEVELS
    missing = tuple(sorted(set(wanted) - amax.keys()))
    gone = [name for name in cache.scales if name in names and name not in values]
    idle = [name for name in cache.scales if name in values and name not in used]
    strange = [name for name in cache.scales if name not in names and name not in values]
    return ImportedRanges(amax, missing, tuple(_details(cache, strange, gone, idle, len(amax), missing)))


def _details(
    cache: TrtCache, strange: list[str], gone: list[str], idle: list[str], used: int, missing: tuple[str, ...]
) -> Iterator[str]:
    yield f"{cache.path.name} ({cache.header}): the INT8 ranges of {used} tensors imported"
    if missing:
        yield f"{len(missing)} tensors that INT8 reads are not in it: {some(missing, _SHOWN)}"
    if gone:
        yield f"{len(gone)} of its tensors are not used: the rewrites removed them ({some(gone, _SHOWN)})"
    if idle:
        yield f"{len(idle)} of its tensors are not used: nothing quantizes them ({some(idle, _SHOWN)})"
    if strange:
        yield f"{len(strange)} of its tensors are not in the model ({some(strange, _SHOWN)})"
    if cache.internal:
        yield f"{cache.internal} of its tensors are TensorRT's own"


def _source(value: ir.Value | None, scales: Mapping[str, float]) -> str | None:
    """The tensor of the cache that holds the values of ``value``: itself, or what it is a copy of."""
    while value is not None:
        if value.name in scales:
            return str(value.name)
        node = value.producer()
        if node is None or node.domain != "" or node.op_type not in _COPIES:
            return None
        value = node.inputs[0]
    return None


def _values(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.inputs
    for node in model.graph:
        yield from (value for value in node.outputs if value.name)


def _lines(path: Path) -> Iterator[str]:
    """The lines of the file, without their ends; the first one always comes."""
    content = read_file(path, "The calibration cache", _MAX_BYTES)
    for number, line in enumerate(content.removeprefix(_BOM).split(b"\n"), 1):
        try:
            yield line.decode().rstrip("\r")
        except UnicodeDecodeError:
            raise _damaged(path, number, "it is not text") from None


def _scale(path: Path, number: int, name: str, digits: str) -> float:
    """The FP32 number of eight digits; a scale is above zero, and ``scale * 127`` is a finite FP32 number."""
    scale: float = struct.unpack(">f", bytes.fromhex(digits))[0]
    if not (math.isfinite(scale) and scale > 0 and scale * LEVELS < 2.0**128):
        raise UsageError(
            f"The calibration cache is damaged: the scale of {name!r} is {scale:g}, not a number above zero",
            where=f"{path}, line {number}",
            remedy="delete the line (the tensor is then calibrated from the samples of --calib), or copy it again",
        )
    return scale


def _damaged(path: Path, number: int, what: str) -> UsageError:
    return UsageError(f"The calibration cache is damaged: {what}", where=f"{path}, line {number}", remedy=_REMEDY)


@dataclass(frozen=True)
class ImportedCache:
    """A calibration cache of TensorRT, and the tensors of the model as loaded, which it names."""

    cache: TrtCache
    names: frozenset[str]


@dataclass(frozen=True)
class Imports:
    """INT8 ranges that were not observed.

    Attributes:
        amax: Largest magnitude by tensor name.
        unknown: Why a tensor has no range, by tensor name: it is not in the cache, and there are no samples.
        steps: What of a cache was used, for the report; empty without one.
    """

    amax: Mapping[str, float] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[StepRecord, ...] = ()


def imported_cache(
    config: BuildConfig, precision: Precision | None, model: ir.Model, clock: Clock
) -> ImportedCache | None:
    """The calibration cache of TensorRT that ``--calib-cache`` names; None when it names none, or a file of our own.

    ``model`` is as loaded; ``clock`` is told when the cache has no use for ``precision``.

    Raises:
        UsageError: The cache is damaged, or that of another model; the file is no cache at all.
    """
    if config.calib_cache is None:
        return None
    if not is_trt_cache(Path(config.calib_cache)):
        check_own(Path(config.calib_cache))
        return None
    cache, names = read_trt_cache(Path(config.calib_cache)), tensor_names(model)
    check_belongs(cache, names)
    if precision not in (Precision.INT8, Precision.AUTO):
        kind = "keeps its types" if precision is None else f"is {precision}"
        clock.warn("calibrate", f"{config.calib_cache} holds INT8 ranges, and the engine {kind}: they are not used")
    return ImportedCache(cache, names)


def statistics_file(config: BuildConfig) -> Path | None:
    """Where the user wants the statistics kept; None for the default. TensorRT's file is read, never written."""
    if config.calib_cache is None or is_trt_cache(Path(config.calib_cache)):
        return None
    return Path(config.calib_cache)


def imports(
    base: ir.Model, given: ImportedCache | None, wanted: Collection[str], samples: Samples, own: Mapping[str, float]
) -> Imports:
    """The INT8 ranges of the tensors ``wanted`` that the model's own Q/DQ and a cache give.

    ``base`` is quantized; ``own`` are the ranges of Q/DQ that was taken out of it.
    """
    own = {**own, **existing_ranges(base)}
    if given is None:
        return Imports(own)
    began = time.perf_counter()
    found = imported_ranges(given.cache, given.names, base, wanted)
    unknown = found.unknown(given.cache.path) if samples.source == "synthetic" else {}
    seconds = time.perf_counter() - began
    return Imports(
        {**found.amax, **own},
        {name: why for name, why in unknown.items() if name not in own},
        (StepRecord("calibration-cache", "PRECISION", len(found.amax), seconds, details=found.details),),
    )
