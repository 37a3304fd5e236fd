"""Build every detector of a folder in FP16 and INT8, and compare engine part and host part with the original.

    python benchmarks/detectors/run.py --folder FOLDER --work WORK [--only NAME,...] [--fixed] [--table]

``WORK/results.json`` has what came of each; ``--table`` writes it into README.md. TensorRT for RTX compiles for an L4.
What is compared runs in ONNX Runtime: the model as exported, and in its place the part for the engine, rewritten
in the types that it has, with the part for the host behind it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import trtopt
from trtopt.errors import TrtoptError
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

HERE = Path(__file__).parent
START, END = "<!-- table -->\n", "<!-- end of table -->"


def shapes_of(path: Path, feeds: dict[str, np.ndarray], *, is_fixed: bool) -> dict[str, Any]:
    """Profiles for dynamic axes: batch 1 to 2, height and width half to twice the example's; or the example alone."""
    ranges: tuple[dict[str, tuple[int, ...]], ...] = ({}, {}, {})
    for item in load(path).inputs:
        if item.is_static:
            continue
        example = feeds[item.name].shape
        for index, made in enumerate(ranges):
            size = {0: (1, 1, 2), 1: (1, 1, 1)}
            made[item.name] = tuple(
                each if isinstance(dim, int) else size[0][index] if axis == 0 else int(each * (0.5, 1, 2)[index])
                for axis, (dim, each) in enumerate(zip(item.shape, example, strict=True))
            )
    low, best, high = ranges
    if is_fixed:
        return {"opt_shapes": [best]} if best else {}
    return {"min_shapes": [low], "opt_shapes": [best], "max_shapes": [high]} if best else {}


def run_parts(main: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of a model and of the part for the host beside it."""
    known = dict(feeds)
    for path in (main, main.with_name(main.stem + ".host.onnx")):
        if path.exists():
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            names = [item.name for item in session.get_outputs()]
            known.update(
                zip(names, session.run(None, {i.name: known[i.name] for i in session.get_inputs()}), strict=True)
            )
    return known


def largest_difference(path: Path, main: Path, shapes: list[dict[str, tuple[int, ...]]]) -> float | str:
    """Of an output over its largest element, on random images of each of the shapes."""
    rng = np.random.default_rng(7)
    worst = 0.0
    with OrtSession(load(path).model) as session:
        for sizes in shapes:
            feeds = {name: rng.random(size, np.float32) for name, size in sizes.items()}
            whole = dict(zip(session.output_names, session.run(feeds), strict=True))
            parts = run_parts(main, feeds)
            for name, value in whole.items():
                if parts[name].shape != value.shape:
                    return f"{name}: {list(parts[name].shape)} for {list(value.shape)}"
            worst = max(worst, apart(list(whole.values()), [parts[name] for name in whole]))
    return worst


def apart(whole: list[np.ndarray], parts: list[np.ndarray]) -> float:
    """The largest difference over the largest element of its output; of detections, each from the one nearest to it:
    where scores are equal but for rounding, they change places."""
    scales = [max(float(np.abs(value.astype(np.float64)).max(initial=0)), 1e-9) for value in whole]
    if whole[0].ndim in (1, 2) and len({len(value) for value in whole}) == 1:
        one, other = (
            np.concatenate([each.reshape(len(each), -1) / scale for each, scale in zip(found, scales, strict=True)], 1)
            for found in (whole, parts)
        )
        off = np.abs(one[:, None] - other[None]).max(axis=2)
        return float(max(off.min(axis=0).max(initial=0), off.min(axis=1).max(initial=0)))
    pairs = zip(whole, parts, scales, strict=True)
    return max(float(np.abs(part.astype(np.float64) - value).max(initial=0)) / scale for value, part, scale in pairs)


def tried(path: Path, work: Path, *, is_fixed: bool) -> dict[str, Any]:
    """What comes of a model."""
    with np.load(path.with_suffix(".npz")) as archive:
        feeds = {name: value[:1] for name, value in archive.items()}
    found: dict[str, Any] = {}
    shapes = shapes_of(path, feeds, is_fixed=is_fixed)
    main = work / f"{path.stem}.onnx"
    for mode in ("fp32", "fp16", "int8"):
        began = time.process_time()
        try:
            if mode == "fp32":
                report = trtopt.optimize(path, output=str(main), calib=feeds, gpu="L4", **shapes)
                ends = [shapes[each][0] for each in sorted(shapes)] or [{k: v.shape for k, v in feeds.items()}]
                found["difference"] = largest_difference(path, main, ends)
                found["host"] = None if report.host is None else report.host.nodes
                continue
            output = work / f"{path.stem}.{mode}.rtx.engine"
            report = trtopt.build(path, precision=mode, calib=feeds, output=str(output), gpu="L4", **shapes)
            accuracy = report.accuracy
            outputs = {} if accuracy is None else accuracy.outputs
            between = () if report.host is None else report.host.between
            left_out = {item.name for item in between if not item.dtype.startswith("float")}
            left_out.update(() if accuracy is None else accuracy.host_outputs)
            judged = [item.sqnr_db for name, item in outputs.items() if name not in left_out]
            cost = report.shipped
            found[mode] = {
                "kernels": None if cost is None else cost.kernels,
                "us": None if cost is None else round(cost.predicted_us, 1),
                "db": round(min((db for db in judged if np.isfinite(db)), default=float("nan")), 1),
                "cpu_s": round(time.process_time() - began, 1),
            }
        except TrtoptError as error:
            found[mode] = {"error": error.what, "where": error.where, "remedy": error.remedy, "code": error.exit_code}
            if mode == "fp32":
                found["difference"] = "refused"
    return found


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "| detector | host, nodes | difference | FP16: kernels, us, dB | INT8: kernels, us, dB |",
        "|---|---|---|---|---|",
    ]

    def cell(entry: dict[str, Any] | None) -> str:
        if not entry:
            return "-"
        if "error" in entry:
            return "refused"
        return ", ".join("-" if entry[key] is None else str(entry[key]) for key in ("kernels", "us", "db"))

    for name, entry in results.items():
        off = entry.get("difference", "-")
        said = f"{off:.1g}" if isinstance(off, float) else off
        lines.append(
            f"| {name} | {entry.get('host') or '-'} | {said} | {cell(entry.get('fp16'))} | {cell(entry.get('int8'))} |"
        )
    refused = {name: entry["fp16"] for name, entry in results.items() if "error" in entry.get("fp16", {})}
    lines += ["", *(f"- {name}: {e['error']} ({e['where']}). Remedy: {e['remedy']}." for name, e in refused.items())]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="what exports.py wrote")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--fixed", action="store_true", help="the example's size alone, one image")
    parser.add_argument("--table", action="store_true", help="write the table into README.md")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    record = options.work / "results.json"
    results = json.loads(record.read_text()) if record.exists() else {}
    names = (
        options.only.split(",")
        if options.only
        else sorted(p.stem for p in (options.folder or options.work).glob("*.onnx"))
    )
    for name in names if options.folder else ():
        results[name] = tried(options.folder / f"{name}.onnx", options.work, is_fixed=options.fixed)
        print(name, json.dumps(results[name]), flush=True)
        record.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    if options.table:
        readme = HERE / "README.md"
        text = readme.read_text()
        head, tail = text.split(START)[0], text.split(END)[1]
        readme.write_text(head + START + table(results) + END + tail)


if __name__ == "__main__":
    main()
