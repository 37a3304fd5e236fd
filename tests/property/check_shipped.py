"""One random network through a whole build: what ships is what was judged, not slower than plain, and still correct."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime as ort
from map_networks import map_network
from random_networks import random_network
from shape_networks import shape_network

import trtopt
from trtopt.config import BuildConfig
from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.build import CompilerPool
from trtopt.errors import TrtoptError
from trtopt.pipeline.plain import plain
from trtopt.pipeline.shipped import SLOWER, STEP
from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.steps import Cost
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession
from trtopt.support.precision import Precision

Shape = tuple[int, ...]
Feeds = dict[str, np.ndarray]

FP16_DB, EIGHT_BIT_DB = 30.0, 10.0
"""What an output keeps of FP32 on inputs that the build has not seen, below its bounds; less only where plain does."""
LEVELS_DB = 20.0
"""What an output keeps at ONNX Runtime's default level of what it is without optimizations: 8 bits round otherwise."""
_AS_PLAIN_DB = 6.0
"""What FP16 may lose beyond plain below its bound."""
_SAMPLES = 32


@dataclass
class Found:
    """What came of one or more networks.

    Attributes:
        problems: What went wrong, in words that name the seed.
        seen: How many builds were dynamic, 8-bit, judged to the digit, held back by plain, ...
    """

    problems: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def add(self, other: Found) -> None:
        self.problems += other.problems
        self.seen += other.seen


@dataclass(frozen=True)
class Case:
    """A network and how it is built.

    Attributes:
        low, best, high: Shapes of each input: one shape where they agree.
        shapes: Of each input, those at which the saved model is run.
        scale: Standard deviation of what the inputs hold.
    """

    seed: int
    proto: onnx.ModelProto
    low: dict[str, Shape]
    best: dict[str, Shape]
    high: dict[str, Shape]
    shapes: tuple[dict[str, Shape], ...]
    precision: str
    scale: float
    keep_dynamic: bool = False

    @property
    def is_fixed(self) -> bool:
        return self.low == self.high

    def options(self) -> dict[str, Any]:
        shapes = {"opt_shapes": (self.best,)}
        if not self.is_fixed:
            shapes |= {"min_shapes": (self.low,), "max_shapes": (self.high,)}
        return {**shapes, "precision": self.precision, "keep_dynamic": self.keep_dynamic}


def case_of(seed: int) -> Case:
    """What a seed stands for: maps, tokens or a network of the recipes' tests; one shape, or ranges of axes.

    From 100 on other precisions are drawn as well, and whether axes of one size stay dynamic.
    """
    rng = np.random.default_rng([seed, 7])
    kind = seed % 3
    proto = (map_network, shape_network, random_network)[kind](seed // 3)
    sizes = {"N": (1, 3, 4), "S": (2, 5, 8), "H": (6, 10, 13), "W": (4, 8, 12)}
    if seed % 4 == 1:  # one shape
        sizes = {axis: (best, best, best) for axis, (_, best, _) in sizes.items()}
    else:
        for axis in [axis for axis in sizes if rng.random() < 0.25]:
            sizes[axis] = (sizes[axis][1],) * 3
    sizes |= {"M": sizes["N"], "T": sizes["S"]}
    axes = {
        str(value.name): [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in proto.graph.input
    }

    def at(pick: Callable[[str], int]) -> dict[str, Shape]:
        return {name: tuple(pick(a) if isinstance(a, str) else a for a in dims) for name, dims in axes.items()}

    low, best, high = (at(lambda axis, i=i: sizes[axis][i]) for i in range(3))  # type: ignore[misc]
    drawn = []
    for _ in range(2):
        sample = {axis: int(rng.integers(sizes[axis][0], sizes[axis][2] + 1)) for axis in ("N", "S", "H", "W")}
        sample |= {"M": sample["N"], "T": sample["S"]}
        drawn.append(at(sample.__getitem__))
    shapes = (low, best, high, *drawn)
    scale = float(rng.choice((1.0, 1.0, 1.0, 30.0, 3000.0)))
    if seed < 100:
        return Case(seed, proto, low, best, high, shapes, "int8" if seed % 5 == 2 else "fp16", scale)
    precision = str(rng.choice(("fp16", "fp16", "int8", "fp8", "auto", "tf32")))
    return Case(seed, proto, low, best, high, shapes, precision, scale, keep_dynamic=rng.random() < 0.2)


def _feeds(case: Case, shapes: dict[str, Shape], seed: int) -> Feeds:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, dtype=np.float32) * case.scale for name, shape in shapes.items()}


