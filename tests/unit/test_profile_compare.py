"""Two profiles of one network, aligned by the nodes of their layers."""

from __future__ import annotations

import dataclasses

import pytest
from analysis_samples import GPU

from trtopt.errors import UsageError
from trtopt.profiling.compare import compare
from trtopt.report.schema.layers import TensorInfo
from trtopt.report.schema.profile import Comparison, ProfileLayer, ProfileReport, ProfileSource, ProfileTotals


def layer(name: str, nodes: str, us: float, dtype: str = "Half", shape: tuple[int, ...] = (8, 64)) -> ProfileLayer:
    given, out = (TensorInfo(f"{name}_in", (8, 32), dtype),), (TensorInfo(f"{name}_out", shape, dtype),)
    return ProfileLayer(name, "gemm", tuple(nodes.split()), (), given, out, (), "", None, None, us)


def report(*layers: ProfileLayer, end_to_end_us: float | None = None) -> ProfileReport:
    total = sum(item.measured_us for item in layers)
    source = ProfileSource("trtexec", {}, "10.3", 100, "profile")
    return ProfileReport(
        dataclasses.asdict(GPU), source, layers, ProfileTotals(total, 0.0, 0.0, end_to_end_us=end_to_end_us), ()
    )


def changes(found: Comparison) -> dict[str, tuple[str, float]]:
    return {region.nodes[0]: (region.change, region.gain_us) for region in found.regions}


def test_layers_of_the_same_nodes_are_compared_whatever_their_names() -> None:
    found = compare(report(layer("old", "conv relu", 30.0)), report(layer("new", "conv relu", 20.0)))
    assert changes(found) == {"conv": ("same", 10.0)} and found.regions[0].aligned == "nodes"
    assert (found.before.measured_us, found.after.measured_us) == (30.0, 20.0)


def test_a_fusion_that_appears_is_one_region_of_both_layers() -> None:
    before = report(layer("conv", "conv", 30.0), layer("relu", "relu", 10.0), layer("fc", "fc", 5.0))
    after = report(layer("conv + relu", "conv relu", 31.0), layer("fc", "fc", 5.0))
    found = compare(before, after)
    assert changes(found) == {"conv": ("fused", 9.0), "fc": ("same", 0.0)}
    assert changes(compare(after, before))["conv"] == ("split", -9.0)


def test_layers_that_share_nodes_through_others_are_one_region() -> None:
    before = report(layer("ab", "a b", 10.0), layer("c", "c", 5.0))
    after = report(layer("a", "a", 4.0), layer("bc", "b c", 6.0))
    (region,) = compare(before, after).regions
    assert region.nodes == ("a", "b", "c") and region.change == "regrouped" and region.gain_us == 5.0


def test_a_layer_that_is_gone_and_one_that_is_new_are_said_so() -> None:
    before = report(layer("conv", "conv", 30.0), layer("copy", "", 8.0, shape=(1, 2)))
    after = report(layer("conv", "conv", 30.0), layer("cast", "cast", 4.0, shape=(3, 4)))
    assert changes(compare(before, after)) == {
        "copy": ("vanished", 8.0),
        "cast": ("appeared", -4.0),
        "conv": ("same", 0.0),
    }


def test_another_type_is_a_change_of_precision() -> None:
    found = compare(report(layer("a", "conv", 30.0, "Half")), report(layer("a", "conv", 30.0, "Int8")))
    (region,) = found.regions
    assert region.changed_precision and (region.before.precisions, region.after.precisions) == (("fp16",), ("int8",))


def test_layers_without_nodes_are_aligned_by_name() -> None:
    conv = layer("conv", "conv", 9.0)
    found = compare(report(conv, layer("Reformat 1", "", 8.0)), report(conv, layer("Reformat 1", "", 3.0)))
    assert found.regions[0].aligned == "name" and found.regions[0].gain_us == 5.0


