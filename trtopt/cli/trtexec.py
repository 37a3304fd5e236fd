"""The spellings of trtexec: those that mean an option of trtopt, those without effect here, those refused and why.

The same table, for readers, is docs/migrating-from-tensorrt-10.md; a test keeps the two equal. Names and meanings as in
the help of trtexec 8.4 to 11.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trtopt.errors import UsageError
from trtopt.support.files import open_file
from trtopt.support.precision import Precision
from trtopt.support.words import did_you_mean

_CACHE_START = b"TRT-"
_NOT_TIMED = "the engine is not timed"
_CALIB_SHAPE = "give --calib samples of the shape to calibrate with"
_TENSORS = "compare intermediate tensors with --compare-tensors"


def _all(names: str, word: str) -> dict[str, str]:
    """The same word for each of the options, named without their dashes."""
    return {f"--{name}": word for name in names.split()}


BUILDER_FLAGS = {
    "--refit": "refit=true",
    "--stripWeights": "strip_plan=true",
    "--versionCompatible": "version_compatible=true",
    "--vc": "version_compatible=true",
    "--allowWeightStreaming": "weight_streaming=true",
}
"""Flags that are one builder option."""

NO_EFFECT = {
    **_all("skipInference buildOnly useCudaGraph noDataTransfers useSpinWait spinWait exposeDMA", _NOT_TIMED),
    **_all("useManagedMemory separateProfileRun threads", _NOT_TIMED),
    "--stronglyTyped": "every network is strongly typed",
    "--explicitBatch": "every network has an explicit batch dimension",
    "--cpuOnly": "TensorRT for RTX builds without a GPU",
}
"""Flags that are accepted and change nothing, and why."""

NO_EFFECT_VALUES = {
    **_all("iterations warmUp duration sleepTime idleTime infStreams streams avgRuns percentile", _NOT_TIMED),
    "--useProfile": _NOT_TIMED,
    "--profile": "profiles are numbered in the order of the shape options",
    "--profilingVerbosity": "engines are always built with detailed layer information",
}
"""Options with a value that are accepted and change nothing, and why."""

REFUSED = {
    "--int4": "use --int8",
    **_all(
        "precisionConstraints layerPrecisions layerOutputTypes",
        "write the precision into the ONNX model; TensorRT 11 has no such option either",
    ),
    **_all(
        "layerDeviceTypes useDLACore allowGPUFallback buildDLAStandalone",
        "leave it out; engines are built for GPUs, not for DLA",
    ),
    **_all("safe consistency restricted", "leave it out; safety-certified engines are not built"),
    "--inputIOFormats": "change the types and layouts of the inputs in the ONNX model",
    "--outputIOFormats": "change the types and layouts of the outputs in the ONNX model",
    **_all("minShapesCalib optShapesCalib maxShapesCalib calibProfile", _CALIB_SHAPE),
    "--batch": "give the batch size in --opt-shapes",
    "--maxBatch": "give the batch size in --max-shapes",
    "--loadInputs": "give the samples to verify on with --eval",
    "--loadRefOutputs": "FP32 outputs of the model are the reference; bound the error with --min-sqnr-db",
    **_all("atol rtol", "bound the error with --min-sqnr-db or --max-accuracy-drop"),
    **_all(
        "loadEngine exportOutput exportTimes exportProfile dumpOutput dumpProfile dumpRefit timeDeserialize timeRefit",
        "run the engine with the runtime that the report names",
    ),
    "--dumpLayerInfo": "write the layers with --export-layer-info FILE",
    "--refitFromOnnx": "build the engine again from the new model",
    "--weightStreamingBudget": "give it where the engine is loaded: `trtopt profile --weight-streaming-budget`, "
    "`Engine.load(weight_budget=...)`",
    **_all("markDebug markUnfusedTensorsAsDebugTensors saveDebugTensors", _TENSORS),
    "--device": "choose the GPU of this machine with CUDA_VISIBLE_DEVICES, the target with --gpu",
    "--computeCapabilities": "name the target with --gpu",
    "--runtimePlatform": "build on the platform that runs the engine",
    "--stripAllWeights": "use --builder strip_plan=true",
    **_all(
        "excludeLeanRuntime l2LimitForTiling noBuilderCache noCompilationCache minTiming avgTiming maxTactics directIO"
        " preview",
        "leave it out; the builder's default is used",
    ),
    "--tacticSources": "use --builder tactic_sources=jit_convolutions or edge_mask_convolutions",
    "--tempdir": "choose the folder of temporary files with TMPDIR",
    "--setPluginsToSerialize": "deploy the plugin library beside the engine",
}
"""Options that are not supported, and what to do instead."""


def model_of(arguments: Sequence[str]) -> list[str]:
    """The arguments with ``--onnx=FILE`` and ``--onnx FILE`` turned into the positional ``FILE``."""
    kept = (argument for argument in arguments if argument != "--onnx")
    return [argument.removeprefix("--onnx=") for argument in kept]


def add_aliases(parser: argparse.ArgumentParser) -> None:
    """Add the spellings that are not plain aliases of a field."""
    hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    for name, setting in BUILDER_FLAGS.items():
        parser.add_argument(name, dest="builder", action="append_const", const=setting, **hidden)
    for name, read in BUILDER_VALUES.items():
        parser.add_argument(name, dest="builder", action="append", type=read, **hidden)
    for name in NO_EFFECT:
        parser.add_argument(name, action=_WithoutEffect, nargs=0, help=argparse.SUPPRESS)
    for name in NO_EFFECT_VALUES:
        parser.add_argument(name, action=_WithoutEffect, help=argparse.SUPPRESS)
    parser.add_argument("--noTF32", dest="no_tf32", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shapes", action="append", help=argparse.SUPPRESS)


class _WithoutEffect(argparse.Action):
    """Remembers that the option was given, for a note."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option_string: object = None
    ) -> None:
        name = self.option_strings[0]
        namespace.notes = [*namespace.notes, f"{name} has no effect: {(NO_EFFECT | NO_EFFECT_VALUES)[name]}"]


