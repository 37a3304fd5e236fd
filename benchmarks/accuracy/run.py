"""Accuracy of FP16 and INT8 on trained models with real inputs, by each model's own metric.

    python benchmarks/accuracy/run.py [MODELS] [--minilm FILE] [--only NAME,...] [--sweep | --keep-all | --budget]

MODELS is a folder of models with an ``evaluate.py`` that writes calibration samples and computes a metric (default:
``shared/models`` beside the checkout). Each model is built by ``trtopt build``, a process, as a user would; the ONNX
file it saves is evaluated twice: on its FP32 twin, which rounds to FP16 wherever the engine does, and as ONNX Runtime
runs the file. ``--sweep`` varies the two thresholds of ``trtopt/precision/rules.py`` and the calibration samples.
``--keep-all`` compares with Model Optimizer, which it installs into a virtual environment under ``--environments``.
``--budget`` searches with ``--max-accuracy-drop`` on one half of the evaluation data and scores on the other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from modes import budget, budget_table, keep_all, keep_all_table  # noqa: E402 - beside this file
from subjects import SUBJECTS, Bench, Subject, as_stored, smallest_sqnr, twin_of  # noqa: E402

DEFAULT_MODELS = HERE.parents[2] / "shared" / "models"
ENVIRONMENTS = Path.home() / ".cache" / "trtopt-benchmarks" / "precision"
MACHINE = "2-core x86-64, no GPU"
SMALLEST_SHARE = 0.8
"""Least share of the flop of eligible layers that has to be INT8 with --keep-all-int8."""

WEIGHT_THRESHOLDS_DB = (34.0, 38.0, 42.0, 99.0)
INPUT_THRESHOLDS_DB = (0.0, 15.0, 20.0, 25.0)
SUBSETS: dict[str, Callable[[list[Path]], list[Path]]] = {
    "even samples": lambda files: files[::2],
    "odd samples": lambda files: files[1::2],
    "first half": lambda files: files[: len(files) // 2],
    "second half": lambda files: files[len(files) // 2 :],
}


def build(bench: Bench, subject: Subject, precision: str) -> dict[str, Any]:
    """``trtopt build`` of one model, and the metric of what it saved."""
    stem = f"{subject.label.replace('/', '-')}-{precision}"
    onnx, report = bench.work / f"{stem}.onnx", bench.work / f"{stem}.json"
    command = [sys.executable, "-m", "trtopt", "build", str(bench.model(subject)), f"--{precision}"]
    command += ["--calib", bench.samples(subject), "--cache-dir", str(bench.work / "cache")]
    command += ["-o", str(bench.work / f"{stem}.engine"), "--save-onnx", str(onnx), "--report", str(report)]
    command += ["--keep-all-int8"] if precision == "int8" else []
    started = time.perf_counter()
    done = subprocess.run([*command, *subject.options], capture_output=True, text=True, check=False)
    result: dict[str, Any] = {"exit_code": done.returncode, "seconds": round(time.perf_counter() - started, 1)}
    if done.returncode:
        error = done.stderr[max(done.stderr.find("error: "), 0) :].strip()
        return {**result, "reason": error[-600:].replace(str(bench.models), "MODELS").replace(str(bench.work), "")}
    found = json.loads(report.read_text())
    result["kernels"] = found["engine"]["kernels"]
    result["sqnr_db"] = smallest_sqnr(found["accuracy"]["outputs"])
    result["kept_fp32"] = len(found["precision"]["kept"])
    if precision == "int8":
        result["int8_flop_share"] = round(found["precision"]["int8_flop_share"], 4)
    with twin_of(onnx) as run:
        result["metric"] = round(bench.metric(subject, run), 5)
    result["metric_in_onnxruntime"] = round(bench.metric(subject, as_stored(onnx)), 5)
    return result


def measure(bench: Bench, subject: Subject) -> dict[str, Any]:
    """FP32, FP16 and INT8 of one model, and whether the targets are met."""
    result: dict[str, Any] = {"metric": subject.key}
    result["fp32"] = baseline = round(bench.metric(subject, as_stored(bench.model(subject))), 5)
    result["fp16"] = half = build(bench, subject, "fp16")
    passed = half["exit_code"] == 6 or (
        half["exit_code"] == 0 and baseline - half["metric"] <= subject.fp16_drop + 1e-5
    )
    if subject.int8 is not None:
        result["int8"] = low = build(bench, subject, "int8")
        passed = passed and low["exit_code"] == 0 and low["int8_flop_share"] >= SMALLEST_SHARE
        passed = passed and subject.passes_int8(low["metric"], baseline)
    result["met"] = passed
    return result


def optimize(bench: Bench, subject: Subject, calib: str) -> dict[str, Any]:
    """INT8 in this process, without an engine: SQNR on the samples, the share in INT8, the metric."""
    import trtopt

    onnx = bench.work / "sweep.onnx"
    report = trtopt.optimize(
        bench.model(subject), precision="int8", calib=calib, eval=bench.samples(subject), output=onnx,
        cache_dir=bench.work / "cache",
    )  # fmt: skip
    found = report.to_json_dict()
    with twin_of(onnx) as run:
        value = bench.metric(subject, run)
    return {
        "sqnr_db": smallest_sqnr(found["accuracy"]["outputs"]),
        "metric": round(value, 5),
        "int8_flop_share": round(found["precision"]["int8_flop_share"], 4),
    }


def sweep(bench: Bench, subject: Subject) -> dict[str, dict[str, Any]]:
    """INT8 of one model over thresholds and over calibration samples, one of them changed at a time."""
    from trtopt.precision import rules

    rows: dict[str, dict[str, Any]] = {}
    calib = bench.samples(subject)
    names = {"SMALLEST_WEIGHT_SQNR_DB": WEIGHT_THRESHOLDS_DB, "SMALLEST_INPUT_SQNR_DB": INPUT_THRESHOLDS_DB}
    for name, values in names.items():
        chosen = getattr(rules, name)
        try:
            for value in values:
                setattr(rules, name, value)
                rows[f"{name} = {value:g}"] = optimize(bench, subject, calib)
        finally:
            setattr(rules, name, chosen)
    for name, select in SUBSETS.items():
        folder = bench.work / f"{subject.name}-{name.replace(' ', '-')}"
        folder.mkdir(exist_ok=True)
        for path in select(sorted(Path(calib).iterdir())):
            (folder / path.name).write_bytes(path.read_bytes())
        rows[name] = optimize(bench, subject, str(folder))
    return rows


def table(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The results as a Markdown table; metrics as fractions."""
    heads = "model, metric, FP32, FP16, INT8, INT8 share of flop, SQNR dB FP16 / INT8, kernels FP16 / INT8, exit, met"
    yield "| " + heads.replace(", ", " | ") + " |"
    yield "|---" * 10 + "|"
    for name, row in results.items():
        if "skipped" in row:
            yield f"| {name} | skipped: {row['skipped']} |" + " |" * 8
            continue
        half, low = row["fp16"], row.get("int8", {})
        cells = [name, row["metric"], f"{row['fp32']:.4f}", _number(half, "metric", 4), _number(low, "metric", 4)]
        cells.append(f"{low['int8_flop_share']:.1%}" if "int8_flop_share" in low else "-")
        cells += [f"{_number(half, 'sqnr_db', 1)} / {_number(low, 'sqnr_db', 1)}"]
        cells += [f"{half.get('kernels', '-')} / {low.get('kernels', '-')}"]
        cells += [f"{half['exit_code']} / {low.get('exit_code', '-')}", "yes" if row["met"] else "NO"]
        yield "| " + " | ".join(cells) + " |"


