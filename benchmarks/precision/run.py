"""Precisions of one network side by side: FP16, two other quantizers, trtopt's ``--int8``, ``--fp8`` and ``--auto``.

    python benchmarks/precision/run.py [--work FOLDER] [--only NAME;...] [--variants NAME;...] [--resume]

Every ONNX file is compiled by TensorRT for RTX for compute capability 8.9 and judged by the same function
(``measure.py``), on an L4 and on an RTX 4090. What trtopt keeps depends on the GPU, so it builds once for each.
The other quantizers run in virtual environments of their own under FOLDER, a process per file; their files are kept
there and used again. ``--resume`` also keeps the rows that ``results.json`` has.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from measure import PLAIN, constants, measure  # noqa: E402 - beside this file
from venvs import PEERS, FailedError, interpreter, run  # noqa: E402

MACHINE = "2-core x86-64, no GPU"
SAMPLES, BATCH, TOKENS, WORDS = 8, 8, 128, 30522
NETWORKS = ("ResNet-50", "ViT-B/16", "MobileNetV2", "BERT, 4 layers", "ConvNeXt-T", "UNet")

OURS = {"ours --fp16": ("--fp16",), "ours --int8": ("--int8",), "ours --fp8": ("--fp8",), "ours --auto": ("--auto",)}
PLAIN_FP16 = "FP16, plain build"
BY_IMAGE = "ModelOpt INT8, by image"
OTHERS = (PLAIN_FP16, "ModelOpt INT8", BY_IMAGE, "ModelOpt FP8", "ONNX Runtime INT8")
VARIANTS = (*OTHERS, *OURS)
JUDGES = ("predicted_us", "plain_us")
SHORT = {"predicted_us": "predicted", "plain_us": "plain"}

LIMITS = {"ResNet-50": 0.88, "ViT-B/16": 0.75}
"""Largest share of FP16's predicted time on the RTX 4090; 1 for the others."""


class Work:
    """The folder that files and virtual environments are kept in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)

    def model(self, name: str) -> Path:
        """The network's FP32 file, written by a process that has PyTorch."""
        from networks import file_name

        path = self.folder / file_name(name)
        if not path.exists():
            run([sys.executable, str(HERE / "networks.py"), name, str(self.folder)])
        return path

    def samples(self, name: str) -> Path:
        """Eight samples in one .npz, the same for everybody: standard normal images, uniform tokens."""
        kind = "tokens" if name.startswith("BERT") else "images"
        path = self.folder / f"{kind}.npz"
        if not path.exists():
            random = np.random.default_rng(0)
            feeds = {"input0": random.standard_normal((SAMPLES, 3, 224, 224), dtype=np.float32)}
            if kind == "tokens":
                words = random.integers(0, WORDS, (SAMPLES, TOKENS), dtype=np.int64)
                feeds = {"input0": words, "input1": np.ones((SAMPLES, TOKENS), np.int64)}
            np.savez(path, **feeds)
        return path

    def made(self, tool: str, out: str, *arguments: str) -> Path:
        """A file of a peer's, from its cache or made now by ``peers.py``."""
        path = self.folder / out
        if not path.exists():
            partial = path.with_name(f"partial-{path.name}")
            run([interpreter(self.folder, tool), str(HERE / "peers.py"), *arguments, str(partial)])
            partial.rename(path)
        return path


def plain_fp16(work: Work, name: str) -> dict[str, Any]:
    """FP16 without recipes."""
    return build(work, name, "plain", ("--fp16", "--recipes", "none"), "RTX-4090")


def modelopt(mode: str, *, by_image: bool = False) -> Callable[[Work, str], dict[str, Any]]:
    """Model Optimizer, with FP32 and with FP16 for the rest: the better of the two on the RTX 4090."""

    def made(work: Work, name: str) -> dict[str, Any]:
        model, samples = work.model(name), work.samples(name)
        found: dict[str, Any] = {}
        for high in ("fp32", "fp16"):
            stem = f"{model.stem}-modelopt-{mode}-{high}{'-by-image' if by_image else ''}.onnx"
            batch = str(BATCH if by_image else 0)
            found[high] = work.made("modelopt", stem, "modelopt", mode, high, batch, str(model), str(samples))
        return better(found)

    return made


