"""What a compiler is asked to build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trtopt.config.base import ShapeMap
from trtopt.engine.backend import Backend
from trtopt.hardware.spec import GpuSpec


@dataclass(frozen=True)
class Profile:
    """The shapes an engine takes.

    Attributes:
        shapes: Per input, its smallest, optimal and largest shape.
    """

    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]

    @property
    def is_static(self) -> bool:
        """Whether every input has one shape only."""
        return all(smallest == largest for smallest, _, largest in self.shapes.values())

    def at_optimum(self) -> Profile:
        """The static profile at the optimal shapes."""
        return Profile({name: (optimum, optimum, optimum) for name, (_, optimum, _) in self.shapes.items()})

    def takes(self, shapes: ShapeMap) -> bool:
        """Whether inputs of these shapes are within the profile; inputs it does not name are not looked at."""
        return all(
            len(shape) == len(low) and all(a <= dim <= b for a, dim, b in zip(low, shape, high, strict=True))
            for name, shape in shapes.items()
            if name in self.shapes
            for low, _, high in (self.shapes[name],)
        )

    def to_json_dict(self) -> dict[str, dict[str, list[int]]]:
        """``{input: {"min": [...], "opt": [...], "max": [...]}}``."""
        return {
            name: dict(zip(("min", "opt", "max"), (list(shape) for shape in shapes), strict=True))
            for name, shapes in self.shapes.items()
        }


@dataclass(frozen=True)
class BuildRequest:
    """What to build.

    Attributes:
        onnx: The model file, with its external data beside it.
        backend: The compiler.
        gpu: The target; None for every GPU from Ampere on (TensorRT for RTX only).
        nodes: The names of all nodes of the model, those of subgraphs included; unique.
        profiles: One optimization profile or more; none for a model whose inputs are all static.
        tf32: Whether FP32 layers may use TF32 Tensor Cores.
        builder: ``KEY=VALUE`` options.
        plugins: Libraries with plugins.
        timing_cache: A file read before and written after the build; TensorRT for RTX ignores it.
        error_on_timing_cache_miss: Whether the build fails where a kernel's time is not in the timing cache; TensorRT
            for RTX, which times nothing, ignores it.
        name: What errors call the model, if not by its file.
        formats: The compiler's memory format (``HWC``, ...) of inputs and outputs that do not have the usual one.
        weights: The files with external data, all of them: a cached engine is found by their content.
    """

    onnx: Path
    backend: Backend
    gpu: GpuSpec | None
    nodes: tuple[str, ...]
    profiles: tuple[Profile, ...] = ()
    tf32: bool = False
    builder: tuple[str, ...] = ()
    plugins: tuple[Path, ...] = ()
    timing_cache: Path | None = None
    error_on_timing_cache_miss: bool = False
    name: str = ""
    formats: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[Path, ...] = ()
