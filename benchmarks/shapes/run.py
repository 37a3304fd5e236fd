"""Buckets of published lengths against one profile of the largest: predicted time of an encoder, for one to four.

    python benchmarks/shapes/run.py MODEL.onnx [--gpu L4] [--batches 1 8 32] [--table]

``MODEL`` takes int64 inputs [batch, length]; ``--table`` writes what is printed into README.md.
"""

from __future__ import annotations

import argparse
from collections import Counter
from functools import lru_cache
from pathlib import Path

from trtopt.engine.buckets import MOST_BUCKETS, Buckets, choose
from trtopt.hardware.spec import find_gpu
from trtopt.pipeline.shapes import RequestTimes
from trtopt.source.onnx_file import load
from trtopt.support.precision import Precision

HERE = Path(__file__).parent
START, END = "<!-- table -->\n", "<!-- end of table -->"

BIN = 16
"""Lengths that a number below counts together, at their largest."""

LENGTHS = {
    # "histograms.py" of Graphcore's packedBERT, which belongs to Krell et al., "Efficient Sequence Packing without
    # Cross-contamination" (arXiv 2107.02027): its numbers by length, added up in bins of 16.
    "SQuAD 1.1 (88641 sequences, 172 tokens on average)": (
        0, 0, 293, 1488, 2208, 2542, 4369, 10267, 12428, 11583, 9448, 7855, 5883, 4539, 3538, 2722,
        2347, 1694, 1440, 1027, 720, 593, 324, 1333,
    ),
    "Wikipedia in pairs (16279552 sequences, 256 tokens on average)": (
        51863, 532972, 1099608, 1178636, 1020223, 833097, 695686, 601798, 534993, 479437, 437648, 403464,
        374027, 346346, 324538, 304654, 285802, 268403, 254107, 241894, 230238, 219537, 209925, 199809,
        191290, 183982, 176838, 170408, 163292, 158102, 153215, 3953720,
    ),
}  # fmt: skip


def row(name: str, batch: int, found: list[Buckets]) -> str:
    """Time of a request in one profile, what more buckets save, and the lengths of the last cut."""
    saved = " | ".join(f"{1 - each.us / found[0].us:.0%}" for each in found[1:])
    ends = ", ".join(str(next(iter(item.high.values()))[1]) for item in found[-1].buckets)
    return f"| {name} | {batch} | {found[0].us:.0f} | {saved} | {ends} | {found[-1].padding:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpu", default="L4")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()

    model = load(args.model)
    names = [item.name for item in model.inputs]
    times = RequestTimes(model.model, Precision.FP16, find_gpu(args.gpu), "the table")

    @lru_cache(None)
    def us(batch: int, length: int) -> float:
        return times(dict.fromkeys(names, (batch, length)))

    more = " | ".join(f"{number} buckets" for number in range(2, MOST_BUCKETS + 1))
    lines = [
        f"| lengths | sequences a request | one profile, us | {more} | largest of each | padding |",
        "|---|---|---|" + "---|" * (MOST_BUCKETS + 1),
    ]
    for name, counts in LENGTHS.items():
        for batch in args.batches:
            requests = Counter(
                {
                    tuple((name, (batch, BIN * number)) for name in sorted(names)): count
                    for number, count in enumerate(counts, 1)
                    if count
                }
            )
            found = [
                choose(requests, lambda shapes: us(*shapes[names[0]]), number) for number in range(1, MOST_BUCKETS + 1)
            ]
            lines.append(row(name, batch, found))
            print(lines[-1], flush=True)
    if args.table:
        before, _, rest = (HERE / "README.md").read_text().partition(START)
        (HERE / "README.md").write_text(before + START + "\n".join(lines) + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
