"""The options of every command that takes a model, each once."""

from __future__ import annotations

from dataclasses import dataclass

from trtopt.config.base import (
    BACKENDS,
    BUILDER,
    CALIB_HELP,
    CALIB_METHODS,
    FILES,
    HTML_HELP,
    MARKDOWN_HELP,
    METRICS,
    PRECISION,
    PREPROCESS_HELP,
    REPORT_HELP,
    REWRITES,
    SAMPLES,
    TARGET,
    TIMING,
    Config,
    ShapeMap,
    file_field,
    flag,
    option_field,
    samples_field,
    shapes_field,
    switch_field,
)
from trtopt.config.budget import Tolerances
from trtopt.errors import UsageError
from trtopt.support.precision import EIGHT_BIT_TYPES, PRECISIONS, Precision

WEIGHT_FORMATS = ("int4", "int8", "nvfp4", "mxfp8")


@dataclass(frozen=True)
class BuildConfig(Config):
    """The options of ``trtopt build`` and ``trtopt optimize``.

    ``precision=None`` means the command's default: FP16 for ``build``, the types the model has for ``optimize``. Paths
    may be given as ``pathlib.Path`` and are kept as strings; one profile's shapes may be given as a mapping without a
    tuple around it.

    Raises:
        UsageError: A value has the wrong type, is out of range, or is not among the choices.
    """

    output: str | None = file_field(
        "file to write: the engine (default: MODEL.rtx.engine or MODEL.engine), or the ONNX file of optimize",
    )
    precision: Precision | None = option_field(
        None,
        "precision written into the graph (default of build: fp16)",
        PRECISION,
        choices=(*PRECISIONS, Precision.AUTO),
    )
    calib: str | None = samples_field(CALIB_HELP)
    calib_method: str = option_field(
        "auto", "how a tensor's INT8 range is chosen from its statistics", SAMPLES, choices=CALIB_METHODS
    )
    calib_cache: str | None = file_field(
        "file that keeps the calibration statistics; or a calibration cache of TensorRT, to take INT8 ranges from",
        group=SAMPLES,
    )
    eval: str | None = samples_field("samples to verify on (default: the calibration samples)")
    steps: float | None = option_field(
        None, "tokens to decode of each prompt of decode:prompts.npz (default: 64)", SAMPLES, metavar="N"
    )
    run_limit: float | None = option_field(
        None, "seconds that one run of the model in ONNX Runtime may take (default: 1800)", SAMPLES, metavar="SECONDS"
    )
    reference: str | None = file_field(
        "outputs that `polygraphy run --save-outputs` wrote for the inputs of --eval, to compare with in place of FP32",
        group=SAMPLES,
        path="file",
    )
    metric: str | None = option_field(
        None,
        f"FILE.py:FUNCTION called with run(feeds) -> outputs, or {', '.join(METRICS)}; higher is better",
        SAMPLES,
        metavar="METRIC",
        path="source",
        words=METRICS,
    )
    preprocess: str | None = option_field(None, PREPROCESS_HELP, SAMPLES, metavar="HOW", path="script")
    preprocess_in_engine: bool = switch_field(
        "let the engine take uint8 pixels, channels last, and do what --preprocess says but for sizes", SAMPLES
    )
    labels: str | None = file_field(
        "labels of the pictures that are verified on: .csv, COCO's .json, or a folder of YOLO's .txt, masks or targets "
        "(default: those in the folder of the pictures)",
        group=SAMPLES,
        path="file",
        metavar="SRC",
    )
    skip_bad: bool = switch_field("leave out pictures that cannot be decoded, and count them", SAMPLES)
    boxes: str | None = option_field(
        None,
        "how the outputs hold boxes, for map50, map and recall: yolov5, yolov7, yolov8, yolov10, yolox, ssd, nms, "
        "detr, rtdetr, fastestdet (default: found by the labels)",
        SAMPLES,
        metavar="FORM",
    )
    max_accuracy_drop: float | None = option_field(
        None, "fail (exit code 7) when accuracy drops by more than X, 0.01 or 1%%", SAMPLES, metavar="X", share=True
    )
    min_sqnr_db: float | None = option_field(
        None,
        "fail (exit code 7) when an output's SQNR is below X dB "
        "(--int8 and --fp8 with your samples: 20 for outputs that hold no scores)",
        SAMPLES,
        metavar="X",
    )
    min_agreement: float | None = option_field(
        None,
        "fail (exit code 7) when an output that holds scores agrees with FP32 in less than this share of its top-1 "
        "(--int8 and --fp8 with your samples: 0.98)",
        SAMPLES,
        metavar="SHARE",
        share=True,
    )
    atol: tuple[str, ...] = option_field(
        (),
        "fail (exit code 7) when a value of an output is off by more than this and by more than --rtol, as in "
        "`polygraphy run` (1e-5 where only the other is given); repeat for several outputs",
        SAMPLES,
        metavar="[OUTPUT:]X",
        repeatable=True,
    )
    rtol: tuple[str, ...] = option_field(
        (), "likewise, as a share of the reference's value", SAMPLES, metavar="[OUTPUT:]X", repeatable=True
    )
    allow_accuracy_loss: bool = switch_field("report failed gates as warnings, exit code 0", SAMPLES)
    compare_tensors: bool = switch_field(
        "compare intermediate tensors too, to name the layer where the error enters", SAMPLES
    )
    keep_all_int8: bool = switch_field("keep every 8-bit region, also where it makes the engine slower", PRECISION)
    weights: str | None = option_field(
        None,
        "store the weights of matrix products in this format where that makes the engine faster; products still "
        "compute in the precision",
        PRECISION,
        choices=WEIGHT_FORMATS,
    )
    weight_block: str | None = option_field(
        None, "weights that share a scale, of --weights int4 (default: 128)", PRECISION, choices=("32", "64", "128")
    )
    keep_all_weights: bool = switch_field("keep every narrow weight, also where it makes the engine slower", PRECISION)
    sparse: bool = switch_field(
        "prune the layers to 2:4 that gain by it, within the accuracy budget (0.01 unless given)", PRECISION
    )
    sparse_all: bool = switch_field("prune every layer that can be 2:4, whether a gain is predicted or not", PRECISION)
    lora: tuple[str, ...] = option_field(
        (),
        "merge an adapter (LoRA, as PEFT saves it) into the weights; repeat for several",
        REWRITES,
        metavar="FILE.safetensors[:SCALE]",
        repeatable=True,
        path="source",
    )
    lora_inputs: float | None = option_field(
        None,
        "make the adapters of --lora inputs of the engine, of this rank, in place of merging them",
        REWRITES,
        metavar="RANK",
    )
    last_token: bool = switch_field("give a decoder's scores of the last token in place of those of all", REWRITES)
    recipes: str = option_field(
        "all", "graph rewrites to apply: all, none, or a comma-separated list", REWRITES, metavar="LIST"
    )
    strict_recipes: bool = switch_field("fail (exit code 5) when a recipe fails instead of rolling it back", REWRITES)
    backend: str = option_field("auto", "compiler", TARGET, choices=BACKENDS)
    min_shapes: tuple[ShapeMap, ...] = shapes_field(
        "smallest shapes, name:1x3x224x224,other:1x77; repeat for several profiles"
    )
    opt_shapes: tuple[ShapeMap, ...] = shapes_field("shapes to optimize for; alone, they make the profile static")
    max_shapes: tuple[ShapeMap, ...] = shapes_field("largest shapes")
    batches: tuple[int, ...] = option_field(
        (), "batch sizes, 1,8,32: a profile for each, which takes what is above the size before", TARGET, metavar="LIST"
    )
    shape_histogram: str | None = file_field(
        "shapes of requests, a line each (ids:1x37,mask:1x37): at most four profiles by predicted time",
        group=TARGET,
        path="file",
    )
    keep_dynamic: bool = switch_field("leave axes dynamic that every profile gives one size", TARGET)
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
        metavar="LIB",
        repeatable=True,
        path="file",
    )
    timing_cache: str | None = file_field(
        "timing cache file of the builder (default: one in the cache, per GPU and version)",
        group=BUILDER,
    )
    error_on_timing_cache_miss: bool = switch_field("fail where a kernel's time is not in the timing cache", BUILDER)
    cache_dir: str | None = file_field(
        "folder of the cache: engines, statistics, searches (default: ~/.cache/trtopt)", path="folder", metavar="DIR"
    )
    cache_gb: float | None = option_field(
        None, "what the cache may take, in GB (default: 10); what was used longest ago goes first", FILES, metavar="GB"
    )
    no_cache: bool = switch_field("build the engine anew, and keep neither it nor the times of kernels", FILES)
    polygraphy: str | None = file_field(
        "folder to keep the model, the optimized model, up to 32 inputs, and both models' outputs in, as Polygraphy "
        "reads them; where the build or a gate fails, the message ends with the command that reduces the model",
        path="folder",
        metavar="DIR",
    )
    save_onnx: str | None = file_field("write the optimized ONNX model")
    epcontext: str | None = file_field(
        "write an ONNX model beside the engine that ONNX Runtime loads it from (EPContext), the part for the host in it"
    )
    epcontext_embed: bool = switch_field("hold the engine in that model, in place of the name of its file", FILES)
    sign: str | None = file_field(
        "private key (Ed25519, PEM) to sign the engine's manifest with", path="file", metavar="KEY.pem"
    )
    report: str | None = file_field(REPORT_HELP)
    html: str | None = file_field(HTML_HELP)
    markdown: str | None = file_field(MARKDOWN_HELP)
    export_layer_info: str | None = file_field("write the engine's fused layers as JSON")

    @property
    def tolerances(self) -> Tolerances | None:
        """What ``atol`` and ``rtol`` say; None where neither is given."""
        return Tolerances.parsed(self.atol, self.rtol) if self.atol or self.rtol else None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.tolerances
        if self.max_accuracy_drop is not None and self.max_accuracy_drop < 0:
            raise UsageError(
                "The largest accuracy drop is negative",
                where=flag("max_accuracy_drop"),
                remedy="give a number from 0 on; the drop is baseline - optimized",
            )
        if self.lora_inputs is not None and not (self.lora_inputs in range(1, 1025) and self.lora):
            what = "Inputs for adapters need a whole rank from 1 to 1024, and adapters that say which layers have them"
            raise UsageError(what, where=flag("lora_inputs"), remedy="give --lora-inputs 16 --lora FILE.safetensors")
        if self.weights != "int4" and self.weight_block is not None:
            what = "The block is that of --weights int4; other formats have one of their own"
            raise UsageError(what, where=flag("weight_block"), remedy="leave it out, or give --weights int4")
        if self.min_agreement is not None and not 0 <= self.min_agreement <= 1:
            raise UsageError(
                "The least agreement is no share", where=flag("min_agreement"), remedy="give a number from 0 to 1"
            )
        ways = [name for name in ("batches", "shape_histogram", "opt_shapes", "max_shapes") if getattr(self, name)]
        if len(ways) > 1 and ways != ["opt_shapes", "max_shapes"]:
            raise UsageError(
                "The shapes are given in two ways",
                where=", ".join(map(flag, ways)),
                remedy=f"leave all but {flag(ways[0])} out",
            )
        if self.steps is not None and not (self.steps >= 1 and self.steps.is_integer()):
            raise UsageError(
                f"There are no {self.steps:g} steps to decode",
                where=flag("steps"),
                remedy="give a whole number from 1 on",
            )
        if self.run_limit is not None and self.run_limit <= 0:
            raise UsageError(
                f"The limit of a run is {self.run_limit:g} seconds",
                where=flag("run_limit"),
                remedy="give seconds above 0",
            )
        if self.cache_gb is not None and self.cache_gb < 0:
            raise UsageError(
                "The size of the cache is negative", where=flag("cache_gb"), remedy="give a number of GB from 0 on"
            )


