"""What the recipes do: kernels, bytes and time of well-known networks without and with them, and trained models.

    python benchmarks/recipes/run.py [networks] [models] [times] [--only NAME,...] [--models FOLDER] [--minilm FILE]

``networks`` builds those of ``networks.py`` with ``trtopt build --fp16`` for an L4 (compute capability 8.9), with
TensorRT for RTX, without and with all recipes. ``models`` does the same with trained models, and compares the
optimized FP32 graph with the original on the model's own inputs and by its own metric. ``times`` is ``trtopt
optimize`` as a user runs it, and where the time goes. All three by default.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from networks import NETWORKS, write

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "analyze"))
DEFAULT_MODELS = HERE.parents[2] / "shared" / "models"
MACHINE = "2-core x86-64, no GPU"
MB = 1e6
FP32_BOUND = 1e-5
"""Largest difference of an output over all samples, over its largest element, in FP32."""


@dataclass(frozen=True)
class Limit:
    """What a network with recipes may cost at most.

    Attributes:
        kernels: Stream syncs apart; None where no number is asked for: then not more than without recipes.
        megabytes: Activations.
        syncs: Stream syncs.
        loops: An engine lists the kernels of a loop once: those launched, and all their bytes, have to become fewer.
        options: Of ``trtopt build`` with recipes.
        options_before: Without recipes.
    """

    kernels: int | None = None
    megabytes: float | None = None
    syncs: int | None = None
    loops: bool = False
    options: tuple[str, ...] = ()
    options_before: tuple[str, ...] = ()


CHANNELS_LAST = ("--io", "input0:fp16:hwc", "--io", "output:fp16:hwc")
FOUR_CHANNELS = ("--io", "input0:fp16:hwc4", "--io", "output:fp16:hwc")
LIMITS = {
    "ViT-B/16": Limit(102, 852.0),
    "BERT, 4 layers": Limit(37, 189.0, 0),
    "ResNet-50, odd widths": Limit(60, 490.0),
    "ConvNeXt-T": Limit(97, 600.0),
    "LSTM 2x512": Limit(loops=True),
    "C2f": Limit(5, options=CHANNELS_LAST, options_before=CHANNELS_LAST),
    "Conv and PReLU": Limit(1, options=CHANNELS_LAST, options_before=CHANNELS_LAST),
    "Conv and Mish": Limit(1, options=CHANNELS_LAST, options_before=CHANNELS_LAST),
    "Conv and Softplus": Limit(1, options=CHANNELS_LAST, options_before=CHANNELS_LAST),
    "Stem, --io hwc": Limit(2, options=CHANNELS_LAST),
    "Stem, --io hwc4": Limit(1, options=FOUR_CHANNELS),
}
TIME_LIMITS = {"ResNet-50": 20.0, "ViT-B/16": 60.0, "20 000 nodes": 60.0}
TIME_BACKENDS = {"ResNet-50": "tensorrt-rtx", "ViT-B/16": "tensorrt-rtx", "20 000 nodes": "tensorrt"}
"""Who judges: the compiler, or the performance model."""


def trtopt(command: str, model: Path, report: Path, *options: str) -> dict[str, Any]:
    """Run the command line; its report with the wall time, or its error."""
    call = [sys.executable, "-m", "trtopt", command, str(model), "--gpu", "L4", "--report", str(report), *options]
    call += ["--cache-dir", str(report.parent / "cache")]
    began = time.perf_counter()
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    seconds = round(time.perf_counter() - began, 1)
    if done.returncode:
        error = done.stderr[max(done.stderr.find("error: "), 0) :].strip()
        return {"exit_code": done.returncode, "reason": error.splitlines()[0][:300], "wall_seconds": seconds}
    return {**json.loads(report.read_text()), "wall_seconds": seconds}


def cost(report: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one build."""
    if "reason" in report:
        return {key: report[key] for key in ("exit_code", "reason")}
    engine = report["engine"]
    return {
        "kernels": engine["kernels"],
        "syncs": sum(layer["type"] in ("signal", "wait") for layer in engine["layers"]),
        "other_layers": sum(not x["is_kernel"] and x["type"] not in ("signal", "wait") for x in engine["layers"]),
        "activation_mb": round(engine["activation_bytes"] / MB, 2),
        "weight_mb": round(engine["weight_bytes"] / MB, 2),
        "predicted_us": round(report["prediction"]["predicted_us"], 1),
    }


