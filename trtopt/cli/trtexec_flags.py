"""Every option of trtexec: what it means to ``trtopt build`` and ``trtopt profile``, or what to do instead.

docs/migrating-from-tensorrt-10.md is written from it (``scripts/trtexec_docs.py``), and :mod:`trtopt.cli.trtexec` reads
command lines by it. The names are those of the help texts of TensorRT 10 and 11 (tests/cli/trtexec_help.toml, with its
sources), and of TensorRT 8 what is still seen in scripts.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """An option of trtexec.

    Attributes:
        name: With its dashes.
        value: An example of its value; empty for a switch.
        command: The command of trtopt that it is for: ``build``, ``profile`` or ``both``.
        means: Its arguments there, ``{}`` for the value; none where the option changes nothing.
        note: What is said of it: of one without effect why, of a refused one what to do instead.
        read: Gives the value as trtopt writes it; raises ``argparse.ArgumentTypeError`` for one that is not supported.
        is_refused: Whether it is refused.
        is_result: Whether a command that does not know it refuses it too, for want of a file or a figure.
    """

    name: str
    value: str
    command: str
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


_READ: dict[str, Callable[[str], str]] = {
    "--memPoolSize": _pools,
    "--workspace": _workspace,
    "--tacticSources": _tactics,
    "--sparsity": _one_of({"disable": "disable", "enable": "enable"}),
    "--hardwareCompatibilityLevel": _one_of(
        {"none": "none", "ampere+": "ampere+", "sameComputeCapability": "same_compute_capability"}
    ),
    "--tilingOptimizationLevel": _one_of({"0": "none", "1": "fast", "2": "moderate", "3": "full"}),
    "--weightStreamingBudget": _budget,
    "--useProfile": _one_of({"0": "0"}),
    "--allocationStrategy": _one_of({"static": "static"}),
    "--useRuntime": _one_of({"full": ""}),
}
"""How values are read that are written in another way here; others are kept."""
_RESULTS = ("--loadEngine", "--loadInputs", "--weightStreamingBudget", "--exportTimes", "--exportProfile")
_REFUSED = "refused"

_TABLE = """
--onnx=model.onnx | both | {} | the model is the argument without a name
--loadEngine=model.engine | profile | {} | the engine likewise
--saveEngine=model.engine | build | --output={} | without it: `MODEL.rtx.engine` or `MODEL.engine`
--minShapes=x:1x3x224x224 | build | --min-shapes={} | repeat the shape options for several profiles
--optShapes=x:8x3x224x224 | both | --opt-shapes={} | alone, it makes a static profile
--maxShapes=x:16x3x224x224 | build | --max-shapes={}
--shapes=x:8x3x224x224 | both | --opt-shapes={} | of a build: yields to the three above, as in trtexec
--fp16 | build | --fp16 | the default; what would overflow in FP16 stays FP32
--bf16 | build | --bf16 | what would lose its meaning in BF16 stays FP32
--int8 | build | --int8 | with `--calib`; what is not INT8 is FP16, so that `--fp16` beside it changes nothing, which
  a note says
--int4 | build | --int4 | weights alone, where that pays: products compute in the precision
--fp8 | build | --fp8 | for compute capability 8.9 and later; what is not FP8 is FP16, likewise
--best | build | --auto | the fastest mix of all types within an accuracy budget, 0.01 unless `--max-accuracy-drop`
  says otherwise
--atol=1e-3 | build | --atol={} | with Polygraphy's [meaning](polygraphy.md#tolerances)
--rtol=1e-3 | build | --rtol={} | likewise
--noTF32 | build | --fp32 | FP32 layers use TF32 only with `--tf32`; beside `--fp16`, `--bf16` or `--int8` it changes
  nothing
--calib=samples.npz | build | --calib={} | samples; a calibration cache of TensorRT goes to `--calib-cache`
--timingCacheFile=timing.cache | build | --timing-cache={} | TensorRT for RTX has no timing cache and ignores it; the
  report says so
--errorOnTimingCacheMiss | build | --error-on-timing-cache-miss | likewise
--noBuilderCache | build | --no-cache | the engine is built anew, and no times of kernels are kept
--builderOptimizationLevel=5 | build | --builder=builder_optimization_level={}
--memPoolSize=workspace:4096M | build | --builder=workspace={} | a number without a unit is in MiB; other pools are
  refused
--workspace=4096 | build | --builder=workspace={} | of TensorRT 8; in MiB
--maxAuxStreams=0 | build | --builder=max_aux_streams={}
--avgTiming=8 | build | --builder=avg_timing_iterations={} | trtexec has 8 without it, the builder 1
--maxTactics=100 | build | --builder=max_num_tactics={}
--tacticSources=-JIT_CONVOLUTIONS | build | --builder=tactic_sources={} | libraries are refused: TensorRT has
  deprecated them
