"""Every option of trtexec: what it means to ``trtopt build`` and ``trtopt profile``, or what to do instead.

docs/migrating-from-tensorrt-10.md is written from it (``scripts/trtexec_docs.py``), and :mod:`trtopt.cli.trtexec` reads
command lines by it. The names are those of the help texts of TensorRT 10 and 11 (tests/cli/trtexec_help.toml, with its
sources), and of TensorRT 8 what is still seen in scripts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Flag:
    """An option of trtexec.

    Attributes:
        name: With its dashes.
        value: An example of its value; empty for a switch.
        command: The command of trtopt that it is for.
        means: Its arguments there, ``{}`` for the value; none where the option changes nothing.
        note: What is said of it: of one without effect why, of a refused one what to do instead.
        read: Gives the value as trtopt writes it; raises ``argparse.ArgumentTypeError`` for one that is not supported.
        is_refused: Whether it is refused.
        is_result: Whether a command that does not know it refuses it too, for want of a file or a figure.
    """

    name: str
    value: str
    command: Literal["build", "profile", "both"]
    means: tuple[str, ...] = ()
    note: str = ""
    read: Callable[[str], str] = str
    is_refused: bool = False
    is_result: bool = False

    @property
    def example(self) -> str:
        """``--name=value``."""
        return f"{self.name}={self.value}" if self.value else self.name

    def arguments(self, value: str) -> list[str]:
        """The arguments of trtopt that it means."""
        text = self.read(value)
        return [part.format(text) for part in self.means]


def _builder(setting: str) -> tuple[str, ...]:
    return (f"--builder={setting}",)


def _one_of(words: Mapping[str, str]) -> Callable[[str], str]:
    """Reads a value that has another name here."""

    def read(value: str) -> str:
        if value not in words:
            raise argparse.ArgumentTypeError(f"{value!r} is not supported; choose one of {', '.join(words)}")
        return words[value]

    return read


def _workspace(text: str) -> str:
    """A size in trtexec's notation, in which a number without a unit is in MiB."""
    return f"{text}{'M' if text.isdecimal() else ''}"


def _pools(text: str) -> str:
    """``workspace:4096M``, the only pool that is not of DLA."""
    pool, _, size = text.partition(":")
    if pool != "workspace" or not size or "," in size:
        raise argparse.ArgumentTypeError(f"{text!r}: only workspace:SIZE is supported, such as workspace:4096M")
    return _workspace(size)


def _tactics(text: str) -> str:
    """``-JIT_CONVOLUTIONS,+EDGE_MASK_CONVOLUTIONS``: what is added to the default, which is both, and taken from it."""
    found = {"EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS"}
    for word in text.split(","):
        if word[1:] not in ("EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS") or word[0] not in "+-":
            what = "only + and - before EDGE_MASK_CONVOLUTIONS and JIT_CONVOLUTIONS are supported"
            raise argparse.ArgumentTypeError(f"{word!r}: {what}")
        found = found | {word[1:]} if word[0] == "+" else found - {word[1:]}
    return "all" if len(found) == 2 else next(iter(found), "none").lower()


def _budget(text: str) -> str:
    """Bytes, or -1; a share, and -2 for no streaming, are refused."""
    if text.endswith("%") or text == "-2":
        raise argparse.ArgumentTypeError(f"{text!r} is not supported; give bytes, -1 for auto, or leave it out")
    return "auto" if text == "-1" else text.removesuffix("B")


_TILING = {"0": "none", "1": "fast", "2": "moderate", "3": "full"}
_HARDWARE = {"none": "none", "ampere+": "ampere+", "sameComputeCapability": "same_compute_capability"}
_SPARSITY = {"disable": "disable", "enable": "enable"}


def _all(names: str, value: str, command: Literal["build", "profile", "both"], note: str) -> list[Flag]:
    """Options without effect, named without their dashes."""
    return [Flag(f"--{name}", value, command, (), note) for name in names.split()]


def _refused(names: str, note: str) -> list[Flag]:
    """Options that are refused, named without their dashes."""
    return [Flag(f"--{name}", "", "both", (), note, is_refused=True) for name in names.split()]


