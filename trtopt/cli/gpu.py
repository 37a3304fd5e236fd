"""``trtopt gpu list`` and ``trtopt gpu show NAME``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtopt.cli.parser import Parser
from trtopt.cli.streams import print_json, print_renderable
from trtopt.report.text.blocks import pairs, table
from trtopt.support.precision import Precision

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trtopt.hardware.spec import GpuSpec

_SCHEMA = "trtopt.gpus/1"


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("trtopt gpu", description="The GPUs an engine can be built for, and what is known of each.")
    commands = parser.add_subparsers(dest="action", metavar="list|show", required=True, parser_class=Parser)
    listing = commands.add_parser("list", help="name all GPUs", description="Name all GPUs.")
    showing = commands.add_parser("show", help="show one GPU", description="Show what is known of one GPU.")
    showing.add_argument("name", metavar="NAME", help="its name, or the beginning of it, in any case")
    for command in (listing, showing):
        command.add_argument(
            "--config", metavar="FILE.toml", help="read more GPUs from the tables [gpu.NAME] of a file"
        )
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    args = make_parser().parse(argv)

    from trtopt.config.toml_file import load_gpus
    from trtopt.hardware.spec import find_gpu
    from trtopt.hardware.user import gpu_table

    table = gpu_table(load_gpus(Path(args.config)) if args.config is not None else {})
    gpus = [find_gpu(args.name, table)] if args.action == "show" else list(table)
    if args.json:
        print_json({"schema": _SCHEMA, "gpus": [as_json(gpu) for gpu in gpus]})
    elif args.action == "show":
        _show(gpus[0])
    else:
        _list(gpus)
    return 0


def as_json(gpu: GpuSpec) -> dict[str, Any]:
    """A GPU's fields, what follows from them, and the backends that can build for it."""
    from trtopt.hardware.spec import precisions_of, ridge_flop_per_byte

    return {
        **dataclasses.asdict(gpu),
        "precisions": list(precisions_of(gpu)),
        "ridge_flop_per_byte": {dtype: round(ridge_flop_per_byte(gpu, dtype), 1) for dtype in gpu.tflops},
        "backends": backends(gpu),
    }


def backends(gpu: GpuSpec) -> list[str]:
    """The backends that can build for ``gpu``: on any machine, or (``tensorrt``) on one that has it."""
    from trtopt.engine.backend import RTX_TARGETS

    return ["tensorrt-rtx", "tensorrt"] if gpu.compute_capability in RTX_TARGETS else ["tensorrt"]


def _list(gpus: Sequence[GpuSpec]) -> None:
    rows = [
        (
            gpu.name,
            gpu.compute_capability,
            f"{gpu.memory_gb:g} GB",
            f"{gpu.bandwidth_gbs:g}",
            f"{gpu.tflops[Precision.FP16]:g}" if Precision.FP16 in gpu.tflops else "",
            f"{gpu.tflops[Precision.INT8]:g}" if Precision.INT8 in gpu.tflops else "",
            "yes" if "tensorrt-rtx" in backends(gpu) else "on that GPU",
        )
        for gpu in gpus
    ]
    headers = ("name", "compute", "memory", "GB/s", "FP16 TF", "INT8 TOP", "build here")
    print_renderable(table(headers, rows, right=(1, 2, 3, 4, 5)))
    print(
        "\nRates are dense, in 1e12 operations per second. 'build here': TensorRT for RTX builds for that GPU on any"
        "\nmachine; the others are built with TensorRT on the GPU itself. 'portable' stands for Ampere and later, and a"
        "\ncompute capability ('8.9', 'sm_89') for the best-known GPU that has it."
    )


def _show(gpu: GpuSpec) -> None:
    from rich.console import Group
    from rich.text import Text

    from trtopt.hardware.spec import UNITS, precisions_of, ridge_flop_per_byte
    from trtopt.report.text.calibration import calibration_lines

    rows = [
        ("name", gpu.name),
        ("compute capability", gpu.compute_capability),
        ("streaming multiprocessors", str(gpu.sm)),
        ("clock, CUDA cores", f"{gpu.clock_cuda_mhz:g} MHz"),
        ("clock, Tensor Cores", f"{gpu.clock_tensor_mhz:g} MHz"),
        ("memory", f"{gpu.memory_gb:g} GB"),
        ("memory bandwidth", f"{gpu.bandwidth_gbs:g} GB/s"),
        ("L2 cache", f"{gpu.l2_mib:g} MiB"),
        ("power limit", f"{gpu.tdp_w:g} W"),
    ]
    rows.append(("2:4 sparsity", "doubles the Tensor Core rates" if gpu.sparse_2_4 else "no"))
    rows.append(("precisions", ", ".join(precisions_of(gpu))))
    rows.append(("backends", ", ".join(backends(gpu))))
    rows.append(("source", gpu.source))
    rows += [("calibrated", text) for text in calibration_lines(dataclasses.asdict(gpu))]
    fma = gpu.fma_per_clock_per_sm
    rates = [
        (
            dtype.upper(),
            f"{gpu.tflops[dtype]:g}",
            f"{fma[unit]:g}" if unit in fma else "",
            f"{ridge_flop_per_byte(gpu, dtype):.1f}",
        )
        for dtype, unit in UNITS.items()
        if dtype in gpu.tflops
    ]
    headers = ("dense", "1e12 op/s", "FMA/clock/SM", "ridge, flop/byte")
    parts: list[RenderableType] = [pairs(rows), Text(""), table(headers, rates, right=(1, 2, 3))]
    if fma.get("fp16_acc16") != fma.get("fp16_acc32"):
        parts.append(Text(f"FP16 products summed in FP16: {fma['fp16_acc16']:g} FMA/clock/SM"))
    print_renderable(Group(*parts))
