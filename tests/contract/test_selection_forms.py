"""What is computed for the selected entries alone, and what for all."""

from __future__ import annotations

from pathlib import Path

from cases_selection import CASES
from contract_case import load_case

from trtopt.graph.edit import static_shape
from trtopt.rewrite.driver import run


def test_one_slice_for_all_readers_and_whole_keys_and_values(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.label == "norm-last")
    graph = run(load_case(case, tmp_path), recipes="late-selection", strict=True).artifact.model.graph
    assert [node.inputs[0].name for node in graph if node.op_type == "Slice" and node.inputs[0]] == ["x"]
    shapes = {str(value.name): static_shape(value) for node in graph for value in node.outputs}
    assert {shapes[name] for name in ("q0", "o3", "m4", "t")} == {(2, 1, 8)}
    assert {shapes[name] for name in ("k0", "v0")} == {(2, 6, 8)}
    assert shapes["p"] == (2, 2, 1, 6)