--sparsity=enable | build | --builder=sparsity={} | `force` is refused: it overwrites weights; see `--sparse`
--hardwareCompatibilityLevel=ampere+ | build | --builder=hardware_compatibility={} | `sameComputeCapability` is
  `same_compute_capability`
--tilingOptimizationLevel=2 | build | --builder=tiling={} | 0 to 3 are none, fast, moderate, full
--l2LimitForTiling=1048576 | build | --builder=l2_limit_for_tiling={} | bytes
--versionCompatible | build | --builder=version_compatible=true
--vc | build | --builder=version_compatible=true | the same
--excludeLeanRuntime | build | --builder=exclude_lean_runtime=true
--stripWeights | build | --builder=strip_plan=true
--weightless | build | --builder=strip_plan=true | its older name
--stripAllWeights | build | --builder=refit=true --builder=strip_plan=true
--refit | build | --builder=refit=true
--allowWeightStreaming | build | --builder=weight_streaming=true
--setBuildRoute=-conv_lowering=on | build | --builder=build_route={} | TensorRT 11.1 and later
--tuneBuildRoutes=-conv_lowering=[on|off] | build | --builder=search=64 --builder=build_route={} | other options of
  the search are varied too, and an engine is taken where it is faster beyond the noise
--staticPlugins=plugin.so | both | --plugins={} | repeat for several
--dynamicPlugins=plugin.so | both | --plugins={} | repeat for several
--plugins=plugin.so | both | --plugins={} | the same
--exportLayerInfo=layers.json | both | --export-layer-info={} | of a build: the layers of `engine.layers[]` of the
  report; of a profile: the inspector's JSON, as trtexec
--verbose | both | --verbose | a line on stderr when a stage starts or ends; the builder's own log is written beside
  the report
