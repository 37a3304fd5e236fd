"""What two compilers made of one model: what parted is named by its node, and equal builds differ in nothing."""

from __future__ import annotations

from dataclasses import replace

from drawn_cases import given
from hypothesis import strategies as st

from trtopt.gates.diff import changes_of
from trtopt.report.schema.analysis import LayerRow
from trtopt.report.schema.diff import DiffReport, DiffSide, RegionDiff
from trtopt.report.schema.layers import NodeName
from trtopt.report.schema.sweep import Failure
from trtopt.report.text.diff import headline, view
from trtopt.report.text.markdown import as_markdown


def row(*nodes: str, us: float = 5.0, moved: int = 1000, op: str = "Conv", dtype: str = "fp16") -> LayerRow:
    flop = 0 if op in ("Cast", "Pad") else 100
    return LayerRow(
        "+".join(nodes) or op, op, nodes, "conv" if flop else "memory", flop, moved, 0.1, dtype, None, None, 0, 0, 1.0,
        1.0, 16, "memory", 1.0, us, 0.5, us,
    )  # fmt: skip


def test_equal_builds_differ_in_nothing() -> None:
    rows = [row("conv", "relu"), row("pool"), row()]
    assert changes_of(rows, rows) == ()
    assert changes_of([], []) == ()


def test_a_node_that_lost_its_kernel_is_named() -> None:
    before = [row("conv", "relu", us=5), row("next")]
    after = [row("conv", us=5), row("relu", us=3, op="Relu"), row("next")]
    (found,) = changes_of(before, after)
    assert (found.parted, found.joined) == (("relu",), ())
    assert found.kernels == ((("conv", "relu"),), (("conv",), ("relu",)))
    assert found.us == (5, 8)
    (back,) = changes_of(after, before)
    assert (back.parted, back.joined) == ((), ("relu",))


def test_a_chain_that_is_cut_in_two_names_what_is_behind_the_cut() -> None:
    (found,) = changes_of([row("a", "b", "c", "d")], [row("a", "b"), row("c", "d")])
    assert found.parted == ("c", "d")


def test_nodes_that_several_kernels_compute_are_together() -> None:
    (found,) = changes_of([row("a", "b", "c")], [row("a", "b"), row("b", "c")])
    assert found.parted == ()
    assert [len(side) for side in found.kernels] == [1, 2]


def test_copies_types_bytes_and_times_are_compared() -> None:
    (found,) = changes_of([row("conv")], [row("conv", us=7, moved=1500, dtype="fp32"), row("conv", op="Pad", us=1)])
    assert (found.copies, found.bytes, found.us) == ((0, 1), (1000, 2500), (5, 8))
    assert found.dtypes == (("fp16",), ("fp32", "fp16"))
    assert changes_of([row("conv")], [row("conv", us=5.01)]) == ()  # less than is printed


def test_kernels_without_nodes_are_aligned_by_what_they_do() -> None:
    before, after = [replace(row(op="Cast"), name="one")], [replace(row(op="Cast"), name="two")]
    assert changes_of(before, after) == ()
    (found,) = changes_of([], after)
    assert found.nodes == ("two",) and found.copies == (0, 1)


@given(st.lists(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=4, unique=True), max_size=6), st.data())
def test_what_parts_one_way_joins_the_other(kernels: list[list[str]], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(kernels))
    before, after = ([row(*nodes) for nodes in side] for side in (kernels, shuffled[: len(shuffled) // 2]))
    there, back = changes_of(before, after), changes_of(after, before)
    assert sorted(item.parted for item in there) == sorted(item.joined for item in back)


def report(*changes: RegionDiff, us: tuple[float, float] = (100, 110), limit: float | None = None) -> DiffReport:
    sides = [DiffSide(name, name, 3, 1000, time) for name, time in zip(("old", "new"), us, strict=True)]
    return DiffReport({"path": "m.onnx", "sha256": ""}, "L4", "fp16", sides[0], sides[1], changes, limit)


def test_the_verdict_is_by_the_predicted_time() -> None:
    assert not report().is_failed and report().slowdown is not None
    assert report(limit=0.05).is_failed and not report(limit=0.1).is_failed
    assert not report(us=(110, 100), limit=0.0).is_failed
    refused = replace(report(limit=10), after=DiffSide("new", failure=Failure("no", "node x", "r", 3)))
    assert refused.is_failed and refused.slowdown is None
    assert "made no engine" in headline(refused) and "no, at node x" in as_markdown(view(refused))
    assert refused.to_json_dict()["passed"] is False


def test_what_changed_is_shown_by_node() -> None:
    changes = changes_of([row("conv", "relu"), row("gap")], [row("conv"), row("relu", op="Relu"), row("gap", us=4)])
    text = as_markdown(view(report(*changes, limit=0.05)))
    assert "new against old: 10.0 % slower by prediction, more than 5.0 %" in text
    assert "Fuses no more" in text and "relu" in text and "Other bytes, types or times" in text
    named = replace(report(*changes), names={"conv": NodeName("layer1.0.conv1", "Conv")})
    assert "layer1.0.conv1" in as_markdown(view(named)) and "layer1" not in text
    assert "nothing differs" in as_markdown(view(report(us=(100, 100))))
