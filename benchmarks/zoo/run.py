"""What trtopt makes of the zoo, held against a plain FP16 cast and judged by two judges.

    python benchmarks/zoo/run.py --folder FOLDER --work WORK [--only NAME,...] [--modes fp16,int8] [--gpu L4] [--fixed]

``FOLDER`` is what export.py wrote. Each network and mode runs in a process of its own, within ``--timeout``; what
``WORK/results.jsonl`` holds is not run again (``--again`` does). ``--table`` writes results.json and the table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
MACHINE = "2-core x86-64, no GPU"
MODES = {"plain": None, "recipes": (), "fp16": ("--fp16",), "int8": ("--int8",), "fp8": ("--fp8",), "auto": ("--auto",)}
PEERS = {"modelopt-int8": "int8", "modelopt-fp8": "fp8"}
"""Model Optimizer's modes, with ``--modelopt`` its interpreter."""
DEFAULT_MODES = "plain,fp16,int8,recipes"
RECIPES_BOUND = 1e-5
"""Largest difference of an output with recipes alone over its largest element, in FP32."""
EIGHT_BIT_DB = 20.0
"""What every output has to keep for an 8-bit time to count."""
SHOWN = ("reason", "kernels", "syncs", "mb", "us", "predicted_us", "db", "difference", "ort", "seconds", "cpu_s")
CHECKED = 2
"""Rows of the batch that are compared in ONNX Runtime."""
NAMED = 2
"""Groups of equal kernels that a row names, of those between an engine and its limit."""


# ---- one network in one mode, in a child process -----------------------------------------------------------------


def shapes_of(entry: Mapping[str, Any], fixed: bool) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Smallest, optimal and largest shape of every input of an export."""
    found = {}
    for name, (_, *shape) in entry["inputs"].items():
        axes = {int(axis): label for axis, label in entry["axes"].get(name, {}).items()}
        low, high = list(shape), list(shape)
        for axis, label in axes.items() if not fixed else ():
            low[axis] = 1 if label in ("batch", "past", "sequence") else shape[axis] // 2
            high[axis] = 2 * shape[axis]
        found[name] = (tuple(low), tuple(shape), tuple(high))
    return found


def plain_model(path: Path, profiles: Sequence[Any]) -> Any:
    """The plain FP16 cast of a file."""
    from trtopt.pipeline.plain import plain
    from trtopt.source.onnx_file import load

    return plain(load(path).model, profiles=profiles)


def optimized(
    path: Path, target: Path, shapes: Mapping[str, Any], options: Sequence[str], work: Path
) -> dict[str, Any]:
    """``trtopt optimize`` as a user runs it."""
    text = [",".join(f"{name}:{'x'.join(map(str, each[i]))}" for name, each in shapes.items()) for i in range(3)]
    asked = ("--opt-shapes", text[1]) if text[0] == text[2] else ()
    asked = asked or ("--min-shapes", text[0], "--opt-shapes", text[1], "--max-shapes", text[2])
    report = target.with_suffix(".json")
    call = [sys.executable, "-m", "trtopt", "optimize", str(path), *asked, *options, "--backend", "tensorrt-rtx"]
    call += ["--report", str(report), "--cache-dir", str(work / "cache"), "-o", str(target)]
    done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=HERE.parents[1])
    if done.returncode:
        said = done.stderr[max(done.stderr.find("error: "), 0) :].strip().splitlines() or [f"exit {done.returncode}"]
        return {"exit_code": done.returncode, "reason": " ".join(said)[:400]}
    found = json.loads(report.read_text())
    rewriting = found.get("rewriting") or {}
    return {
        "warnings": [each[:200] for each in found.get("warnings", [])],
        "applied": {step["name"]: step["changes"] for step in found["steps"] if step["changes"]},
        "stages": {stage: round(value, 1) for stage, value in found["seconds"].items()},
        "judged_us": round(((rewriting.get("after") or {}).get("predicted_us")) or 0.0, 1) or None,
        "reported": {key: found[key] for key in ("shipped", "plain", "dynamic_cost") if found.get(key)},
    }


def quantized_by_peer(path: Path, target: Path, mode: str, shapes: Mapping[str, Any], python: str) -> dict[str, Any]:
    """Model Optimizer's defaults with FP16 beside, calibrated on samples like those that trtopt makes for itself: two
    batches of the optimum's size."""
    import numpy as np

    from trtopt.graph.artifact import InputSpec
    from trtopt.precision.observe.samples import SYNTHETIC, open_samples
    from trtopt.source.onnx_file import load

    fixed = [InputSpec(item.name, item.dtype, shapes[item.name][1]) for item in load(path).inputs]
    batches = list(open_samples(SYNTHETIC, fixed, count=2))
    feeds = {name: np.concatenate([each[name] for each in batches]) for name in batches[0]}
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "samples.npz"
        np.savez(samples, **feeds)
        peer = HERE.parent / "precision" / "peers.py"
        call = [python, str(peer), "modelopt", mode, "fp16", "0", str(path), str(samples), str(target)]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if line and not line[0].isspace()]
    return {"reason": (said or [f"exit {done.returncode}"])[-1][:300]} if done.returncode else {}


