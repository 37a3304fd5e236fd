"""Channels of random networks in random orders: whatever may move moves, and the networks compute what they did."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from random_networks import random_network

from trtopt.graph import invariants
from trtopt.graph.channels.links import Dim
from trtopt.graph.channels.orders import orderable_groups, put_in_order
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

BOUND = 1e-5
"""Largest difference of an output over its largest element."""


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_orders(first: int, tmp_path: Path) -> None:
    moved = 0
    for seed in range(first, first + 10):
        onnx.save(random_network(seed), tmp_path / "m.onnx")
        model = load(tmp_path / "m.onnx").model
        clone, rng = model.clone(), np.random.default_rng(seed)
        values = [value for node in clone.graph for value in node.outputs if value.shape is not None]
        groups = orderable_groups([Dim(value, axis) for value in values for axis in range(len(value.shape or ()))])
        free = [group for group in groups if not group.reason and not group.outputs and group.size > 1]
        put_in_order(clone, [(group, rng.permutation(group.size)) for group in free])
        moved += len(free)
        invariants.check(clone)
        feeds = {
            str(value.name): rng.standard_normal([dim if isinstance(dim, int) else 2 for dim in value.shape or ()])
            for value in model.graph.inputs
        }
        feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
        with OrtSession(model, fuse=False) as before, OrtSession(clone, fuse=False) as after:
            for one, other in zip(before.run(feeds), after.run(feeds), strict=True):
                scale = float(np.abs(one).max(initial=0.0)) or 1.0
                assert float(np.abs(one - other).max(initial=0.0)) <= BOUND * scale, seed
    assert moved >= 10
