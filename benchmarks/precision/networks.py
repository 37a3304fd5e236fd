"""The networks whose precisions ``run.py`` compares: random seeded weights, batch 8, ONNX of opset 17.

ResNet-50, ViT-B, MobileNetV2, BERT and ConvNeXt-T are those of ``benchmarks/recipes``; the UNet is here.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

RECIPES = Path(__file__).parent.parent / "recipes" / "networks.py"


def _recipes() -> Any:
    """``benchmarks/recipes/networks.py``; not imported by name, since this file has the same."""
    spec = importlib.util.spec_from_file_location("recipes_networks", RECIPES)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{RECIPES} is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class TwoConvs(nn.Sequential):
    """Batch norm folded, as in exports."""

    def __init__(self, c_in: int, c_out: int) -> None:
        first, second = nn.Conv2d(c_in, c_out, 3, padding=1), nn.Conv2d(c_out, c_out, 3, padding=1)
        super().__init__(first, nn.ReLU(), second, nn.ReLU())


class UNet(nn.Module):
    """Ronneberger et al. 2015, figure 1, padded convolutions: input [N, 3, H, W], output [N, 21, H, W]."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512, 1024), classes: int = 21) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.first, self.pool = TwoConvs(3, widths[0]), nn.MaxPool2d(2)
        self.down = nn.ModuleList(TwoConvs(narrow, wide) for narrow, wide in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for narrow, wide in reversed(pairs))
        self.merge = nn.ModuleList(TwoConvs(2 * narrow, narrow) for narrow, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = [self.first(x)]
        for block in self.down:
            maps.append(block(self.pool(maps[-1])))
        x = maps.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat((maps.pop(), up(x)), 1))
        return self.head(x)


NAMES = ("ResNet-50", "ViT-B/16", "MobileNetV2", "BERT, 4 layers", "ConvNeXt-T", "UNet")


def file_name(name: str) -> str:
    """The file a network is written to."""
    return str(_recipes().file_name(name))


def write(name: str, folder: Path, seed: int = 0, *, free: bool = False) -> Path:
    """Write one network as ONNX into ``folder``; with ``free``, its batch may be of any size."""
    recipes = _recipes()
    if name != "UNet":
        return Path(recipes.write(name, folder, seed, free=free))
    torch.manual_seed(seed)
    network = UNet().eval()
    network.apply(recipes._keep_scale)
    path = folder / file_name(name)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names: dict[str, Any] = {"input_names": ["input0"], "output_names": ["output"]}
        if free:
            names["dynamic_axes"] = {"input0": {0: "batch"}, "output": {0: "batch"}}
        image = torch.zeros(recipes.IMAGE)
        torch.onnx.export(network, (image,), str(path), opset_version=17, dynamo=False, **names)
    return path


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
