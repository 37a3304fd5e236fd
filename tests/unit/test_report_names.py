"""What the user calls the layers of a report, and equal ones as one row."""

from __future__ import annotations

import dataclasses
import json
import re

import onnx_ir as ir
import pytest
from analysis_samples import GPU, analysis_of, resnet50_layers

from trtopt.graph.module_path import names_of
from trtopt.report.html.page import html_page
from trtopt.report.schema.layers import NodeName
from trtopt.report.text.analysis import view
from trtopt.report.text.format import short_name
from trtopt.report.text.layers import layer_table
from trtopt.report.text.names import Labels, equal_layers

_SCOPES = "pkg.torch.onnx.name_scopes"


def _value(name: str) -> ir.Value:
    return ir.Value(name=name)


def _node(op: str, name: str, inputs: list[ir.Value], output: ir.Value, scopes: str = "") -> ir.Node:
    notes = {_SCOPES: scopes} if scopes else {}
    return ir.Node("", op, inputs, outputs=[output], name=name, metadata_props=notes)


def _model(*nodes: ir.Node) -> ir.Model:
    return ir.Model(ir.Graph([], [], nodes=nodes, opset_imports={"": 21}), ir_version=10)


def test_nodes_that_rewrites_make_are_named_after_what_they_replace_or_read() -> None:
    x, y = _value("x"), _value("y")
    exported = _model(_node("MatMul", "node_1", [x, _value("w")], y, "['', 'fc', 'linear']"))
    new, out, quantized = _value("new"), _value("y"), _value("q")
    rewritten = _model(
        _node("MatMul", "made", [_value("x"), _value("w")], new),
        _node("Add", "made_Add", [new, _value("b")], out),
        _node("QuantizeLinear", "trtopt/Q", [out, _value("s")], quantized),
    )
    found = names_of(exported, rewritten)
    assert {name: item.module for name, item in found.items()} == {"node_1": "fc", "made_Add": "fc", "trtopt/Q": "fc"}


def test_a_convolution_with_a_folded_normalization_has_its_own_name() -> None:
    node = _node("Conv", "c", [_value("x"), _value("layer1.0.conv2.weight")], _value("y"), "['', 'layer1.0.bn2', 'bn']")
    assert names_of(_model(node))["c"].module == "layer1.0.conv2"
    tied = _node("MatMul", "m", [_value("x"), _value("embed.tokens.weight")], _value("y"), "['', 'lm_head', 'linear']")
    assert names_of(_model(tied))["m"].module == "lm_head", "a weight of another place tells nothing"


def test_sizes_that_no_module_computes_have_no_name() -> None:
    scopes = "['_empty_nn_module_stack_from_metadata_hook', 'sym_size_int_10']"
    assert names_of(_model(_node("Shape", "s", [_value("x")], _value("y"), scopes))) == {}


def test_a_namespace_stands_in_for_scopes() -> None:
    node = _node("Conv", "c", [_value("x")], _value("y"))
    node.metadata_props["namespace"] = ": Net/layer1: torch.nn.Sequential/layer1.0: Block/conv2d: aten.conv2d.default"
    assert names_of(_model(node))["c"].module == "layer1.0"


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("/layer3/layer3.2/conv2/Conv", "layer3.2.conv2"),
        ("/features/features.1/conv/conv.0/conv.0.0/Conv", "features.1.conv.0.0"),
        ("/layer1/layer10/Conv", "layer1.layer10"),
    ],
)
def test_a_name_of_the_torchscript_exporter_is_shown_without_the_containers_it_repeats(node: str, name: str) -> None:
    names = names_of(_model(_node("Conv", node, [_value("x")], _value("y"))))
    assert Labels(names).of((node,), "kernel_7").text == name


LABELS = Labels(
    {
        "conv": NodeName("layer1.0.conv1", "Conv"),
        "relu": NodeName("layer1.0.act1", "Relu"),
        "q": NodeName("layer.0.attention.self.query", "MatMul"),
        "k": NodeName("layer.0.attention.self.key", "MatMul"),
        "far": NodeName("head", "MatMul"),
    }
)


@pytest.mark.parametrize(
    ("nodes", "name"),
    [
        (("relu", "conv"), "layer1.0.conv1"),
        (("q", "k"), "layer.0.attention.self.*"),
        (("q", "far"), "layer.0.attention.self.query +1"),
        (("unknown",), "kernel_7"),
        ((), "kernel_7"),
    ],
)
def test_a_kernel_is_called_after_its_products(nodes: tuple[str, ...], name: str) -> None:
    assert LABELS.of(nodes, "kernel_7").text == name


def test_the_search_of_a_page_has_every_module_of_a_layer_that_is_called_after_its_product() -> None:
    row = dataclasses.replace(analysis_of(resnet50_layers).layers[0], name="kernel_7", onnx_nodes=("conv", "relu"))
    analysis = dataclasses.replace(analysis_of(resnet50_layers), layers=(row,), names=LABELS.names)
    data = re.search(r'id="data">(.*?)</script>', html_page(view(analysis, GPU)), re.DOTALL)
    assert data is not None
    layer = json.loads(data[1])["layers"][0]
    assert (layer["name"], layer["modules"]) == ("layer1.0.conv1 (kernel_7)", ["layer1.0.conv1", "layer1.0.act1"])


def test_equal_layers_whose_names_differ_by_numbers_are_one_row() -> None:
    row = analysis_of(resnet50_layers).layers[0]
    names = ["layer1.0.conv1", "layer1.1.conv1", "layer1.10.conv1", "layer1.0.downsample"]
    rows = [dataclasses.replace(row, name=name) for name in names]
    wider = dataclasses.replace(row, name="layer1.3.conv1", bytes=row.bytes + 1)
    groups = equal_layers([*rows, wider], Labels({}))
    assert [(group.name.text, len(group.rows)) for group in groups] == [
        ("layer1.*.conv1", 3),
        ("layer1.0.downsample", 1),
        ("layer1.3.conv1", 1),
    ]
    cells = layer_table([*rows, wider], 5 * row.predicted_us, Labels({})).rows[0]
    assert [getattr(cell, "text", cell) for cell in cells[1:5:3]] == ["x3", "60.0 %"]


def test_a_kernel_of_several_modules_is_a_row_with_one_of_a_single_module() -> None:
    row = analysis_of(resnet50_layers).layers[0]
    rows = [dataclasses.replace(row, name=name) for name in ("enc.layers.*", "enc.layers.2", "enc.layers.2")]
    assert [group.name.text for group in equal_layers(rows, Labels({}))] == ["enc.layers.*"]


@pytest.mark.parametrize(
    ("name", "width", "shown"),
    [
        ("encoder.layer.0.output.dense", 40, "encoder.layer.0.output.dense"),
        ("encoder.layer.0.output.dense", 20, "…0.output.dense"),
        ("/encoder/layers.11/query/MatMul", 16, "…11/query/MatMul"),
        ("Reformatting CopyNode for Input Tensor 0 to MaxPool_12", 36, "…for Input Tensor 0 to MaxPool_12"),
        ("onelongwordwithoutanypart", 10, "one...part"),
    ],
)
def test_a_name_is_cut_between_its_parts(name: str, width: int, shown: str) -> None:
    assert short_name(name, width) == shown