_MEANT = [
    Flag("--onnx", "model.onnx", "both", ("{}",), "the model is the argument without a name"),
    Flag("--loadEngine", "model.engine", "profile", ("{}",), "the engine likewise", is_result=True),
    Flag("--saveEngine", "model.engine", "build", ("--output={}",), "without it: `MODEL.rtx.engine` or `MODEL.engine`"),
    Flag(
        "--minShapes",
        "x:1x3x224x224",
        "build",
        ("--min-shapes={}",),
        "repeat the shape options for several profiles",
    ),
    Flag("--optShapes", "x:8x3x224x224", "both", ("--opt-shapes={}",), "alone, it makes a static profile"),
    Flag("--maxShapes", "x:16x3x224x224", "build", ("--max-shapes={}",)),
    Flag(
        "--shapes",
        "x:8x3x224x224",
        "both",
        ("--opt-shapes={}",),
        "of a build: yields to the three above, as in trtexec",
    ),
    Flag("--fp16", "", "build", ("--fp16",), "the default; what would overflow in FP16 stays FP32"),
    Flag("--bf16", "", "build", ("--bf16",), "what would lose its meaning in BF16 stays FP32"),
    Flag(
        "--int8",
        "",
        "build",
        ("--int8",),
        "with `--calib`; what is not INT8 is FP16, so that `--fp16` beside it changes nothing, which a note says",
    ),
    Flag("--int4", "", "build", ("--int4",), "weights alone, where that pays: products compute in the precision"),
    Flag("--fp8", "", "build", ("--fp8",), "for compute capability 8.9 and later; what is not FP8 is FP16, likewise"),
    Flag(
        "--best",
        "",
        "build",
        ("--auto",),
        "the fastest mix of all types within an accuracy budget, 0.01 unless `--max-accuracy-drop` says otherwise",
    ),
    Flag("--atol", "1e-3", "build", ("--atol={}",), "with Polygraphy's [meaning](polygraphy.md#tolerances)"),
    Flag("--rtol", "1e-3", "build", ("--rtol={}",), "likewise"),
    Flag(
        "--noTF32",
        "",
        "build",
        ("--fp32",),
        "FP32 layers use TF32 only with `--tf32`; beside `--fp16`, `--bf16` or `--int8` it changes nothing",
    ),
    Flag(
        "--calib",
        "samples.npz",
        "build",
        ("--calib={}",),
        "samples; a calibration cache of TensorRT goes to `--calib-cache`",
    ),
    Flag(
        "--timingCacheFile",
        "timing.cache",
        "build",
        ("--timing-cache={}",),
        "TensorRT for RTX has no timing cache and ignores it; the report says so",
    ),
    Flag("--errorOnTimingCacheMiss", "", "build", ("--error-on-timing-cache-miss",), "likewise"),
    Flag(
        "--noBuilderCache", "", "build", ("--no-cache",), "the engine is built anew, and no times of kernels are kept"
    ),
    Flag("--builderOptimizationLevel", "5", "build", _builder("builder_optimization_level={}")),
    Flag(
        "--memPoolSize",
        "workspace:4096M",
        "build",
        _builder("workspace={}"),
        "a number without a unit is in MiB; other pools are refused",
        _pools,
    ),
    Flag("--workspace", "4096", "build", _builder("workspace={}"), "of TensorRT 8; in MiB", _workspace),
    Flag("--maxAuxStreams", "0", "build", _builder("max_aux_streams={}")),
    Flag("--avgTiming", "8", "build", _builder("avg_timing_iterations={}"), "trtexec has 8 without it, the builder 1"),
    Flag("--maxTactics", "100", "build", _builder("max_num_tactics={}")),
    Flag(
        "--tacticSources",
        "-JIT_CONVOLUTIONS",
        "build",
        _builder("tactic_sources={}"),
        "libraries are refused: TensorRT has deprecated them",
        _tactics,
    ),
    Flag(
        "--sparsity",
        "enable",
        "build",
        _builder("sparsity={}"),
        "`force` is refused: it overwrites weights; see `--sparse`",
        _one_of(_SPARSITY),
    ),
    Flag(
        "--hardwareCompatibilityLevel",
        "ampere+",
        "build",
        _builder("hardware_compatibility={}"),
        "`sameComputeCapability` is `same_compute_capability`",
        _one_of(_HARDWARE),
    ),
    Flag(
        "--tilingOptimizationLevel",
        "2",
        "build",
        _builder("tiling={}"),
        "0 to 3 are none, fast, moderate, full",
        _one_of(_TILING),
    ),
    Flag("--l2LimitForTiling", "1048576", "build", _builder("l2_limit_for_tiling={}"), "bytes"),
    Flag("--versionCompatible", "", "build", _builder("version_compatible=true")),
    Flag("--vc", "", "build", _builder("version_compatible=true"), "the same"),
    Flag("--excludeLeanRuntime", "", "build", _builder("exclude_lean_runtime=true")),
    Flag("--stripWeights", "", "build", _builder("strip_plan=true")),
    Flag("--weightless", "", "build", _builder("strip_plan=true"), "its older name"),
    Flag("--stripAllWeights", "", "build", (*_builder("refit=true"), *_builder("strip_plan=true"))),
    Flag("--refit", "", "build", _builder("refit=true")),
    Flag("--allowWeightStreaming", "", "build", _builder("weight_streaming=true")),
    Flag("--setBuildRoute", "-conv_lowering=on", "build", _builder("build_route={}"), "TensorRT 11.1 and later"),
    Flag(
        "--tuneBuildRoutes",
        "-conv_lowering=[on|off]",
        "build",
        (*_builder("search=64"), *_builder("build_route={}")),
        "other options of the search are varied too, and an engine is taken where it is faster beyond the noise",
    ),
    Flag("--staticPlugins", "plugin.so", "both", ("--plugins={}",), "repeat for several"),
    Flag("--dynamicPlugins", "plugin.so", "both", ("--plugins={}",), "repeat for several"),
    Flag("--plugins", "plugin.so", "both", ("--plugins={}",), "the same"),
    Flag(
        "--exportLayerInfo",
        "layers.json",
        "both",
        ("--export-layer-info={}",),
        "of a build: the layers of `engine.layers[]` of the report; of a profile: the inspector's JSON, as trtexec",
    ),
    Flag(
        "--verbose",
        "",
        "both",
        ("--verbose",),
        "a line on stderr when a stage starts or ends; the builder's own log is written beside the report",
    ),
    Flag("--warmUp", "500", "profile", ("--warmup={}",), "milliseconds"),
    Flag("--duration", "10", "profile", ("--duration={}",), "seconds; without both: until the median stands still"),
    Flag("--iterations", "100", "profile", ("--iterations={}",)),
    Flag("--infStreams", "2", "profile", ("--inf-streams={}",)),
    Flag("--streams", "2", "profile", ("--inf-streams={}",), "its older name"),
    Flag(
        "--loadInputs",
        "x:x.bin",
        "profile",
        ("--load-inputs={}",),
        "also `.npy`; for all inputs one `.npz`, or what [Polygraphy](polygraphy.md#inputs) saved or loads",
        is_result=True,
    ),
    Flag("--includeDataTransfers", "", "profile", ("--data-transfers",), "in the stream of the inference"),
    Flag("--noCudaGraph", "", "profile", ("--no-cuda-graph",)),
    Flag(
        "--weightStreamingBudget",
        "1G",
        "profile",
        ("--weight-streaming-budget={}",),
        "bytes; -1 is `auto`; shares are refused; where an engine is served, `Engine.load(weight_budget=...)`",
        _budget,
        is_result=True,
    ),
    Flag("--exportTimes", "times.json", "profile", ("--export-times={}",), "trtexec's JSON", is_result=True),
    Flag("--exportProfile", "profile.json", "profile", ("--export-profile={}",), "trtexec's JSON", is_result=True),
]

