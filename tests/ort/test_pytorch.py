"""A PyTorch module becomes an ONNX file that was seen to compute the same, or nothing is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

torch = pytest.importorskip("torch", reason="exporting needs torch")
pytest.importorskip("onnxscript", reason="exporting needs onnxscript")

from trtopt.errors import GateError, InvalidModelError, UsageError  # noqa: E402
from trtopt.events import Event  # noqa: E402
from trtopt.source.pytorch import ExportRecord, export  # noqa: E402
from trtopt.source.torch_call import bounds_of  # noqa: E402


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(4, 10)

    def forward(self, image: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.drop(torch.relu(self.norm(self.conv(image)))).mean((2, 3))
        y = self.head(y)
        return y if scale is None else y * scale


class Masked(torch.nn.Module):
    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"p": torch.where(mask[..., None], x, -1e4).softmax(-1), "best": x.argmax(-1)}


class Grows(torch.nn.Module):
    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.cat([past, x], 1)
        return (x @ keys.transpose(1, 2)).softmax(-1) @ keys, keys


def run(path: Path, **feeds: np.ndarray) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)


@dataclass(frozen=True)
class Exported:
    """A module in training mode, but for its normalization, and what its export wrote, told and left behind."""

    net: Net
    path: Path
    record: ExportRecord
    events: list[Event]
    training: tuple[bool, bool, bool]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    net, path = Net().train(), tmp_path_factory.mktemp("exported") / "net.onnx"
    net.norm.eval()
    events: list[Event] = []
    record = export(net, path, (torch.randn(2, 1, 6, 6),), on_event=events.append)
    training = net.training, net.norm.training, net.drop.training
    return Exported(net.eval(), path, record, events, training)


def test_a_live_module_is_exported_in_evaluation_mode_and_keeps_its_training_flags(exported: Exported) -> None:
    assert exported.training == (True, False, True)
    image = torch.randn(2, 1, 6, 6)
    expected = exported.net(image).detach().numpy()
    np.testing.assert_allclose(run(exported.path, image=image.numpy())[0], expected, atol=1e-5)
    assert [(spec.name, spec.shape) for spec in exported.record.inputs] == [("image", (2, 1, 6, 6))]
    assert [check.inputs for check in exported.record.checks] == ["example", "random"]
    assert all(0 <= check.max_ratio < 1e-5 for check in exported.record.checks)


def test_keyword_inputs_keep_their_names(tmp_path: Path) -> None:
    net = Net()
    export(net, tmp_path / "net.onnx", {"image": torch.randn(2, 1, 6, 6), "scale": torch.ones(1)})
    image, scale = torch.randn(2, 1, 6, 6), torch.tensor([3.0])
    expected = net.eval()(image, scale).detach().numpy()
    (found,) = run(tmp_path / "net.onnx", image=image.numpy(), scale=scale.numpy())
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_dynamic_axis_takes_other_sizes_and_is_checked_at_them(tmp_path: Path, size: int) -> None:
    net = Net()
    record = export(net, tmp_path / "net.onnx", (torch.randn(size, 1, 6, 6),), dynamic=("image:0=batch:1..16",))
    assert record.inputs[0].shape == ("batch", 1, 6, 6)
    assert {"batch=1", f"batch={max(size, 2) + 1}"} <= {check.inputs for check in record.checks}
    for batch in (1, 2, 7):
        image = torch.randn(batch, 1, 6, 6)
        np.testing.assert_allclose(
            run(tmp_path / "net.onnx", image=image.numpy())[0], net.eval()(image).detach().numpy(), atol=1e-5
        )


def test_axes_of_one_symbol_change_together_and_several_outputs_are_checked(tmp_path: Path) -> None:
    example = {"x": torch.randn(2, 5, 3), "mask": torch.tensor([[True, True, False, True, False]] * 2)}
    dynamic = ("x:0=batch", "mask:0=batch", "x:1=length:1..64", "mask:1=length:1..64")
    record = export(Masked(), tmp_path / "m.onnx", example, dynamic=dynamic)
    assert [spec.shape for spec in record.inputs] == [("batch", "length", 3), ("batch", "length")]
    assert len(record.outputs) == 2
    assert [check.inputs for check in record.checks][2:] == ["batch=1, length=1", "batch=3, length=6"]


def test_a_cache_may_be_empty_and_is_checked_so(tmp_path: Path) -> None:
    example = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    record = export(Grows(), tmp_path / "m.onnx", example, dynamic=("past:1=past:0..8",))
    assert record.inputs[1].shape == (2, "past", 4)
    assert [check.inputs for check in record.checks][2:] == ["past=0", "past=6"]
    found = run(tmp_path / "m.onnx", x=example[0].numpy(), past=np.zeros((2, 0, 4), np.float32))
    np.testing.assert_array_equal(found[1], example[0].numpy())
    assert bounds_of(["past:1=past:0..8", "x:1=tokens"]) == {("past", 1): (0, 8)}


def test_nodes_keep_the_path_of_their_module_and_no_path_of_the_machine(exported: Exported) -> None:
    model = onnx.load(exported.path)
    scopes = {entry.value for node in model.graph.node for entry in node.metadata_props if "name_scopes" in entry.key}
    assert any("'head'" in scope for scope in scopes)
    assert str(Path(__file__).parent) not in exported.path.read_bytes().decode("latin1")


@pytest.mark.parametrize("opset", [18, *(pytest.param(opset, marks=pytest.mark.long) for opset in (21, 23, 24))])
def test_the_opset_is_the_one_asked_for(tmp_path: Path, opset: int) -> None:
    export(Net(), tmp_path / "net.onnx", (torch.randn(2, 1, 6, 6),), opset=opset)
    assert onnx.load(tmp_path / "net.onnx").opset_import[0].version == opset


SCRIPT = """
import torch
net = torch.nn.Linear(3, 2)
def make():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
class Net(torch.nn.Module):
    def forward(self, x):
        return x + 1
