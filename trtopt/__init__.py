"""trtopt turns a trained PyTorch or ONNX model into a fast TensorRT engine and says why it is as fast as it is."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trtopt import sparsity
from trtopt.errors import (
    ClosedError,
    EngineBuildError,
    GateError,
    IntegrityError,
    InvalidModelError,
    LayerListError,
    MissingDependencyError,
    QueueFullError,
    RecipeError,
    ResourceError,
    TargetError,
    TrtoptError,
    UsageError,
)
from trtopt.support.version import VERSION

if TYPE_CHECKING:
    from trtopt.analysis.analyze import analyze
    from trtopt.analysis.profile import profile
    from trtopt.analysis.sensitivity import sensitivity
    from trtopt.api import build, export, optimize
    from trtopt.config import AnalyzeConfig, BuildConfig, ProfileConfig, SensitivityConfig
    from trtopt.engine.manifest import verify
    from trtopt.events import Event
    from trtopt.fleet.diff import diff
    from trtopt.fleet.sweep import sweep
    from trtopt.gates.check import Limits, check
    from trtopt.report.schema.analysis import Analysis
    from trtopt.report.schema.build import BuildReport
    from trtopt.report.schema.check import CheckReport
    from trtopt.report.schema.profile import ProfileReport
    from trtopt.report.schema.sensitivity import Sensitivity
    from trtopt.report.schema.sweep import SweepReport
    from trtopt.serve.bundle import bundle
    from trtopt.serve.engine import Engine
    from trtopt.serve.triton import TritonConfig
    from trtopt.serve.triton_repository import TritonReport, triton
    from trtopt.source.pytorch import ExportRecord

__version__ = VERSION
__all__ = [
    "Analysis",
    "AnalyzeConfig",
    "BuildConfig",
    "BuildReport",
    "CheckReport",
    "ClosedError",
    "Engine",
    "EngineBuildError",
    "Event",
    "ExportRecord",
    "GateError",
    "IntegrityError",
    "InvalidModelError",
    "LayerListError",
    "Limits",
    "MissingDependencyError",
    "ProfileConfig",
    "ProfileReport",
    "QueueFullError",
    "RecipeError",
    "ResourceError",
    "Sensitivity",
    "SensitivityConfig",
    "SweepReport",
    "TargetError",
    "TritonConfig",
    "TritonReport",
    "TrtoptError",
    "UsageError",
    "analyze",
    "build",
    "bundle",
    "check",
    "diff",
    "export",
    "optimize",
    "profile",
    "sensitivity",
    "sparsity",
    "sweep",
    "triton",
    "verify",
]

_NAMES = {
    "trtopt.analysis.analyze": ("analyze",),
    "trtopt.analysis.profile": ("profile",),
    "trtopt.analysis.sensitivity": ("sensitivity",),
    "trtopt.api": ("build", "export", "optimize"),
    "trtopt.config": ("AnalyzeConfig", "BuildConfig", "ProfileConfig", "SensitivityConfig"),
    "trtopt.engine.manifest": ("verify",),
    "trtopt.events": ("Event",),
    "trtopt.fleet.diff": ("diff",),
    "trtopt.fleet.sweep": ("sweep",),
    "trtopt.gates.check": ("Limits", "check"),
    "trtopt.report.schema.analysis": ("Analysis",),
    "trtopt.report.schema.build": ("BuildReport",),
    "trtopt.report.schema.check": ("CheckReport",),
    "trtopt.report.schema.profile": ("ProfileReport",),
    "trtopt.report.schema.sensitivity": ("Sensitivity",),
    "trtopt.report.schema.sweep": ("SweepReport",),
    "trtopt.serve.bundle": ("bundle",),
    "trtopt.serve.engine": ("Engine",),
    "trtopt.serve.triton": ("TritonConfig",),
    "trtopt.serve.triton_repository": ("TritonReport", "triton"),
    "trtopt.source.pytorch": ("ExportRecord",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Resolve public names on first use, so that ``import trtopt`` stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trtopt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, which completion in a shell or notebook shows."""
    return sorted([*__all__, "__version__"])
