"""The options of ``trtopt build`` and ``trtopt optimize``."""

from __future__ import annotations

from dataclasses import dataclass

from trtopt.config.base import (
    BACKENDS,
    BUILDER,
    CALIB_METHODS,
    FILES,
    PRECISION,
    REPORT_HELP,
    REWRITES,
    SAMPLES,
    TARGET,
    Config,
    ShapeMap,
    flag,
    option_field,
)
from trtopt.errors import UsageError
from trtopt.support.precision import PRECISIONS, Precision


@dataclass(frozen=True)
class BuildConfig(Config):
    """The options of ``trtopt build`` and ``trtopt optimize``.

    ``precision=None`` means the command's default: FP16 for ``build``, the types the model has for ``optimize``. Paths
    may be given as ``pathlib.Path`` and are kept as strings; one profile's shapes may be given as a mapping without a
    tuple around it.

    Raises:
        UsageError: A value has the wrong type, is out of range, or is not among the choices.
    """

    output: str | None = option_field(
        None,
        "file to write: the engine (default: MODEL.rtx.engine or MODEL.engine), or the ONNX file of optimize",
        FILES,
        aliases=("--saveEngine",),
        metavar="FILE",
        path="output",
    )
    precision: Precision | None = option_field(
        None,
        "precision written into the graph (default of build: fp16)",
        PRECISION,
        choices=(*PRECISIONS, Precision.AUTO),
    )
    calib: str | None = option_field(
        None,
        "calibration samples: .npz, .npy, a folder of either, script.py:function, or 'synthetic'",
        SAMPLES,
        metavar="SRC",
        path="source",
        words=("synthetic",),
    )
    calib_method: str = option_field(
        "auto", "how a tensor's INT8 range is chosen from its statistics", SAMPLES, choices=CALIB_METHODS
    )
    calib_cache: str | None = option_field(
        None,
        "file that keeps the calibration statistics; or a calibration cache of TensorRT, to take INT8 ranges from",
        SAMPLES,
        metavar="FILE",
        path="output",
    )
    eval: str | None = option_field(
        None,
        "samples to verify on (default: the calibration samples)",
        SAMPLES,
        metavar="SRC",
        path="source",
        words=("synthetic",),
    )
    metric: str | None = option_field(
        None,
        "FILE.py:FUNCTION called with run(feeds) -> outputs, or top1, agreement, sqnr; higher is better",
        SAMPLES,
        metavar="METRIC",
        path="source",
        words=("top1", "agreement", "sqnr"),
    )
    max_accuracy_drop: float | None = option_field(
        None, "fail (exit code 7) when accuracy drops by more than X", SAMPLES, metavar="X"
    )
    min_sqnr_db: float | None = option_field(
        None, "fail (exit code 7) when an output's SQNR is below X dB", SAMPLES, metavar="X"
    )
    allow_accuracy_loss: bool = option_field(False, "report failed gates as warnings, exit code 0", SAMPLES)
    compare_tensors: bool = option_field(
        False,
        "compare intermediate tensors too, to name the layer where the error enters",
        SAMPLES,
    )
    keep_all_int8: bool = option_field(
        False, "keep every 8-bit region, also where it makes the engine slower", PRECISION
    )
    sparse: bool = option_field(
        False, "prune the layers to 2:4 that gain by it, within the accuracy budget (0.01 unless given)", PRECISION
    )
    sparse_all: bool = option_field(
        False, "prune every layer that can be 2:4, whether a gain is predicted or not", PRECISION
    )
    recipes: str = option_field(
        "all", "graph rewrites to apply: all, none, or a comma-separated list", REWRITES, metavar="LIST"
    )
    strict_recipes: bool = option_field(
        False, "fail (exit code 5) when a recipe fails instead of rolling it back", REWRITES
    )
    backend: str = option_field("auto", "compiler", TARGET, choices=BACKENDS)
    min_shapes: tuple[ShapeMap, ...] = option_field(
        (),
        "smallest shapes, name:1x3x224x224,other:1x77; repeat for several profiles",
        TARGET,
        aliases=("--minShapes",),
        metavar="S",
        repeatable=True,
    )
    opt_shapes: tuple[ShapeMap, ...] = option_field(
        (),
        "shapes to optimize for; alone, they make the profile static",
        TARGET,
        aliases=("--optShapes",),
        metavar="S",
        repeatable=True,
    )
    max_shapes: tuple[ShapeMap, ...] = option_field(
        (), "largest shapes", TARGET, aliases=("--maxShapes",), metavar="S", repeatable=True
    )
    io: tuple[str, ...] = option_field(
        (), "type and layout of an input or output, x:fp16:hwc4", TARGET, metavar="NAME:DTYPE:LAYOUT", repeatable=True
    )
    builder: tuple[str, ...] = option_field(
        (), "builder option (the keys are in docs/build.md)", BUILDER, metavar="KEY=VALUE", repeatable=True
    )
    plugins: tuple[str, ...] = option_field(
        (),
        "shared library with TensorRT plugins",
        BUILDER,
        aliases=("--staticPlugins", "--dynamicPlugins"),
        metavar="LIB",
        repeatable=True,
        path="file",
    )
    timing_cache: str | None = option_field(
        None,
        "timing cache file of the builder (default: one in the cache, per GPU and version)",
        BUILDER,
        aliases=("--timingCacheFile",),
        metavar="FILE",
        path="output",
    )
    error_on_timing_cache_miss: bool = option_field(
        False,
        "fail where a kernel's time is not in the timing cache",
        BUILDER,
        aliases=("--errorOnTimingCacheMiss",),
    )
    cache_dir: str | None = option_field(
        None,
        "folder of the cache: engines, statistics, searches (default: ~/.cache/trtopt)",
        FILES,
        metavar="DIR",
        path="folder",
    )
    cache_gb: float | None = option_field(
        None, "what the cache may take, in GB (default: 10); what was used longest ago goes first", FILES, metavar="GB"
    )
    no_cache: bool = option_field(False, "build the engine anew, and keep neither it nor the times of kernels", FILES)
    save_onnx: str | None = option_field(None, "write the optimized ONNX model", FILES, metavar="FILE", path="output")
    sign: str | None = option_field(
        None, "private key (Ed25519, PEM) to sign the engine's manifest with", FILES, metavar="KEY.pem", path="file"
    )
    report: str | None = option_field(None, REPORT_HELP, FILES, metavar="FILE", path="output")
    export_layer_info: str | None = option_field(
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
        if self.cache_gb is not None and self.cache_gb < 0:
            raise UsageError(
                "The size of the cache is negative", where=flag("cache_gb"), remedy="give a number of GB from 0 on"
            )
