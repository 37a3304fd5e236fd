"""Scores the shipped constants on kernels that `measure.py` timed on GPUs; no constant was fitted to these.

python benchmarks/predictor/measured_rows.py      prints the table and writes it into the README
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from fitting import Array, Measured, score
from measured_data import behind_products, measured
from readme import replace_table

from trtopt.roofline.constants import constants_for
from trtopt.roofline.intervals import interval_of, kind_of


@dataclass(frozen=True)
class Part:
    """Some kernels of the table: how they are called, their kind, operators and types as in :func:`measured`, and the
    longest row."""

    name: str
    kind: str
    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    longest: int = 2**31


COMPILED = ("layer_norm compiled", "rms_norm compiled", "softmax compiled")

PARTS = (
    Part("products, BF16 and FP16 (cuBLAS)", "gemm", ("matmul",), ("bf16", "fp16")),
    Part("products, FP8 (cuBLASLt)", "gemm", ("matmul",), ("fp8",)),
    Part("products, INT8 (cuBLASLt)", "gemm", ("matmul",), ("int8",)),
    Part("products with a 2:4 weight, FP16 (cuSPARSELt)", "gemm", ("sparse",)),
    Part("convolutions, FP16 (cuDNN)", "conv", ("conv",), ("fp16",)),
    Part("convolutions, TF32 (cuDNN)", "conv", ("conv",), ("tf32",)),
    Part("depthwise convolutions (cuDNN)", "conv", ("depthwise",)),
    Part("attention, no mask (cuDNN)", "attention", ("encoder cudnn",)),
    Part("attention, causal (cuDNN)", "attention", ("causal cudnn",)),
    Part("attention, one query (cuDNN)", "attention", ("step cudnn",)),
    Part("attention (FlashAttention-2 of PyTorch)", "attention", ("encoder flash", "causal flash", "step flash")),
    Part("norms and softmax of up to 1024 (torch.compile)", "rows", COMPILED, longest=1024),
    Part("norms and softmax of any length (torch.compile)", "rows", COMPILED),
    Part("RMS norm, BF16, inputs from the DRAM (torch.compile)", "rows", ("rms_norm cold",)),
    Part("layer norm (PyTorch)", "rows", ("layer_norm",)),
    Part("RMS norm (PyTorch)", "rows", ("rms_norm",)),
    Part("softmax (PyTorch)", "rows", ("softmax",)),
    Part("sums of rows (PyTorch)", "rows", ("sum",)),
    Part("group norm (PyTorch, two kernels)", "rows", ("group_norm",)),
    Part("element-wise: add, ReLU, SiLU, GELU (PyTorch)", "memory", ("add", "relu", "silu", "gelu")),
    Part("casts and copies (PyTorch)", "memory", ("cast", "copy")),
    Part("heads transposed (PyTorch)", "layout", ("heads",)),
    Part("channels last, matrices transposed (PyTorch)", "layout", ("channels last", "transpose")),
)


def predictions(part: Part, table: str = "h200") -> tuple[Measured, Array]:
    """The kernels of a part, and their predicted times in microseconds, [kernels]."""
    whole = measured(table, part.kind, part.ops, part.dtypes)
    kept = [each for each in whole.samples if each.work.rows is None or each.work.rows.length <= part.longest]
    found = Measured.of(replace(whole, samples=tuple(kept)))
    return found, found.predict(constants_for(found.dataset.gpu))


def lines() -> Iterator[str]:
    """The table in Markdown: each part on an H200, and its error and sum on an H100."""
    yield "| kernels | error | sum | Spearman | in the range | measured / predicted, 10 to 90 % | H100: error | sum |"
    yield "|---" * 8 + "|"
    for part in PARTS:
        sides = [predictions(part, table) if any_of(part, table) else None for table in ("h200", "h100")]
        yield _line(part.name, sides)
    sides = [Measured.of(behind_products(table)) for table in ("h200", "h100")]
    name = "what an element-wise kernel adds behind a product"
    yield _line(name, [(each, each.predict(constants_for(each.dataset.gpu))) for each in sides], ranged=False)


def any_of(part: Part, table: str) -> bool:
    """Whether a table has kernels of a part."""
    return bool(measured(table, part.kind, part.ops, part.dtypes).samples)


def _line(name: str, sides: Sequence[tuple[Measured, Array] | None], *, ranged: bool = True) -> str:
    """A part on the H200 and the H100; without the share in the range where there is no range of its kind."""
    cells = [name]
    for side, whole in zip(sides, (True, False), strict=True):
        if side is None:
            cells += [""] * (5 if whole else 2)
            continue
        found, predicted = side
        result, ratios = score(predicted, found.measured_us), found.measured_us / predicted
        cells += [f"{result.mape:.1%} of {result.kernels}", f"{result.ratio:.2f}"]
        if whole:
            low, high = np.quantile(ratios, (0.1, 0.9))
            cells += [f"{result.spearman:.3f}", _inside(found, ratios) if ranged else "", f"{low:.2f} to {high:.2f}"]
    return f"| {' | '.join(cells)} |"


def _inside(found: Measured, ratios: Array) -> str:
    """The share of kernels within the range that their prediction comes with."""
    ranges = [interval_of(kind_of(work), found.dataset.gpu) for work in found.batch.works]
    return f"{np.mean([low <= ratio <= high for ratio, (low, high) in zip(ratios, ranges, strict=True)]):.0%}"


if __name__ == "__main__":
    text = list(lines())
    print("\n".join(text))
    replace_table("measured", text)