def sweep_table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    names = list(results)
    yield "| SQNR dB; metric; INT8 share | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for setting in next(iter(results.values()), {}):
        cells = []
        for name in names:
            row = results[name][setting]
            cells.append(f"{_number(row, 'sqnr_db', 1)}; {row['metric']:.4f}; {row['int8_flop_share']:.0%}")
        yield f"| {setting} | " + " | ".join(cells) + " |"


def _number(row: Mapping[str, Any], key: str, digits: int) -> str:
    value = row.get(key)
    return "-" if value is None else f"{value:.{digits}f}"


def stored(path: Path) -> dict[str, Any]:
    """The results so far."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def store(path: Path, kind: str, found: Mapping[str, Any], date: str) -> None:
    """Put one kind of results into the file, with the versions they were measured with; the other kind stays."""
    versions = {name: metadata.version(name) for name in ("trtopt", "numpy", "onnx", "onnxruntime", "tensorrt-rtx")}
    header = {"machine": MACHINE, "date": date, "python": platform.python_version(), "versions": versions}
    path.write_text(json.dumps({**stored(path), **header, kind: found}, indent=2) + "\n")


def write_table(readme: Path, name: str, lines: list[str]) -> None:
    """Put a table between the README's markers of this name."""
    before, opening, rest = readme.read_text().partition(f"<!-- {name} -->\n")
    _, closing, after = rest.partition(f"<!-- end of {name} -->")
    if not opening or not closing:
        raise SystemExit(f"{readme} has no markers for the table {name}")
    readme.write_text(before + opening + "\n".join(lines) + "\n" + closing + after)


