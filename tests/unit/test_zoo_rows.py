"""Which rows of its inputs a network of the zoo is compared on, and what its weights are."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((4, 5), {"0": "batch"}, (2, 5)),
        ((4, 5), {"0": "past", "1": "batch"}, (4, 2)),
        ((4, 5), {"0": "indices"}, (4, 5)),
        ((1, 5), {"0": "batch"}, (1, 5)),
    ],
)
def test_only_the_batch_is_cut(shape: tuple[int, int], axes: dict[str, str], expected: tuple[int, int]) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "zoo" / "run.py"
    spec = importlib.util.spec_from_file_location("zoo_run", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.rows_of(np.zeros(shape), axes).shape == expected


def test_weights_that_start_as_good_as_zero_are_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "zoo"))
    monkeypatch.setitem(sys.modules, "torchvision_ops", ModuleType("torchvision_ops"))
    settle = importlib.import_module("subject").settle
    layer = torch.nn.Linear(64, 64)
    torch.nn.init.normal_(layer.weight, std=1e-10)
    inputs = torch.randn(32, 64)
    settle(layer, (inputs,))
    assert float((layer(inputs) - layer.bias).detach().std()) == pytest.approx(1, rel=0.1)
