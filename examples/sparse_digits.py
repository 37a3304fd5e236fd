"""The network of ``digits.py`` with 2:4 weights, trained back to its accuracy.

``sparse_digits.py FOLDER`` trains it, masks all its weights that can be 2:4, trains it again for a few epochs, exports
``sparse.onnx``, and prints the accuracy on images that no training saw.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from digits import data, fit, network

if TYPE_CHECKING:
    from torch import nn


def accuracy(module: nn.Module, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of the images that the module, in evaluation mode, knows: 0..1."""
    import torch

    module.eval()
    with torch.no_grad():
        found = module(torch.from_numpy(images)).argmax(1)
    module.train()
    return float((found.numpy() == labels).mean())


def main(folder: Path) -> dict[str, float]:
    """Train, prune, train again, export into ``folder``; the accuracy after each step."""
    import torch

    import trtopt

    folder.mkdir(parents=True, exist_ok=True)
    images, labels, parts = data()
    learn, test = ((images[parts[name]], labels[parts[name]]) for name in ("learn", "test"))
    module = network()
    fit(module, *learn, epochs=8, learning_rate=2e-3)
    share = {"dense": accuracy(module, *test)}

    prepared = trtopt.sparsity.prepare(module)
    for name, kept in prepared.masked.items():
        print(f"{name} is 2:4 and keeps {kept:.0%} of its magnitude")
    for name, reason in prepared.refused.items():
        print(f"{name} stays dense: {reason}")
    share["pruned"] = accuracy(module, *test)
    fit(module, *learn, epochs=4, learning_rate=1e-3)
    trtopt.sparsity.finalize(module)
    share["trained back"] = accuracy(module, *test)

    example = (torch.from_numpy(images[:2]),)
    trtopt.export(module, folder / "sparse.onnx", example_inputs=example, dynamic=("input:0=batch:1..64",))
    for name, value in share.items():
        print(f"{name:<14}{value:8.2%} of {len(test[0])} test images")
    return share


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: sparse_digits.py FOLDER")
    main(Path(sys.argv[1]))