@contextlib.contextmanager
def one_pool() -> Iterator[None]:
    """One compiler for all judges of all builds inside: starting one takes longer than a small network."""
    with CompilerPool(2) as pool:

        @contextlib.contextmanager
        def shared(_: int) -> Iterator[CompilerPool]:
            yield pool

        places = ("trtopt.judge.judges.CompilerPool", "trtopt.pipeline.pricing.CompilerPool")
        with mock.patch(places[0], shared), mock.patch(places[1], shared):
            yield


def check_all(
    seeds: Iterable[int], show: Callable[[str], None] = lambda _: None, backend: str = TENSORRT_RTX.name
) -> Found:
    """:func:`check` of many seeds; ``show`` is told each problem as it comes."""
    total = Found()
    with one_pool():
        for seed in seeds:
            found = check(seed, backend)
            total.add(found)
            for problem in found.problems:
                show(problem)
    return total


def check(seed: int, backend: str = TENSORRT_RTX.name) -> Found:
    """Build the network of a seed, and look at the report and at the saved model; for TensorRT, whose builder needs the
    GPU, the optimized model alone is made."""
    case, found = case_of(seed), Found()
    found.seen.update(["fixed" if case.is_fixed else "a range", case.precision])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, saved = folder / "net.onnx", folder / "saved.onnx"
        onnx.save(case.proto, source)
        calib = _samples(case)
        try:
            config = BuildConfig(backend=backend, no_cache=True, cache_dir=name, **case.options())
            if backend == TENSORRT_RTX.name:
                report = trtopt.build(source, replace(config, save_onnx=str(saved)), calib=calib)
            else:
                report = trtopt.optimize(source, replace(config, output=str(saved)), calib=calib)
            wrong = _of_report(report, found)
            if saved.is_file():
                wrong += _of_outputs(case, source, saved)
        except (TrtoptError, ValueError, ArithmeticError, LookupError, TypeError) as error:
            wrong = [f"{type(error).__name__}: {error}"]
    found.problems += [f"seed {seed}: {' '.join(text.split())[:400]}" for text in wrong]
    return found


def _samples(case: Case) -> dict[str, np.ndarray]:
    """Samples at the best shape, one row each."""
    rows = {name: (_SAMPLES, *shape[1:]) for name, shape in case.best.items()}
    return _feeds(case, rows, case.seed)


def _of_report(report: BuildReport, found: Found) -> list[str]:
    """What a report says that cannot be."""
    if report.gate_failures:
        found.seen["refused for its accuracy"] += 1
        return [] if Precision(report.precision.requested).is_quantized else [f"gate: {report.gate_failures}"]
    shipped, least = report.shipped, report.plain
    if shipped is None or least is None:
        return [f"not priced: {'; '.join(report.warnings)}"]
    wrong = _of_engine(report, shipped) if report.engine is not None else []
    if shipped.predicted_us > least.predicted_us * SLOWER and report.accuracy_cost is None:
        wrong.append(f"ships {shipped.predicted_us:.2f} us, plain {least.form} takes {least.predicted_us:.2f}")
    found.seen["accuracy costs"] += report.accuracy_cost is not None
    found.seen["held by plain"] += any(step.name == STEP and step.changes for step in report.steps)
    if report.precision.requested == Precision.FP16 and not report.precision.kept and report.rewriting.after:
        found.seen["judged to the digit"] += 1
        after = report.rewriting.after
        is_near = math.isclose(after.predicted_us, shipped.predicted_us, rel_tol=1e-9)  # sums in another order
        if not is_near or after != replace(shipped, predicted_us=after.predicted_us):
            wrong.append(f"judged {report.rewriting.after} after its recipes, ships {shipped}")
    found.seen["ships apart from what was judged"] += bool(report.judged_apart)
    if report.judged_apart.endswith("not known"):
        wrong.append(report.judged_apart)
    is_said = report.config["backend"] != TENSORRT_RTX.name and "FP8 products are taken for INT8" in report.saved
    if not report.saved.endswith("loads it") and not is_said:
        wrong.append(report.saved)
    return wrong


