"""The compiler's level of an analysis: the layers a real engine of the model would have, without running anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtopt.clock import Clock
from trtopt.config import BuildConfig
from trtopt.engine.backend import RTX_TARGETS, TENSORRT_RTX, choose_backend
from trtopt.engine.profiles import Profile
from trtopt.engine.work import layers_of_engine
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import GpuSpec, gpus_of
from trtopt.pipeline import apply_plan, compile_engine
from trtopt.precision.decide import decide, wanted_tensors
from trtopt.precision.ranges import StatsBuilder, TensorStats
from trtopt.precision.widen import widen
from trtopt.report.records import StepRecord
from trtopt.rewrite import driver
from trtopt.rewrite.protocol import Target
from trtopt.roofline.work import Layer

_BLACKWELL = (10, 0)
_BLACKWELL_TARGET = "12.0"
_OLDEST_PROXY = "8.0"


@dataclass(frozen=True)
class CompiledLevel:
    """The fused layers of an engine.

    Attributes:
        layers: The kernels, each with its work; ``work`` is None where the cost is not known.
        proxy: The GPU it was lowered for when the compiler cannot target the one asked for; else None.
        model: The graph that was compiled, recipes applied and precision written into it; its node names are those
            of ``layers[].onnx_nodes``.
        shapes: Static shapes of its values at the input shapes, by name.
    """

    layers: tuple[Layer, ...]
    proxy: str | None
    model: ir.Model
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def kernels(self) -> int:
        """Kernels launched by one inference; a loop's body counts once."""
        return len(self.layers)


def compile_level(
    artifact: ModelArtifact,
    gpu: GpuSpec,
    precision: str | None,
    shapes: Mapping[str, tuple[int, ...]],
    clock: Clock,
    *,
    recipes: str = "all",
) -> CompiledLevel:
    """Rewrite, lower and compile a model to see which kernels it becomes. Nothing is run, so no samples are needed.

    Args:
        artifact: The model as loaded.
        gpu: The GPU; where TensorRT for RTX cannot target it, another stands in (see :func:`nearest_target`).
        precision: One of ``config.PRECISIONS``; None leaves the types as they are.
        shapes: A shape for each input with a dynamic axis; the engine takes these only.
        clock: Times, warnings, progress.
        recipes: As ``--recipes``.

    Raises:
        MissingDependencyError: TensorRT for RTX is not installed, or too old.
        EngineBuildError: The compiler refused the model.
        UsageError: Shapes or recipes are wrong.
        InvalidModelError: The model cannot run at these shapes.
    """
    target = nearest_target(gpu)
    choose_backend(TENSORRT_RTX.name, target, None)
    with clock.stage("rewrite"):
        cleaned = driver.run(
            artifact, recipes=recipes, target=Target(TENSORRT_RTX.name, precision), on_event=clock.listen
        )
    with clock.stage("rewrite precision"):
        lowered = cleaned if precision is None else lower_unobserved(cleaned, precision, shapes)
    all_shapes = static_shapes(lowered.model, shapes)
    inputs = {item.name: all_shapes[item.name] for item in lowered.inputs}
    profile = Profile({name: (shape, shape, shape) for name, shape in inputs.items()})
    profiles = () if all(item.is_static for item in lowered.inputs) else (profile,)
    engine = compile_engine(lowered, TENSORRT_RTX, target, profiles, BuildConfig(), precision == "tf32", clock)
    work = layers_of_engine(engine.record.layers, lowered.model, all_shapes, tf32=precision == "tf32")
    for note in work.notes:
        clock.warn("compile", note)
    return CompiledLevel(
        layers=work.layers,
        proxy=None if target is gpu else f"{target.name} (compute capability {target.compute_capability})",
        model=lowered.model,
        shapes=all_shapes,
    )


def nearest_target(gpu: GpuSpec) -> GpuSpec:
    """The GPU to lower for: ``gpu`` itself where TensorRT for RTX can target it.

    Else one of the highest target from 8.0 on that is not above its compute capability: 8.6 for 8.7, 8.9 for 9.0. Two
    exceptions: Blackwell 10.x and 11.x become 12.0, the same generation, where the compiler knows their types (FP4);
    and what is older than 8.0 becomes 8.0, since 7.5 is lowered unlike all others (no FP32 products, depthwise
    convolutions padded to eight channels). For ResNet-50, MobileNetV2, ViT-B, BERT-base and ConvNeXt-T in FP16 or INT8
    the targets from 8.0 to 12.0 give the same kernels (TensorRT for RTX 1.7.1).
    """
    if gpu.compute_capability in RTX_TARGETS:
        return gpu
    wanted = _version(gpu.compute_capability)
    if wanted >= _BLACKWELL:
        return gpus_of(_BLACKWELL_TARGET)[0]
    below = [target for target in RTX_TARGETS if _version(_OLDEST_PROXY) <= _version(target) <= wanted]
    return gpus_of(max(below, key=_version, default=_OLDEST_PROXY))[0]


def _version(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))


def lower_unobserved(artifact: ModelArtifact, precision: str, shapes: Mapping[str, tuple[int, ...]]) -> ModelArtifact:
    """Write a precision into the graph without having run it: speed does not depend on the values.

    What needs no statistics is decided as a build decides it: the compiler's INT8 table, operators without a narrow
    form, constants that do not survive, final scores. Every range is taken as harmless (small values where a
    scale is needed), so a build on real samples may keep more nodes in a wider type.

    Args:
        artifact: The cleaned model.
        precision: One of ``config.PRECISIONS``.
        shapes: Input shapes, for those with dynamic axes.
    """
    base = widen(artifact.model)
    wanted = wanted_tensors(base, precision, TENSORRT_RTX.name)
    stats = dict.fromkeys(wanted.histogram, _harmless())
    plan = decide(base, precision, TENSORRT_RTX.name, stats, static_shapes(base, shapes))
    return artifact.with_step(
        apply_plan(base, plan),
        StepRecord(f"precision-{precision}", "PRECISION", changes=len(plan.quantized), seconds=0.0),
    )


def _harmless() -> TensorStats:
    """Evenly spread over -1/16..1/16: sums of a million such terms fit FP16."""
    builder = StatsBuilder(histogram=True)
    builder.update(np.linspace(-1 / 16, 1 / 16, 256, dtype=np.float32))
    return builder.finish()