--warmUp=500 | profile | --warmup={} | milliseconds
--duration=10 | profile | --duration={} | seconds; without both: until the median stands still
--iterations=100 | profile | --iterations={}
--infStreams=2 | profile | --inf-streams={}
--streams=2 | profile | --inf-streams={} | its older name
--loadInputs=x:x.bin | profile | --load-inputs={} | also `.npy`; for all inputs one `.npz`, or what
  [Polygraphy](polygraphy.md#inputs) saved or loads
--includeDataTransfers | profile | --data-transfers | in the stream of the inference
--noCudaGraph | profile | --no-cuda-graph
--weightStreamingBudget=1G | profile | --weight-streaming-budget={} | bytes; -1 is `auto`; shares are refused; where
  an engine is served, `Engine.load(weight_budget=...)`
--exportTimes=times.json | profile | --export-times={} | trtexec's JSON
--exportProfile=profile.json | profile | --export-profile={} | trtexec's JSON
--skipInference --buildOnly | build | - | `trtopt profile` times engines, a build does not
--stronglyTyped | build | - | every network is strongly typed
--explicitBatch | build | - | every network has an explicit batch dimension
--cpuOnly | build | - | TensorRT for RTX builds without a GPU
--profile=0 | build | - | profiles are numbered in the order of the shape options
--profilingVerbosity=detailed | build | - | engines are always built with detailed layer information
--ignoreParsedPluginLibs | build | - | plugin libraries are never written into an engine
--tuningSearch=fast | build | - | one option or knob is varied at a time, from the fastest engine so far
--tuningCacheFile=t.json | build | - | the cache has what was built and timed (--cache-dir), the report too
--continue | build | - | a search that is started again builds and times nothing twice
--useCudaGraph | profile | - | a CUDA graph is used where one can be captured
--noDataTransfers | profile | - | nothing is transferred unless --data-transfers is given
--exposeDMA | profile | - | the transfers of a stream never overlap with its inferences
--useSpinWait --spinWait --noSpinWait | profile | - | the host waits as the CUDA driver has it by default
--threads | profile | - | one thread enqueues for all streams
--separateProfileRun | profile | - | the layers are always timed in runs of their own
--avgRuns=10 | profile | - | each inference is timed; --export-times has them all
--percentile=99 | profile | - | the median and the percentiles 90, 95 and 99 are always reported
--dumpProfile --dumpLayerInfo | profile | - | the layers and their times are always shown
--asyncFileReader | profile | - | the engine is read before anything is timed
--useProfile=0 | profile | - | an engine runs in the optimization profile that takes its --shapes and values; others
  than 0 are refused
--allocationStrategy=static | profile | - | a context has the memory of its largest profile, other strategies are
  refused
--useRuntime=full | profile | - | engines run in the full runtime, others are refused
--precisionConstraints --layerPrecisions --layerOutputTypes | both | refused | write the precision into the ONNX
  model; TensorRT 11 has no such option either
--layerDeviceTypes --useDLACore --allowGPUFallback --buildDLAStandalone --uint8AsymmetricQuantizationDLA
  --reportCapabilityDLA --adjustForDLA | both | refused | leave it out; engines are built for GPUs, not for DLA
--safe --consistency --restricted --dumpKernelText --safetyPlugins --remoteAutoTuningConfig | both | refused | leave
  it out; safety-certified engines are not built
--inputIOFormats --outputIOFormats | both | refused | give types and layouts by name: trtopt build --io x:fp16:hwc8
--minShapesCalib --optShapesCalib --maxShapesCalib --calibProfile | both | refused | give --calib samples of the shape
  to calibrate with
--batch | both | refused | give the batch size in --opt-shapes
--maxBatch | both | refused | give the batch size in --max-shapes
--loadRefOutputs | both | refused | give what Polygraphy saved: trtopt build --reference outputs.json --eval
  inputs.json
--refPair --accuracyAlgorithm --accuracyThreshold | both | refused | bound the error of the build with --atol, --rtol,
  --min-sqnr-db, --min-agreement or --max-accuracy-drop
--exportOutput --dumpOutput --dumpRawBindingsToFile | both | refused | run the engine in Python:
  trtopt.Engine.load(PATH).run(inputs) returns the outputs
--dumpOptimizationProfile | both | refused | read inputs[].ranges in the engine's manifest, MODEL.engine.manifest.json
--getPlanVersionOnly | both | refused | read backend_version in the engine's manifest, MODEL.engine.manifest.json
--refitFromOnnx --dumpRefit --timeRefit | both | refused | build the engine again from the new model; trtopt does not
  refit
--timeDeserialize | both | refused | leave it out; trtexec --loadEngine=ENGINE --timeDeserialize times the loading
--sleepTime=1 | profile | refused | leave it out; inferences are timed without gaps
--idleTime=1 | profile | refused | leave it out; inferences are timed without gaps
--persistentCacheRatio=0.5 | profile | refused | leave it out; TensorRT's default is used
--useManagedMemory | profile | refused | leave it out; inputs and outputs lie on the GPU
--markDebug --markUnfusedTensorsAsDebugTensors --saveDebugTensors --saveAllDebugTensors | both | refused | compare
  intermediate tensors with trtopt build --compare-tensors
--device | both | refused | choose the GPU of this machine with CUDA_VISIBLE_DEVICES, the target with --gpu
--computeCapabilities | both | refused | name the target with --gpu
--runtimePlatform | both | refused | build on the platform that runs the engine
--noCompilationCache --minTiming --directIO --preview --monitorMemory | both | refused | leave it out; TensorRT's
  default is used
--pluginInstanceNorm --pi --enablePluginOverride | both | refused | leave it out; the parser's own operators are used
--decomposableAttentions | both | refused | leave it out; recipes bring attention into the form that is one kernel
--leanDLLPath | both | refused | leave it out; an engine brings its lean runtime, or runs in the full one
--tempdir | both | refused | choose the folder of temporary files with TMPDIR
--tempfileControls | both | refused | leave it out; TensorRT's default is used
--setPluginsToSerialize | both | refused | deploy the plugin library beside the engine
--tuneBuildRouteFile | both | refused | give what it holds: --builder search=16 --builder
  build_route='-knob=[one|two]'
--tuningTimeOut | both | refused | bound the search by its builds: --builder search=16
--saveAllEngines | both | refused | build again with the options of a trial in the report (engine.builder_search[])
--dryRun | both | refused | leave it out; the search varies one of its options at a time
--helpBuildRoute | both | refused | run trtexec --helpBuildRoute where TensorRT 11.1 or later is installed
"""
"""Options with an example of their value, command, arguments there (``-`` for none), and note; a line goes on where the
next is indented."""


def _rows() -> Iterator[Flag]:
    for row in re.sub(r"\n +", " ", _TABLE).strip().split("\n"):
        options, command, means, *note = row.split(" | ", 3)
        for option in options.split():
            name, _, value = option.partition("=")
            is_refused = means == _REFUSED
            arguments = () if is_refused or means == "-" else tuple(means.split())
            marks = is_refused, name in _RESULTS
            yield Flag(name, value, command, arguments, "".join(note), _READ.get(name, str), *marks)


FLAGS: dict[str, Flag] = {flag.name: flag for flag in _rows()}
"""By name, in the order of the documentation."""
