"""What torch.onnx.export takes, trtopt export takes; what neither compiler runs is said with the layer's name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

torch = pytest.importorskip("torch", reason="exporting needs torch")
pytest.importorskip("onnxscript", reason="exporting needs onnxscript")

from trtopt import api  # noqa: E402
from trtopt.errors import InvalidModelError, UsageError  # noqa: E402
from trtopt.source.pytorch import export  # noqa: E402

nn = torch.nn


def run(path: Path, **feeds: torch.Tensor) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {name: value.numpy() for name, value in feeds.items()})


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


class Decoder(nn.Module):
    """One step of attention behind a past of any length, in a causal mask that is cut to it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> dict:
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        if k.shape[1] > 64:
            raise ValueError("too long")
        mask = self.mask[k.shape[1] - x.shape[1] : k.shape[1], : k.shape[1]]
        heads = (each.unsqueeze(1) for each in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        return {"hidden": y * scale, "present": (k, v)}


def test_a_past_of_any_length_nested_in_the_arguments(tmp_path: Path) -> None:
    net, past = Decoder().eval(), tuple(torch.randn(2, 2, 5, 8).unbind())
    names = ("x", "past_0", "past_1")
    dynamic = [*(f"{name}:0=batch" for name in names), *(f"{name}:1=past:1..63" for name in names[1:])]
    example = {"x": torch.randn(2, 1, 8), "past": past, "scale": 2.0}
    record = export(net, tmp_path / "m.onnx", example, dynamic=dynamic)
    assert [(spec.name, spec.shape[:2]) for spec in record.inputs] == [
        ("x", ("batch", 1)),
        ("past_0", ("batch", "past")),
        ("past_1", ("batch", "past")),
    ]
    assert record.outputs == ("hidden", "present_0", "present_1")
    assert [check.inputs for check in record.checks][2:] == ["batch=1, past=1", "batch=3, past=6"]


class Sum(nn.Module):
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return inputs[0] + inputs[1]


def test_inputs_without_names_of_their_own_are_numbered(tmp_path: Path) -> None:
    pair = (torch.randn(1, 4), torch.randn(1, 4))
    record = export(Sum(), tmp_path / "m.onnx", pair, dynamic=["inputs_0:0=batch", "inputs_1:0=batch"])
    assert [(spec.name, spec.shape) for spec in record.inputs] == [
        ("inputs_0", ("batch", 4)),
        ("inputs_1", ("batch", 4)),
    ]


class Halves(nn.Module):
    """Takes sizes that are multiples of four only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = nn.functional.avg_pool2d(x, 4)
        return x + nn.functional.interpolate(small, scale_factor=4.0)


def test_an_axis_whose_size_must_be_a_multiple_is_checked_at_the_double(tmp_path: Path) -> None:
    record = export(Halves(), tmp_path / "m.onnx", (torch.randn(1, 2, 8, 8),), dynamic=["x:2=height", "x:3=width"])
    assert record.inputs[0].shape == (1, 2, "height", "width")
    assert [check.inputs for check in record.checks] == ["example", "random", "height=16, width=16"]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rows = kind(8, 4, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x)[0]


def test_a_recurrent_layer_over_a_time_of_any_length_again_and_again(tmp_path: Path) -> None:
    for _ in range(2):  # torch's own exporter refuses the second of one process
        record = export(Recurrent(nn.LSTM), tmp_path / "m.onnx", (torch.randn(2, 5, 8),), dynamic=["x:1=time"])
        assert operators(tmp_path / "m.onnx")["LSTM"] == 1
        assert record.inputs[0].shape == (2, "time", 8)


def test_the_remedy_for_a_layer_of_one_length_names_what_works(tmp_path: Path) -> None:
    net, x = Recurrent(nn.RNN).eval(), torch.randn(2, 5, 8)
    with pytest.raises(InvalidModelError, match=r"static shape of 5 .*inputs\['x'\]") as caught:
        export(net, tmp_path / "m.onnx", (x,), dynamic=["x:1=time"])
    assert "leave that axis out" in str(caught.value.remedy) and "dynamo=False" in str(caught.value.remedy)
    export(net, tmp_path / "fixed.onnx", (x,), dynamic=["x:0=batch"])
    axes = {"x": {1: "time"}}
    torch.onnx.export(net, (x,), tmp_path / "t.onnx", dynamo=False, input_names=["x"], dynamic_axes=axes)
    longer = torch.randn(2, 9, 8)
    np.testing.assert_allclose(run(tmp_path / "t.onnx", x=longer)[0], net(longer).detach().numpy(), atol=1e-5)


class Bags(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(20, 4, **options)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        return self.bags(ids, offsets)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sum"},
        {"mode": "mean", "padding_idx": 1},
        pytest.param({"mode": "max"}, marks=pytest.mark.long),
        pytest.param({"mode": "sum", "padding_idx": -1}, marks=pytest.mark.long),
    ],
)
def test_bags_of_one_length_are_a_gather_and_a_reduction(tmp_path: Path, options: dict[str, object]) -> None:
    net, ids = Bags(**options).eval(), torch.tensor([[0, 1, 1, 19], [1, 1, 1, 1], [7, 19, 8, 1]])
    api.export(net, tmp_path / "m.onnx", example_inputs=(ids,), dynamic=["ids:0=batch"])
    found = operators(tmp_path / "m.onnx")
    assert found["Gather"] == 1 and not {"Loop", "SequenceEmpty"} & set(found)
    np.testing.assert_allclose(run(tmp_path / "m.onnx", ids=ids[:2])[0], net(ids[:2]).detach().numpy(), atol=1e-6)


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.dense, self.head = Bags(), nn.Linear(4, 4), nn.Linear(4, 128)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.head(self.dense(x) + self.table(ids, offsets))


def test_what_no_compiler_runs_is_refused_at_export_with_the_name_of_the_module(tmp_path: Path) -> None:
    example = (torch.randn(3, 4), torch.arange(9), torch.tensor([0, 2, 5]))
    with pytest.raises(InvalidModelError, match=r"does not run .*Sequence") as caught:
        api.export(Ragged(), tmp_path / "m.onnx", example_inputs=example)
    assert "of the module table.bags" in str(caught.value.where)
    assert not (tmp_path / "m.onnx").exists()


library = torch.library.Library("trtopt_tests", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.define("unknown(Tensor x) -> Tensor")
for operator in ("twice", "unknown"):
    torch.library.impl(library, operator, "CPU")(lambda x: x * 2)
torch.library.register_fake("trtopt_tests::twice", lambda x: torch.empty_like(x), lib=library)


class Custom(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(torch.ops.trtopt_tests, self.name)(x) + 1


@pytest.mark.parametrize(("name", "remedy"), [("twice", "PyTorch's own operators"), ("unknown", "fake implementation")])
def test_a_custom_operator_that_stops_the_export_is_named_with_its_call(tmp_path: Path, name: str, remedy: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), Custom(name))
    with pytest.raises(InvalidModelError, match=f"trtopt_tests.*{name}") as caught:
        export(net, tmp_path / "m.onnx", (torch.randn(2, 4),))
    assert str(caught.value.where).startswith("1 (Custom), test_pytorch_accepts.py:")
    assert "getattr(torch.ops.trtopt_tests, self.name)" in str(caught.value.where)
    assert remedy in str(caught.value.remedy)


def test_outputs_get_the_names_that_are_given(tmp_path: Path) -> None:
    net, x = nn.Linear(4, 2), torch.randn(1, 4)
    assert export(net, tmp_path / "m.onnx", (x,), output_names=["score"]).outputs == ("score",)
    np.testing.assert_allclose(run(tmp_path / "m.onnx", input=x)[0], net(x).detach().numpy(), atol=1e-6)
    for wrong in (["a", "b"], ["input"]):
        with pytest.raises(UsageError, match="not a name for each of the 1 outputs"):
            export(net, tmp_path / "n.onnx", (x,), output_names=wrong)
    assert not (tmp_path / "n.onnx").exists()


class Twins(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x.relu()
        return {"x": y, "add": y, "same": y, "sum": y + 1}


def test_fields_that_are_names_within_the_graph_or_the_same_tensor_twice(tmp_path: Path) -> None:
    x = torch.randn(3)
    record = export(Twins(), tmp_path / "m.onnx", (x,))
    assert record.outputs[1:] == ("add", "same", "sum") and len(set(record.outputs)) == 4
    for found, add in zip(run(tmp_path / "m.onnx", x=x), (0, 0, 0, 1), strict=True):
        np.testing.assert_allclose(found, x.relu().numpy() + add, atol=1e-6)
