"""The rows of the benchmark's table for element-wise kernels, softmax and norms."""

from __future__ import annotations

from data import Dataset
from fitting import Measured
from norms_data import NEUSIGHT, cudnn_norms, neusight
from norms_fit import OPS, mean_constants, row_constants
from scoring import SPLIT_SEEDS, Row, compare, halves, predictor

from trtopt.roofline.constants import Constants, constants_for

_LIMIT = 0.10
_NAMES = {"elementwise": "element-wise", "softmax": "softmax", "ln": "layer norm"}


def norm_rows() -> list[Row]:
    """Half of the shapes left out on A100 40GB and T4; A100 80GB from A100 40GB; RMS norm of GB200 from A100 and T4."""
    tables = {name: [neusight(name, op) for op in OPS] for name in NEUSIGHT}
    rows = []
    for name in ("a100_pcie_40gb", "t4"):
        rows += _half_rows(tables[name])
    known = row_constants(tables["a100_pcie_40gb"], _base(tables["a100_pcie_40gb"]))
    for op, left, other in zip(OPS, tables["a100_80gb_pcie"], tables["a100_pcie_40gb"], strict=True):
        fold = (predictor(known), [Measured.of(other)], Measured.of(left))
        title = f"{left.gpu.name}: {_NAMES[op]}, fitted to those of {other.gpu.name}"
        rows.append(compare(title, _LIMIT, [fold]))
    t4 = row_constants(tables["t4"], _base(tables["t4"]))
    norms = [Measured.of(tables[name][OPS.index("ln")]) for name in ("a100_pcie_40gb", "t4")]
    for backend in ("cudnn", "torch_compile"):
        left = cudnn_norms("gb200", "GB200-per-GPU", backend)
        fold = (predictor(mean_constants([known, t4], constants_for(left.gpu))), norms, Measured.of(left))
        rows.append(compare(f"{left.gpu.name}: RMS norm ({backend}), GPU left out", _LIMIT, [fold]))
    return rows


def _half_rows(tables: list[Dataset]) -> list[Row]:
    """Each kind of kernel of one GPU, its constants from half of the shapes of all kinds."""
    base = _base(tables)
    splits = [_split(tables, seed) for seed in SPLIT_SEEDS]
    fitted = [predictor(row_constants(tables, base, train)) for train, _ in splits]
    rows = []
    for op, table in zip(OPS, tables, strict=True):
        folds = [
            (predict, [Measured.of(table, train)], Measured.of(table, test))
            for predict, (train, test) in zip(fitted, splits, strict=True)
        ]
        rows.append(compare(f"{table.gpu.name}: {_NAMES[op]}, half left out", _LIMIT, folds))
    return rows


def _split(tables: list[Dataset], seed: int) -> tuple[frozenset[str], frozenset[str]]:
    """All shapes of the tables in two halves: a shape that one kind is fitted to is scored of none."""
    samples = tuple(sample for table in tables for sample in table.samples)
    return halves(Dataset("shapes", tables[0].gpu, samples), seed)


def _base(tables: list[Dataset]) -> Constants:
    return constants_for(tables[0].gpu)
