"""trtopt turns a trained PyTorch or ONNX model into a fast TensorRT engine and says why it is as fast as it is."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trtopt import sparsity

if TYPE_CHECKING:
    from trtopt.api import build, export, optimize
    from trtopt.api_analyze import analyze
    from trtopt.api_check import check
    from trtopt.api_profile import profile
    from trtopt.api_sensitivity import sensitivity
    from trtopt.api_sweep import sweep
    from trtopt.api_triton import TritonReport, triton
    from trtopt.config import AnalyzeConfig, BuildConfig, ProfileConfig, SensitivityConfig
    from trtopt.engine.manifest import verify
    from trtopt.errors import TrtoptError
    from trtopt.report.analysis import Analysis
    from trtopt.report.check import CheckReport
    from trtopt.report.profile import ProfileReport
    from trtopt.report.records import BuildReport
    from trtopt.report.sensitivity import Sensitivity
    from trtopt.report.sweep import SweepReport
    from trtopt.serve.engine import Engine
    from trtopt.serve.triton import TritonConfig

__version__ = "0.1.0"
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
    "check",
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
    "Analysis": "trtopt.report.analysis",
    "AnalyzeConfig": "trtopt.config",
    "BuildConfig": "trtopt.config",
    "BuildReport": "trtopt.report.records",
    "CheckReport": "trtopt.report.check",
    "Engine": "trtopt.serve.engine",
    "ProfileConfig": "trtopt.config",
    "ProfileReport": "trtopt.report.profile",
    "Sensitivity": "trtopt.report.sensitivity",
    "SensitivityConfig": "trtopt.config",
    "SweepReport": "trtopt.report.sweep",
    "TritonConfig": "trtopt.serve.triton",
    "TritonReport": "trtopt.api_triton",
    "TrtoptError": "trtopt.errors",
    "analyze": "trtopt.api_analyze",
    "build": "trtopt.api",
    "check": "trtopt.api_check",
    "export": "trtopt.api",
    "optimize": "trtopt.api",
    "profile": "trtopt.api_profile",
    "sensitivity": "trtopt.api_sensitivity",
    "sweep": "trtopt.api_sweep",
    "triton": "trtopt.api_triton",
    "verify": "trtopt.engine.manifest",
}


def __getattr__(name: str) -> Any:
    """Resolve public names on first use, so that ``import trtopt`` stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trtopt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