def test_nodes_that_were_numbered_anew_are_aligned_by_type_and_shape_in_order() -> None:
    before = report(*(layer(f"old{i}", f"Conv_{i}", 10.0 + i, shape=(8, 64 * (1 + i % 2))) for i in range(6)))
    after = report(*(layer(f"new{i}", f"node_Conv_{i}", 5.0 + i, shape=(8, 64 * (1 + i % 2))) for i in range(6)))
    found = compare(before, after)
    assert len(found.regions) == 6 and {region.aligned for region in found.regions} == {"shape"}
    assert {region.gain_us for region in found.regions} == {5.0}
    assert any("share no node" in line for line in found.warnings)


def test_no_layer_is_lost_or_counted_twice() -> None:
    before = report(*(layer(f"b{i}", f"n{i} n{i + 1}" if i % 3 else f"n{i}", float(i + 1)) for i in range(20)))
    after = report(*(layer(f"a{i}", f"n{2 * i} n{2 * i + 1}", float(i + 2)) for i in range(12)))
    found = compare(before, after)
    for side, whole in (("before", before), ("after", after)):
        names = [name for region in found.regions for name in getattr(region, side).layers]
        assert sorted(names) == sorted(item.name for item in whole.layers)
    gain = sum(region.gain_us for region in found.regions)
    assert gain == pytest.approx(before.totals.measured_us - after.totals.measured_us)


def test_profiles_of_different_networks_are_refused() -> None:
    with pytest.raises(UsageError, match="0 % and 0 % of their time in common"):
        compare(report(layer("a", "conv", 1.0, shape=(1,))), report(layer("b", "gemm", 1.0, shape=(2,))))
    copy = layer("Reformatting CopyNode for Input Tensor 0", "", 20.0)
    with pytest.raises(UsageError, match="of their time in common"):
        compare(report(copy, layer("a", "conv", 100.0, shape=(1,))), report(copy, layer("b", "gemm", 90.0, shape=(2,))))


def test_a_name_that_stands_for_another_node_aligns_nothing() -> None:
    """Exporters number nodes: Conv_2 of one file is Conv_3 of the next."""
    before = report(*(layer(f"Conv_{i}", f"Conv_{i}", 10.0 * (i + 1), shape=(8, 64 << i)) for i in range(4)))
    after = report(*(layer(f"Conv_{i + 1}", f"Conv_{i + 1}", 10.0 * (i + 1), shape=(8, 64 << i)) for i in range(4)))
    found = compare(before, after)
    assert {region.gain_us for region in found.regions} == {0.0}
    pairs = [(region.before.layers, region.after.layers) for region in found.regions]
    assert sorted(pairs) == [((f"Conv_{i}",), (f"Conv_{i + 1}",)) for i in range(4)]


def test_parameters_in_the_names_of_fused_layers_align_before_numbers() -> None:
    before = report(layer("l1.weight + Conv_1", "Conv_1", 10.0), layer("l2.weight + Conv_3", "Conv_3", 20.0))
    after = report(
        layer("l1.weight + Conv_3", "Conv_3", 9.0), layer("l2.weight + Conv_5 + Relu_6", "Conv_5 Relu_6", 18.0)
    )
    found = compare(before, after)
    assert sorted(region.gain_us for region in found.regions) == [1.0, 2.0]


def test_kernels_of_other_names_that_do_the_same_are_aligned() -> None:
    first = dataclasses.replace(layer("p0", "Pool_0", 5.0), type="CudaPooling")
    second = dataclasses.replace(layer("p1", "Pool_1", 5.0), type="TiledPooling")
    (region,) = compare(report(first), report(second)).regions
    assert region.aligned == "shape" and region.change == "same"


def test_another_device_is_said() -> None:
    other = dataclasses.replace(report(layer("a", "conv", 1.0)), gpu={**dataclasses.asdict(GPU), "name": "T4"})
    found = compare(report(layer("a", "conv", 1.0)), other)
    assert any("different devices: L4 and T4" in line for line in found.warnings)
