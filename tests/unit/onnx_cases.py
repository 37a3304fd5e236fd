"""The models of one node among ONNX's own test cases."""

from __future__ import annotations

import importlib
import pkgutil
import random
import warnings

import onnx

SLOW = ("averagepool", "lppool", "maxpool")
"""Modules whose expected results come from loops in Python: three quarters of the time of all cases."""

FEW = 200


def single_operators() -> list[tuple[str, onnx.ModelProto]]:
    """Every case, FP32, FP16, BF16 and FP64 ones alike; making them takes six seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        return [(case.name, case.model) for case in collect_testcases(None) if len(case.model.graph.node) == 1]


def some_operators() -> list[tuple[str, onnx.ModelProto]]:
    """A seeded choice of the cases that are made quickly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case import node

        names = sorted(found.name for found in pkgutil.iter_modules(node.__path__) if found.name not in SLOW)
        for name in names:
            importlib.import_module(f"{node.__name__}.{name}")
        cases = [(case.name, case.model) for case in node._NodeTestCases if len(case.model.graph.node) == 1]
    return random.Random(20).sample(cases, FEW)
