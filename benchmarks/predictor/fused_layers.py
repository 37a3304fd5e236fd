"""Predict the fused layers TensorRT for RTX makes of five networks, and check that their flop add up to the graphs'.

    python benchmarks/predictor/fused_layers.py

Random weights, batch 8 (BERT-base: sequence length 128), compiled for compute capability 8.9 without a GPU. Writes
``fused_layers.json`` and the table of the README.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from random_models import Bert, Vit, convnext_t, mobilenet_v2
from readme import replace_table

import trtopt
from trtopt.analysis.compiled import CompiledLevel, compile_level
from trtopt.events import ignore
from trtopt.graph import edit
from trtopt.hardware.spec import find_gpu
from trtopt.report.schema.analysis import WITHOUT_KERNEL
from trtopt.roofline.layer import layer_time
from trtopt.roofline.node_work import GraphTypes, work_of_node
from trtopt.source.onnx_file import load
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "calibration"))

from resnet50 import resnet50  # noqa: E402  (a neighbour's module: its folder is on the path only now)

BATCH, LENGTH, VOCABULARY = 8, 128, 30522
MACHINE = "2-core x86-64, no GPU"
GPUS = ("L4", "RTX-4090")
CASES = (
    ("ResNet-50", "fp16"),
    ("ResNet-50", "int8"),
    ("MobileNetV2", "fp16"),
    ("ViT-B/16", "fp16"),
    ("BERT-base", "fp16"),
    ("ConvNeXt-T", "fp16"),
)
TOLERANCE = 0.01


def write_models(folder: Path) -> dict[str, Path]:
    """The five networks as ONNX files, by name."""
    torch.manual_seed(0)
    image = (torch.randn(BATCH, 3, 224, 224),)
    tokens = (torch.randint(0, VOCABULARY, (BATCH, LENGTH)), torch.ones(BATCH, LENGTH, dtype=torch.int64))
    files = {"ResNet-50": folder / "resnet50.onnx"}
    resnet50(files["ResNet-50"], batch=BATCH)
    modules = {
        "MobileNetV2": (mobilenet_v2, image),
        "ViT-B/16": (Vit, image),
        "BERT-base": (Bert, tokens),
        "ConvNeXt-T": (convnext_t, image),
    }
    for name, (make, inputs) in modules.items():
        files[name] = folder / f"{make.__name__}.onnx"
        trtopt.export(make().eval(), files[name], example_inputs=inputs)
    return files


def graph_flop(level: CompiledLevel) -> int:
    """Flop of the graph that was compiled, node by node."""
    works = (work_of_node(node, level.shapes, GraphTypes()) for node in edit.all_nodes(level.model.graph))
    return sum(work.flop for work in works if work is not None)


def measure(path: Path, precision: str) -> dict[str, Any]:
    """Compile a model once, and predict its layers on each GPU."""
    started = time.perf_counter()
    level = compile_level(load(path), find_gpu(GPUS[0]), Precision(precision), {}, Clock(ignore))
    costed = [layer.work for layer in level.layers if layer.work is not None]
    expected = graph_flop(level)
    found = sum(work.flop for work in costed)
    predicted = {name: round(sum(layer_time(work, find_gpu(name)).predicted_us for work in costed), 1) for name in GPUS}
    return {
        "layers": sum(layer.op not in WITHOUT_KERNEL for layer in level.layers),
        "without_cost": [layer.name for layer in level.layers if layer.work is None],
        "graph_flop": expected,
        "layer_flop": found,
        "flop_ratio": found / expected,
        "megabytes": round(sum(work.bytes for work in costed) / 1e6, 1),
        "predicted_us": predicted,
        "seconds": round(time.perf_counter() - started, 1),
    }


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """One line per case."""
    lines = [
        "| network, batch 8 | layers | without cost | flop / graph's | GFLOP | MB | "
        + " | ".join(f"{gpu}, us" for gpu in GPUS)
        + " |",
        "|---" * (6 + len(GPUS)) + "|",
    ]
    for name, row in rows.items():
        times = " | ".join(f"{row['predicted_us'][gpu]:.0f}" for gpu in GPUS)
        lines.append(
            f"| {name} | {row['layers']} | {len(row['without_cost'])} | {row['flop_ratio']:.6f} | "
            f"{row['layer_flop'] / 1e9:.2f} | {row['megabytes']:.1f} | {times} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = write_models(Path(folder))
        rows = {f"{name} {precision}": measure(files[name], precision) for name, precision in CASES}
    print("\n".join(table(rows)))
    replace_table("fused", table(rows))
    versions = {item: metadata.version(item) for item in ("trtopt", "onnx", "onnx-ir", "tensorrt-rtx", "torch")}
    results = {
        "machine": MACHINE,
        "date": options.date,
        "python": platform.python_version(),
        "versions": versions,
        "cases": rows,
    }
    (HERE / "fused_layers.json").write_text(json.dumps(results, indent=2) + "\n")
    wrong = [n for n, row in rows.items() if row["without_cost"] or abs(row["flop_ratio"] - 1) > TOLERANCE]
    if wrong:
        raise SystemExit(f"layers without a cost, or flop off by more than {TOLERANCE:.0%}: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
