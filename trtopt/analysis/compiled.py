"""The compiler's level of an analysis: the layers a real engine of the model would have, without running anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from trtopt.config import BuildConfig
from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.request import ShapeProfile
from trtopt.engine.work import layers_of_engine
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import GpuSpec
from trtopt.judge.judges import judge_for, written
from trtopt.judge.protocol import PriceFile
from trtopt.judge.target import BuildTarget, nearest_target
from trtopt.pipeline.compile import Compilation, compile_engine
from trtopt.pipeline.guard import rewrite
from trtopt.pipeline.host import cut
from trtopt.precision.fp16.states import fp32_outputs, with_states
from trtopt.report.html.profile_graph import links
from trtopt.report.schema.analysis import LayerRow
from trtopt.report.schema.layers import LayerInfo
from trtopt.report.schema.steps import StepRecord
from trtopt.report.text.layers import as_layers
from trtopt.report.text.names import Labels
from trtopt.roofline.work import Layer
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision


@dataclass(frozen=True)
class CompiledLevel:
    """The fused layers of an engine.

    Attributes:
        layers: The kernels, each with its work; ``work`` is None where the cost is not known.
        proxy: The GPU it was lowered for when the compiler cannot target the one asked for; else None.
        model: The graph that was compiled, recipes applied and precision written into it; its node names are those
            of ``layers[].onnx_nodes``.
        shapes: Static shapes of its values at the input shapes, by name.
        listed: The layers as the compiler lists them.
    """

    layers: tuple[Layer, ...]
    proxy: str | None
    model: ir.Model
    shapes: Mapping[str, tuple[int, ...]]
    listed: tuple[LayerInfo, ...]


def compile_level(
    artifact: ModelArtifact,
    gpu: GpuSpec,
    precision: Precision | None,
    shapes: Mapping[str, tuple[int, ...]],
    clock: Clock,
    *,
    recipes: str = "all",
) -> CompiledLevel:
    """Rewrite, lower and compile a model to see which kernels it becomes. Nothing is run, so no samples are needed.

    What the compiler refuses at the end of the model is left out, as a build leaves it to the host.

    Args:
        artifact: The model as loaded.
        gpu: The GPU; where TensorRT for RTX cannot target it, another stands in (see :func:`nearest_target`).
        precision: The precision asked for; None leaves the types as they are.
        shapes: A shape for each input with a dynamic axis; the engine takes these only.
        clock: Times, warnings, progress.
        recipes: As ``--recipes``.

    Raises:
        MissingDependencyError: TensorRT for RTX is not installed, or too old.
        EngineBuildError: The compiler refused the model.
        UsageError: Shapes or recipes are wrong.
        InvalidModelError: The model cannot run at these shapes, or the compiler refuses a node in its middle.
    """
    nearest = nearest_target(gpu)
    artifact = cut(artifact, TENSORRT_RTX, shapes, clock).artifact
    shapes = {item.name: shapes[item.name] for item in artifact.inputs if item.name in shapes}
    with clock.stage("rewrite"):
        config = BuildConfig(recipes=recipes)
        prices = partial(PriceFile, folder=config.cache_dir, on_event=clock.listen, plugins=config.plugins)
        open_judge = partial(judge_for, TENSORRT_RTX, gpu, prices=prices)
        asked = BuildTarget(TENSORRT_RTX, gpu, (_static(shapes),))
        cleaned = rewrite(artifact, asked, precision, config, open_judge, {}, clock.listen).artifact
    with clock.stage("rewrite precision"):
        lowered = cleaned if precision is None else lower_unobserved(cleaned, precision, shapes)
    all_shapes = static_shapes(lowered.model, shapes)
    inputs = {item.name: all_shapes[item.name] for item in lowered.inputs}
    profiles = () if all(item.is_static for item in lowered.inputs) else (_static(inputs),)
    job = Compilation(BuildTarget(TENSORRT_RTX, nearest, profiles), precision == Precision.TF32)
    engine = compile_engine(lowered, job, BuildConfig(), clock)
    work = layers_of_engine(engine.record.layers or (), lowered.model, all_shapes, tf32=precision == Precision.TF32)
    for note in work.notes:
        clock.warn("compile", note)
    return CompiledLevel(
        layers=work.layers,
        proxy=None if nearest is gpu else f"{nearest.name} (compute capability {nearest.compute_capability})",
        model=lowered.model,
        shapes=all_shapes,
        listed=engine.record.layers or (),
    )


def _static(shapes: Mapping[str, tuple[int, ...]]) -> ShapeProfile:
    """The profile of these shapes alone."""
    return ShapeProfile({name: (shape, shape, shape) for name, shape in shapes.items()})


def links_of_engine(rows: Sequence[LayerRow], listed: Sequence[LayerInfo]) -> tuple[tuple[int, int], ...]:
    """Which layers of an engine read from which, by their tensors: pairs of indices (writer, reader)."""
    return tuple(links(as_layers(rows, Labels({}), listed)))


def lower_unobserved(
    artifact: ModelArtifact, precision: Precision, shapes: Mapping[str, tuple[int, ...]]
) -> ModelArtifact:
    """As :func:`~trtopt.judge.judges.written`, with a step, and states as a build has them."""
    step = StepRecord(f"precision-{precision}", "PRECISION", changes=0, seconds=0.0)
    model = written(artifact.model, precision, shapes, TENSORRT_RTX, fp32_outputs(artifact.model))
    return artifact.with_step(with_states(model), step)