def engine_cost(path: Path, profiles: Sequence[Any], gpu: str, work: Path) -> dict[str, Any]:
    """Compile a file by TensorRT for RTX and judge the engine by both judges."""
    from second_judge import judged

    from trtopt.engine.backend import TENSORRT_RTX
    from trtopt.engine.build import build_engine
    from trtopt.engine.limit import limit_of
    from trtopt.engine.request import BuildRequest
    from trtopt.engine.work import layers_of_engine
    from trtopt.graph import edit
    from trtopt.graph.shapes import static_shapes
    from trtopt.hardware.spec import find_gpu
    from trtopt.roofline.layer import predict
    from trtopt.source.onnx_file import load
    from trtopt.source.save import save_model

    model = load(path).model
    file = work / "compiled.onnx"
    files = save_model(model, file)
    nodes = tuple(str(node.name) for node in edit.all_nodes(model.graph))
    began = time.perf_counter()
    request = BuildRequest(file, TENSORRT_RTX, find_gpu(gpu), nodes, tuple(profiles), weights=files[1:])
    engine = build_engine(request)
    seconds = round(time.perf_counter() - began, 1)
    shapes = static_shapes(model, {name: shape for name, (_, shape, _) in profiles[0].shapes.items()})
    ours = layers_of_engine(engine.sized_layers, model, shapes)
    found = judged(engine.record.layers, engine.sized_layers, model, shapes)
    rows = predict(ours.layers, find_gpu(gpu))[0]
    limit = limit_of(engine.sized_layers, ours.layers, rows, model, find_gpu(gpu))
    predicted = sum(row.predicted_us for row in rows)
    return {**found, "predicted_us": round(predicted, 1), "compile_s": seconds, "limit": shown_limit(limit)}


def shown_limit(limit: Any) -> dict[str, Any]:
    """What a row says of an engine's limit: necessary microseconds, and what the engine takes beyond them, by reason
    and for the groups of equal kernels that take most."""
    from trtopt.report.text.limit import by_reason

    first = [(item.op, item.reason, item.kernels, round(item.excess_us, 1)) for item in limit.kernels[:NAMED]]
    reasons = [(reason, kernels, round(us, 1)) for reason, kernels, us in by_reason(limit)]
    return {"us": round(limit.limit_us, 1), "reasons": reasons, "kernels": first}


def outputs_of(path: Path, feeds: Mapping[str, Any], fast: bool) -> list[Any]:
    """What ONNX Runtime gives: at its default level, or as written."""
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 3
    if not fast:
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    given = {item.name: feeds[item.name] for item in session.get_inputs()}
    for item in session.get_inputs():  # caches keep their own type
        given[item.name] = given[item.name].astype("float16") if item.type == "tensor(float16)" else given[item.name]
    found = session.run(None, given)
    host = path.with_suffix(".host.onnx")  # what the compiler does not run, behind the engine
    if not host.exists():
        return found
    return outputs_of(
        host, {**feeds, **{item.name: each for item, each in zip(session.get_outputs(), found, strict=True)}}, fast
    )


def rows_of(array: Any, axes: Mapping[str, str]) -> Any:
    """The first rows of an input's batch; all of one that has none.

    Args:
        array: What the network was exported with, NumPy.
        axes: Names of its dynamic axes, by number.
    """
    batch = next((int(axis) for axis, label in axes.items() if label == "batch"), None)
    return array if batch is None else array[(slice(None),) * batch + (slice(CHECKED),)]


def compare(original: Path, made: Path, fixed: bool) -> dict[str, Any]:
    """The outputs of two files on the export's own inputs, which no search saw."""
    import numpy as np

    axes = {} if fixed else json.loads((original.parent / "exports.json").read_text())[original.stem]["axes"]
    with np.load(original.with_suffix(".npz")) as stored:
        feeds = {name: rows_of(stored[name], axes.get(name, {})) for name in stored.files}
    expected = outputs_of(original, feeds, fast=True)
    found, loads = None, "yes"
    try:
        found = outputs_of(made, feeds, fast=True)
    except Exception as error:  # noqa: BLE001 - whatever the runtime raises is the finding
        loads = f"{type(error).__name__}: {error}"[:200]
        try:
            found = outputs_of(made, feeds, fast=False)
        except Exception:  # noqa: BLE001
            return {"ort": loads}
    if any(one.shape != other.shape for one, other in zip(expected, found, strict=True)):
        return {"ort": loads, "other_shapes": True}  # another number of boxes
    db, difference = [], 0.0
    for one, other in zip(expected, found, strict=True):
        a, b = one.astype(np.float64), other.astype(np.float64)
        noise = float(((a - b) ** 2).sum())
        power = float((a**2).sum())
        db.append(math.inf if noise == 0 else 10 * math.log10(power / noise) if power and noise > 0 else math.nan)
        difference = max(difference, float(np.abs(a - b).max(initial=0) / (np.abs(a).max(initial=0) or 1)))
    worst = math.nan if any(map(math.isnan, db)) else min(db)
    return {"ort": loads, "db": None if not math.isfinite(worst) else round(worst, 1), "difference": difference}


