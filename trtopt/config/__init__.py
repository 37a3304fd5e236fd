"""Every option once: its help, unit, choices, aliases and kind of value."""

from trtopt.config.base import FILES, GROUPS, TIMING, Config, Option, ShapeMap, field_kinds, flag, options
from trtopt.config.budget import DEFAULT_ACCURACY_DROP, DEFAULT_FLOOR, RANDOM_FLOOR, AccuracyBudget, Floor, Tolerances
from trtopt.config.commands import ONNXRUNTIME, AnalyzeConfig, BuildConfig, ProfileConfig, SensitivityConfig

__all__ = [
    "DEFAULT_ACCURACY_DROP",
    "DEFAULT_FLOOR",
    "FILES",
    "GROUPS",
    "ONNXRUNTIME",
    "RANDOM_FLOOR",
    "TIMING",
    "AccuracyBudget",
    "AnalyzeConfig",
    "BuildConfig",
    "Config",
    "Floor",
    "Option",
    "ProfileConfig",
    "SensitivityConfig",
    "ShapeMap",
    "Tolerances",
    "field_kinds",
    "flag",
    "options",
]