_WITHOUT_EFFECT = [
    *_all("skipInference buildOnly", "", "build", "`trtopt profile` times engines, a build does not"),
    *_all("stronglyTyped", "", "build", "every network is strongly typed"),
    *_all("explicitBatch", "", "build", "every network has an explicit batch dimension"),
    *_all("cpuOnly", "", "build", "TensorRT for RTX builds without a GPU"),
    *_all("profile", "0", "build", "profiles are numbered in the order of the shape options"),
    *_all("profilingVerbosity", "detailed", "build", "engines are always built with detailed layer information"),
    *_all("ignoreParsedPluginLibs", "", "build", "plugin libraries are never written into an engine"),
    *_all("tuningSearch", "fast", "build", "one option or knob is varied at a time, from the fastest engine so far"),
    *_all("tuningCacheFile", "t.json", "build", "the cache has what was built and timed (--cache-dir), the report too"),
    *_all("continue", "", "build", "a search that is started again builds and times nothing twice"),
    *_all("useCudaGraph", "", "profile", "a CUDA graph is used where one can be captured"),
    *_all("noDataTransfers", "", "profile", "nothing is transferred unless --data-transfers is given"),
    *_all("exposeDMA", "", "profile", "the transfers of a stream never overlap with its inferences"),
    *_all("useSpinWait spinWait noSpinWait", "", "profile", "the host waits as the CUDA driver has it by default"),
    *_all("threads", "", "profile", "one thread enqueues for all streams"),
    *_all("separateProfileRun", "", "profile", "the layers are always timed in runs of their own"),
    *_all("avgRuns", "10", "profile", "each inference is timed; --export-times has them all"),
    *_all("percentile", "99", "profile", "the median and the percentiles 90, 95 and 99 are always reported"),
    *_all("dumpProfile dumpLayerInfo", "", "profile", "the layers and their times are always shown"),
    *_all("asyncFileReader", "", "profile", "the engine is read before anything is timed"),
    Flag(
        "--useProfile",
        "0",
        "profile",
        (),
        "an engine runs in the optimization profile that takes its --shapes and values; others than 0 are refused",
        _one_of({"0": "0"}),
    ),
    Flag(
        "--allocationStrategy",
        "static",
        "profile",
        (),
        "a context has the memory of its largest profile, other strategies are refused",
        _one_of({"static": "static"}),
    ),
    Flag(
        "--useRuntime",
        "full",
        "profile",
        (),
        "engines run in the full runtime, others are refused",
        _one_of({"full": ""}),
    ),
]

