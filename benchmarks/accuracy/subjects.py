"""The trained models of the accuracy benchmarks, what is asked of them, and how their ONNX files are run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]


@dataclass(frozen=True)
class Subject:
    """A model and what is asked of it.

    Attributes:
        name: What ``evaluate.py`` calls it.
        key: The metric among those it returns.
        int8: Smallest metric in INT8: a number, or a drop from FP32 when negative; None when INT8 is not asked for.
        file: The ONNX file in its folder.
        fp16_drop: Largest drop in FP16.
        options: More options of ``trtopt build``.
    """

    name: str
    key: str
    int8: float | None
    file: str = "model.onnx"
    fp16_drop: float = 0.002
    options: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return self.name if self.file == "model.onnx" else f"{self.name}/{self.file}"

    def passes_int8(self, value: float, baseline: float) -> bool:
        if self.int8 is None:
            return True
        return value >= (baseline + self.int8 if self.int8 < 0 else self.int8) - 1e-9


_SILERO = ("--opt-shapes", "input:1x576,state:2x1x128")
SUBJECTS = (
    Subject("resnet20_cifar10", "top1", 0.80),
    Subject("squeezenet11_fp16", "top1", -2 / 300, fp16_drop=1 / 300),
    Subject("squeezenet11_fp16", "top1", -2 / 300, "model_fp16.onnx", fp16_drop=1 / 300),
    Subject("minilm_l6_sts", "spearman", 0.861),
    Subject("fastestdet_coco", "map50", 0.330),
    Subject("dscnn_kws", "top1", 0.909),
    Subject("mnist_cntk", "top1", 0.988),
    Subject("crepe_tiny", "argmax_agree", 0.80),
    Subject("silero_vad", "speech_fraction", None, options=_SILERO),
    Subject("silero_vad", "speech_fraction", None, "model_ifless.onnx", options=_SILERO),
)


class Bench:
    """The models, their samples and what was computed once."""

    def __init__(self, models: Path, minilm: Path | None, work: Path) -> None:
        self.models = models
        self.minilm = minilm
        self.work = work
        self._counts: dict[str, int] = {}
        spec = importlib.util.spec_from_file_location("evaluate", models / "evaluate.py")
        if spec is None or spec.loader is None:
            raise SystemExit(f"no evaluate.py in {models}")
        self.evaluate = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.evaluate)

    def model(self, subject: Subject) -> Path:
        if subject.name == "minilm_l6_sts" and self.minilm is not None:
            return self.minilm
        return self.models / subject.name / subject.file

    def metric(self, subject: Subject, run: Run) -> float:
        """The model's own metric of ``run``, as a fraction."""
        return float(self.evaluate.metric(subject.name, run)[subject.key])

    def count(self, subject: Subject) -> int:
        """The number of samples its metric is over."""
        if subject.name not in self._counts:
            self._counts[subject.name] = int(self.evaluate.metric(subject.name, as_stored(self.model(subject)))["n"])
        return self._counts[subject.name]

    def samples(self, subject: Subject) -> str:
        """Calibration samples: a folder, or ``synthetic`` where the model has none."""
        if self.evaluate.REG[subject.name][1] is None:
            return "synthetic"
        folder = self.work / f"{subject.name}-calib"
        if not folder.exists():
            command = [sys.executable, str(self.models / "evaluate.py"), "calib", subject.name, str(folder)]
            subprocess.run(command, check=True)
        if subject.file != "model_fp16.onnx":
            return str(folder)
        half = self.work / f"{subject.name}-calib-fp16"
        if not half.exists():
            half.mkdir()
            for path in sorted(folder.iterdir()):
                with np.load(path) as arrays:
                    np.savez(half / path.name, **{name: arrays[name].astype(np.float16) for name in arrays})
        return str(half)


def as_stored(path: Path) -> Run:
    """The file as ONNX Runtime runs it; FP32 arrays become FP16 where the model's input is FP16."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    halves = {item.name for item in session.get_inputs() if item.type == "tensor(float16)"}

    def run(feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        ready = {name: value.astype(np.float16) if name in halves else value for name, value in feeds.items()}
        return list(session.run(None, ready))

    return run


@contextmanager
def twin_of(path: Path) -> Iterator[Run]:
    """The file's FP32 twin: what ``trtopt build`` verified."""
    from trtopt.accuracy.emulation import fp32_emulation
    from trtopt.source.onnx_file import load
    from trtopt.support.ort_session import OrtSession

    model = load(path).model
    halves = {value.name for value in model.graph.inputs if str(value.dtype) == "FLOAT16"}
    with OrtSession(fp32_emulation(model), keep_qdq=True) as session:

        def run(feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            return session.run({n: v.astype(np.float16) if n in halves else v for n, v in feeds.items()})

        yield run


def smallest_sqnr(outputs: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The worst output's, in dB; None when all are equal to the reference."""
    known = [item["sqnr_db"] for item in outputs.values() if item["sqnr_db"] is not None]
    return round(min(known), 2) if known else None
