"""FP16 and INT8 of trained models on a real GPU, by ONNX Runtime's CUDA provider, against what a build verified.

    python benchmarks/accuracy/on_gpu.py prepare FOLDER [MODELS]   on any machine: models, samples, outputs of FP32
                                                                   and of the twin
    python on_gpu.py run FOLDER OUT.json                           on the GPU: NumPy and onnxruntime-gpu alone
    python benchmarks/accuracy/on_gpu.py table OUT.json            the table of the README

The twin is the FP32 form that rounds wherever the engine does: it is what `trtopt build` judges without a GPU. `plain`
is the whole network cast to FP16. One more network, made here, holds values above 65504 in its middle and not at its
end: FP16 on a GPU overflows there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES = 48
FORMS = ("plain", "fp16", "int8")
NAMES = ("resnet20_cifar10", "squeezenet11_fp16", "fastestdet_coco", "dscnn_kws", "mnist_cntk", "crepe_tiny")
Feeds = Mapping[str, np.ndarray]
Run = Callable[[Feeds], list[np.ndarray]]


def sqnr_db(want: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> float:
    """Signal over noise in decibels, of all outputs together, each over its own power; minus infinity with NaN."""
    worst = np.inf
    for left, right in zip(want, got, strict=True):
        wide, other = np.asarray(left, np.float64), np.asarray(right, np.float64)
        if not np.isfinite(other).all():
            return -np.inf
        noise = np.sum((wide - other) ** 2)
        if noise > 0:
            worst = min(worst, 10 * np.log10(np.sum(wide**2) / noise))
    return float(worst)


def prepare(folder: Path, models: Path) -> None:
    """Everything that the GPU machine needs; a model that is there is kept."""
    from subjects import SUBJECTS, Bench

    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(models, None, folder / "work")
    (folder / "work").mkdir(exist_ok=True)
    for subject in SUBJECTS:
        if subject.label in NAMES and not (folder / f"{subject.name}.npz").exists():
            files = sorted(Path(bench.samples(subject)).iterdir())[:SAMPLES]
            _prepare_one(folder, subject.name, bench.model(subject), [dict(np.load(file)) for file in files])
    if not (folder / "overflow.npz").exists():
        feeds = [
            {"x": np.random.default_rng(index).standard_normal((1, 256)).astype(np.float32)} for index in range(SAMPLES)
        ]
        _prepare_one(folder, "overflow", _overflow(folder / "work"), feeds)


def _overflow(folder: Path) -> Path:
    """A product whose results reach 1e5, a layer norm, a product."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    draw = np.random.default_rng(0).standard_normal
    weights = {"w": draw((256, 512)) * 4e3, "one": np.ones(512), "zero": np.zeros(512), "v": draw((512, 16)) / 22}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["large"], "large"),
        helper.make_node("LayerNormalization", ["large", "one", "zero"], ["normal"], "normal"),
        helper.make_node("MatMul", ["normal", "v"], ["y"], "y"),
    ]
    graph = helper.make_graph(
        nodes,
        "overflow",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    path = folder / "overflow.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def _prepare_one(folder: Path, name: str, model: Path, feeds: Sequence[Feeds]) -> None:
    import onnx_ir as ir
    from subjects import as_stored, twin_of

    import trtopt
    from trtopt.pipeline.plain import plain
    from trtopt.source.onnx_file import load

    calib = {key: np.concatenate([feed[key] for feed in feeds]) for key in feeds[0]}
    ir.save(plain(load(model).model), folder / f"{name}.plain.onnx")
    for form in ("fp16", "int8"):
        options: dict[str, Any] = {"keep_all_int8": True, "allow_accuracy_loss": True} if form == "int8" else {}
        trtopt.optimize(model, precision=form, calib=calib, output=folder / f"{name}.{form}.onnx", **options)
    runs: dict[str, Run] = {"want": as_stored(model)}
    found: dict[str, np.ndarray] = {}
    for index, feed in enumerate(feeds):
        found.update({f"in {index} {key}": value for key, value in feed.items()})
    for form in FORMS:
        with twin_of(folder / f"{name}.{form}.onnx") as twin:
            _keep(found, f"twin-{form}", twin, feeds)
        runs[f"cpu-{form}"] = as_stored(folder / f"{name}.{form}.onnx")
    for what, run in runs.items():
        _keep(found, what, run, feeds)
    np.savez_compressed(folder / f"{name}.npz", **found)
    print(name, flush=True)


def _keep(found: dict[str, np.ndarray], what: str, run: Run, feeds: Sequence[Feeds]) -> None:
    for index, feed in enumerate(feeds):
        found.update({f"{what} {index} {place}": value for place, value in enumerate(run(feed))})


def _outputs(data: Mapping[str, np.ndarray], what: str, index: int) -> list[np.ndarray]:
    places = sorted(int(key.split()[2]) for key in data if key.startswith(f"{what} {index} "))
    return [data[f"{what} {index} {place}"] for place in places]


def run(folder: Path, out: Path) -> None:
    """SQNR over FP32 on the CPU of every form on the GPU, of its twin, and of the file on the CPU."""
    import onnxruntime

    options = {"use_tf32": "0"}
    results: dict[str, Any] = {"onnxruntime": onnxruntime.__version__, "rows": []}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as arrays:
            data = dict(arrays)
        count = len({key.split()[1] for key in data if key.startswith("in ")})
        want = [_outputs(data, "want", index) for index in range(count)]
        for form in FORMS:
            file = folder / f"{path.stem}.{form}.onnx"
            session = onnxruntime.InferenceSession(
                file, providers=[("CUDAExecutionProvider", options), "CPUExecutionProvider"]
            )
            if "CUDAExecutionProvider" not in session.get_providers():
                raise SystemExit("onnxruntime has no CUDA provider here")
            halves = {item.name for item in session.get_inputs() if item.type == "tensor(float16)"}
            gpu = []
            for index in range(count):
                feed = {key.split()[2]: value for key, value in data.items() if key.startswith(f"in {index} ")}
                gpu.append(session.run(None, {k: v.astype(np.float16) if k in halves else v for k, v in feed.items()}))
            twin = [_outputs(data, f"twin-{form}", index) for index in range(count)]
            cpu = [_outputs(data, f"cpu-{form}", index) for index in range(count)]
            row = {"model": path.stem, "form": form, "samples": count}
            row.update(gpu=_over(want, gpu), twin=_over(want, twin), cpu=_over(want, cpu), gpu_to_twin=_over(twin, gpu))
            row["top1"] = _agreement(want, gpu), _agreement(want, twin)
            results["rows"].append(row)
            print(row, flush=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


def _over(want: Sequence[Sequence[np.ndarray]], got: Sequence[Sequence[np.ndarray]]) -> float | None:
    """All samples together; None for outputs that are not finite."""
    value = sqnr_db(*(_joined(side) for side in (want, got)))
    return round(value, 2) if np.isfinite(value) else None


def _joined(samples: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Each output of all samples, flat."""
    return [np.concatenate([np.ravel(sample[place]) for sample in samples]) for place in range(len(samples[0]))]


def _agreement(want: Sequence[Sequence[np.ndarray]], got: Sequence[Sequence[np.ndarray]]) -> float:
    """Share of samples whose largest value of the first output is at the same place."""
    return float(np.mean([np.argmax(left[0]) == np.argmax(right[0]) for left, right in zip(want, got, strict=True)]))


def table(path: Path) -> None:
    """Print the results as Markdown."""
    print("| model | form | GPU, dB | twin, dB | file on the CPU, dB | GPU against twin, dB | top-1 GPU / twin |")
    print("|---" * 7 + "|")
    for row in json.loads(path.read_text())["rows"]:
        values = [row[key] for key in ("gpu", "twin", "cpu", "gpu_to_twin")]
        cells = ["not finite" if value is None else f"{value:.1f}" for value in values]
        gpu, twin = row["top1"]
        print(f"| {row['model']} | {row['form']} | {' | '.join(cells)} | {gpu:.1%} / {twin:.1%} |")


def main() -> None:
    """One of prepare, run, table."""
    command, *rest = sys.argv[1:]
    if command == "prepare":
        sys.path.insert(0, str(Path(__file__).parent))
        prepare(Path(rest[0]), Path(rest[1]) if rest[1:] else Path(__file__).parents[3] / "shared" / "models")
    elif command == "run":
        run(Path(rest[0]), Path(rest[1]))
    else:
        table(Path(rest[0]))


if __name__ == "__main__":
    main()
