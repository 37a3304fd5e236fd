"""Scores the performance model on whole networks it was not fitted to: BERT in TensorRT, by batch and sequence length.

    python benchmarks/predictor/end_to_end.py

The latencies are those that NVIDIA publishes with TensorRT's `demo/BERT`, captured in a CUDA graph. Needs the folder
`profiles` (see `data.py`).
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from data import PROFILES, product
from fitting import SOFT, SUM_WEIGHT, Array, score
from scipy.optimize import brentq, least_squares

from trtopt.graph.cost import SOFTMAX_FLOP
from trtopt.hardware.spec import GpuSpec, find_gpu
from trtopt.roofline.batch import Batch
from trtopt.roofline.constants import Constants, constants_for, sustained_share
from trtopt.roofline.layer import launch_us
from trtopt.roofline.work import Gemm, Layer, Work, in_network
from trtopt.support.precision import ELEMENT_BYTES, Precision

GPUS = {"NVIDIA A100 (40GB)": "A100-SXM4-40GB", "NVIDIA T4 (16GB)": "T4"}
"""GPUs of the table and their names here. The table does not say which A100: SXM4 and PCIe differ in nothing that the
model reads."""

PRECISIONS: dict[str, Precision] = {"FP16": "fp16", "INT8": "int8"}

MLPERF = {"T4": 3494.53 / 8, "L4": 1032.08}
"""Sequences per second and GPU of BERT large on SQuAD in INT8: NVIDIA's offline results of bert-99, T4x8 in
mlcommons/inference_results_v0.7 at 1321d137a110, L4x1 in mlcommons/inference_results_v3.0 at dad59af09e9e."""

MLPERF_DATA = (
    "ratio to T4 of BERT large in INT8 in MLPerf Inference (bert-99 offline, NVIDIA, L4 of v3.0 to T4 of v0.7)"
)

_MLPERF_LENGTH, _MLPERF_BATCH = 192, 128
"""Tokens of a sequence and sequences at a time. The benchmark's vary and are not published with its result; the ratio
of two GPUs hardly depends on them: with 128 or 384 tokens, the share of the L4 is 0.71 or 0.69, not 0.70."""

HEAD_SIZE = 64
_GELU_FLOP = 9
_NORM_FLOP = 8


@dataclass(frozen=True)
class Encoder:
    """Sizes of a BERT (Devlin et al. 2019, section 3)."""

    width: int
    depth: int


ENCODERS = {"bert base": Encoder(768, 12), "bert large": Encoder(1024, 24)}


@dataclass(frozen=True)
class Latency:
    """A published latency.

    Attributes:
        gpu: A key of :data:`GPUS`.
        release: Major and minor version of TensorRT.
        model: A key of :data:`ENCODERS`.
        precision: A key of :data:`PRECISIONS`.
        length: Tokens of a sequence.
        batch: Sequences.
        measured_us: Mean latency in microseconds.
    """

    gpu: str
    release: tuple[int, int]
    model: str
    precision: str
    length: int
    batch: int
    measured_us: float


def published() -> list[Latency]:
    """The latencies of dense BERT base and large, without the rows marked as misprints."""
    with (PROFILES / "end_to_end" / "bert_trt_latency.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["suspect"] == "0" and row["model"].lower() in ENCODERS]
    found = []
    for row in rows:
        major, minor = row["trt_release"].removeprefix("release/").split(".")
        found.append(
            Latency(
                row["gpu"],
                (int(major), int(minor)),
                row["model"].lower(),
                row["precision"],
                int(row["seq_len"]),
                int(row["batch"]),
                float(row["avg_ms"]) * 1e3,
            )
        )
    return found


def kernels(encoder: Encoder, tokens: int, length: int, dtype: Precision) -> list[tuple[Work, int]]:
    """The kernels of `demo/BERT`, each with how often it runs: its plugins merge Q, K and V into one product and fuse
    the attention, and the addition with the normalisation after it; the compiler fuses GELU into its product."""
    width, size = encoder.width, ELEMENT_BYTES[dtype]

    def moved(per_token: int) -> int:
        return int(tokens * per_token * size)

    def memory(reads: int) -> Work:
        return Work("memory", _NORM_FLOP * tokens * width, moved(reads * width), 2 * 4 * width, moved(width), dtype)

    scores = Gemm(length, length, HEAD_SIZE, tokens // length * width // HEAD_SIZE)
    flop = 2 * scores.flop + SOFTMAX_FLOP * tokens * length * width // HEAD_SIZE
    widen = product(tokens, 4 * width, width, dtype)
    layer = [
        product(tokens, 3 * width, width, dtype),
        Work("attention", flop, moved(3 * width), 0, moved(width), dtype, gemm=scores),
        product(tokens, width, width, dtype),
        memory(2),
        dataclasses.replace(widen, flop=widen.flop + _GELU_FLOP * tokens * 4 * width),
        product(tokens, width, 4 * width, dtype),
        memory(2),
    ]
    first, last = memory(3), product(tokens, 2, width, "fp16")
    network = [Layer("", "", (), work) for work in (first, *layer * encoder.depth, last)]
    first, *rest = (found.work for found in in_network(network, sum(each.work.weight_bytes for each in network)))
    return [(first, 1), *((work, encoder.depth) for work in rest[: len(layer)]), (rest[-1], 1)]


def predict(rows: Sequence[Latency], gpu: GpuSpec, constants: Constants, share: float) -> Array:
    """Predicted microseconds of each latency, with the GPU at ``share`` of its clock."""
    return _Networks.of(rows, gpu).predict(constants, share)


def fitted_share(rows: Sequence[Latency], gpu: GpuSpec, constants: Constants) -> float:
    """The share of its clock that the GPU sustains, with the loss of :func:`fitting.fit`."""
    networks, measured = _Networks.of(rows, gpu), _measured(rows)

    def residuals(share: Array) -> Array:
        predicted = networks.predict(constants, float(share[0]))
        ratio = np.log(predicted.sum() / measured.sum())
        return np.append(predicted / measured - 1, SUM_WEIGHT * np.sqrt(len(rows)) * ratio)

    found: Any = least_squares(residuals, [0.8], bounds=(0.1, 1.0), loss="soft_l1", f_scale=SOFT, diff_step=1e-3)
    return float(found.x[0])


def share_from_mlperf(name: str, constants: Constants, known: tuple[str, Constants, float]) -> float:
    """The share of its clock a card sustains, from its throughput over that of a card whose share is known.

    Args:
        name: The card.
        constants: Its constants.
        known: The other card, its constants and its share.
    """
    row = Latency("", (0, 0), "bert large", "INT8", _MLPERF_LENGTH, _MLPERF_BATCH, 0.0)
    other, *of_other = known
    wanted = predict([row], find_gpu(other), *of_other)[0] * MLPERF[other] / MLPERF[name]
    found: Any = brentq(lambda share: predict([row], find_gpu(name), constants, share)[0] - wanted, 0.1, 1.0)
    return float(found)


def latest(rows: Sequence[Latency]) -> list[Latency]:
    """Those of the last release, of rows of one GPU."""
    last = max(row.release for row in rows)
    return [row for row in rows if row.release == last]


def score_end_to_end() -> list[dict[str, Any]]:
    """Score the shipped constants, which no network is part of, on every GPU and precision.

    A card that is held back by its power limit is scored twice: at the clock of its datasheet, and at the share of it
    that was fitted to the other one of the two networks.

    Returns:
        Rows with ``gpu``, ``precision``, ``clock``; ``mape``, ``ratio``, ``spearman``, ``kernels`` (the number of
        latencies) of the last ``release``; and the least and the most over all ``releases``, of ``mape`` and ``ratio``.
    """
    found = []
    for label, name in GPUS.items():
        gpu = find_gpu(name)
        rows = [row for row in published() if row.gpu == label]
        clocks = {"as on the datasheet": dict.fromkeys(ENCODERS, 1.0)}
        if sustained_share(gpu) < 1:
            clocks["fitted to the other network"] = _crossed_shares(latest(rows), gpu)
        for clock, shares in clocks.items():
            for precision in PRECISIONS:
                some = [row for row in rows if row.precision == precision]
                found.append({"gpu": name, "precision": precision, "clock": clock, **_scores(some, gpu, shares)})
    return found


def _crossed_shares(rows: Sequence[Latency], gpu: GpuSpec) -> dict[str, float]:
    """For each model, the share fitted to the rest."""
    constants = constants_for(gpu)
    return {model: fitted_share([row for row in rows if row.model != model], gpu, constants) for model in ENCODERS}


def _scores(rows: Sequence[Latency], gpu: GpuSpec, shares: dict[str, float]) -> dict[str, Any]:
    by_release = {}
    for release in sorted({row.release for row in rows}):
        part = sorted((row for row in rows if row.release == release), key=lambda row: row.model)
        predicted = [
            predict([row for row in part if row.model == model], gpu, constants_for(gpu), shares[model])
            for model in sorted(ENCODERS)
        ]
        by_release[release] = score(np.concatenate(predicted), _measured(part))
    last = max(by_release)
    return {
        "shares": shares,
        "release": _text(last),
        **dataclasses.asdict(by_release[last]),
        "releases": [_text(release) for release in by_release],
        "mape_range": _range([item.mape for item in by_release.values()]),
        "ratio_range": _range([item.ratio for item in by_release.values()]),
    }


@dataclass(frozen=True)
class _Networks:
    """The kernels of many networks: which network each belongs to, and how often it runs there."""

    gpu: GpuSpec
    kernels: Batch
    network: np.ndarray[tuple[int], np.dtype[np.intp]]
    count: Array
    networks: int

    @staticmethod
    def of(rows: Sequence[Latency], gpu: GpuSpec) -> _Networks:
        found = [
            (work, index, count)
            for index, row in enumerate(rows)
            for work, count in kernels(
                ENCODERS[row.model], row.batch * row.length, row.length, PRECISIONS[row.precision]
            )
        ]
        works, network, count = zip(*found, strict=True)
        batch = Batch.of(works, gpu)
        return _Networks(gpu, batch, np.array(network), np.array(count, dtype=np.float64), len(rows))

    def predict(self, constants: Constants, share: float) -> Array:
        """Microseconds, [networks]."""
        batch = dataclasses.replace(self.kernels, sustained_share=share)
        times = batch.predict(constants).total + launch_us(self.gpu, constants)
        return np.bincount(self.network, weights=times * self.count, minlength=self.networks)


def _measured(rows: Sequence[Latency]) -> Array:
    return np.array([row.measured_us for row in rows])


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def _range(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table of the README."""
    head = "| GPU | precision | clock | TensorRT | error | sum | Spearman | latencies | error, all releases | sum |"
    found = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        low, high = row["mape_range"]
        least, most = row["ratio_range"]
        clock = row["clock"]
        if clock.startswith("fitted"):
            clock += " (" + ", ".join(f"{share:.2f} for {model}" for model, share in row["shares"].items()) + ")"
        cells = [row["gpu"], row["precision"], clock, row["release"], f"{row['mape']:.1%}", f"{row['ratio']:.2f}"]
        cells += [
            f"{row['spearman']:.3f}",
            str(row["kernels"]),
            f"{low:.1%} to {high:.1%}",
            f"{least:.2f} to {most:.2f}",
        ]
        found.append(f"| {' | '.join(cells)} |")
    return found


if __name__ == "__main__":
    print("\n".join(lines(score_end_to_end())))
