"""Random networks through whole builds: what ships was judged, is not slower than plain, computes the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from check_shipped import case_of, check_all

from trtopt.engine.backend import TENSORRT, TENSORRT_RTX

pytest.importorskip("tensorrt_rtx")

FEW = (0, 1, 2, 3, 4, 6, 7, 9, 10, 11, 13, 16, 19, 20, 22, 28, 30, 33, 36, 43)
MANY = tuple(range(first, first + 25) for first in range(0, 100, 25))
"""By tests that run beside each other."""


def test_a_seed_makes_one_case() -> None:
    for seed in FEW:
        assert case_of(seed).proto.SerializeToString(deterministic=True) == case_of(seed).proto.SerializeToString(
            deterministic=True
        )


@pytest.mark.parametrize("backend", [TENSORRT_RTX.name, TENSORRT.name])
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(FEW, id="few"),
        *(pytest.param(seeds, id=f"from {seeds.start}", marks=pytest.mark.long) for seeds in MANY),
    ],
)
def test_what_ships_was_judged_and_computes_the_same(seeds: Sequence[int], backend: str) -> None:
    found = check_all(seeds, backend=backend)
    assert not found.problems, "\n".join(found.problems)
    for kind in ("a range", "fixed", "int8", "judged to the digit"):
        assert found.seen[kind] >= len(seeds) // 10, found.seen