def resolve(args: argparse.Namespace) -> None:
    """Turn ``--noTF32`` and ``--shapes`` into options, as trtexec does: they yield to more precise ones."""
    if args.no_tf32 and getattr(args, "precision", Precision.FP32) == Precision.TF32:
        raise UsageError("--noTF32 contradicts --tf32", where="--noTF32", remedy="leave one of them out")
    if args.no_tf32 and not hasattr(args, "precision"):
        args.precision = Precision.FP32
    if args.shapes and not any(hasattr(args, name) for name in ("min_shapes", "opt_shapes", "max_shapes")):
        args.opt_shapes = args.shapes
    elif args.shapes:
        args.notes = [*args.notes, "--shapes has no effect beside --minShapes, --optShapes or --maxShapes"]


def check_calibration(source: str | None) -> None:
    """Refuse a calibration cache of TensorRT, which ``--calib`` of trtexec takes and which holds no samples."""
    if source is None or not Path(source).is_file():
        return
    try:
        with open_file(Path(source), "The samples") as file:
            start = file.read(len(_CACHE_START))
    except UsageError:
        return  # whoever opens the samples says what is wrong
    if start == _CACHE_START:
        raise UsageError(
            "A calibration cache of TensorRT holds no samples",
            where=f"--calib {source}",
            remedy="give it to --calib-cache, which takes its INT8 ranges, and samples (such as an .npz) to --calib",
        )


def _setting(key: str, words: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Reads a value of trtexec as a builder option; ``words`` are the values with another name here."""

    def read(value: str) -> str:
        if words is not None and value not in words:
            hint = did_you_mean(value, words) or f"choose one of {', '.join(words)}"
            raise argparse.ArgumentTypeError(f"{value!r} is not supported; {hint}")
        return f"{key}={words[value] if words is not None else value}"

    return read


def _workspace(text: str) -> str:
    """A size in trtexec's notation, in which a number without a unit is in MiB."""
    return f"workspace={text}{'M' if text.isdecimal() else ''}"


def _pools(text: str) -> str:
    """``workspace:4096M``, the only pool that is not of DLA."""
    pool, _, size = text.partition(":")
    if pool != "workspace" or not size or "," in size:
        raise argparse.ArgumentTypeError(f"{text!r}: only workspace:SIZE is supported, such as workspace:4096M")
    return _workspace(size)


BUILDER_VALUES: dict[str, Callable[[str], str]] = {
    "--builderOptimizationLevel": _setting("builder_optimization_level"),
    "--maxAuxStreams": _setting("max_aux_streams"),
    "--tilingOptimizationLevel": _setting("tiling", {"0": "none", "1": "fast", "2": "moderate", "3": "full"}),
    "--hardwareCompatibilityLevel": _setting(
        "hardware_compatibility",
        {"none": "none", "ampere+": "ampere+", "sameComputeCapability": "same_compute_capability"},
    ),
    "--sparsity": _setting("sparsity", {"disable": "disable", "enable": "enable"}),
    "--memPoolSize": _pools,
    "--workspace": _workspace,
}
"""Options whose value becomes one builder option."""
