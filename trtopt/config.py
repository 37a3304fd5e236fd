"""Every option once: its help, unit, choices, aliases, and whether it changes the engine (part of the cache key)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8")
CALIB_METHODS = ("auto", "max", "percentile", "entropy", "mse")
BACKENDS = ("auto", "tensorrt", "tensorrt-rtx")

ShapeMap = dict[str, tuple[int, ...]]
"""Shapes by input name, for example ``{"input": (1, 3, 224, 224)}``."""


@dataclass(frozen=True)
class Option:
    """What the command line, the configuration file and the cache need to know of a field.

    Attributes:
        help: One line for ``--help``.
        choices: The allowed values, if few.
        aliases: Other spellings on the command line (trtexec's).
        metavar: The placeholder in ``--help``.
        changes_engine: Whether another value may give another engine.
        repeatable: The option may be given several times.
    """

    help: str
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    metavar: str = ""
    changes_engine: bool = True
    repeatable: bool = False


def _option(default: Any, help: str, **kwargs: Any) -> Any:
    return field(default=default, metadata={"option": Option(help, **kwargs)})


@dataclass(frozen=True)
class BuildConfig:
    """The options of ``trtopt build`` and ``trtopt optimize``.

    Paths are strings; shapes are parsed. ``precision=None`` means the command's default: FP16 for ``build``, the types
    the model has for ``optimize``.
    """

    output: str | None = _option(
        None,
        "file to write: the engine (default: MODEL.rtx.engine or MODEL.engine), or the ONNX file of optimize",
        aliases=("--saveEngine",),
        metavar="FILE",
        changes_engine=False,
    )
    precision: str | None = _option(
        None, "precision written into the graph (default of build: fp16)", choices=PRECISIONS
    )
    calib: str | None = _option(
        None, "calibration samples: .npz, .npy, a folder of either, script.py:function, or 'synthetic'", metavar="SRC"
    )
    calib_method: str = _option(
        "auto", "how a tensor's INT8 range is chosen from its statistics", choices=CALIB_METHODS
    )
    calib_cache: str | None = _option(
        None, "file that keeps the calibration statistics", metavar="FILE", changes_engine=False
    )
    eval: str | None = _option(
        None, "samples to verify on (default: the calibration samples)", metavar="SRC", changes_engine=False
    )
    metric: str | None = _option(
        None,
        "FILE.py:FUNCTION called with run(feeds) -> outputs, or top1, agreement, sqnr; higher is better",
        metavar="METRIC",
        changes_engine=False,
    )
    max_accuracy_drop: float | None = _option(
        None, "fail (exit code 7) when accuracy drops by more than X", metavar="X", changes_engine=False
    )
    min_sqnr_db: float | None = _option(
        None, "fail (exit code 7) when an output's SQNR is below X dB", metavar="X", changes_engine=False
    )
    allow_accuracy_loss: bool = _option(False, "report failed gates as warnings, exit code 0", changes_engine=False)
    compare_tensors: bool = _option(
        False, "compare intermediate tensors too, to name the layer where the error enters", changes_engine=False
    )
    keep_all_int8: bool = _option(False, "keep every INT8 region, also where it does not pay")
    recipes: str = _option("all", "graph rewrites to apply: all, none, or a comma-separated list", metavar="LIST")
    strict_recipes: bool = _option(
        False, "fail (exit code 5) when a recipe fails instead of rolling it back", changes_engine=False
    )
    gpu: str | None = _option(
        None, "target GPU, or 'portable' for Ampere and later (default: the one present, else L4)", metavar="NAME"
    )
    backend: str = _option("auto", "compiler", choices=BACKENDS)
    min_shapes: tuple[ShapeMap, ...] = _option(
        (),
        "smallest shapes, name:1x3x224x224,other:1x77; repeat for several profiles",
        aliases=("--minShapes",),
        metavar="S",
        repeatable=True,
    )
    opt_shapes: tuple[ShapeMap, ...] = _option(
        (),
        "shapes to optimize for; alone, they make the profile static",
        aliases=("--optShapes", "--shapes"),
        metavar="S",
        repeatable=True,
    )
    max_shapes: tuple[ShapeMap, ...] = _option(
        (), "largest shapes", aliases=("--maxShapes",), metavar="S", repeatable=True
    )
    builder: tuple[str, ...] = _option(
        (), "builder option KEY=VALUE (see docs/build.md)", metavar="KEY=VALUE", repeatable=True
    )
    plugins: tuple[str, ...] = _option(
        (),
        "shared library with TensorRT plugins",
        aliases=("--staticPlugins", "--dynamicPlugins"),
        metavar="LIB",
        repeatable=True,
    )
    timing_cache: str | None = _option(
        None, "timing cache file of the builder", aliases=("--timingCacheFile",), metavar="FILE", changes_engine=False
    )
    cache_dir: str | None = _option(
        None, "folder for cached calibration statistics (default: ~/.cache/trtopt)", metavar="DIR", changes_engine=False
    )
    save_onnx: str | None = _option(None, "write the optimized ONNX model", metavar="FILE", changes_engine=False)
    report: str | None = _option(None, "write the report as JSON", metavar="FILE", changes_engine=False)


def options(config: type) -> dict[str, Option]:
    """The options of a configuration class by field name."""
    return {item.name: item.metadata["option"] for item in dataclasses.fields(config)}
