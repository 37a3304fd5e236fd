"""Every kind of engine on a real GPU, as the self-test runs it. Skipped where there is none."""

from __future__ import annotations

import pytest

from trtopt.engine.backend import TENSORRT, TENSORRT_RTX
from trtopt.serve.selftest import engine_kinds, selftest_kinds, why_not_checked


@pytest.mark.gpu
def test_every_kind_runs_is_timed_and_served() -> None:
    reasons = {backend: why_not_checked(backend) for backend in (TENSORRT_RTX, TENSORRT)}
    if all(reasons.values()):
        pytest.skip("; ".join(reasons.values()))
    found = {(check["backend"], check["kind"]): check for check in selftest_kinds()}
    assert all(check["ok"] for check in found.values()), found
    expected = {(b.name, name) for name, kind in engine_kinds().items() for b in kind.backends if not reasons[b]}
    assert found.keys() == expected