def measured(name: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """One network in one mode."""
    from trtopt.engine.request import ShapeProfile
    from trtopt.source.save import save_model

    entry = json.loads((options.folder / "exports.json").read_text())[name]
    path, made = options.folder / f"{name}.onnx", options.work / "made" / f"{name}.{mode}.onnx"
    shapes = shapes_of(entry, options.fixed)
    profiles = (ShapeProfile(shapes),)
    made.parent.mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    began = time.perf_counter()
    if mode == "plain":
        save_model(plain_model(path, profiles), made)
    elif mode in PEERS:
        found = quantized_by_peer(path, made, PEERS[mode], shapes, options.modelopt)
    else:
        found = optimized(path, made, shapes, (*MODES[mode], "--gpu", options.gpu), options.work)
    found["seconds"] = round(time.perf_counter() - began, 1)
    if "reason" in found:
        return found
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        found.update(engine_cost(made, profiles, options.gpu, Path(folder)))
    return found


# ---- all of them -------------------------------------------------------------------------------------------------


def child(arguments: Sequence[str], timeout: float) -> dict[str, Any]:
    """This script in a process of its own; its last line, or why there is none."""
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, said = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"reason": f"no end after {timeout:g} s"}
    if process.returncode:
        last = [line for line in said.splitlines() if line and not line[0].isspace()]
        return {"reason": (last or [f"exit {process.returncode}"])[-1][:300]}
    return json.loads(out.strip().splitlines()[-1])


def run(name: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """A network in a mode: made and compiled in one process, compared in another, which a bad file may take down."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    given = ["--folder", str(options.folder), "--work", str(options.work), "--gpu", options.gpu]
    given += ["--modelopt", options.modelopt] + ["--fixed"] * options.fixed
    found = child([*given, "--child", name, mode], options.timeout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["cpu_s"] = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)
    found["load_average"] = round(os.getloadavg()[0], 1)
    made = options.work / "made" / f"{name}.{mode}.onnx"
    if "reason" not in found:
        compared = child([*given, "--compare", name, mode], options.timeout)
        found.update({"ort": compared["reason"]} if "reason" in compared else compared)
    for each in (made, made.with_suffix(".json"), made.with_suffix(".host.onnx")):
        each.unlink(missing_ok=True)
    return found


def key_of(row: Mapping[str, Any]) -> tuple[str, str, str, bool]:
    return (row["network"], row["mode"], row["gpu"], row["fixed"])


def known_rows(path: Path) -> dict[tuple[str, str, str, bool], dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {key_of(row): row for row in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where export.py wrote")
    parser.add_argument("--work", type=Path, required=True, help="for results.jsonl, the cache and what is made")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument(
        "--modes", default=DEFAULT_MODES, help=f"of {', '.join((*MODES, *PEERS))} (default: {DEFAULT_MODES})"
    )
    parser.add_argument("--modelopt", default="", help="the Python that has Model Optimizer, for its modes")
    parser.add_argument("--gpu", default="L4", choices=["L4", "RTX-4090"])
    parser.add_argument("--fixed", action="store_true", help="the example's sizes only, instead of a range")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a mode of a network")
    parser.add_argument("--again", action="store_true", help="run what is there again")
    parser.add_argument("--table", action="store_true", help="write results.json and the table, and run nothing")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--compare", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.work, options.folder = options.work.resolve(), options.folder and options.folder.resolve()
    if options.child:
        print(json.dumps(measured(*options.child, options)))
        return
    if options.compare:
        name, mode = options.compare
        made = options.work / "made" / f"{name}.{mode}.onnx"
        print(json.dumps(compare(options.folder / f"{name}.onnx", made, options.fixed)))
        return
    lines = options.work / "results.jsonl"
    if options.table:
        from table import write

        versions = {each: metadata.version(each) for each in ("trtopt", "onnx", "onnxruntime", "tensorrt-rtx")}
        facts = {"machine": MACHINE, "date": options.date, "python": platform.python_version(), "versions": versions}
        write(list(known_rows(lines).values()), facts)
        return
    options.work.mkdir(parents=True, exist_ok=True)
    exports = json.loads((options.folder / "exports.json").read_text())
    wanted = (
        options.only.split(",") if options.only else [name for name, entry in exports.items() if "reason" not in entry]
    )
    for name in wanted:
        for mode in options.modes.split(","):
            row = {"network": name, "mode": mode, "gpu": options.gpu, "fixed": options.fixed}
            if key_of(row) in known_rows(lines) and not options.again:
                continue
            row.update(run(name, mode, options), date=options.date)
            with lines.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(name, mode, {key: row[key] for key in SHOWN if row.get(key) is not None}, flush=True)


if __name__ == "__main__":
    main()
