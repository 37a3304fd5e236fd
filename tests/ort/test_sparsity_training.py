"""Weights that ``trtopt.sparsity.prepare`` masked are 2:4 whatever happens to the module until ``finalize``."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("onnxscript", reason="exporting needs onnxscript")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

import trtopt  # noqa: E402
from trtopt.errors import InvalidModelError, UsageError  # noqa: E402
from trtopt.sparsity import finalize, prepare  # noqa: E402
from trtopt.sparsity.layers import is_sparse  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: more threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """x [N, T, 8] -> [N, 8]: products of two and three axes, and convolutions with and without groups."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.grouped = nn.Conv1d(8, 16, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm1d(16)
        self.image = nn.Conv2d(4, 8, 3)
        self.volume = nn.Conv3d(8, 8, (2, 1, 1))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.grouped(self.encoder(x).transpose(1, 2))))
        y = self.image(y.unflatten(1, (4, 4)))
        y = self.volume(y[:, :, :, None].expand(-1, -1, -1, 2, -1))
        return self.head(y.mean((2, 3, 4)))


WEIGHTS = {
    *("encoder.self_attn.in_proj_weight", "encoder.self_attn.out_proj.weight", "encoder.linear1.weight"),
    *("encoder.linear2.weight", "grouped.weight", "image.weight", "volume.weight", "head.weight"),
}


def weight_of(module: nn.Module, name: str) -> np.ndarray:
    path, _, tensor = name.rpartition(".")
    return getattr(module.get_submodule(path), tensor).detach().double().numpy()


def zeros_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: weight_of(module, name) == 0 for name in WEIGHTS}


def assert_masked(module: nn.Module, zeros: dict[str, np.ndarray]) -> None:
    for name, zero in zeros.items():
        weight = weight_of(module, name)
        assert is_sparse(weight, 1), name
        np.testing.assert_array_equal(weight == 0, zero, err_msg=name)


def output(module: nn.Module, x: torch.Tensor) -> np.ndarray:
    module.eval()
    with torch.no_grad():
        found = module(x).numpy()
    module.train()
    return found


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(4, 5, 8)).square().mean().backward()
        optimizer.step()


def test_the_two_largest_of_four_input_channels_stay_as_they_are() -> None:
    layer = nn.Conv2d(8, 2, 2, groups=2)
    dense = layer.weight.detach().clone()
    prepared = prepare(layer)
    weight = layer.weight.detach()
    _, best = dense.abs().topk(2, dim=1)
    wanted = torch.zeros_like(dense).scatter(1, best, dense.gather(1, best))
    assert torch.equal(weight, wanted)
    assert torch.equal(layer.parametrizations.weight.original, wanted), (
        "norms over parameters see what is computed with"
    )
    assert prepared.refused == {}
    assert prepared.masked == {"weight": pytest.approx(float(wanted.abs().sum() / dense.abs().sum()), rel=1e-6)}


def test_a_weight_that_is_2_4_already_keeps_its_zeros() -> None:
    layer = nn.Linear(8, 64)
    with torch.no_grad():
        layer.weight *= torch.tensor([0.0, 1, 0, 1, 1, 1, 0, 0])
    before = layer.weight.detach().clone()
    assert prepare(layer).masked == {"weight": 1.0}
    train(nn.Sequential(layer), torch.optim.SGD(layer.parameters(), lr=0.1))
    finalize(layer)
    assert not torch.equal(layer.weight, before)
    assert torch.equal(layer.weight == 0, before == 0)