_DLA = "leave it out; engines are built for GPUs, not for DLA"
_SAFE = "leave it out; safety-certified engines are not built"
_CALIB_SHAPE = "give --calib samples of the shape to calibrate with"
_TENSORS = "compare intermediate tensors with trtopt build --compare-tensors"
_BOUND = "bound the error of the build with --atol, --rtol, --min-sqnr-db, --min-agreement or --max-accuracy-drop"
_OUTPUTS = "run the engine in Python: trtopt.Engine.load(PATH).run(inputs) returns the outputs"
_GAPS = "leave it out; inferences are timed without gaps"
_DEFAULT = "leave it out; TensorRT's default is used"

_NOT_SUPPORTED = [
    *_refused(
        "precisionConstraints layerPrecisions layerOutputTypes",
        "write the precision into the ONNX model; TensorRT 11 has no such option either",
    ),
    *_refused("layerDeviceTypes useDLACore allowGPUFallback buildDLAStandalone", _DLA),
    *_refused("uint8AsymmetricQuantizationDLA reportCapabilityDLA adjustForDLA", _DLA),
    *_refused("safe consistency restricted dumpKernelText safetyPlugins remoteAutoTuningConfig", _SAFE),
    *_refused("inputIOFormats outputIOFormats", "give types and layouts by name: trtopt build --io x:fp16:hwc8"),
    *_refused("minShapesCalib optShapesCalib maxShapesCalib calibProfile", _CALIB_SHAPE),
    *_refused("batch", "give the batch size in --opt-shapes"),
    *_refused("maxBatch", "give the batch size in --max-shapes"),
    *_refused("loadRefOutputs", "give what Polygraphy saved: trtopt build --reference outputs.json --eval inputs.json"),
    *_refused("refPair accuracyAlgorithm accuracyThreshold", _BOUND),
    *_refused("exportOutput dumpOutput dumpRawBindingsToFile", _OUTPUTS),
    *_refused("dumpOptimizationProfile", "read inputs[].ranges in the engine's manifest, MODEL.engine.manifest.json"),
    *_refused("getPlanVersionOnly", "read backend_version in the engine's manifest, MODEL.engine.manifest.json"),
    *_refused("refitFromOnnx dumpRefit timeRefit", "build the engine again from the new model; trtopt does not refit"),
    *_refused("timeDeserialize", "leave it out; trtexec --loadEngine=ENGINE --timeDeserialize times the loading"),
    Flag("--sleepTime", "1", "profile", (), _GAPS, is_refused=True),
    Flag("--idleTime", "1", "profile", (), _GAPS, is_refused=True),
    Flag("--persistentCacheRatio", "0.5", "profile", (), _DEFAULT, is_refused=True),
    Flag("--useManagedMemory", "", "profile", (), "leave it out; inputs and outputs lie on the GPU", is_refused=True),
    *_refused("markDebug markUnfusedTensorsAsDebugTensors saveDebugTensors saveAllDebugTensors", _TENSORS),
    *_refused("device", "choose the GPU of this machine with CUDA_VISIBLE_DEVICES, the target with --gpu"),
    *_refused("computeCapabilities", "name the target with --gpu"),
    *_refused("runtimePlatform", "build on the platform that runs the engine"),
    *_refused("noCompilationCache minTiming directIO preview monitorMemory", _DEFAULT),
    *_refused("pluginInstanceNorm pi enablePluginOverride", "leave it out; the parser's own operators are used"),
    *_refused("decomposableAttentions", "leave it out; recipes bring attention into the form that is one kernel"),
    *_refused("leanDLLPath", "leave it out; an engine brings its lean runtime, or runs in the full one"),
    *_refused("tempdir", "choose the folder of temporary files with TMPDIR"),
    *_refused("tempfileControls", _DEFAULT),
    *_refused("setPluginsToSerialize", "deploy the plugin library beside the engine"),
    *_refused("tuneBuildRouteFile", "give what it holds: --builder search=16 --builder build_route='-knob=[one|two]'"),
    *_refused("tuningTimeOut", "bound the search by its builds: --builder search=16"),
    *_refused("saveAllEngines", "build again with the options of a trial in the report (engine.builder_search[])"),
    *_refused("dryRun", "leave it out; the search varies one of its options at a time"),
    *_refused("helpBuildRoute", "run trtexec --helpBuildRoute where TensorRT 11.1 or later is installed"),
]

FLAGS: dict[str, Flag] = {flag.name: flag for flag in (*_MEANT, *_WITHOUT_EFFECT, *_NOT_SUPPORTED)}
"""By name, in the order of the documentation."""
