"""A small convolutional network on scikit-learn's digits: 1797 real images of 8x8 pixels.

``digits.py train FOLDER`` trains it, exports ``digits.onnx`` and writes the samples: ``calib.npz`` (training images),
``eval.npz`` (what ``trtopt build`` judges the engine by) and ``test.npz`` (kept for the summary).
``digits.py summary FOLDER`` prints what came of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import nn


def data() -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """The images [1797, 1, 8, 8], their labels, and the indices of those to ``learn``, ``eval`` and ``test`` on."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[:, None] / 16.0).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    parts = {"learn": order[:997], "eval": order[997:1397], "test": order[1397:]}
    return images, digits.target.astype(np.int64), parts


def network() -> nn.Module:
    """The network, untrained."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 10)),
    )


def fit(module: nn.Module, images: np.ndarray, labels: np.ndarray, epochs: int, learning_rate: float) -> None:
    """Train the module on all of the images."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate)
    for epoch in range(epochs):
        total = 0.0
        for batch in np.array_split(np.random.default_rng(epoch).permutation(len(images)), 16):
            scores = module(torch.from_numpy(images[batch]))
            loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels[batch]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() / 16
        print(f"epoch {epoch + 1:2}  loss {total:.4f}")


def train(folder: Path) -> None:
    """Train, export and write the samples into ``folder``."""
    import torch

    import trtopt

    folder.mkdir(parents=True, exist_ok=True)
    images, labels, parts = data()
    module = network()
    fit(module, images[parts["learn"]], labels[parts["learn"]], epochs=8, learning_rate=2e-3)
    example = (torch.from_numpy(images[:2]),)
    trtopt.export(module, folder / "digits.onnx", example_inputs=example, dynamic=("input:0=batch:1..64",))
    np.savez(folder / "calib.npz", input=images[parts["learn"][:256]])
    for name in ("eval", "test"):
        np.savez(folder / f"{name}.npz", input=images[parts[name]], __labels__=labels[parts[name]])


def summary(folder: Path) -> None:
    """Print the engine's layers and the accuracy that the report and ONNX Runtime give."""
    import onnxruntime

    report = json.loads((folder / "report.json").read_text())
    engine, metric = report["engine"], report["accuracy"]["metric"]
    print(f"layers of {engine['path']}:")
    for layer in engine["layers"]:
        types = "/".join(sorted({tensor["dtype"] for tensor in layer["inputs"]})) or "-"
        print(f"  {layer['type']:<12} {types:<12} {', '.join(layer['onnx_nodes']) or layer['name']}")

    samples = np.load(folder / "test.npz")
    share = {}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for name in ("digits.onnx", "digits.int8.onnx"):
        session = onnxruntime.InferenceSession(folder / name, options, providers=["CPUExecutionProvider"])
        scores = session.run(None, {"input": samples["input"]})[0]
        share[name] = float((scores.argmax(1) == samples["__labels__"]).mean())
    print(f"{'accuracy':<34}{'FP32':>8}{'INT8':>8}")
    print(f"{'evaluation images, by trtopt':<34}{metric['baseline']:8.2%}{metric['optimized']:8.2%}")
    print(f"{'test images, by ONNX Runtime alone':<34}{share['digits.onnx']:8.2%}{share['digits.int8.onnx']:8.2%}")


if __name__ == "__main__":
    commands = {"train": train, "summary": summary}
    if len(sys.argv) != 3 or sys.argv[1] not in commands:
        sys.exit("usage: digits.py train|summary FOLDER")
    commands[sys.argv[1]](Path(sys.argv[2]))