def _of_engine(report: BuildReport, shipped: Cost) -> list[str]:
    """Where the engine's layers, their prediction and what the report says of them differ."""
    engine, analysis = report.engine, report.analysis
    if engine is None or engine.layers is None or analysis is None:
        return [f"not priced: {'; '.join(report.warnings)}"]
    wrong = []
    layers = (engine.kernels, sum(layer.type in ("signal", "wait") for layer in engine.layers))
    if (shipped.kernels, shipped.syncs) != layers:
        wrong.append(f"ships {shipped.kernels} kernels and {shipped.syncs} syncs, the engine has {layers}")
    if not math.isclose(shipped.predicted_us, analysis.totals.predicted_us, rel_tol=1e-9):
        wrong.append(f"ships {shipped.predicted_us} us, the analysis says {analysis.totals.predicted_us}")
    if shipped.bytes != analysis.totals.bytes:
        wrong.append(f"ships {shipped.bytes} bytes, the analysis says {analysis.totals.bytes}")
    bound = analysis.limit
    if bound is None or not 0 <= bound.limit_us <= bound.predicted_us * (1 + 1e-9):
        wrong.append(f"the limit is above the prediction: {bound}")
    elif not math.isclose(bound.limit_us + sum(item.excess_us for item in bound.kernels), shipped.predicted_us):
        wrong.append("limit and excesses do not add up to the prediction")
    return wrong


def _of_outputs(case: Case, source: Path, saved: Path) -> list[str]:
    """Where the saved model computes something else than the network it was made of."""
    wrong = []
    original = load(source).model
    half = plain(original)
    least = FP16_DB if case.precision in ("fp16", "tf32") else EIGHT_BIT_DB
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    default = ort.InferenceSession(str(saved), options, providers=["CPUExecutionProvider"])
    with OrtSession(original, threads=1) as one, OrtSession(load(saved).model, threads=1) as other:
        for shapes in case.shapes:
            feeds = _feeds(case, shapes, case.seed + 1)
            expected, computed = one.run(feeds), other.run(feeds)
            apart = min(_sqnr_db(a, b) for a, b in zip(computed, default.run(None, feeds), strict=True))
            if apart < LEVELS_DB:
                wrong.append(f"ONNX Runtime's own level is {apart} dB from none at {shapes}")
            if [x.shape for x in expected] != [x.shape for x in computed]:
                wrong.append(f"shapes {[x.shape for x in computed]} at {shapes}, not {[x.shape for x in expected]}")
                continue
            kept = [_sqnr_db(a, b) for a, b in zip(expected, computed, strict=True)]
            if all(db >= least for db in kept):
                continue
            with OrtSession(half, threads=1) as third:
                also = [_sqnr_db(a, b) for a, b in zip(expected, third.run(feeds), strict=True)]
            if any(db < min(least, as_plain - _AS_PLAIN_DB) for db, as_plain in zip(kept, also, strict=True)):
                wrong.append(f"outputs keep {kept} dB at {shapes}, plain {also}")
    return wrong


def _sqnr_db(expected: np.ndarray, computed: np.ndarray) -> float:
    """Infinite where both are equal; minus infinity where what is finite is not any more."""
    known = np.isfinite(expected)
    if not np.isfinite(computed[known]).all():
        return -math.inf
    error = float(np.square(expected[known].astype(np.float64) - computed[known]).sum())
    signal = float(np.square(expected[known].astype(np.float64)).sum())
    return math.inf if error == 0 else 10 * math.log10(signal / error) if signal else -math.inf