def broken():
    raise ValueError("no weights")
def number():
    return 7
"""


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        pytest.param("net", "input:float32:2x3", marks=pytest.mark.long),
        ("make", "input:fp32:2x3"),
        pytest.param("Net", "x:int64:4", marks=pytest.mark.long),
    ],
)
def test_a_target_in_a_file_may_be_a_module_a_function_or_a_class(tmp_path: Path, name: str, inputs: str) -> None:
    (tmp_path / "nets.py").write_text(SCRIPT)
    record = export(f"{tmp_path / 'nets.py'}:{name}", tmp_path / "net.onnx", inputs=[inputs])
    assert (tmp_path / "net.onnx").is_file() and len(record.checks) == 2


def test_a_target_in_a_package_is_found_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quick_nets.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    export("quick_nets:net", tmp_path / "a.onnx", inputs=["input:float32:2x3"])
    export("torch.nn:Hardswish", tmp_path / "b.onnx", inputs=["input:float32:2x3"])
    assert (tmp_path / "a.onnx").is_file() and (tmp_path / "b.onnx").is_file()


def test_an_exported_program_is_exported_with_its_own_inputs(tmp_path: Path) -> None:
    net = Net().eval()
    batch = torch.export.Dim("batch", min=1, max=8)
    program = torch.export.export(net, (torch.randn(2, 1, 6, 6),), dynamic_shapes={"image": {0: batch}})
    torch.export.save(program, tmp_path / "net.pt2")
    record = export(str(tmp_path / "net.pt2"), tmp_path / "net.onnx")
    assert record.inputs[0].shape[1:] == (1, 6, 6) and isinstance(record.inputs[0].shape[0], str)
    image = torch.randn(5, 1, 6, 6)
    np.testing.assert_allclose(
        run(tmp_path / "net.onnx", image=image.numpy())[0], net(image).detach().numpy(), atol=1e-5
    )
    with pytest.raises(UsageError, match="has its inputs"):
        export(str(tmp_path / "net.pt2"), tmp_path / "net.onnx", inputs=["image:float32:2x1x6x6"])


class Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class Random(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


def test_an_input_of_another_name_is_told_the_option_to_give(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as found:
        export(Net(), tmp_path / "net.onnx", inputs=["picture:float32:2x1x6x6"])
    assert found.value.remedy.endswith("--input image:float32:2x1x6x6")


@pytest.mark.parametrize(
    ("target", "options", "error", "message"),
    [
        (Net(), {"inputs": ["picture:float32:2x1x6x6"]}, UsageError, "do not fit the module"),
        (Net(), {}, UsageError, "needs example inputs"),
        (Net(), {"inputs": ["image:float32"]}, UsageError, "not understood"),
        (Net(), {"inputs": ["image:float31:2x1x6x6"]}, UsageError, "unknown dtype"),
        (Net(), {"inputs": ["image:fp32:2x1x6x6", "image:fp32:2x1x6x6"]}, UsageError, "given twice"),
        (Net(), {"inputs": ["image:fp32:2x1x6x6"], "dynamic": ["image:4=h"]}, UsageError, "no input with an axis 4"),
        (Net(), {"inputs": ["image:fp32:2x1x6x6"], "dynamic": ["image:0"]}, UsageError, "not understood"),
        (Net(), {"inputs": ["image:fp32:2x1x6x6"], "dynamic": ["image:0=b:8..2"]}, UsageError, "no range"),
        (Net(), {"inputs": ["image:fp32:2x1x6x6"], "dynamic": ["image:0=b:0..2"]}, UsageError, "no range"),
        (Net(), {"inputs": ["image:fp32:2x1x6x6"], "opset": 12}, UsageError, "cannot be exported"),
        (Net(), {"inputs": ["image:fp32:2x1x6x6"], "dynamic": ["image:1=c"]}, UsageError, "to have 1 channels"),
        (Net(), {"inputs": ["image:fp32:2x3x6x6"]}, UsageError, "expected input.* to have 1 channels"),
        (torch.nn.Embedding(4, 2), {"example_inputs": (torch.tensor([9]),)}, UsageError, "PyTorch fails"),
        (Branches(), {"inputs": ["x:fp32:3"]}, InvalidModelError, "data-dependent"),
        (Random(), {"inputs": ["x:fp32:3"]}, GateError, "differs from PyTorch: output .* by 0"),
        (lambda x: x, {"inputs": ["x:fp32:3"]}, UsageError, "Not a torch.nn.Module"),
        ("weights.pth", {}, UsageError, "holds weights"),
        ("missing.pt2", {}, UsageError, "does not exist"),
        ("missing.py:net", {}, UsageError, "does not exist"),
        ("nets.py:nothing", {}, UsageError, "no module or function 'nothing'"),
        ("nets.py:broken", {}, UsageError, "ValueError: no weights"),
        ("nets.py:number", {}, UsageError, "no torch.nn.Module but int"),
        ("torch.nn:Nothing", {}, UsageError, "cannot be imported"),
        ("what is this", {}, UsageError, "not understood"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_said_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    target: object,
    options: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    (tmp_path / "nets.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as caught:
        export(target, tmp_path / "net.onnx", **options)
    assert len(str(caught.value).splitlines()) <= 3 and caught.value.remedy
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != "") == ["nets.py"]
    assert capfd.readouterr() == ("", "")


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["net.pt", "net.pth", "net.ckpt", "net.pt2"])
def test_a_file_that_torch_save_wrote_is_refused_without_unpickling_it(tmp_path: Path, name: str) -> None:
    torch.save({"weight": Payload(tmp_path / "unpickled")}, tmp_path / name)
    with pytest.raises(UsageError, match=r"holds weights|no exported program"):
        export(str(tmp_path / name), tmp_path / "net.onnx")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_progress_starts_advances_and_ends(exported: Exported) -> None:
    assert [event.kind for event in exported.events] == ["start", "advance", "advance", "advance", "end"]
    assert exported.events[0].total == 3


class OneIsOther(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1.0 if not torch.compiler.is_compiling() and x.shape[0] == 1 else x * 2.0


def test_a_size_at_which_the_graph_differs_may_be_bound(tmp_path: Path) -> None:
    with pytest.raises(GateError) as found:
        export(OneIsOther(), tmp_path / "net.onnx", inputs=["x:fp32:2x4"], dynamic=["x:0=n"])
    assert "n=1" in found.value.where and "--dynamic NAME:AXIS=SYMBOL:MIN..MAX" in found.value.remedy
    export(OneIsOther(), tmp_path / "net.onnx", inputs=["x:fp32:2x4"], dynamic=["x:0=n:2..8"])
