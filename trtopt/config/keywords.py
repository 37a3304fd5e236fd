"""The options of Python callers, for editors and type checkers: the fields of each configuration as keywords."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from trtopt.support.precision import Precision

Path = str | os.PathLike[str]
Texts = str | Sequence[str]
Shapes = Mapping[str, Sequence[int]] | Sequence[Mapping[str, Sequence[int]]]
"""Shapes by input name; for several profiles one such mapping each."""

Share = float | str
"""0.01, or ``"1%"``."""

BuildPrecision = Literal["fp32", "tf32", "fp16", "bf16", "int8", "fp8", "auto"] | Precision
AnalyzePrecision = Literal["fp32", "tf32", "fp16", "bf16", "int8", "fp8"] | Precision
EightBit = Literal["int8", "fp8"] | Precision
CalibMethod = Literal["auto", "max", "percentile", "entropy", "mse"]
Backend = Literal["auto", "tensorrt", "tensorrt-rtx"]


class ModelOptions(TypedDict, total=False):
    """What all take that take a model.

    Attributes:
        example_inputs: Of a PyTorch module: the arguments of ``forward`` as a tuple, or by name.
    """

    example_inputs: Any
    gpu: str | None
    inputs: Texts
    dynamic: Texts
    gpus: Mapping[str, Mapping[str, Any]]


class SampleOptions(TypedDict, total=False):
    """Samples: what ``--calib`` takes, or a Python object (:func:`trtopt.precision.observe.loaders.take`).

    Attributes:
        evaluation: Another name of ``eval``, which is that of a builtin function.
    """

    calib: Any
    calib_method: CalibMethod
    eval: Any
    evaluation: Any


class BuildOptions(ModelOptions, SampleOptions, total=False):
    """Those of :func:`trtopt.build` and :func:`trtopt.optimize`: the fields of :class:`trtopt.BuildConfig`.

    Attributes:
        metric: What ``--metric`` takes, or a function called as ``f(run)``.
    """

    output: Path | None
    precision: BuildPrecision | None
    calib_cache: Path | None
    steps: float | None
    run_limit: float | None
    reference: Path | None
    metric: str | Callable[..., Any] | None
    preprocess: str | None
    preprocess_in_engine: bool
    labels: Path | None
    skip_bad: bool
    boxes: str | None
    max_accuracy_drop: Share | None
    min_sqnr_db: float | None
    min_agreement: Share | None
    atol: Texts
    rtol: Texts
    allow_accuracy_loss: bool
    compare_tensors: bool
    keep_all_int8: bool
    weights: Literal["int4", "int8", "nvfp4", "mxfp8"] | None
    weight_block: Literal["32", "64", "128"] | None
    keep_all_weights: bool
    lora: Texts
    lora_inputs: float | None
    last_token: bool
    sparse: bool
    sparse_all: bool
    recipes: str
    strict_recipes: bool
    backend: Backend
    min_shapes: Shapes
    opt_shapes: Shapes
    max_shapes: Shapes
    batches: str | Sequence[int]
    shape_histogram: Path | None
    keep_dynamic: bool
    io: Texts
    builder: Texts
    plugins: Path | Sequence[Path]
    timing_cache: Path | None
    error_on_timing_cache_miss: bool
    cache_dir: Path | None
    cache_gb: float | None
    no_cache: bool
    polygraphy: Path | None
    save_onnx: Path | None
    epcontext: Path | None
    epcontext_embed: bool
    sign: Path | None
    report: Path | None
    html: Path | None
    markdown: Path | None
    export_layer_info: Path | None


class AnalyzeOptions(ModelOptions, total=False):
    """Those of :func:`trtopt.analyze`: the fields of :class:`trtopt.AnalyzeConfig`."""

    precision: AnalyzePrecision | None
    shapes: Shapes
    compile: bool
    sparse: bool
    batch_sweep: str | Sequence[int]
    latency_budget_ms: float | None
    report: Path | None
    html: Path | None
    markdown: Path | None


class SensitivityOptions(ModelOptions, SampleOptions, total=False):
    """Those of :func:`trtopt.sensitivity`: the fields of :class:`trtopt.SensitivityConfig`."""

    precision: EightBit
    preprocess: str | None
    cache_dir: Path | None
    backend: Backend
    report: Path | None
    html: Path | None
    markdown: Path | None


class ProfileOptions(ModelOptions, total=False):
    """Those of :func:`trtopt.profile`: the fields of :class:`trtopt.ProfileConfig`."""

    layer_info: Path | None
    layer_profile: Path | None
    times: Path | None
    key: Path | None
    plugins: Path | Sequence[Path]
    weight_streaming_budget: str | None
    specialization: Literal["eager", "lazy", "none"] | None
    cache_dir: Path | None
    backend: Literal["auto", "tensorrt", "tensorrt-rtx", "onnxruntime"]
    shapes: Shapes
    load_inputs: str | None
    warmup: float | None
    duration: float | None
    iterations: float | None
    inf_streams: float | None
    data_transfers: bool
    no_cuda_graph: bool
    export_times: Path | None
    export_profile: Path | None
    export_layer_info: Path | None
    polygraphy: Path | None
    report: Path | None
    html: Path | None
    markdown: Path | None
    trace: Path | None
