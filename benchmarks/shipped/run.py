"""What ships against plain, on trained models with samples of their own: fixed shapes and ranges, FP16 and INT8.

    python benchmarks/shipped/run.py --work WORK [--models FOLDER] [--only "NAME;..."] [--timeout S] [--table]

Each build is a command of its own, within ``--timeout``, its cache empty; what ``WORK/results.jsonl`` holds is not
run again. ``--table`` writes results.json and the table of the README.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
MACHINE = "2-core x86-64, no GPU"
GPU = "L4"
SAMPLES = 64
LENGTH = 32
"""Tokens of a text where MiniLM's length is fixed."""
NETWORKS: dict[str, tuple[str, str, str, str]] = {
    "mnist_cntk": ("model.onnx", "", "", ""),
    "dscnn_kws": ("model.onnx", "mfcc:1x1x49x10", "mfcc:8x1x49x10", "mfcc:32x1x49x10"),
    "resnet20_cifar10": ("model.onnx", "input:1x3x32x32", "input:8x3x32x32", "input:32x3x32x32"),
    "crepe_tiny": ("model.onnx", "frames:1x1024", "frames:8x1024", "frames:32x1024"),
    "squeezenet11_fp16": ("model.onnx", "", "", ""),
    "fastestdet_coco": ("model.onnx", "", "", ""),
    "minilm_l6_sts": ("model.onnx", "1x4", "8x32", "32x64"),
    "silero_vad": ("model.onnx", "", "input:1x512,state:2x1x128", ""),
}
"""File, smallest, optimal and largest shapes; the first and last only where there is a range, none where the file has
one shape. Of MiniLM, of each of its inputs."""
CHANNELS_LAST = ("--io", "input0:fp16:hwc", "--io", "output:fp16:hwc")
WRITTEN: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "C2f": ("recipes", "input0:{}x64x28x28", CHANNELS_LAST),
    "Conv and PReLU": ("recipes", "input0:{}x64x28x28", CHANNELS_LAST),
    "Conv and Mish": ("recipes", "input0:{}x64x28x28", CHANNELS_LAST),
    "Conv and Softplus": ("recipes", "input0:{}x64x28x28", CHANNELS_LAST),
    "Stem, --io hwc": ("recipes", "input0:{}x3x224x224", CHANNELS_LAST),
    "Detector with NMS": ("recipes", "input0:{}x3x160x160", ()),
    "LSTM 2x512": ("recipes", "input0:64x{}x512", ()),
    "BERT, 4 layers": ("recipes", "input0:{0}x128,input1:{0}x128", ()),
    "MobileNetV2": ("recipes", "input0:{}x3x224x224", ()),
    "ResNet-50": ("recipes", "input0:{}x3x224x224", ()),
    "ResNet-50, odd widths": ("recipes", "input0:{}x3x224x224", ()),
    "ViT-B/16": ("recipes", "input0:{}x3x224x224", ()),
    "ConvNeXt-T": ("recipes", "input0:{}x3x224x224", ()),
    "UNet": ("precision", "input0:{}x3x224x224", ()),
}
"""The networks of ``benchmarks/recipes`` and ``benchmarks/precision``, whose batch may be of any size: the benchmark,
the shapes by their batch, the options it builds with. Weights are random: they are built with random data."""
BATCHES = (1, 8, 32)
ALL = (*NETWORKS, *WRITTEN)
WITHOUT_SAMPLES = ("silero_vad", *WRITTEN)
"""Silero's next state follows from its last: built with random data."""
MODES = ("fp16", "int8")


def shapes_of(name: str, fixed: bool) -> list[str]:
    """The options that say the shapes."""
    if name in WRITTEN:
        texts = [WRITTEN[name][1].format(size) for size in BATCHES]
    else:
        _, *texts = NETWORKS[name]
    if not texts[1]:
        return []
    if name == "minilm_l6_sts":
        inputs = ("input_ids", "attention_mask", "token_type_ids")
        texts = [",".join(f"{item}:{text}" for item in inputs) for text in texts]
    if fixed:
        return ["--opt-shapes", texts[1]]
    return ["--min-shapes", texts[0], "--opt-shapes", texts[1], "--max-shapes", texts[2]]


