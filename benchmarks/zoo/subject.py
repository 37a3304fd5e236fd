"""What a network of the zoo is: a module, its inputs and dynamic axes; random weights that keep activations sane."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torchvision_ops  # noqa: F401
from torch import nn

BATCH = 8
SEED = 0


@dataclass
class Subject:
    """A network as it is exported.

    Attributes:
        module: The network, or a thin module around it.
        inputs: Example inputs by name, in the order of ``call``.
        axes: Dynamic axes: input -> axis -> name.
        call: ``call(module, *inputs)``, what is exported.
        deploy: Called last, on the module with its final weights: what its library does before deployment.
    """

    module: nn.Module
    inputs: Mapping[str, torch.Tensor]
    axes: Mapping[str, Mapping[int, str]]
    call: Callable[..., Any] = lambda module, *inputs: module(*inputs)
    deploy: Callable[[nn.Module], nn.Module] = lambda module: module


NETWORKS: dict[str, Callable[[], Subject]] = {}


def network(make: Callable[[], Subject]) -> Callable[[], Subject]:
    """Put a function under its name into the zoo."""
    NETWORKS[make.__name__] = make
    return make


def batched(inputs: Mapping[str, torch.Tensor], **more: Mapping[int, str]) -> dict[str, dict[int, str]]:
    """The first axis of every input is the batch; ``more`` adds axes by input."""
    return {name: {0: "batch", **more.get(name, {})} for name in inputs}


def image(size: int, batch: int = BATCH) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def tokens(vocabulary: int, length: int, batch: int = BATCH) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


class Exported(nn.Module):
    """``call`` of a subject as a module, which is what exporters take."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs: torch.Tensor) -> Any:
        found = self.call(self.module, *inputs)
        return found[0] if isinstance(found, (tuple, list)) and len(found) == 1 else found


_NOTHING = 1e-8
"""Standard deviation up to which weights count as zero: SAM's start at 1e-10, which no FP16 holds."""


def _fill(module: nn.Module) -> None:
    """Make parameters that libraries start at one constant (biases, norms, layer scales) differ, as training does."""
    for name, value in module.named_parameters():
        if value.numel() < 2 or not value.is_floating_point() or float(value.std()) > _NOTHING:
            continue
        first = float(value.flatten()[0]) if float(value.std()) == 0 else 0.0
        noise = torch.randn_like(value)
        if first >= 0.5:  # the scale of a normalization
            value.data = 1 + 0.1 * noise
        elif first and abs(first) < 0.5:  # a layer scale, 1e-6 for some
            value.data = 0.2 + 0.02 * noise
        elif value.ndim < 2 or "bias" in name or "table" in name:
            value.data = 0.05 * noise
        else:  # started at zero, as the last layers of diffusion networks and adapters
            value.data = noise / max(value[0].numel(), 1) ** 0.5


@torch.no_grad()
def settle(exported: Exported, inputs: tuple[torch.Tensor, ...]) -> None:
    """Scale weights so that each product gives standard deviation 1; take BatchNorm's statistics from inputs."""
    _fill(exported)
    norms = [item for item in exported.modules() if isinstance(item, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        if norm.bias is not None:  # at 0, random networks are chaotic: rounding grows with every layer
            norm.bias.data += 1
        norm.train()
        norm.momentum = None
        norm.reset_running_stats()
    embedded = {item.weight.data_ptr() for item in exported.modules() if isinstance(item, nn.Embedding)}
    done: set[int] = set()

    def scale(item: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        weight = item.weight
        spread = float(output.std()) if output.numel() > 1 else 1.0
        if weight.data_ptr() in done or weight.data_ptr() in embedded or not spread > 1e-8:
            return output
        done.add(weight.data_ptr())
        weight.data = weight.data / spread
        if item.bias is None:
            return output / spread
        bias = item.bias.view(_like(item, output))
        return (output - bias) / spread + bias

    products = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
    hooks = [item.register_forward_hook(scale) for item in exported.modules() if type(item) in products]
    exported(*inputs)
    for hook in hooks:
        hook.remove()
    exported.eval()


def _like(item: nn.Module, output: torch.Tensor) -> list[int]:
    """The shape in which a bias adds to an output."""
    if isinstance(item, nn.Linear):
        return [1] * (output.ndim - 1) + [-1]
    return [1, -1] + [1] * (output.ndim - 2)


def names() -> list[str]:
    """All networks of the zoo."""
    for each in ("vision", "text", "dense", "other"):
        importlib.import_module(f"networks_{each}")
    return list(NETWORKS)


def made(name: str) -> tuple[Exported, Subject]:
    """A network of the zoo with its final weights, in eval mode."""
    names()
    torch.manual_seed(SEED)
    subject = NETWORKS[name]()
    subject.module.eval()
    exported = Exported(subject.module, subject.call)
    settle(exported, tuple(subject.inputs.values()))
    exported.module = subject.deploy(exported.module)
    return exported.eval().requires_grad_(False), subject
