"""Every option once: its help, unit, choices, aliases and kind of value. A module per command."""

from trtopt.config.analyze import AnalyzeConfig
from trtopt.config.base import (
    BACKENDS,
    BUILDER,
    CALIB_METHODS,
    FILES,
    GROUPS,
    PRECISION,
    REWRITES,
    SAMPLES,
    TARGET,
    Config,
    FieldKind,
    Option,
    PathKind,
    ShapeMap,
    checked,
    field_kinds,
    flag,
    options,
)
from trtopt.config.budget import DEFAULT_ACCURACY_DROP, AccuracyBudget
from trtopt.config.build import BuildConfig
from trtopt.config.profile import ONNXRUNTIME, ProfileConfig
from trtopt.config.sensitivity import SensitivityConfig

__all__ = [
    "BACKENDS",
    "BUILDER",
    "CALIB_METHODS",
    "DEFAULT_ACCURACY_DROP",
    "FILES",
    "GROUPS",
    "ONNXRUNTIME",
    "PRECISION",
    "REWRITES",
    "SAMPLES",
    "TARGET",
    "AccuracyBudget",
    "AnalyzeConfig",
    "BuildConfig",
    "Config",
    "FieldKind",
    "Option",
    "PathKind",
    "ProfileConfig",
    "SensitivityConfig",
    "ShapeMap",
    "checked",
    "field_kinds",
    "flag",
    "options",
]
