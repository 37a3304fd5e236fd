"""INT8 against Model Optimizer without a budget, and INT8 within a budget of accuracy."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from halves import SCORE, SEARCH, Half, write_script
from subjects import Bench, Subject, as_stored, smallest_sqnr, twin_of

PRECISION = Path(__file__).parent.parent / "precision"
sys.path.append(str(PRECISION))
from venvs import interpreter, run  # noqa: E402 - benchmarks/precision

ASKED = {
    "resnet20_cifar10": 0.809,
    "dscnn_kws": 0.910,
    "fastestdet_coco": 0.338,
    "crepe_tiny": 0.841,
    "minilm_l6_sts": 0.863,
}
"""Model Optimizer's better metric as measured before; it fails on the others."""

COUNTED = ("top1", "argmax_agree")
FEWER = 2
"""Correct samples by which a count may be behind."""

ROUNDING = 5e-4
"""The metrics asked for have three digits."""

LARGEST_DROP = 0.01


def trtopt_build(bench: Bench, subject: Subject, stem: str, options: Sequence[str]) -> dict[str, Any]:
    """``trtopt build``: its report and the file it saved, or the reason it ended with."""
    base = bench.work / f"{subject.label.replace('/', '-')}-{stem}"
    onnx, report = base.with_suffix(".onnx"), base.with_suffix(".json")
    command = [
        sys.executable,
        "-m",
        "trtopt",
        "build",
        str(bench.model(subject)),
        *options,
        "--backend",
        "tensorrt-rtx",
    ]
    command += ["--calib", bench.samples(subject), "--cache-dir", str(bench.work / "cache")]
    command += ["-o", str(base.with_suffix(".rtx.engine")), "--save-onnx", str(onnx), "--report", str(report)]
    started = time.perf_counter()
    done = subprocess.run([*command, *subject.options], capture_output=True, text=True, check=False)
    result: dict[str, Any] = {"exit_code": done.returncode, "seconds": round(time.perf_counter() - started, 1)}
    if done.returncode:
        error = done.stderr[max(done.stderr.find("error: "), 0) :].strip()[-600:]
        result["reason"] = error.replace(str(bench.models), "MODELS").replace(str(bench.work), "")
        return result
    found = json.loads(report.read_text())
    share, metric = found["precision"].get("int8_flop_share"), found["accuracy"].get("metric") or {}
    return {
        **result,
        "onnx": str(onnx),
        "kernels": found["engine"]["kernels"],
        "predicted_us": round(found["prediction"]["predicted_us"], 1) if found.get("prediction") else None,
        "int8_flop_share": round(share, 4) if share is not None else None,
        "sqnr_db": smallest_sqnr(found["accuracy"]["outputs"]),
        "metric_found": {name: metric[name] for name in ("baseline", "optimized") if name in metric},
        "stages": {stage: round(value, 1) for stage, value in found["seconds"].items() if value >= 1},
    }


def keep_all(bench: Bench, subject: Subject, environments: Path) -> dict[str, Any]:
    """``--int8 --keep-all-int8`` and Model Optimizer's INT8 on all evaluation data."""
    result: dict[str, Any] = {"metric": subject.key}
    result["fp32"] = round(bench.metric(subject, as_stored(bench.model(subject))), 5)
    mine = trtopt_build(bench, subject, "keep-all", ("--int8", "--keep-all-int8"))
    if mine["exit_code"] == 0:
        mine.update(metrics(bench, subject, Path(mine.pop("onnx"))))
    result["ours"] = mine
    result["modelopt"] = {high: modelopt(bench, subject, high, environments) for high in ("fp32", "fp16")}
    values = [row["metric"] for row in result["modelopt"].values() if "metric" in row]
    result["modelopt_better"] = max(values, default=None)
    result["asked"] = ASKED.get(subject.name)
    result["met"] = mine["exit_code"] == 0 and all(
        reaches(subject, mine["metric"], value, bench) for value in (*values, result["asked"]) if value is not None
    )
    return result


def reaches(subject: Subject, value: float, other: float, bench: Bench) -> bool:
    """Whether a metric is as good as another: counts at most two samples behind, others to three digits."""
    slack = FEWER / bench.count(subject) if subject.key in COUNTED else 0.0
    return value >= other - max(slack, ROUNDING) - 1e-9


def metrics(bench: Bench, subject: Subject, path: Path) -> dict[str, float]:
    """The metric of a file's FP32 twin, and of the file as ONNX Runtime runs it."""
    with twin_of(path) as twin:
        found = {"metric": round(bench.metric(subject, twin), 5)}
    found["metric_in_onnxruntime"] = round(bench.metric(subject, as_stored(path)), 5)
    return found


