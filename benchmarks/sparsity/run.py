"""Trained models with all their weights 2:4: time, memory and accuracy of one-shot pruning, Model Optimizer's beside.

    python benchmarks/sparsity/run.py [MODELS] [--minilm FILE] [--only NAME,...] [--methods NAME;...] [--resume]

MODELS is a folder of models with an ``evaluate.py`` that writes calibration samples and computes a metric (default:
``shared/models`` beside the checkout). Every method is a process of its own, on two cores, and writes an ONNX file,
whose metric is computed by ONNX Runtime. Model Optimizer prunes PyTorch modules, and so MiniLM alone (``minilm.py``);
it is installed into a virtual environment under ``--environments``. ``--resume`` keeps the rows of ``results.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "accuracy"), str(HERE.parent / "precision")]
from ours import cleaned  # noqa: E402 - beside this file
from subjects import SUBJECTS, Bench, Run, Subject, as_stored  # noqa: E402 - benchmarks/accuracy
from venvs import PEERS, interpreter, run  # noqa: E402 - benchmarks/precision

from trtopt.accuracy.compare import Accumulator  # noqa: E402
from trtopt.sparsity.layers import candidates  # noqa: E402

DEFAULT_MODELS = HERE.parents[2] / "shared" / "models"
ENVIRONMENTS = Path.home() / ".cache" / "trtopt-benchmarks" / "precision"
MACHINE = "2-core x86-64, no GPU"
CORES = 2
"""What every process is given."""

MINILM = "minilm_l6_sts"
ALL = {subject.name: subject for subject in SUBJECTS if subject.int8 is not None and subject.file == "model.onnx"}
"""The models that have calibration samples."""

PEER = {
    "Model Optimizer, magnitude": "magnitude",
    "Model Optimizer, SparseGPT": "sparsegpt",
    "Model Optimizer, SparseGPT with its weights": "sparsegpt-weights",
}
OURS = ("magnitude", "recovery")
DENSE = "dense"
FEWER = ("Model Optimizer, SparseGPT with its weights", "recovery")
EVERY = (2, 4)
"""Every so many-th file of samples, for the methods of ``FEWER`` on MiniLM."""


class Judge:
    """What the pruned files of one model are compared with: the dense file's metric and outputs."""

    def __init__(self, bench: Bench, subject: Subject) -> None:
        self._bench, self._subject = bench, subject
        self._outputs: list[list[np.ndarray]] = []

        def kept(feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            self._outputs.append(dense(feeds))
            return self._outputs[-1]

        dense = as_stored(bench.model(subject))
        self._weights = len(candidates(cleaned(bench.model(subject)).model).layers)
        self.dense = round(bench.metric(subject, kept), 5)

    def of(self, path: Path) -> dict[str, Any]:
        """The metric of a file, how far its outputs are from the dense ones on the same data, and its 2:4 weights."""
        sums, stored = Accumulator(), as_stored(path)
        value = self._bench.metric(self._subject, self._compared(stored, sums))
        layers = candidates(cleaned(path).model).layers
        sparse = sum(layer.sparse for layer in layers)
        if sparse != self._weights or len(layers) != self._weights:
            raise SystemExit(f"{self._subject.name}: {sparse} of {self._weights} weights are 2:4")
        return {"metric": round(value, 5), "sqnr_db": round(sums.result().sqnr_db or 0.0, 2), "sparse_weights": sparse}

    def _compared(self, stored: Run, sums: Accumulator) -> Run:
        expected = iter(self._outputs)

        def compared(feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            found = stored(feeds)
            for reference, output in zip(next(expected), found, strict=True):
                sums.update(reference, output)
            return found

        return compared


def methods_of(name: str) -> dict[str, int]:
    """The rows of a model: the method, with every how-many-th file of samples."""
    if name != MINILM:
        return dict.fromkeys(OURS, 1)
    return dict.fromkeys((*PEER, *OURS), 1) | {f"{m}, 1/{every}": every for m in FEWER for every in EVERY}


def samples(bench: Bench, subject: Subject, every: int) -> Path:
    """The folder with every so many-th file of a model's calibration samples."""
    folder = Path(bench.samples(subject))
    if every == 1:
        return folder
    fewer = folder.with_name(f"{folder.name}-{every}")
    if not fewer.exists():
        fewer.mkdir()
        for path in sorted(folder.iterdir())[::every]:
            shutil.copy(path, fewer)
    return fewer


def measure(bench: Bench, judge: Judge, subject: Subject, label: str, environments: Path) -> dict[str, Any]:
    """One method on one model: what the process took, and what its file is worth."""
    every = methods_of(subject.name)[label]
    method = label if every == 1 else label.rpartition(",")[0]
    out, figures = bench.work / "out.onnx", bench.work / "figures.json"
    if method in PEER:
        command = [interpreter(environments, "modelopt"), str(HERE / "peers.py"), PEER[method]]
    else:
        command = [sys.executable, str(HERE / "ours.py"), method]
    run([*command, str(bench.model(subject)), str(samples(bench, subject, every)), str(out), str(figures)])
    row = {**json.loads(figures.read_text()), **judge.of(out)}
    row["drop"] = round(judge.dense - row["metric"], 5)
    row["load_average"] = round(os.getloadavg()[0], 1)
    return row


def minilm_table(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """All samples first, then fewer."""
    yield from head("method, Spearman, drop in points, SQNR dB, seconds, CPU seconds, peak MiB, above the model MiB")
    for label in (DENSE, *methods_of(MINILM)):
        if label == DENSE and label in rows:
            yield f"| dense | {rows[label]['metric']:.4f} |" + " |" * 6
        elif label in rows:
            row = rows[label]
            cells = [label, f"{row['metric']:.4f}", f"{100 * row['drop']:.2f}", f"{row['sqnr_db']:.1f}"]
            cells += [f"{row['seconds']:.1f}", f"{row['cpu_seconds']:.1f}", f"{row['peak_mib']}", f"{row['above_mib']}"]
            yield "| " + " | ".join(cells) + " |"


def models_table(models: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Metric and SQNR by method, and what the last method took."""
    yield from head("model, metric, 2:4 weights, dense, " + ", ".join(OURS) + ", seconds")
    for name, rows in models.items():
        shown = [rows.get(method) for method in OURS]
        if name == MINILM or None in shown:
            continue
        cells = [name, ALL[name].key, str(rows["recovery"]["sparse_weights"]), f"{rows[DENSE]['metric']:.4f}"]
        cells += [f"{row['metric']:.4f}; {row['sqnr_db']:.1f} dB" for row in shown if row]
        yield "| " + " | ".join([*cells, " / ".join(f"{row['seconds']:.1f}" for row in shown if row)]) + " |"


def head(names: str) -> Iterator[str]:
    yield "| " + names.replace(", ", " | ") + " |"
    yield "|---" * len(names.split(", ")) + "|"


def stored() -> dict[str, Any]:
    path = HERE / "results.json"
    return dict(json.loads(path.read_text())["models"]) if path.exists() else {}


def store(models: Mapping[str, Mapping[str, Mapping[str, Any]]], date: str) -> None:
    """Write ``results.json`` and the README's tables."""
    packages = ("trtopt", "numpy", "onnx", "onnxruntime")
    header: dict[str, Any] = {"machine": MACHINE, "cores": CORES, "date": date, "python": platform.python_version()}
    header["versions"] = {name: metadata.version(name) for name in packages}
    header["peers"] = PEERS["modelopt"]
    (HERE / "results.json").write_text(json.dumps({**header, "models": models}, indent=2) + "\n")
    readme = HERE / "README.md"
    for name, lines in (("minilm", minilm_table(models.get(MINILM, {}))), ("models", models_table(models))):
        before, opening, rest = readme.read_text().partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- end of {name} -->")
        if not opening or not closing:
            raise SystemExit(f"{readme} has no markers for the table {name}")
        readme.write_text(before + opening + "\n".join(lines) + "\n" + closing + after)


def limit_cores() -> None:
    """Give this process and its children two cores, and their libraries as many threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(CORES)))


def listed(text: str, separator: str, known: Sequence[str]) -> list[str]:
    """The names of an option, all known ones where it is empty."""
    names = [name for name in text.split(separator) if name] or list(known)
    if set(names) - set(known):
        raise SystemExit(f"not known: {', '.join(sorted(set(names) - set(known)))}; known: {separator.join(known)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="?", type=Path, default=DEFAULT_MODELS, help="folder of models")
    parser.add_argument("--minilm", type=Path, help="the MiniLM model, assembled (default: model.onnx in its folder)")
    parser.add_argument("--only", default="", help="names of models, comma-separated")
    parser.add_argument("--methods", default="", help="methods, separated by semicolons")
    parser.add_argument("--resume", action="store_true", help="only what results.json does not have")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help=f"({ENVIRONMENTS})")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    options = parser.parse_args()
    if not (options.models / "evaluate.py").exists():
        parser.error(f"no models in {options.models}: give the folder that holds evaluate.py")
    names = listed(options.only, ",", list(ALL))
    methods = listed(options.methods, ";", list(methods_of(MINILM)))
    limit_cores()
    found: dict[str, Any] = stored()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.models.resolve(), options.minilm, Path(folder))
        for name in names:
            rows = dict(found.get(name, {}))
            wanted = [m for m in methods_of(name) if m in methods and not (options.resume and m in rows)]
            if not wanted:
                continue
            judge = Judge(bench, ALL[name])
            rows[DENSE] = {"metric": judge.dense}
            for label in wanted:
                rows[label] = measure(bench, judge, ALL[name], label, options.environments.resolve())
                print(f"{name}, {label}: {json.dumps(rows[label])}", flush=True)
                found[name] = rows
                store({each: found[each] for each in ALL if each in found}, options.date)
    print("\n".join([*minilm_table(found.get(MINILM, {})), "", *models_table(found)]))


if __name__ == "__main__":
    main()
