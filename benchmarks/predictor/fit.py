"""Fits the constants of the performance model and writes them to ``trtopt/roofline/constants.toml``.

    python benchmarks/predictor/fit.py

Needs the folder `profiles` (see `data.py`). Each set of constants is written with what it was fitted to.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path

from attention_fit import with_attention
from data import TABLES, Dataset, deepbench, gemm_table, tensorrt_layers
from end_to_end import GPUS, MLPERF_DATA, fitted_share, latest, published, share_from_mlperf
from fitting import (
    FAMILY_FIELDS,
    FIELDS,
    FIRM,
    LAYER_FIELDS,
    LOOSE,
    MEDIUM,
    PRODUCT_FIELDS,
    START,
    STIFF,
    TIMING_FIELDS,
    Measured,
    fit,
    log_mean,
)
from norms_fit import with_rows
from quantized_fit import all_quantized_constants

from trtopt.hardware.spec import find_gpu
from trtopt.roofline.constants import GENERIC, Constants, Fit, set_for

OUT = Path(__file__).parents[2] / "trtopt" / "roofline" / "constants.toml"

_MOST = 3000


def product_constants(table: Dataset, groups: frozenset[str] | None = None, hold: float = LOOSE) -> Constants:
    """The constants of matrix products from a table of them (or from some of its (n, k) pairs)."""
    return fit([Measured.of(table, groups, _MOST)], fields=PRODUCT_FIELDS, hold=hold)


def layer_constants(layers: Dataset, start: Constants, groups: frozenset[str] | None = None) -> Constants:
    """The constants of the other kernels and of the timing, from engines, those of products being known."""
    return fit([Measured.of(layers, groups)], start=start, fields=(*TIMING_FIELDS, *FAMILY_FIELDS), hold=FIRM)


def engine_constants(layers: Dataset, groups: frozenset[str] | None = None) -> Constants:
    """All constants of a GPU of which nothing but engines was measured."""
    return fit([Measured.of(layers, groups)], fields=LAYER_FIELDS, hold=FIRM)


def unseen_constants(tables: list[Dataset]) -> Constants:
    """The constants of products for a GPU none of these tables is of: the mean of their logarithms."""
    return log_mean([product_constants(table, hold=STIFF) for table in tables], PRODUCT_FIELDS, START)


def v100_constants(bench: list[Dataset], groups: frozenset[str] | None = None) -> Constants:
    """All constants from DeepBench, in which products and convolutions weigh the same."""
    return fit([Measured.of(part, groups) for part in bench], hold=MEDIUM)


def all_constants() -> dict[str, tuple[str, str, Constants]]:
    """Compute capability, data and constants of each set, by name."""
    tables = {name: gemm_table(name, gpu) for name, gpu in TABLES.items()}
    a100, laptop = tensorrt_layers("A100-PCIe-80GB"), tensorrt_layers("RTX-3060-Laptop")
    found: dict[str, tuple[str, str, Constants]] = {}
    on_a100 = layer_constants(a100, product_constants(tables["a100_sxm"]))
    on_laptop = engine_constants(laptop)
    families = (*TIMING_FIELDS, *FAMILY_FIELDS)
    on_v100 = v100_constants([deepbench("gemm"), deepbench("conv")])
    shared = log_mean([on_a100, on_laptop], families, unseen_constants(list(tables.values())))
    from_v100 = {name: getattr(on_v100, name) for name in ("misaligned_share", "winograd_gain")}
    shared, on_a100, on_laptop = (dataclasses.replace(each, **from_v100) for each in (shared, on_a100, on_laptop))
    both = "TensorRT layers of A100-80GB-PCIe and RTX-3060-Laptop; alignment and Winograd: DeepBench"
    found[GENERIC] = ("", f"mean of the sets of {', '.join(TABLES)}; {both}", shared)
    for name, table in tables.items():
        products = product_constants(table)
        kept = {field: getattr(products, field) for field in PRODUCT_FIELDS}
        base = on_a100 if name == "a100_sxm" else shared
        others = "TensorRT layers of A100-80GB-PCIe (5 engines of ResNet-18)" if base is on_a100 else both
        data = f"{table.name}: {len(table.samples)} BF16 matrix products; {others}"
        found[TABLES[name]] = (table.gpu.compute_capability, data, dataclasses.replace(base, **kept))
    found["RTX-3060-Laptop"] = (
        "8.6",
        "TensorRT layers of RTX-3060-Laptop (AlexNet, MobileNetV2, ResNet-18)",
        on_laptop,
    )
    found["V100-SXM2-16GB"] = ("7.0", "DeepBench: matrix products and convolutions of V100", on_v100)
    found["T4"] = ("7.5", f"{found[GENERIC][1]}; streams and rows: NeuSight's timings of T4", shared)
    complete = with_rows({name: constants for name, (_, _, constants) in found.items()})
    complete = all_quantized_constants(with_attention(complete))
    return {name: (capability, data, complete[name]) for name, (capability, data, _) in found.items()}


def low_power_shares(fits: Sequence[Fit]) -> dict[str, tuple[float, str]]:
    """The share of its clock that each measured low-power card sustains, and the data it is from.

    Args:
        fits: The sets; each card has the one that holds for its architecture.
    """
    sets = {fit.name: fit.constants for fit in fits}
    on = {name: sets[set_for(find_gpu(name).compute_capability, fits)] for name in ("T4", "L4")}
    rows = latest([row for row in published() if GPUS[row.gpu] == "T4"])
    t4 = fitted_share(rows, find_gpu("T4"), on["T4"])
    release = ".".join(map(str, rows[0].release))
    on_t4 = f"{len(rows)} latencies of BERT base and large in TensorRT {release} (demo/BERT of NVIDIA/TensorRT)"
    return {"T4": (t4, on_t4), "L4": (share_from_mlperf("L4", on["L4"], ("T4", on["T4"], t4)), MLPERF_DATA)}


def main() -> None:
    """Fit, and write the file."""
    lines = [
        "# Constants of the performance model, written by benchmarks/predictor/fit.py; constants.py explains them.",
        f"# Fitted {datetime.date.today().isoformat()} to what others measured: NVIDIA/TensorRT b8b46f213c3f",
        "# (layers of A100), fuzzylabs/edge-vision-power-estimation 6d8ac68acf65 (layers of RTX 3060 Laptop),",
        "# ai-dynamo/aiconfigurator 095f58a51c4c (matrix products), baidu-research/DeepBench da81ba782073 (V100),",
        "# sitar-lab/NeuSight 6945927d9afc (streams and rows: A100 40GB and T4).",
    ]
    found = all_constants()
    for name, (capability, data, constants) in found.items():
        lines += ["", "[[fit]]", f'name = "{name}"', f'compute_capability = "{capability}"', f'data = "{data}"']
        lines += [f"{field} = {getattr(constants, field):.6g}" for field in FIELDS]
    for name, (share, data) in low_power_shares([Fit(name, *values) for name, values in found.items()]).items():
        capability = find_gpu(name).compute_capability
        lines += ["", "[[low_power]]", f'name = "{name}"', f'compute_capability = "{capability}"']
        lines += [f"sustained_share = {share:.6g}", f'data = "{data}"']
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