def samples_of(name: str, fixed: bool, options: argparse.Namespace) -> Path | str:
    """The model's own calibration samples, written once; those of MiniLM at a fixed length filled up to it."""
    if name in WITHOUT_SAMPLES:
        return "synthetic"
    folder: Path = options.work / "samples" / name
    if not folder.is_dir():
        sys.path.insert(0, str(options.models))
        import evaluate

        evaluate.write_calib(name, str(folder), SAMPLES)
    if name != "minilm_l6_sts" or not fixed:
        return folder
    filled = options.work / "samples" / f"{name}-fixed"
    filled.mkdir(exist_ok=True)
    for file in folder.iterdir():
        arrays = {key: array[:, :LENGTH] for key, array in np.load(file).items()}
        fill = {key: ((0, 0), (0, LENGTH - array.shape[1])) for key, array in arrays.items()}
        np.savez(filled / file.name, **{key: np.pad(array, fill[key]) for key, array in arrays.items()})
    return filled


def path_of(name: str, options: argparse.Namespace) -> Path:
    """The model's file; a network of another benchmark is written once."""
    if name not in WRITTEN:
        return Path(options.models) / name / NETWORKS[name][0]
    benchmark = WRITTEN[name][0]
    folder: Path = options.work / "networks" / benchmark
    sys.path.insert(0, str(HERE.parent / "precision"))
    import networks

    path = folder / networks.file_name(name)
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        networks.write(name, folder, free=True)
    return path


def built(name: str, mode: str, fixed: bool, options: argparse.Namespace) -> dict[str, Any]:
    """One build as a user runs it, and what its report says."""
    path = path_of(name, options)
    if not path.is_file():
        return {"reason": f"{path.name} is not there: it has to be assembled first"}
    report, cache = options.work / "report.json", options.work / "cache"
    report.unlink(missing_ok=True)
    shutil.rmtree(cache, ignore_errors=True)
    call = [sys.executable, "-m", "trtopt", "build", str(path), f"--{mode}", *shapes_of(name, fixed)]
    call += ["--calib", str(samples_of(name, fixed, options)), "--backend", "tensorrt-rtx"]
    call += WRITTEN[name][2] if name in WRITTEN else ()
    call += ["--gpu", GPU, "--cache-dir", str(cache), "--report", str(report), "-o", str(options.work / "net.engine")]
    began, load = time.perf_counter(), os.getloadavg()[0]
    try:
        done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=options.timeout)
    except subprocess.TimeoutExpired:
        return {"reason": f"more than {options.timeout:.0f} s"}
    found = {"seconds": round(time.perf_counter() - began, 1), "load_average": round(load, 1)}
    if not report.is_file():
        return found | {"reason": f"exit {done.returncode}: {' '.join(done.stderr.split())[-300:]}"}
    return found | figures(json.loads(report.read_text())) | {"exit_code": done.returncode}


def figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the table shows of a report."""
    keys = ("shipped", "plain", "accuracy_cost", "dynamic_cost", "judged_apart", "gate_failures", "warnings")
    accuracy = report["accuracy"]
    outputs = [item for name, item in accuracy["outputs"].items() if name not in accuracy["host_outputs"]]
    agreements = [item["top1_agreement"] for item in outputs if item["top1_agreement"] is not None]
    return {
        **{key: report[key] for key in keys},
        "after_recipes": report["rewriting"]["after"],
        "kept_fp32": len(report["precision"]["kept"]),
        "flop_share_int8": report["precision"]["int8_flop_share"],
        "db": min((item["sqnr_db"] for item in outputs if item["sqnr_db"] is not None), default=None),
        "agreement": min(agreements, default=None),
        "stages": {name: round(value, 1) for name, value in report["seconds"].items()},
    }


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A row a build: what plain costs, what was judged, what ships."""
    head = "network | shapes | mode | plain | judged, us | shipped | of plain | range costs | dB | top-1 | build, s"
    lines = [f"| {head} |", "|---" * 11 + "|"]
    for row in rows:
        cells = [row["network"], "fixed" if row["fixed"] else "range", row["mode"].upper()]
        if row.get("shipped") is None or row.get("plain") is None:
            why = row.get("reason") or "; ".join(row.get("gate_failures", [])) or "not priced"
            cells += [why.replace("|", "/")[:80], *["-"] * 6, f"{row.get('seconds', 0):.0f}"]
        else:
            plain, shipped, dynamic = row["plain"], row["shipped"], row["dynamic_cost"]
            form = "" if plain["form"] == "fp16" else f" ({plain['form']})"
            cells += [_cost(plain) + form, _judged(row), _cost(shipped)]
            cells += [f"{shipped['predicted_us'] / plain['predicted_us']:.3f}"]
            cells += ["-" if dynamic is None else f"{dynamic['kernels']:+d} kernels, {dynamic['share']:+.1%}"]
            cells += ["-" if row["db"] is None else f"{row['db']:.1f}"]
            cells += ["-" if row["agreement"] is None else f"{row['agreement']:.3f}"]
            cells += [f"{row['seconds']:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _judged(row: Mapping[str, Any]) -> str:
    """What the whole network was judged at last before the engine: the report tells where that is not what ships."""
    if row["judged_apart"]:
        return str(row["judged_apart"].split(" us ")[0].removeprefix("judged ")) + " (apart)"
    return "plain taken" if row["after_recipes"] is None else f"{row['shipped']['predicted_us']:.1f}"


def _cost(cost: Mapping[str, Any]) -> str:
    syncs = f"+{cost['syncs']}" if cost["syncs"] else ""
    return f"{cost['kernels']}{syncs} / {cost['bytes'] / 1e6:.2f} / {cost['predicted_us']:.1f}"


def write(rows: list[dict[str, Any]], date: str) -> None:
    """results.json, and the table in the README."""
    order = [(name, mode, fixed) for name in ALL for mode in MODES for fixed in (True, False)]
    rows = sorted(rows, key=lambda row: order.index(key_of(row)))
    versions = {name: metadata.version(name) for name in ("onnx", "onnxruntime", "tensorrt-rtx")}
    facts = {"machine": MACHINE, "gpu": GPU, "date": date, "versions": versions, "rows": rows}
    (HERE / "results.json").write_text(json.dumps(facts, indent=1) + "\n")
    readme = HERE / "README.md"
    before, opening, rest = readme.read_text().partition("<!-- table -->\n")
    _, closing, after = rest.partition("<!-- end of table -->")
    readme.write_text(before + opening + table(rows) + "\n" + closing + after)


def key_of(row: Mapping[str, Any]) -> tuple[str, str, bool]:
    return row["network"], row["mode"], row["fixed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="for results.jsonl, samples and what is made")
    parser.add_argument("--models", type=Path, default=HERE.parents[2] / "shared" / "models")
    parser.add_argument("--only", default=";".join(ALL), help="names, separated by semicolons")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a build")
    parser.add_argument("--table", action="store_true", help="write results.json and the table, and run nothing")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.work / "results.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    known = {key_of(row): row for row in map(json.loads, lines)}
    if options.table:
        write(list(known.values()), options.date)
        return
    for name in options.only.split(";"):
        for mode in options.modes.split(","):
            for fixed in (True, False) if name in WRITTEN or NETWORKS[name][1] else (True,):
                row: dict[str, Any] = {"network": name, "mode": mode, "fixed": fixed}
                if key_of(row) in known:
                    continue
                row |= built(name, mode, fixed, options)
                with file.open("a") as out:
                    out.write(json.dumps(row) + "\n")
                print(table([row]).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
