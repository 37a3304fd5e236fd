"""Weights in narrow formats: what they cost MiniLM in Spearman and a decoder in tokens, and the bytes they save.

    python benchmarks/weights/run.py SHARED_MODELS MINILM.onnx FOLDER DECODER [--format NAME...]

SHARED_MODELS holds ``evaluate.py`` (it needs ``tokenizers``), MINILM.onnx is what ``minilm_l6_sts/assemble.py`` there
writes, and FOLDER holds a DECODER that ``benchmarks/decoders/export.py`` wrote. A format is one of ``--weights``,
``int4/32`` with its block; the decoder is built with INT4. Rows that FOLDER has are kept; all go to ``results.json``
and are printed as a table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import trtopt
from trtopt.accuracy.emulation import fp32_emulation
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

HERE = Path(__file__).parent
FORMATS = ("int4", "int4/32", "int8", "nvfp4")
NAME = "minilm_l6_sts"
SHAPES = {"min_shapes": (1, 4), "opt_shapes": (1, 32), "max_shapes": (8, 128)}


def module(path: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def spearman(evaluate: ModuleType, model: Path) -> float:
    """MiniLM's on the 1500 pairs, as an engine rounds the graph; weights without a kernel of ONNX Runtime (FP4) are
    dequantized before."""
    with OrtSession(fp32_emulation(load(model).model)) as session:
        return round(float(evaluate.metric(NAME, session.run)["spearman"]), 4)


def minilm(evaluate: ModuleType, model: Path, folder: Path, form: str) -> dict[str, Any]:
    """MiniLM with all weights of its linear layers in one format, fitted to the calibration sentences."""
    if form == "fp32":
        return {"spearman": spearman(evaluate, model)}
    calib, saved, (weights, _, block) = folder / "calib", folder / "minilm.stored.onnx", form.partition("/")
    evaluate.write_calib(NAME, str(calib))
    inputs = [str(value.name) for value in load(model).model.graph.inputs]
    report = trtopt.optimize(
        model,
        precision="fp16",
        weights=weights,
        weight_block=block or None,
        keep_all_weights=True,
        allow_accuracy_loss=True,
        recipes="none",
        gpu="RTX 5090" if weights == "nvfp4" else "L4",
        calib=str(calib),
        output=saved,
        cache_dir=folder / "cache",
        **{name: dict.fromkeys(inputs, shape) for name, shape in SHAPES.items()},
    )
    if report.weights is None:
        raise ValueError(f"no weights in {form}")
    share = round(report.weights.bytes / report.weights.bytes_before, 4)
    return {"spearman": spearman(evaluate, saved), "weights": len(report.weights.nodes), "bytes_of_fp16": share}


def once(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the file holds, made where it is not there."""
    if not file.exists():
        file.write_text(json.dumps(make()))
    return dict(json.loads(file.read_text()))


def main() -> None:
    """All rows, as a file and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("models", "minilm", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("decoder")
    parser.add_argument("--format", nargs="+", default=FORMATS)
    options = parser.parse_args()
    evaluate, decoders = module(options.models / "evaluate.py"), module(HERE.parent / "decoders" / "run.py")
    rows: dict[str, dict[str, Any]] = {}
    step = "top-1 | predicted | bytes of a step (weights, caches)"
    print(f"| | MiniLM: Spearman | bytes of its weights | {options.decoder}: {step} | all of its weights: {step} |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    folder = options.folder
    for form in ("fp32", *options.format):
        file = folder / f"minilm.{form.replace('/', '-')}.row.json"
        rows[form] = {"minilm": once(file, partial(minilm, evaluate, options.minilm, folder, form))}
        found = rows[form]["minilm"]
        cells = [form, found["spearman"], found.get("bytes_of_fp16", "")]
        for kept in ("", "all") if form in decoders.WEIGHTS else ():
            file = folder / f"{'.'.join(filter(None, (options.decoder, form, kept)))}.row.json"
            found = once(file, partial(decoders.measured, folder, options.decoder, form, kept))
            rows[form][f"{options.decoder} {kept}".strip()] = found
            cells += [
                f"{found['same']} of {found['counted']}",
                f"{found['us']:.0f} us (FP16: {found['plain_us']:.0f})",
                f"{found['bytes'] / 1e6:.1f} MB ({(found['weights'] + found['caches']) / 1e6:.1f})",
            ]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    (HERE / "results.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
