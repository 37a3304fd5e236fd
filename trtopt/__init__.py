"""trtopt turns a trained PyTorch or ONNX model into a fast TensorRT engine and says why it is as fast as it is."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trtopt import sparsity
from trtopt.support.version import VERSION

if TYPE_CHECKING:
    from trtopt.analysis.analyze import analyze
    from trtopt.analysis.profile import profile
    from trtopt.analysis.sensitivity import sensitivity
    from trtopt.api import build, export, optimize
    from trtopt.config import AnalyzeConfig, BuildConfig, ProfileConfig, SensitivityConfig
    from trtopt.engine.manifest import verify
    from trtopt.errors import TrtoptError
    from trtopt.fleet.diff import diff
    from trtopt.fleet.sweep import sweep
    from trtopt.gates.check import check
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

__version__ = VERSION
__all__ = [
    "Analysis",
    "AnalyzeConfig",
    "BuildConfig",
    "BuildReport",
    "CheckReport",
    "Engine",
    "ProfileConfig",
    "ProfileReport",
    "Sensitivity",
    "SensitivityConfig",
    "SweepReport",
    "TritonConfig",
    "TritonReport",
    "TrtoptError",
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

_HOMES = {
    "Analysis": "trtopt.report.schema.analysis",
    "AnalyzeConfig": "trtopt.config",
    "BuildConfig": "trtopt.config",
    "BuildReport": "trtopt.report.schema.build",
    "CheckReport": "trtopt.report.schema.check",
    "Engine": "trtopt.serve.engine",
    "ProfileConfig": "trtopt.config",
    "ProfileReport": "trtopt.report.schema.profile",
    "Sensitivity": "trtopt.report.schema.sensitivity",
    "SensitivityConfig": "trtopt.config",
    "SweepReport": "trtopt.report.schema.sweep",
    "TritonConfig": "trtopt.serve.triton",
    "TritonReport": "trtopt.serve.triton_repository",
    "TrtoptError": "trtopt.errors",
    "analyze": "trtopt.analysis.analyze",
    "build": "trtopt.api",
    "bundle": "trtopt.serve.bundle",
    "check": "trtopt.gates.check",
    "diff": "trtopt.fleet.diff",
    "export": "trtopt.api",
    "optimize": "trtopt.api",
    "profile": "trtopt.analysis.profile",
    "sensitivity": "trtopt.analysis.sensitivity",
    "sweep": "trtopt.fleet.sweep",
    "triton": "trtopt.serve.triton_repository",
    "verify": "trtopt.engine.manifest",
}


def __getattr__(name: str) -> Any:
    """Resolve public names on first use, so that ``import trtopt`` stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trtopt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
