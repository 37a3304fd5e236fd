"""MiniLM pruned by Model Optimizer. Run in a virtual environment that has it, and not trtopt.

    python peers.py magnitude|sparsegpt|sparsegpt-weights MODEL.onnx SAMPLES OUT.onnx FIGURES.json

SAMPLES is a folder of feeds. Model Optimizer 0.47 takes SparseGPT's masks alone: the
weights that SparseGPT fitted to them are computed and dropped, and the dense ones stay under the mask
(``sparsity/weight_sparsity/sparsegpt.py``: ``create_sgpt_mask`` returns a mask). ``sparsegpt-weights`` puts them in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import modelopt.torch.sparsity as sparsity
import numpy as np
import onnx
import onnxruntime
import torch
from minilm import inputs_of, module_of, products, write_weights
from modelopt.torch.sparsity.weight_sparsity import sparsegpt
from usage import measured

LARGEST_DIFFERENCE = 1e-4
"""Between the outputs of the module and of the file, which are of the order of 1."""


def feeds_of(folder: str) -> list[dict[str, np.ndarray]]:
    feeds = []
    for path in sorted(Path(folder).iterdir()):
        with np.load(path) as arrays:
            feeds.append({name: arrays[name] for name in arrays})
    return feeds


def difference(module: Any, model: str, feed: dict[str, np.ndarray]) -> float:
    """The largest between the outputs of a module and of an ONNX file."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    with torch.no_grad():
        return float(np.abs(module(*inputs_of(feed)).numpy() - session.run(None, feed)[0]).max())


def prune(module: Any, method: str, feeds: list[dict[str, np.ndarray]]) -> None:
    """Prune with the tool's defaults, in place."""
    config: dict[str, Any] = {"verbose": False}
    if method != "magnitude":
        config |= {"data_loader": feeds, "collect_func": inputs_of}
    mode = "sparse_magnitude" if method == "magnitude" else "sparsegpt"
    fitted = keep_fitted() if method == "sparsegpt-weights" else []
    sparsity.sparsify(module, mode, config=config)
    sparsity.export(module)
    if fitted:
        layers = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
        for layer, weight in zip(layers, fitted, strict=True):
            layer.weight.data = weight


def keep_fitted() -> list[torch.Tensor]:
    """A list that the weights which SparseGPT fits are put in, layer by layer, in the order of the module."""
    kept: list[torch.Tensor] = []
    original = sparsegpt.prepare

    def prepare(*arguments: Any) -> Any:
        found = original(*arguments)
        kept.append(found[0])  # a copy, which its caller fits in place
        return found

    sparsegpt.prepare = prepare
    return kept


def main(method: str, source: str, samples: str, out: str, figures: str) -> None:
    model, feeds = onnx.load(source), feeds_of(samples)
    module = module_of(model)
    found: dict[str, Any] = measured(lambda: prune(module, method, feeds))
    dense = module_of(model)
    write_weights(model, module)
    onnx.save(model, out)
    apart = {
        name: difference(*pair, feeds[0]) for name, pair in {"dense": (dense, source), "pruned": (module, out)}.items()
    }
    if max(apart.values()) > LARGEST_DIFFERENCE:
        raise SystemExit(f"the module and the file are apart: {apart}")
    found["differences"] = {name: float(f"{value:.1e}") for name, value in apart.items()}
    found["layers_fitted"] = sum(
        is_fitted(module.get_submodule(path), dense.get_submodule(path)) for path, _ in products(model)
    )
    Path(figures).write_text(json.dumps(found))


def is_fitted(pruned: Any, dense: Any) -> bool:
    """Whether weights that stay differ from those they were."""
    stays = pruned.weight != 0
    return bool((pruned.weight[stays] != dense.weight[stays]).any())


if __name__ == "__main__":
    main(*sys.argv[1:])
