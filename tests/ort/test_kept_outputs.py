"""FP32 outputs of the model as loaded, kept for later runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from trtopt.accuracy import reference
from trtopt.accuracy.reference import KeptOutputs, Reference
from trtopt.cache.checksummed import to_line
from trtopt.events import Event
from trtopt.support.ort_session import Feeds, OrtSession

FEEDS = {"x": np.array([[0.5, -2.0, 3.0]], np.float32)}


def network(offset: float = 1.0) -> ir.Model:
    text = f"g (float[N,3] x) => (float[N,3] y, int64[N] best) <float b = {{{offset}}}>"
    body = "{ y = Add(x, b) best = ArgMax <axis = 1, keepdims = 0> (y) }"
    return ir.from_onnx_text(f'<ir_version: 9, opset_import: ["" : 19]>\n{text} {body}')


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    class Counted(OrtSession):
        def run(self, feeds: Feeds) -> list[np.ndarray]:
            found.append("run")
            return super().run(feeds)

    monkeypatch.setattr(reference, "OrtSession", Counted)
    return found


def outputs(folder: Path, model: ir.Model | None = None, events: list[Event] | None = None) -> list[np.ndarray]:
    model = model or network()
    kept = KeptOutputs(model, ["y", "best"], folder, ([] if events is None else events).append)
    with Reference(model, None, kept) as runner:
        return runner.run(FEEDS)


def test_a_later_run_takes_the_outputs_that_an_earlier_one_found(runs: list[str], tmp_path: Path) -> None:
    first, second = outputs(tmp_path), outputs(tmp_path)
    assert len(runs) == 1
    for before, after in zip(first, second, strict=True):
        assert before.dtype == after.dtype and np.array_equal(before, after) and after.flags.writeable
    assert not np.array_equal(outputs(tmp_path, network(2.0))[0], first[0]) and len(runs) == 2


@pytest.mark.parametrize(
    "entry",
    [
        [["<f4", [1, 3], "AAAA"], ["<i8", [1], "AAAAAAAAAAA="]],
        [["<f4", [1 << 60, 3], ""], ["<i8", [1], "AAAAAAAAAAA="]],
        [["(,f4", [0], ""], ["<i8", [1], "AAAAAAAAAAA="]],
        [["|O", [1], "AAAAAAAAAAA="], ["<i8", [1], "AAAAAAAAAAA="]],
        [["<i8", [1], "AAAAAAAAAAA="]],
        "outputs",
        None,
    ],
)
def test_a_line_that_is_no_outputs_is_left_out(runs: list[str], tmp_path: Path, entry: Any) -> None:
    expected = outputs(tmp_path)
    (file,) = (tmp_path / "outputs").iterdir()
    file.write_bytes(to_line({"sample": reference.digest(FEEDS).hex(), "outputs": entry}))
    found = outputs(tmp_path)
    assert len(runs) == 2 and all(map(np.array_equal, expected, found))


def test_large_outputs_are_not_kept(runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_MOST_KEPT_BYTES", 8)
    outputs(tmp_path)
    outputs(tmp_path)
    assert len(runs) == 2 and not (tmp_path / "outputs").exists()