@dataclass(frozen=True)
class AnalyzeConfig(Config):
    """The options of ``trtopt analyze``.

    ``precision=None`` means FP16, or the types the model has where it already carries 16-bit types or Q/DQ. Batch sizes
    may be given as text, as on the command line, or as integers.

    Raises:
        UsageError: As of :class:`BuildConfig`.
    """

    precision: Precision | None = option_field(
        None, "precision to predict (default: fp16, or the model's own 16-bit and INT8)", PRECISION, choices=PRECISIONS
    )
    shapes: tuple[ShapeMap, ...] = shapes_field(
        "input shapes, name:1x3x224x224,other:1x77 (default: 8 on a dynamic first axis)", "--opt-shapes", "--optShapes"
    )
    compile: bool = switch_field("compile with TensorRT for RTX and predict the layers of the engine too", TARGET)
    sparse: bool = switch_field(
        "say for each layer whether 2:4 structured sparsity pays, and which weights are 2:4 already", TARGET
    )
    batch_sweep: tuple[int, ...] = option_field(
        (),
        "batch sizes to predict: 1,2,4 or 1..256 (a range: its ends, and four sizes per doubling)",
        TARGET,
        metavar="LIST",
    )
    latency_budget_ms: float | None = option_field(
        None,
        "name the batch of the sweep with the highest throughput within MS milliseconds",
        TARGET,
        aliases=("--latency-budget",),
        metavar="MS",
    )
    report: str | None = file_field(REPORT_HELP)
    html: str | None = file_field(HTML_HELP)
    markdown: str | None = file_field(MARKDOWN_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        where = flag("latency_budget_ms")
        if self.latency_budget_ms is not None and self.latency_budget_ms <= 0:
            raise UsageError("The latency budget is not positive", where=where, remedy="give milliseconds above 0")
        if self.latency_budget_ms is not None and not self.batch_sweep:
            what = "A latency budget needs batch sizes to choose from"
            raise UsageError(what, where=where, remedy="add --batch-sweep 1..256")


@dataclass(frozen=True)
class SensitivityConfig(Config):
    """The options of ``trtopt sensitivity``.

    Raises:
        UsageError: As of :class:`BuildConfig`.
    """

    precision: Precision = option_field(
        Precision.INT8, "8-bit type (default: int8)", PRECISION, choices=EIGHT_BIT_TYPES
    )
    calib: str | None = samples_field(CALIB_HELP)
    calib_method: str = option_field(
        "auto", "how a tensor's INT8 range is chosen from its statistics", SAMPLES, choices=CALIB_METHODS
    )
    eval: str | None = samples_field("samples to measure errors on (default: the calibration samples)")
    preprocess: str | None = option_field(None, PREPROCESS_HELP, SAMPLES, metavar="HOW", path="script")
    cache_dir: str | None = file_field(
        "folder for cached statistics and errors (default: ~/.cache/trtopt)",
        group=SAMPLES,
        path="folder",
        metavar="DIR",
    )
    backend: str = option_field("auto", "compiler whose placement rules choose the regions", TARGET, choices=BACKENDS)
    report: str | None = file_field(REPORT_HELP)
    html: str | None = file_field(HTML_HELP)
    markdown: str | None = file_field(MARKDOWN_HELP)


ONNXRUNTIME = "onnxruntime"
PROFILE_BACKENDS = ("auto", "tensorrt", "tensorrt-rtx", ONNXRUNTIME)


@dataclass(frozen=True)
class ProfileConfig(Config):
    """The options of ``trtopt profile``.

    Raises:
        UsageError: As of :class:`BuildConfig`; or one of ``layer_info`` and ``layer_profile`` is there without the
            other.
    """

    layer_info: str | None = file_field("the engine's layers, as trtexec --exportLayerInfo wrote them", path="file")
    layer_profile: str | None = file_field("their times, as trtexec --exportProfile wrote them", path="file")
    times: str | None = file_field(
        "times of whole inferences, as trtexec --exportTimes wrote them (.json or .json.gz)", path="file"
    )
    key: str | None = file_field(
        "public key (Ed25519, PEM) that the engine's manifest has to be signed with", path="file"
    )
    plugins: tuple[str, ...] = option_field(
        (),
        "shared library with the engine's TensorRT plugins, one that it was built with",
        TARGET,
        metavar="LIB",
        repeatable=True,
        path="file",
    )
    weight_streaming_budget: str | None = option_field(
        None,
        "bytes of weights that stay on the GPU (K, M, G), or auto, of an engine of --builder weight_streaming=true; "
        "the others are streamed (default: all stay)",
        TARGET,
        metavar="BYTES",
    )
    specialization: str | None = option_field(
        None,
        "when TensorRT for RTX compiles kernels for the very shapes of a dynamic engine: before it is timed, beside "
        "runs of general kernels, or never (default: eager)",
        TARGET,
        choices=("eager", "lazy", "none"),
    )
    cache_dir: str | None = file_field(
        "folder that keeps the kernels which TensorRT for RTX compiles (default: ~/.cache/trtopt)",
        path="folder",
        metavar="DIR",
    )
    backend: str = option_field(
        "auto",
        "what runs the network: an engine's own runtime on this machine's GPU, or ONNX Runtime on its CPU",
        TARGET,
        choices=PROFILE_BACKENDS,
    )
    shapes: tuple[ShapeMap, ...] = shapes_field(
        "input shapes to run at, name:1x3x224x224,other:1x77 (default: 8 on a dynamic first axis; an engine's optimum)",
        "--opt-shapes",
        "--optShapes",
    )
    load_inputs: str | None = option_field(
        None,
        "values to run on: an .npz, .json (Polygraphy), a folder of these, script.py[:function], or "
        "name:file,other:file with raw values or an .npy (default: random)",
        TARGET,
        metavar="FILES",
    )
    warmup: float | None = option_field(
        None, "milliseconds before the first inference that counts (default: 200)", TIMING, metavar="MS"
    )
    duration: float | None = option_field(
        None,
        "seconds of inferences that count, at least (default: until the median stands still; 3 with --iterations)",
        TIMING,
        metavar="S",
    )
    iterations: float | None = option_field(
        None, "inferences that count, at least (default: 10 with --duration)", TIMING, metavar="N"
    )
    inf_streams: float | None = option_field(
        None, "contexts of the engine that run at once (default: 1)", TIMING, metavar="N"
    )
    data_transfers: bool = switch_field("transfer inputs and outputs with each inference, and time that", TIMING)
    no_cuda_graph: bool = switch_field("time without a CUDA graph only", TIMING)
    export_times: str | None = file_field("write the times of every inference as trtexec does", group=TIMING)
    export_profile: str | None = file_field("write the times of the layers as trtexec does", group=TIMING)
    export_layer_info: str | None = file_field("write the engine inspector's layers as trtexec does", group=TIMING)
    polygraphy: str | None = file_field(
        "folder to keep the inputs that were run, and their outputs, in, as Polygraphy reads them",
        path="folder",
        metavar="DIR",
    )
    report: str | None = file_field(REPORT_HELP)
    html: str | None = file_field(HTML_HELP)
    markdown: str | None = file_field(MARKDOWN_HELP)
    trace: str | None = file_field("write the layers as a trace for chrome://tracing or Perfetto")

    def __post_init__(self) -> None:
        super().__post_init__()
        pair = {name: getattr(self, name) for name in ("layer_info", "layer_profile")}
        missing = [name for name, value in pair.items() if value is None]
        if len(missing) == 1:
            what = "Layers and their times come in two files"
            raise UsageError(what, where=flag(next(iter(pair.keys() - missing))), remedy=f"give {flag(missing[0])} too")
        if self.times is not None and missing:
            what = "Times of whole inferences need the layers too"
            raise UsageError(what, where="--times", remedy="give --layer-info and --layer-profile")
        for name, least, most in (
            ("warmup", 0, 600_000),
            ("duration", 0, 600),
            ("iterations", 1, 10_000_000),
            ("inf_streams", 1, 64),
        ):
            value = getattr(self, name)
            if value is not None and (not least <= value <= most or (least and value != int(value))):
                remedy = f"give a {'whole ' if least else ''}number from {least} to {most}"
                raise UsageError(f"{flag(name)} is {value:g}", where=flag(name), remedy=remedy)