def measure_network(name: str, folder: Path) -> dict[str, Any]:
    """One network without and with recipes, and whether the limit is met."""
    model, limit = write(name, folder), LIMITS.get(name, Limit())
    made: dict[str, Any] = {}
    for recipes in ("none", "all"):
        engine, report = folder / "network.rtx.engine", folder / "report.json"
        options = ("--fp16", "--backend", "tensorrt-rtx", "--recipes", recipes, "-o", str(engine))
        options += limit.options if recipes == "all" else limit.options_before
        found = trtopt("build", model, report, *options)
        made[recipes] = cost(found)
        if recipes == "all" and "reason" not in found:
            steps = found["steps"]
            made["launched"] = found["rewriting"]
            made["rewrite_seconds"] = round(found["seconds"].get("rewrite", 0.0), 1)
            made["applied"] = {step["name"]: step["changes"] for step in steps if step["changes"]}
            made["refused"] = {step["name"]: reasons(step) for step in steps if step["refusals"]}
    model.unlink()
    made["met"] = is_met(made, limit)
    return made


def reasons(step: Mapping[str, Any]) -> dict[str, int]:
    """Why a recipe left places alone, the commonest five reasons with the number of nodes."""
    return dict(Counter(refusal["reason"][:200] for refusal in step["refusals"]).most_common(5))


def is_met(made: Mapping[str, Any], limit: Limit) -> bool:
    before, after = made["none"], made["all"]
    if "reason" in after:
        return False
    if limit.loops:
        first, last = made["launched"]["before"], made["launched"]["after"]
        return bool(last["kernels"] < first["kernels"] and last["bytes"] < first["bytes"])
    if limit.kernels is None and "reason" not in before:
        return bool(after["kernels"] <= before["kernels"] and after["activation_mb"] <= before["activation_mb"])
    checks = (("kernels", limit.kernels), ("activation_mb", limit.megabytes), ("syncs", limit.syncs))
    return all(most is None or after[key] <= most for key, most in checks)