def onnxruntime(work: Work, name: str) -> dict[str, Any]:
    """ONNX Runtime's static Q/DQ of all operators and of products alone, as it is and with FP16 for what it leaves in
    FP32: the best of the four on the RTX 4090."""
    model, samples = work.model(name), work.samples(name)
    found: dict[str, Path] = {}
    for kind in ("ort", "ort-products"):
        full = work.made("onnxruntime", f"{model.stem}-{kind}.onnx", kind, str(model), str(samples))
        half = work.made("modelopt", f"{model.stem}-{kind}-fp16.onnx", "half", str(full))
        found |= {f"{kind} fp32": full, f"{kind} fp16": half}
    return better(found)


def better(files: Mapping[str, Path]) -> dict[str, Any]:
    """The measurement of the faster file on the RTX 4090; the others' figures beside it."""
    found: dict[str, dict[str, Any]] = {}
    for rest, path in files.items():
        try:
            found[rest] = measure(path)
        except Exception as error:  # noqa: BLE001 - whatever the compiler says of a foreign file is the result
            found[rest] = {"reason": str(error)[:300]}
    built = {rest: row for rest, row in found.items() if "reason" not in row}
    if not built:
        return {"reason": "; ".join(f"{rest}: {row['reason']}" for rest, row in found.items())}
    best = min(built, key=lambda rest: built[rest]["predicted_us"]["RTX-4090"])
    return {**built[best], "rest": best, "candidates": found}


def ours(options: Sequence[str]) -> Callable[[Work, str], dict[str, Any]]:
    """``trtopt build``, once for each GPU."""

    def made(work: Work, name: str) -> dict[str, Any]:
        stem = "-".join(option.strip("-") for option in options)
        return {"for": {gpu: build(work, name, f"{stem}-{gpu}", options, gpu) for gpu in PLAIN}}

    return made


def build(work: Work, name: str, stem: str, options: Sequence[str], gpu: str) -> dict[str, Any]:
    """``trtopt build`` as a process, and the measurement of the ONNX file it saves."""
    model = work.model(name)
    base = work.folder / f"{model.stem}-{stem}"
    onnx, report = base.with_suffix(".onnx"), base.with_suffix(".json")
    command = [sys.executable, "-m", "trtopt", "build", str(model), *options, "--backend", "tensorrt-rtx"]
    command += ["--gpu", gpu, "--calib", str(work.samples(name)), "--cache-dir", str(work.folder / "cache")]
    command += ["-o", str(base.with_suffix(".rtx.engine")), "--save-onnx", str(onnx), "--report", str(report)]
    started = time.perf_counter()
    try:
        run(command)
    except FailedError as error:
        return {"reason": str(error).replace(str(work.folder), "FOLDER")}
    seconds = time.perf_counter() - started
    found = json.loads(report.read_text())
    row = {**measure(onnx), "seconds": round(seconds, 1)}
    regions = found.get("guard") or []
    if regions:
        row["regions"] = {"all": len(regions), "kept": sum(bool(item["kept"]) for item in regions)}
        reasons = Counter(item["reason"][:200] for item in regions if not item["kept"])
        row["not_kept"] = dict(reasons.most_common(3))
    row["stages"] = {stage: round(value, 1) for stage, value in found["seconds"].items() if value >= 1}
    return row


MAKERS: dict[str, Callable[[Work, str], dict[str, Any]]] = {
    PLAIN_FP16: plain_fp16,
    "ModelOpt INT8": modelopt("int8"),
    BY_IMAGE: modelopt("int8", by_image=True),
    "ModelOpt FP8": modelopt("fp8"),
    "ONNX Runtime INT8": onnxruntime,
    **{name: ours(options) for name, options in OURS.items()},
}


def figures(row: Mapping[str, Any], gpu: str) -> Mapping[str, Any] | None:
    """What a variant costs on a GPU; None where it could not be built."""
    found = row["for"][gpu] if "for" in row else row
    return None if "reason" in found else found


def time_of(rows: Mapping[str, Any], name: str, gpu: str, judge: str) -> float | None:
    found = figures(rows[name], gpu) if name in rows else None
    return None if found is None else float(found[judge][gpu])


def best_other(rows: Mapping[str, Any], gpu: str, judge: str) -> tuple[float, str] | None:
    """The fastest of what trtopt did not make, FP16 built plainly among it."""
    times = [(time_of(rows, name, gpu, judge), name) for name in OTHERS]
    return min(((time, name) for time, name in times if time is not None), default=None)


def lead(rows: Mapping[str, Any], name: str, gpu: str, judge: str) -> float | None:
    """By how much a variant is ahead of the best of the others: 0.1 when that takes 10 % longer."""
    mine, other = time_of(rows, name, gpu, judge), best_other(rows, gpu, judge)
    return None if mine is None or other is None else other[0] / mine - 1