def modelopt(bench: Bench, subject: Subject, high: str, environments: Path) -> dict[str, Any]:
    """Model Optimizer's INT8 with ``high`` for the rest, calibrated on the same samples, and its two metrics."""
    out = bench.work / f"{subject.label.replace('/', '-')}-modelopt-{high}.onnx"
    arguments = ["modelopt", "int8", high, "0", str(bench.model(subject)), bench.samples(subject), str(out)]
    try:
        run([interpreter(environments, "modelopt"), str(PRECISION / "peers.py"), *arguments])
        found: dict[str, Any] = metrics(bench, subject, out)
    except Exception as error:  # noqa: BLE001 - whatever a foreign tool or its file fails with is the result
        text = str(error).replace(str(bench.models), "MODELS").replace(str(bench.work), "")
        return {"reason": text.replace(str(environments), "")[-400:]}
    return found


def budget(bench: Bench, subject: Subject) -> dict[str, Any]:
    """``--int8 --max-accuracy-drop`` with the model's own metric: searched on one half, scored on the other."""
    script = write_script(bench.work / f"metric_{subject.name}.py", bench.models, subject.name, subject.key)
    options = ("--int8", "--max-accuracy-drop", f"{LARGEST_DROP:g}", "--metric", script)
    result: dict[str, Any] = {"metric": subject.key}
    half = trtopt_build(bench, subject, "budget-fp16", ("--fp16",))
    result["fp16"] = {key: half.get(key) for key in ("exit_code", "kernels", "predicted_us", "seconds", "reason")}
    mine = trtopt_build(bench, subject, "budget", options)
    result["ours"] = mine
    scored = Half(bench.models, subject.name, subject.key, SCORE)
    result["fp32"] = {"score": round(scored.metric(as_stored(bench.model(subject))), 5)}
    if mine["exit_code"]:
        return {**result, "met": False}
    searched = Half(bench.models, subject.name, subject.key, SEARCH)
    result["fp32"]["search"] = round(searched.metric(as_stored(bench.model(subject))), 5)
    with twin_of(Path(mine.pop("onnx"))) as twin:
        mine["score"], mine["search"] = round(scored.metric(twin), 5), round(searched.metric(twin), 5)
    result["met"] = result["fp32"]["score"] - mine["score"] <= LARGEST_DROP + 1e-9
    return result


def keep_all_table(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    heads = "model, metric, FP32, ours, Model Optimizer FP32 / FP16, asked, INT8 share of flop, SQNR dB, kernels"
    yield "| " + f"{heads}, seconds, met".replace(", ", " | ") + " |"
    yield "|---" * 11 + "|"
    for name, row in results.items():
        mine = row["ours"]
        peers = " / ".join(
            f"{each['metric']:.4f}" if "metric" in each else "fails" for each in row["modelopt"].values()
        )
        cells = [name, row["metric"], f"{row['fp32']:.4f}", number(mine.get("metric"), ".4f"), peers]
        cells += [number(row["asked"], ".3f"), number(mine.get("int8_flop_share"), ".1%")]
        cells += [number(mine.get("sqnr_db"), ".1f"), number(mine.get("kernels"), "d"), f"{mine['seconds']:.0f}"]
        yield "| " + " | ".join([*cells, "yes" if row["met"] else "NO"]) + " |"


def budget_table(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    heads = "model, metric, FP32 searched / scored, optimized searched / scored, drop where scored, INT8 share of flop"
    yield "| " + f"{heads}, predicted us FP16 -> optimized, kernels, seconds, exit, met".replace(", ", " | ") + " |"
    yield "|---" * 11 + "|"
    for name, row in results.items():
        full, mine, half = row["fp32"], row["ours"], row["fp16"]
        drop = full["score"] - mine["score"] if "score" in mine else None
        cells = [
            name,
            row["metric"],
            *(" / ".join(number(x.get(k), ".4f") for k in ("search", "score")) for x in (full, mine)),
        ]
        cells += [number(drop, "+.4f"), number(mine.get("int8_flop_share"), ".1%")]
        cells += [f"{number(half['predicted_us'], '.1f')} -> {number(mine.get('predicted_us'), '.1f')}"]
        cells += [f"{number(half['kernels'], 'd')} -> {number(mine.get('kernels'), 'd')}", f"{mine['seconds']:.0f}"]
        yield "| " + " | ".join([*cells, str(mine["exit_code"]), "yes" if row["met"] else "NO"]) + " |"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