def is_asked(subject: Subject, kind: str) -> bool:
    """Whether a kind of measurement has this model: without INT8 there is only the first."""
    return kind == "models" or (subject.int8 is not None and subject.file == "model.onnx")


TABLES: dict[str, Callable[[Mapping[str, Mapping[str, Any]]], Iterator[str]]] = {
    "models": table,
    "sweep": sweep_table,
    "keep-all": keep_all_table,
    "budget": budget_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="?", type=Path, default=DEFAULT_MODELS, help="folder of models")
    parser.add_argument("--minilm", type=Path, help="the MiniLM model, assembled (default: model.onnx in its folder)")
    parser.add_argument("--only", default="", help="names of models, comma-separated")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--sweep", action="store_true", help="vary thresholds and samples instead")
    kinds.add_argument("--keep-all", action="store_true", help="compare with Model Optimizer instead")
    kinds.add_argument("--budget", action="store_true", help="search within a budget of accuracy instead")
    parser.add_argument("--resume", action="store_true", help="only what results.json does not have")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help=f"({ENVIRONMENTS})")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    options = parser.parse_args()
    if not (options.models / "evaluate.py").exists():
        parser.error(f"no models in {options.models}: give the folder that holds evaluate.py")
    only = [name for name in options.only.split(",") if name]
    kind = next((name for name in TABLES if getattr(options, name.replace("-", "_")) is True), "models")
    measures: dict[str, Callable[[Bench, Subject], dict[str, Any]]] = {
        "models": measure,
        "sweep": sweep,
        "keep-all": partial(keep_all, environments=options.environments.resolve()),
        "budget": budget,
    }
    path = HERE / "results.json"
    found: dict[str, Any] = stored(path).get(kind, {})
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.models.resolve(), options.minilm, Path(folder))
        for subject in SUBJECTS:
            if (only and subject.name not in only) or not is_asked(subject, kind):
                continue
            if options.resume and subject.label in found:
                continue
            if not bench.model(subject).exists():
                reason = f"{bench.model(subject).name} is not there (the models' README says how it is assembled)"
                print(f"{subject.label}: skipped: {reason}", flush=True)
                if kind == "models":
                    found[subject.label] = {"skipped": reason}
                continue
            started = os.times().elapsed
            found[subject.label] = measures[kind](bench, subject)
            seconds = os.times().elapsed - started
            print(f"{subject.label}: {seconds:.0f} s: {json.dumps(found[subject.label])}", flush=True)
            store(path, kind, found, options.date)
    found = {subject.label: found[subject.label] for subject in SUBJECTS if subject.label in found}
    lines = list(TABLES[kind](found))
    print("\n".join(lines))
    write_table(HERE / "README.md", kind, lines)


if __name__ == "__main__":
    main()