def best_ours(rows: Mapping[str, Any], gpu: str, judge: str) -> tuple[float, str] | None:
    times = [(time_of(rows, name, gpu, judge), name) for name in OURS]
    return min(((time, name) for time, name in times if time is not None), default=None)


def table(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """All figures. ``a / b`` are the engines that trtopt built for the L4 and for the RTX 4090."""
    heads = ["network", "variant", "kernels", "activation MB", "weight MB", "engine MB", "INT8, FP8 share of flop"]
    heads += [f"{gpu} {SHORT[judge]}, us" for gpu in PLAIN for judge in JUDGES]
    heads += ["leads the best of the others: L4, RTX 4090 (plain judge)"]
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for network, rows in results.items():
        for name in VARIANTS:
            if name in rows:
                yield "| " + " | ".join([network, name, *cells(rows, name)]) + " |"


def cells(rows: Mapping[str, Any], name: str) -> list[str]:
    """The figures of one variant."""
    found = [figures(rows[name], gpu) for gpu in PLAIN]
    if None in found:
        parts = rows[name].get("for", {"": rows[name]})
        reasons = [str(part["reason"]).replace("|", "/").replace("\n", " ")[:160] for part in parts.values()
                   if "reason" in part]  # fmt: skip
        return [f"not built: {reasons[0]}", *[""] * (5 + 2 * len(PLAIN))]
    line = []
    for key in ("kernels", "activation_mb", "weight_mb", "engine_mb"):
        values = [f"{item[key]:g}" for item in found if item is not None]
        line.append(" / ".join(dict.fromkeys(values)))
    shares = [f"{item['int8_flop_share']:.0%}, {item['fp8_flop_share']:.0%}" for item in found if item is not None]
    line.append(" / ".join(dict.fromkeys(shares)))
    for gpu in PLAIN:
        for judge in JUDGES:
            mine, first = time_of(rows, name, gpu, judge), time_of(rows, PLAIN_FP16, gpu, judge)
            line.append(f"{mine:.0f}" + (f" ({mine / first:.2f})" if mine is not None and first else ""))
    line.append(lead_cell(rows, name) if name in OURS else "")
    return line


def lead_cell(rows: Mapping[str, Any], name: str) -> str:
    parts = []
    for gpu in PLAIN:
        shown = [lead(rows, name, gpu, judge) for judge in JUDGES]
        both = [f"{value:+.0%}" if value is not None else "-" for value in shown]
        parts.append(f"{both[0]} ({both[1]})")
    return ", ".join(parts)


def summary(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The best of ours against FP16 and the best of the others, and what was asked."""
    heads = "network, judge, FP16 plain / ours us, best of the others, best of ours, of FP16 plain / ours, lead, asked"
    heads += ", met, why no more"
    yield "| " + heads.replace(", ", " | ") + " |"
    yield "|---" * len(heads.split(", ")) + "|"
    for network, rows in results.items():
        for gpu in PLAIN:
            for judge in JUDGES:
                line = summary_line(network, rows, gpu, judge)
                if line is not None:
                    yield "| " + " | ".join(line) + " |"


def summary_line(network: str, rows: Mapping[str, Any], gpu: str, judge: str) -> list[str] | None:
    other, mine = best_other(rows, gpu, judge), best_ours(rows, gpu, judge)
    first, half = (time_of(rows, name, gpu, judge) for name in (PLAIN_FP16, "ours --fp16"))
    if other is None or mine is None or first is None or half is None:
        return None
    limit = LIMITS.get(network, 1.0) if (gpu, judge) == ("RTX-4090", "predicted_us") else 1.0
    ahead = other[0] / mine[0] - 1
    met = mine[0] <= limit * first + 0.05 and ahead > -5e-4
    if network == "MobileNetV2":
        engines = [figures(rows[name], gpu) for name in ("ours --int8", PLAIN_FP16) if name in rows]
        met = met and all(item is not None for item in engines) and engines[0]["engine_mb"] <= engines[-1]["engine_mb"]  # type: ignore[index]
    asked = f"<= {limit:g}" + (", engine not larger" if network == "MobileNetV2" else "") if judge == JUDGES[0] else "-"
    return [
        network, f"{gpu} {SHORT[judge]}", f"{first:.0f} / {half:.0f}", f"{other[0]:.0f} ({other[1]})",
        f"{mine[0]:.0f} ({mine[1]})", f"{mine[0] / first:.3f} / {mine[0] / half:.3f}", f"{ahead:+.1%}", asked,
        ("yes" if met else "NO") if judge == JUDGES[0] else ("ahead" if ahead > -5e-4 else "behind"),
        why(rows, gpu),
    ]  # fmt: skip


def why(rows: Mapping[str, Any], gpu: str) -> str:
    """What the guard said of the regions that stayed FP16 with ``--int8``."""
    found = figures(rows["ours --int8"], gpu) if "ours --int8" in rows else None
    if found is None or "regions" not in found:
        return "-"
    regions = found["regions"]
    reason = next(iter(found["not_kept"]), "")
    return f"{regions['kept']} of {regions['all']} regions" + (f"; {reason}" if reason else "")


def constant_lines() -> Iterator[str]:
    """The figures that the two judges rest on."""
    found = constants()
    for gpu, each in found.items():
        model, plain = each["model"], each["plain"]
        rates = ", ".join(f"{dtype} {rate:g}" for dtype, rate in model["tflops"].items())
        yield (
            f"- {gpu}, performance model: {model['bandwidth_gbs']:g} GB/s, L2 {model['l2_mib']:g} MiB, "
            f"{model['sm']} SMs, {model['clock_mhz']:g} MHz, dense TFLOP/s: {rates}; FP16 products summed in FP16 "
            f"(convolutions): {model['fp16_acc16_tflops']:g}; constants: set `{model['fitted_set']}` "
            f"({model['fitted_to']})"
        )
        rates = ", ".join(f"{dtype} {rate:g}" for dtype, rate in plain["tflops"].items())
        yield f"- {gpu}, plain judge: {plain['bandwidth_gbs']:g} GB/s, dense TFLOP/s: {rates}"
    sets = {each["model"]["fitted_set"]: each["model"]["constants"] for each in found.values()}
    for name, values in sets.items():
        yield f"- set `{name}`: " + ", ".join(f"{key} {value:g}" for key, value in values.items())


def stored(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def store(results: Mapping[str, Mapping[str, Any]], date: str) -> None:
    """Write ``results.json`` and the README's tables."""
    packages = ("trtopt", "numpy", "onnx", "onnxruntime", "tensorrt-rtx", "torch")
    header: dict[str, Any] = {"machine": MACHINE, "date": date, "python": platform.python_version()}
    header["versions"] = {name: metadata.version(name) for name in packages}
    header["peers"] = PEERS
    content = {**header, "constants": constants(), "networks": results}
    (HERE / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    readme = HERE / "README.md"
    for name, lines in (("summary", summary(results)), ("all", table(results)), ("constants", constant_lines())):
        before, opening, rest = readme.read_text().partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- end of {name} -->")
        if not opening or not closing:
            raise SystemExit(f"{readme} has no markers for the table {name}")
        readme.write_text(before + opening + "\n".join(lines) + "\n" + closing + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path.home() / ".cache" / "trtopt-benchmarks" / "precision"
    parser.add_argument("--work", type=Path, default=folder, help=f"folder for files and environments ({folder})")
    parser.add_argument("--only", default="", help="networks, separated by semicolons")
    parser.add_argument("--variants", default="", help="variants, separated by semicolons")
    parser.add_argument("--resume", action="store_true", help="keep the rows that results.json has")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    options = parser.parse_args()
    networks = [name for name in options.only.split(";") if name] or list(NETWORKS)
    variants = [name for name in options.variants.split(";") if name] or list(VARIANTS)
    for asked, known in ((networks, NETWORKS), (variants, VARIANTS)):
        if set(asked) - set(known):
            parser.error(f"not known: {', '.join(sorted(set(asked) - set(known)))}; known: {'; '.join(known)}")
    found = dict(stored(HERE / "results.json").get("networks", {}))
    work = Work(options.work)
    for network in networks:
        for name in VARIANTS:
            if name not in variants or (name == BY_IMAGE and network != "ResNet-50"):
                continue
            rows = dict(found.get(network, {}))
            if options.resume and name in rows and "reason" not in rows[name]:
                continue
            started = os.times().elapsed
            try:
                rows[name] = MAKERS[name](work, network)
            except FailedError as error:
                rows[name] = {"reason": str(error).replace(str(work.folder), "FOLDER")}
            found[network] = rows
            print(f"{network}, {name}: {os.times().elapsed - started:.0f} s: {json.dumps(rows[name])}", flush=True)
            store({each: found[each] for each in NETWORKS if each in found}, options.date)
    results = {each: found[each] for each in NETWORKS if each in found}
    store(results, options.date)
    print("\n".join([*summary(results), "", *table(results), "", *constant_lines()]))


if __name__ == "__main__":
    main()
