"""Every option once: its help, unit, choices, aliases and kind of value."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trtopt.batch_sizes import checked_batches, parse_batches
from trtopt.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8")
CALIB_METHODS = ("auto", "max", "percentile", "entropy", "mse")
BACKENDS = ("auto", "tensorrt", "tensorrt-rtx")

ShapeMap = dict[str, tuple[int, ...]]
"""Shapes by input name, for example ``{"input": (1, 3, 224, 224)}``."""

PathKind = Literal["", "output", "file", "folder", "source"]


@dataclass(frozen=True)
class Option:
    """What the command line, the configuration file and the cache need to know of a field.

    Attributes:
        help: One line for ``--help``.
        group: The heading of ``--help`` it stands under.
        choices: The allowed values, if few.
        aliases: Other spellings on the command line (trtexec's).
        metavar: The placeholder in ``--help``.
        repeatable: The option may be given several times.
        path: What the value is as a path: a file that is written (``output``), a file or folder that is read or kept,
            a ``source`` (a path, or ``file.py:function``), or empty when it is no path.
        words: The values of a path option that are words, not paths.
    """

    help: str
    group: str
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    metavar: str = ""
    repeatable: bool = False
    path: PathKind = ""
    words: tuple[str, ...] = ()


PRECISION = "precision"
SAMPLES = "calibration and accuracy"
TARGET = "target and shapes"
REWRITES = "graph rewrites"
BUILDER = "builder"
FILES = "files"
GROUPS = (PRECISION, SAMPLES, TARGET, REWRITES, BUILDER, FILES)

_REPORT_HELP = "write the report as JSON"


def _option(default: Any, help: str, group: str, **kwargs: Any) -> Any:
    return field(default=default, metadata={"option": Option(help, group, **kwargs)})


@dataclass(frozen=True)
class Config:
    """What the commands that take a model share.

    Attributes:
        gpus: GPUs of the user's own and other figures for known ones, by name: the tables ``[gpu.NAME]`` of the
            configuration file (:func:`trtopt.hardware.user.gpu_table`).
    """

    gpu: str | None = _option(
        None,
        "target GPU (default: the one present, else L4); builds also take 'portable', for Ampere and later",
        TARGET,
        metavar="NAME",
    )
    gpus: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = field_kinds(type(self))
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name in kinds and (value is not None or item.default is not None):
                value = checked(item.name, item.metadata["option"], kinds[item.name], value)
                object.__setattr__(self, item.name, value)
        tables = isinstance(self.gpus, Mapping) and all(isinstance(table, Mapping) for table in self.gpus.values())
        _expect("gpus", self.gpus, "a mapping of GPU fields by GPU name", tables)

    def with_options(self, changes: Mapping[str, Any]) -> Self:
        """A copy with other values of the named options.

        Raises:
            UsageError: There is no such option, or its value is wrong.
        """
        known = [item.name for item in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                remedy = did_you_mean(name, known) or "see docs/build.md and docs/analyze.md"
                raise UsageError(f"There is no option {name!r}", where=name, remedy=remedy)
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class BuildConfig(Config):
    """The options of ``trtopt build`` and ``trtopt optimize``.

    ``precision=None`` means the command's default: FP16 for ``build``, the types the model has for ``optimize``. Paths
    may be given as ``pathlib.Path`` and are kept as strings; one profile's shapes may be given as a mapping without a
    tuple around it.

    Raises:
        UsageError: A value has the wrong type, is out of range, or is not among the choices.
    """

    output: str | None = _option(
        None,
        "file to write: the engine (default: MODEL.rtx.engine or MODEL.engine), or the ONNX file of optimize",
        FILES,
        aliases=("--saveEngine",),
        metavar="FILE",
        path="output",
    )
    precision: str | None = _option(
        None, "precision written into the graph (default of build: fp16)", PRECISION, choices=PRECISIONS
    )
    calib: str | None = _option(
        None,
        "calibration samples: .npz, .npy, a folder of either, script.py:function, or 'synthetic'",
        SAMPLES,
        metavar="SRC",
        path="source",
        words=("synthetic",),
    )
    calib_method: str = _option(
        "auto", "how a tensor's INT8 range is chosen from its statistics", SAMPLES, choices=CALIB_METHODS
    )
    calib_cache: str | None = _option(
        None,
        "file that keeps the calibration statistics",
        SAMPLES,
        metavar="FILE",
        path="output",
    )
    eval: str | None = _option(
        None,
        "samples to verify on (default: the calibration samples)",
        SAMPLES,
        metavar="SRC",
        path="source",
        words=("synthetic",),
    )
    metric: str | None = _option(
        None,
        "FILE.py:FUNCTION called with run(feeds) -> outputs, or top1, agreement, sqnr; higher is better",
        SAMPLES,
        metavar="METRIC",
        path="source",
        words=("top1", "agreement", "sqnr"),
    )
    max_accuracy_drop: float | None = _option(
        None, "fail (exit code 7) when accuracy drops by more than X", SAMPLES, metavar="X"
    )
    min_sqnr_db: float | None = _option(
        None, "fail (exit code 7) when an output's SQNR is below X dB", SAMPLES, metavar="X"
    )
    allow_accuracy_loss: bool = _option(False, "report failed gates as warnings, exit code 0", SAMPLES)
    compare_tensors: bool = _option(
        False,
        "compare intermediate tensors too, to name the layer where the error enters",
        SAMPLES,
    )
    keep_all_int8: bool = _option(
        False, "keep every INT8 region, also where it does not pay (none is taken back yet)", PRECISION
    )
    recipes: str = _option(
        "all", "graph rewrites to apply: all, none, or a comma-separated list", REWRITES, metavar="LIST"
    )
    strict_recipes: bool = _option(False, "fail (exit code 5) when a recipe fails instead of rolling it back", REWRITES)
    backend: str = _option("auto", "compiler", TARGET, choices=BACKENDS)
    min_shapes: tuple[ShapeMap, ...] = _option(
        (),
        "smallest shapes, name:1x3x224x224,other:1x77; repeat for several profiles",
        TARGET,
        aliases=("--minShapes",),
        metavar="S",
        repeatable=True,
    )
    opt_shapes: tuple[ShapeMap, ...] = _option(
        (),
        "shapes to optimize for; alone, they make the profile static",
        TARGET,
        aliases=("--optShapes",),
        metavar="S",
        repeatable=True,
    )
    max_shapes: tuple[ShapeMap, ...] = _option(
        (), "largest shapes", TARGET, aliases=("--maxShapes",), metavar="S", repeatable=True
    )
    io: tuple[str, ...] = _option(
        (), "type and layout of an input or output, x:fp16:hwc4", TARGET, metavar="NAME:DTYPE:LAYOUT", repeatable=True
    )
    builder: tuple[str, ...] = _option(
        (), "builder option (the keys are in docs/build.md)", BUILDER, metavar="KEY=VALUE", repeatable=True
    )
    plugins: tuple[str, ...] = _option(
        (),
        "shared library with TensorRT plugins",
        BUILDER,
        aliases=("--staticPlugins", "--dynamicPlugins"),
        metavar="LIB",
        repeatable=True,
        path="file",
    )
    timing_cache: str | None = _option(
        None,
        "timing cache file of the builder",
        BUILDER,
        aliases=("--timingCacheFile",),
        metavar="FILE",
        path="output",
    )
    cache_dir: str | None = _option(
        None,
        "folder for cached calibration statistics (default: ~/.cache/trtopt)",
        SAMPLES,
        metavar="DIR",
        path="folder",
    )
    save_onnx: str | None = _option(None, "write the optimized ONNX model", FILES, metavar="FILE", path="output")
    report: str | None = _option(None, _REPORT_HELP, FILES, metavar="FILE", path="output")
    export_layer_info: str | None = _option(
        None,
        "write the engine's fused layers as JSON",
        FILES,
        aliases=("--exportLayerInfo",),
        metavar="FILE",
        path="output",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_accuracy_drop is not None and self.max_accuracy_drop < 0:
            raise UsageError(
                "The largest accuracy drop is negative",
                where=flag("max_accuracy_drop"),
                remedy="give a number from 0 on; the drop is baseline - optimized",
            )


@dataclass(frozen=True)
class AnalyzeConfig(Config):
    """The options of ``trtopt analyze``.

    ``precision=None`` means FP16, or the types the model has where it already carries 16-bit types or Q/DQ. Batch sizes
    may be given as text, as on the command line, or as integers.

    Raises:
        UsageError: As of :class:`BuildConfig`.
    """

    precision: str | None = _option(
        None, "precision to predict (default: fp16, or the model's own 16-bit and INT8)", PRECISION, choices=PRECISIONS
    )
    shapes: tuple[ShapeMap, ...] = _option(
        (),
        "input shapes, name:1x3x224x224,other:1x77 (default: 8 on a dynamic first axis)",
        TARGET,
        aliases=("--opt-shapes", "--optShapes"),
        metavar="S",
        repeatable=True,
    )
    compile: bool = _option(False, "compile with TensorRT for RTX and predict the layers of the engine too", TARGET)
    batch_sweep: tuple[int, ...] = _option(
        (),
        "batch sizes to predict: 1,2,4 or 1..256 (a range: its ends, and four sizes per doubling)",
        TARGET,
        metavar="LIST",
    )
    latency_budget_ms: float | None = _option(
        None,
        "name the batch of the sweep with the highest throughput within MS milliseconds",
        TARGET,
        aliases=("--latency-budget",),
        metavar="MS",
    )
    report: str | None = _option(None, _REPORT_HELP, FILES, metavar="FILE", path="output")
    html: str | None = _option(None, "write the report as one HTML file", FILES, metavar="FILE", path="output")

    def __post_init__(self) -> None:
        super().__post_init__()
        where = flag("latency_budget_ms")
        if self.latency_budget_ms is not None and self.latency_budget_ms <= 0:
            raise UsageError("The latency budget is not positive", where=where, remedy="give milliseconds above 0")
        if self.latency_budget_ms is not None and not self.batch_sweep:
            what = "A latency budget needs batch sizes to choose from"
            raise UsageError(what, where=where, remedy="add --batch-sweep 1..256")


FieldKind = Literal["flag", "number", "text", "texts", "shapes", "batches"]


def options(config: type) -> dict[str, Option]:
    """The options of a configuration class by field name."""
    return {item.name: item.metadata["option"] for item in dataclasses.fields(config) if "option" in item.metadata}


def field_kinds(config: type) -> dict[str, FieldKind]:
    """What kind of value each field of a configuration class holds, read from its annotation."""
    kinds: dict[Any, FieldKind] = {
        bool: "flag",
        float | None: "number",
        str: "text",
        str | None: "text",
        tuple[str, ...]: "texts",
        tuple[ShapeMap, ...]: "shapes",
        tuple[int, ...]: "batches",
    }
    hints = typing.get_type_hints(config)
    return {name: kinds[hints[name]] for name in options(config)}


def flag(name: str) -> str:
    """The option's spelling on the command line: ``calib_method`` is ``--calib-method``."""
    return "--" + name.replace("_", "-")


def nearest(word: str, words: Iterable[str]) -> str:
    """The one of ``words`` most like ``word``, or nothing when none is near."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)), "")


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """``did you mean X?`` for the nearest of ``words``, or nothing when none is near."""
    near = nearest(word, words)
    return f"did you mean {near}?" if near else ""


def checked(name: str, option: Option, kind: FieldKind, value: Any) -> Any:
    """``value`` in the field's own type.

    Raises:
        UsageError: It has another type, is out of range, or is not among the choices.
    """
    if kind == "flag":
        return _expect(name, value, "true or false", isinstance(value, bool))
    if kind == "number":
        _expect(name, value, "a number", isinstance(value, (int, float)) and not isinstance(value, bool))
        return float(_expect(name, value, "a finite number", math.isfinite(value)))
    if kind == "shapes":
        profiles = (value,) if isinstance(value, Mapping) else value
        _expect(name, value, "shapes by input name", isinstance(profiles, (list, tuple)))
        return tuple(_shape_map(name, profile) for profile in profiles)
    if kind == "batches":
        sizes = parse_batches(value, flag(name)) if isinstance(value, str) else value
        good = isinstance(sizes, (list, tuple)) and all(type(size) is int for size in sizes)
        _expect(name, value, "batch sizes, such as (1, 2, 4)", good)
        return checked_batches(sizes, flag(name))
    if kind == "texts":
        items = (value,) if isinstance(value, (str, os.PathLike)) else value
        _expect(name, value, "a list of texts", isinstance(items, (list, tuple)))
        return tuple(_text(name, option, item) for item in items)
    return _text(name, option, value)


def _text(name: str, option: Option, value: Any) -> str:
    text = str(os.fspath(value)) if isinstance(value, os.PathLike) and option.path else value
    _expect(name, value, "a text that is not empty", isinstance(text, str) and text != "")
    if option.choices and text not in option.choices:
        raise UsageError(
            f"{text!r} is not a value of {name}",
            where=name,
            remedy=did_you_mean(str(text).lower(), option.choices) or f"choose one of {', '.join(option.choices)}",
        )
    return str(text)


def _shape_map(name: str, value: Any) -> ShapeMap:
    wanted = "shapes by input name, such as {'input': (1, 3, 224, 224)}"
    _expect(name, value, wanted, isinstance(value, Mapping))
    for key, dims in value.items():
        _expect(name, value, wanted, isinstance(key, str) and key != "" and isinstance(dims, (list, tuple)))
        _expect(name, value, wanted, all(type(dim) is int and dim >= 0 for dim in dims))
    return {key: tuple(dims) for key, dims in value.items()}


def _expect(name: str, value: Any, wanted: str, good: bool) -> Any:
    if not good:
        raise UsageError(
            f"{name} must be {wanted}, not {value!r}", where=name, remedy="see docs/build.md and docs/analyze.md"
        )
    return value