@cache
def accuracy_benchmark() -> Any:
    """``benchmarks/accuracy/run.py``, which knows the trained models and their metrics."""
    spec = importlib.util.spec_from_file_location("accuracy_run", HERE.parent / "accuracy" / "run.py")
    if spec is None or spec.loader is None:
        raise SystemExit("benchmarks/accuracy/run.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def measure_model(bench: Any, subject: Any) -> dict[str, Any]:
    """A trained model: its cost without and with recipes, and the FP32 graph against the original."""
    path, work = bench.model(subject), bench.work
    made: dict[str, Any] = {}
    for recipes in ("none", "all"):
        options = ("--fp16", "--backend", "tensorrt-rtx", "--recipes", recipes, "--calib", bench.samples(subject))
        output = ("-o", str(work / "model.rtx.engine"), *subject.options)
        made[recipes] = cost(trtopt("build", path, work / "report.json", *options, *output))
    optimized = work / "optimized.onnx"
    options = ("--backend", "tensorrt-rtx", "--recipes", "all", "--calib", bench.samples(subject))
    report = trtopt("optimize", path, work / "report.json", *options, "-o", str(optimized), *subject.options)
    if "reason" in report:
        return {**made, "reason": report["reason"], "met": False}
    as_stored = accuracy_benchmark().as_stored
    first, second = as_stored(path), as_stored(optimized)
    errors: dict[int, float] = {}
    scales: dict[int, float] = {}

    def both(feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        expected, found = first(feeds), second(feeds)
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
            errors[index] = max(errors.get(index, 0.0), float(np.abs(a - b).max(initial=0)))
            scales[index] = max(scales.get(index, 0.0), float(np.abs(a).max(initial=0)))
        return found

    made["metric_name"] = subject.key
    made["metric_before"], made["metric_after"] = bench.metric(subject, first), bench.metric(subject, both)
    made["largest_difference"] = max(error / (scales[index] or 1.0) for index, error in errors.items())
    bound = FP32_BOUND if subject.file != "model_fp16.onnx" else 1e-2  # types are kept: its arithmetic is FP16
    same = f"{made['metric_before']:.4f}" == f"{made['metric_after']:.4f}"
    made["met"] = same and made["largest_difference"] <= bound
    return made


def measure_time(name: str, folder: Path) -> dict[str, Any]:
    """``trtopt optimize`` with all recipes: seconds of the process, and of its stages and recipes."""
    from models import many_nodes

    path = folder / "many.onnx"
    if name in NETWORKS:
        path = write(name, folder)
    else:
        many_nodes(path)
    backend = TIME_BACKENDS[name]
    options = ("--backend", backend, "--recipes", "all", "-o", str(folder / "optimized.onnx"))
    found = trtopt("optimize", path, folder / "report.json", "--fp16", *options)
    if "reason" in found:
        return {"reason": found["reason"], "met": False}
    slowest = sorted(found["steps"], key=lambda step: -step["seconds"])
    return {
        "backend": backend,
        "nodes": found["model"].get("nodes"),
        "wall_seconds": found["wall_seconds"],
        "seconds": {stage: round(value, 2) for stage, value in found["seconds"].items()},
        "slowest_recipes": {step["name"]: round(step["seconds"], 2) for step in slowest[:5] if step["seconds"] >= 0.05},
        "met": found["wall_seconds"] <= TIME_LIMITS[name],
    }


def short(found: Mapping[str, Any]) -> str:
    """Kernels and megabytes of one build."""
    if "reason" in found:
        return f"exit {found['exit_code']}"
    syncs = f" (+{found['syncs']} syncs)" if found["syncs"] else ""
    return f"{found['kernels']}{syncs} / {found['activation_mb']:g}"


def launched(row: Mapping[str, Any]) -> str:
    """Kernels launched, those of a loop as often as they run, and the bytes of activations and weights."""
    costs = [row.get("launched", {}).get(key) for key in ("before", "after")]
    if None in costs:
        return "-"
    return " -> ".join(f"{each['kernels']} / {each['bytes'] / MB:.0f}" for each in costs)


def network_table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = ["| network | without | with | limit | launched, MB in all | predicted us | rewriting, s | met |"]
    lines.append("|---" * 8 + "|")
    for name, row in results.items():
        limit = LIMITS.get(name, Limit())
        asked = "not worse" if limit.kernels is None else f"{limit.kernels}"
        asked += f" / {limit.megabytes:g}" if limit.megabytes is not None else ""
        times = [f"{row[key]['predicted_us']:.0f}" if "predicted_us" in row[key] else "-" for key in ("none", "all")]
        cells = [name, short(row["none"]), short(row["all"]), asked, launched(row), " -> ".join(times)]
        cells += [f"{row.get('rewrite_seconds', '-')}", "yes" if row["met"] else "NO"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def model_table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = ["| model | without | with | largest difference, FP32 | metric | before | after | met |", "|---" * 8 + "|"]
    for name, row in results.items():
        if "skipped" in row or "reason" in row:
            lines.append(f"| {name} | {row.get('skipped', row.get('reason'))} |" + " |" * 6)
            continue
        cells = [name, short(row["none"]), short(row["all"]), f"{row['largest_difference']:.1e}", row["metric_name"]]
        cells += [f"{row[key]:.4f}" for key in ("metric_before", "metric_after")] + ["yes" if row["met"] else "NO"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def time_table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = ["| network | judged for | seconds | limit | stages, s | slowest recipes, s |", "|---" * 6 + "|"]
    for name, row in results.items():
        if "reason" in row:
            lines.append(f"| {name} | {row['reason']} | | {TIME_LIMITS[name]:g} | | |")
            continue
        parts = [", ".join(f"{k} {v:g}" for k, v in row[key].items()) for key in ("seconds", "slowest_recipes")]
        limit = f"{TIME_LIMITS[name]:g}"
        lines.append(f"| {name} | {row['backend']} | {row['wall_seconds']:g} | {limit} | {parts[0]} | {parts[1]} |")
    return lines


TABLES: dict[str, Callable[[Mapping[str, Mapping[str, Any]]], list[str]]] = {
    "networks": network_table,
    "models": model_table,
    "times": time_table,
}


def store(kind: str, name: str, found: Mapping[str, Any], date: str) -> None:
    """Put one row into ``results.json`` and its table into the README; the others stay."""
    path, readme = HERE / "results.json", HERE / "README.md"
    results = dict(json.loads(path.read_text())) if path.exists() else {}
    versions = {
        each: metadata.version(each) for each in ("trtopt", "numpy", "onnx", "onnxruntime", "tensorrt-rtx", "torch")
    }
    results.update(machine=MACHINE, date=date, python=platform.python_version(), versions=versions)
    order = {"networks": NETWORKS, "times": TIME_LIMITS}.get(kind, {})
    rows = {**results.get(kind, {}), name: {**found, "load_average": round(os.getloadavg()[0], 1)}}
    results[kind] = {each: rows[each] for each in (*order, *rows) if each in rows}
    path.write_text(json.dumps(results, indent=2) + "\n")
    before, opening, rest = readme.read_text().partition(f"<!-- {kind} -->\n")
    _, closing, after = rest.partition(f"<!-- end of {kind} -->")
    if not opening or not closing:
        raise SystemExit(f"{readme} has no markers for the table {kind}")
    readme.write_text(before + opening + "\n".join(TABLES[kind](results[kind])) + "\n" + closing + after)


def models(folder: Path, options: argparse.Namespace, wanted: Sequence[str]) -> None:
    """The trained models, where they are there."""
    if not (options.models / "evaluate.py").exists():
        print(f"models skipped: no evaluate.py in {options.models}; give their folder with --models")
        return
    accuracy = accuracy_benchmark()
    try:
        bench = accuracy.Bench(options.models, options.minilm, folder)
    except ModuleNotFoundError as error:
        print(f"models skipped: {error}; their evaluation needs pillow and tokenizers")
        return
    for subject in accuracy.SUBJECTS:
        if wanted and subject.label not in wanted:
            continue
        if not bench.model(subject).exists():
            found: dict[str, Any] = {"skipped": "its file has to be assembled first: see --minilm"}
        else:
            found = measure_model(bench, subject)
        print(subject.label, found, flush=True)
        store("models", subject.label, found, options.date)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[[], *TABLES], help="what to measure (default: all)")
    parser.add_argument("--only", default="", help="names, separated by semicolons")
    parser.add_argument("--models", type=Path, default=DEFAULT_MODELS, help="folder of trained models")
    parser.add_argument("--minilm", type=Path, help="the MiniLM model, assembled")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    options = parser.parse_args()
    kinds = options.kinds or list(TABLES)
    wanted = [name for name in options.only.split(";") if name]
    measures = {"networks": (NETWORKS, measure_network), "times": (TIME_LIMITS, measure_time)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in kinds:
            if kind == "models":
                models(folder, options, wanted)
                continue
            names, measure = measures[kind]
            for each in names:
                if not wanted or each in wanted:
                    found = measure(each, folder)
                    print(each, found, flush=True)
                    store(kind, each, found, options.date)


if __name__ == "__main__":
    main()