def muon(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Its updates are orthogonalized: not zero where the gradient is."""
    return torch.optim.Muon([parameter for parameter in parameters if parameter.ndim == 2], lr=0.1, weight_decay=0.1)


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, amsgrad=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9, centered=True),
    "Muon": muon,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_masks_survive_an_optimizer_that_has_momentum_from_dense_training(
    make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    net = Net()
    optimizer = make(net.parameters())
    train(net, optimizer)
    assert set(prepare(net).masked) == WEIGHTS
    zeros, before = zeros_of(net), weight_of(net, "head.weight")
    train(net, optimizer)
    hidden = net.head.parametrizations.weight.original.detach().numpy()
    assert hidden[zeros["head.weight"]].any(), "the optimizer wrote where the mask is"
    assert_masked(net, zeros)
    x = torch.randn(3, 5, 8)
    expected = output(net, x)
    finalize(net)
    assert_masked(net, zeros)
    assert np.abs(weight_of(net, "head.weight") - before).max() > 1e-3
    np.testing.assert_array_equal(output(net, x), expected)
    train(net, optimizer)
    assert not is_sparse(weight_of(net, "head.weight"), 1), "a plain module, trained by the same optimizer"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_masks_survive_mixed_precision(dtype: torch.dtype) -> None:
    net = Net()
    prepare(net)
    zeros, before = zeros_of(net), weight_of(net, "head.weight")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            scores = net(torch.randn(4, 5, 8))
        assert scores.dtype == dtype
        scaler.scale(scores.float().square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    finalize(net)
    assert_masked(net, zeros)
    assert np.abs(weight_of(net, "head.weight") - before).max() > 1e-3


def test_the_masks_survive_a_change_of_type() -> None:
    net = Net()
    prepare(net)
    zeros = zeros_of(net)
    net.to(torch.bfloat16)
    finalize(net)
    assert net.head.weight.dtype == torch.bfloat16
    assert_masked(net, zeros)


def test_a_state_dict_goes_round_through_prepared_and_plain_modules(tmp_path: Path) -> None:
    net = Net()
    prepare(net)
    zeros = zeros_of(net)
    train(net, torch.optim.Adam(net.parameters(), lr=0.01))
    torch.save(net.state_dict(), tmp_path / "prepared.pt")
    other = Net()
    prepare(other)
    assert any((zeros_of(other)[name] != zero).any() for name, zero in zeros.items())
    other.load_state_dict(torch.load(tmp_path / "prepared.pt", weights_only=True))
    assert_masked(other, zeros)
    x = torch.randn(3, 5, 8)
    np.testing.assert_array_equal(output(other, x), output(net, x))
    train(other, torch.optim.Adam(other.parameters(), lr=0.01))
    assert_masked(other, zeros)
    finalize(other)
    plain = Net()
    plain.load_state_dict(other.state_dict())
    assert_masked(plain, zeros)
    np.testing.assert_array_equal(output(plain, x), output(other, x))
    with pytest.raises(RuntimeError, match=r"parametrizations\.weight\.original"):
        net.load_state_dict(plain.state_dict())


def test_a_copy_can_be_finalized_by_itself() -> None:
    net = Net()
    prepare(net)
    zeros = zeros_of(net)
    best = copy.deepcopy(net)
    finalize(best)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    finalize(net)
    assert_masked(best, zeros)
    assert_masked(net, zeros)
    assert type(net.head) is type(best.head) is nn.Linear
    assert not np.array_equal(weight_of(net, "head.weight"), weight_of(best, "head.weight"))


def test_a_compiled_module_is_prepared_and_finalized() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    assert set(prepare(compiled).masked) == {f"_orig_mod.{name}" for name in WEIGHTS}
    zeros = zeros_of(net)
    train(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1, weight_decay=0.1))
    finalize(compiled)
    assert_masked(net, zeros)
    assert "parametrizations" not in " ".join(net.state_dict())


def test_averaged_weights_with_averaged_buffers_have_the_mask() -> None:
    net = Net()
    prepare(net)
    zeros = zeros_of(net)
    average = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        train(net, optimizer, steps=1)
        average.update_parameters(net)
    finalize(average)
    assert_masked(average.module, zeros)
    assert_masked(net, zeros)


def products(path: Path) -> dict[str, tuple[np.ndarray, int]]:
    """The weights that Conv, Gemm and MatMul of an ONNX model read, with the axis they sum over."""
    graph = onnx.load(path).graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    found = {}
    for node in graph.node:
        if node.op_type in ("Conv", "Gemm", "MatMul") and node.input[1] in constants:
            transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
            found[node.input[1]] = (constants[node.input[1]], int(node.op_type == "Conv" or transposed))
    return found


@pytest.mark.parametrize(
    ("by", "finalized"),
    [
        ("trtopt", True),
        pytest.param("trtopt", False, marks=pytest.mark.long),
        pytest.param("torch", True, marks=pytest.mark.long),
    ],
)
def test_the_exported_weights_are_2_4_along_the_axis_that_is_summed(tmp_path: Path, by: str, finalized: bool) -> None:
    net, x, path = Net(), torch.randn(2, 5, 8), tmp_path / "net.onnx"
    prepare(net)
    train(net, torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1))
    if finalized:
        finalize(net)
    if by == "trtopt":
        trtopt.export(net, path, example_inputs=(x,))
    else:
        torch.onnx.export(net.eval(), (x,), path, dynamo=True, verbose=False)
    found = products(path)
    assert len(found) == len(WEIGHTS)
    assert {axis for weight, axis in found.values() if weight.ndim == 2} == {0, 1}, "MatMul and Gemm"
    for name, (weight, axis) in found.items():
        assert is_sparse(weight, axis), name
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], output(net, x), atol=1e-5)


def uninitialized() -> nn.Module:
    return nn.LazyLinear(8)


def integers() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    return layer


def infinite() -> nn.Module:
    layer = nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight[0, 0] = float("inf")
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: nn.Linear(10, 8), "it sums over 10 channels: no multiple of 4"),
        (lambda: nn.Conv2d(3, 8, 3), "it sums over 3 channels: no multiple of 4"),
        (lambda: nn.Conv2d(8, 8, 3, groups=8), "each of its 8 groups reads 1 channels: no multiple of 4"),
        (lambda: nn.ConvTranspose2d(8, 8, 3), "ConvTranspose2d is none of Linear"),
        (lambda: nn.LSTM(8, 8), "LSTM is none of Linear"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), "it is parametrized already"),
        (lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), "Linear does not multiply by it"),
        (lambda: nn.Linear(8, 8, device="meta"), "it has no values yet"),
        (uninitialized, "it has no values yet"),
        (integers, "it holds torch.int8"),
        (infinite, "it holds values that are not finite"),
    ],
)
def test_what_cannot_be_2_4_is_refused_with_the_reason(layer: Callable[[], nn.Module], reason: str) -> None:
    refused = layer()
    kind = type(refused)
    prepared = prepare(nn.Sequential(nn.Linear(8, 8), refused))
    assert set(prepared.masked) == {"0.weight"}
    assert prepared.refused and all(name.startswith("1.") for name in prepared.refused)
    assert all(text.startswith(reason) for text in prepared.refused.values()), prepared.refused
    assert type(refused) is kind, "not touched"


def tied(*layers: nn.Module) -> nn.Sequential:
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    return nn.Sequential(*layers)


def test_layers_that_share_a_weight_share_its_mask() -> None:
    net = tied(nn.Linear(8, 8), nn.Linear(8, 8))
    assert set(prepare(net).masked) == {"0.weight", "1.weight"}
    train(net, torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.1))
    assert torch.equal(net[0].weight, net[1].weight)
    finalize(net)
    assert net[0].weight is net[1].weight
    assert is_sparse(weight_of(net, "0.weight"), 1)


def test_a_weight_shared_with_a_layer_that_is_not_masked_stays_dense() -> None:
    net = tied(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    net.append(nn.Linear(8, 8))
    prepared = prepare(net)
    assert set(prepared.masked) == {"3.weight"}
    assert prepared.refused["1.weight"].startswith("it is shared with 0.weight: Embedding is none of Linear")
    pair = tied(nn.Linear(8, 8), nn.Linear(8, 8)).append(nn.Linear(8, 8))
    prepared = prepare(pair, layers=lambda name, layer: name != "1")
    assert set(prepared.masked) == {"2.weight"}
    assert prepared.refused["0.weight"] == "it is shared with 1.weight: that layer was not chosen"


def test_layers_are_chosen_by_name_or_by_a_function() -> None:
    assert set(prepare(Net(), layers=["head", "image"]).masked) == {"head.weight", "image.weight"}
    prepared = prepare(Net(), layers=lambda name, layer: isinstance(layer, nn.Linear) and name != "head")
    assert set(prepared.masked) == {
        *("encoder.self_attn.out_proj.weight", "encoder.linear1.weight", "encoder.linear2.weight")
    }


def prepared_net() -> Net:
    net = Net()
    prepare(net)
    return net


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: prepare("net"), "Not a torch.nn.Module: str"),
        (lambda: finalize("net"), "Not a torch.nn.Module: str"),
        (lambda: prepare(nn.ReLU()), "has no weight that can be 2:4"),
        (lambda: prepare(nn.Linear(6, 8)), "it sums over 6 channels"),
        (lambda: prepare(Net(), layers=["head", "tail"]), "has no layer tail"),
        (lambda: prepare(Net(), layers=["head", "norm"]), "No weight that can be 2:4 in norm"),
        (lambda: prepare(Net(), layers=3), "Not a choice of layers: 3"),
        (lambda: prepare(prepared_net()), "is prepared already"),
        (lambda: prepare(prepared_net().head), "is prepared already"),
        (lambda: prepare(nn.Sequential(prepared_net())), "is prepared already"),
        (lambda: finalize(Net()), "was not prepared"),
        (lambda: finalize(prepared_net().head), "was not prepared"),
    ],
)
def test_wrong_use_is_a_usage_error_with_a_remedy(call: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert said in str(caught.value) and caught.value.remedy


def test_a_module_can_be_prepared_again_after_finalize() -> None:
    net = prepared_net()
    finalize(net)
    with pytest.raises(UsageError):
        finalize(net)
    zeros = zeros_of(net)
    prepare(net)
    assert_masked(net, zeros)


def removed(net: Net) -> None:
    parametrize.remove_parametrizations(net.head, "weight")
    train(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))


def replaced(net: Net) -> None:
    net.head = nn.Linear(8, 8)


def dropped(net: Net) -> None:
    net.head = nn.Identity()


def overwritten(net: Net) -> None:
    net.head.parametrizations.weight[0].mask.fill_(1)
    net.head.parametrizations.weight.original.data.fill_(1.0)


@pytest.mark.parametrize("lose", [removed, replaced, dropped, overwritten])
def test_a_lost_mask_is_an_error_and_nothing_is_changed(lose: Callable[[Net], None]) -> None:
    net = prepared_net()
    lose(net)
    with pytest.raises(InvalidModelError, match="1 of 8 weights") as caught:
        finalize(net)
    assert caught.value.where == "head.weight" and caught.value.remedy
    assert parametrize.is_parametrized(net.image, "weight")


def test_the_digits_example_writes_into_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    digits = importlib.import_module("digits")
    monkeypatch.setattr(digits, "fit", lambda *_, **__: None)
    monkeypatch.setattr(trtopt, "export", lambda module, path, **_: path.touch())
    digits.train(tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"digits.onnx", "calib.npz", "eval.npz", "test.npz"}


@pytest.mark.long
def test_the_digits_network_is_trained_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    share = importlib.import_module("sparse_digits").main(tmp_path / "new")
    assert share["dense"] > 0.97
    assert share["trained back"] >= share["dense"] - 0.005
    found = products(tmp_path / "new" / "sparse.onnx")
    dense = [weight.shape for weight, axis in found.values() if not is_sparse(weight, axis)]
    assert len(found) == 4 and dense == [(32, 1, 3, 3)], "all but the convolution of one channel"
