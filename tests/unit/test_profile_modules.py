"""The path of the PyTorch module in the nodes that torch's two exporters write."""

from __future__ import annotations

import io
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from trtopt.graph.module_path import module_of, module_of_node


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("/features/features.1/conv/conv.0/conv.0.0/Conv", "features.1.conv.0.0"),
        ("/features/features.18/features.18.0/Conv", "features.18.0"),
        ("/layer1/layer1.0/conv1/Conv", "layer1.0.conv1"),
        ("/layer1/layer1.0/Add_1", "layer1.0"),
        ("/layer1/layer10/Conv", "layer1.layer10"),
        ("/model.0/conv/Conv", "model.0.conv"),
        ("/fc/Gemm", "fc"),
        ("/Softmax", ""),
        ("/", ""),
        ("", ""),
        ("Conv_0", ""),
        ("node_Conv_51", ""),
        ("resnet/block1/Conv2D", ""),
    ],
)
def test_the_path_is_in_the_name(name: str, module: str) -> None:
    assert module_of(name) == module


@pytest.mark.parametrize(
    ("scopes", "module"),
    [
        ("['', 'layer1', 'layer1.0', 'layer1.0.conv1', 'conv2d_3']", "layer1.0.conv1"),
        ("['', 'mean']", ""),
        ("['mean']", "a"),
        ("[]", "a"),
        ("{'': 1}", "a"),
        ("[1, 2]", "a"),
        ("not a list", "a"),
        ("[" * 10_000, "a"),
        (None, "a"),
    ],
)
def test_the_metadata_of_a_node_counts_before_its_name(scopes: str | None, module: str) -> None:
    properties = {} if scopes is None else {"pkg.torch.onnx.name_scopes": scopes}
    node = ir.Node("", "Conv", [], name="/a/Conv", metadata_props=properties)
    assert module_of_node(node) == module


EXPECTED = {
    "Conv": ["conv1", "features.0.conv.0.0", "features.0.conv.1", "features.1.conv.0.0", "features.1.conv.1"],
    "Clip": ["features.0.conv.0.1", "features.1.conv.0.1"],
    "Add": ["features.0", "features.1"],
    "Gemm": ["layers.0", "layers.1"],
    "Softmax": [""],
}


def exported(*, dynamo: bool) -> ir.Model:
    """A network of nested modules, exported by torch: as EXPECTED says, and ReLUs of one module called three times."""
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU6())
            self.conv = nn.Sequential(inner, nn.Conv2d(8, 8, 1))

        def forward(self, x: Any) -> Any:
            return x + self.conv(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(3, 8, 3)
            self.features = nn.Sequential(Block(), Block())
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)])
            self.act = nn.ReLU()

        def forward(self, x: Any) -> Any:
            x = self.features(self.act(self.conv1(x))).mean((2, 3))
            for layer in self.layers:
                x = self.act(layer(x))
            return torch.softmax(x, 1)

    net, data = Net().eval(), (torch.zeros(1, 3, 16, 16),)
    if dynamo:
        pytest.importorskip("onnxscript")
        proto = torch.onnx.export(net, data, dynamo=True, verbose=False).model_proto
    else:
        buffer = io.BytesIO()
        torch.onnx.export(net, data, buffer, dynamo=False)
        proto = onnx.load_from_string(buffer.getvalue())
    return ir.from_proto(proto)


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_both_exporters_of_torch_tell_the_modules(dynamo: bool) -> None:
    model = exported(dynamo=dynamo)
    found: dict[str, list[str]] = {}
    for node in model.graph:
        found.setdefault(node.op_type, []).append(module_of_node(node))
    assert {kind: found[kind] for kind in EXPECTED} == EXPECTED
    reused = ["act", "act", "act"] if dynamo else ["act", "act_1", "act_2"]
    assert found["Relu"] == reused, "without metadata, the second call of a module cannot be told from another module"
