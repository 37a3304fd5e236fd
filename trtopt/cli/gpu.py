"""``trtopt gpu list`` and ``trtopt gpu show NAME``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trtopt.cli.parser import Parser
from trtopt.cli.streams import print_json, print_renderable

if TYPE_CHECKING:
    from trtopt.hardware.spec import GpuSpec

_SCHEMA = "trtopt.gpus/1"
_RATES = ("fp32", "tf32", "fp16", "fp8", "int8", "fp4")


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = Parser(prog="trtopt gpu", description="The GPUs an engine can be built for, and what is known of each.")
    commands = parser.add_subparsers(dest="action", metavar="list|show", required=True, parser_class=Parser)
    listing = commands.add_parser("list", help="name all GPUs", description="Name all GPUs.")
    showing = commands.add_parser("show", help="show one GPU", description="Show what is known of one GPU.")
    showing.add_argument("name", metavar="NAME", help="its name, or the beginning of it, in any case")
    for command in (listing, showing):
        command.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse(argv)

    from trtopt.hardware.spec import all_gpus, find_gpu

    gpus = [find_gpu(args.name)] if args.action == "show" else list(all_gpus())
    if args.json:
        print_json({"schema": _SCHEMA, "gpus": [as_json(gpu) for gpu in gpus]})
    elif args.action == "show":
        _show(gpus[0])
    else:
        _list(gpus)
    return 0


def as_json(gpu: GpuSpec) -> dict[str, Any]:
    """A GPU's fields, and the backends that can build for it."""
    return {**dataclasses.asdict(gpu), "backends": backends(gpu)}


def backends(gpu: GpuSpec) -> list[str]:
    """The backends that can build for ``gpu``: on any machine, or (``tensorrt``) on one that has it."""
    from trtopt.engine.backend import RTX_TARGETS

    return ["tensorrt-rtx", "tensorrt"] if gpu.compute_capability in RTX_TARGETS else ["tensorrt"]


def _list(gpus: Sequence[GpuSpec]) -> None:
    from trtopt.report.text import table

    rows = [
        (
            gpu.name,
            gpu.compute_capability,
            f"{gpu.memory_gb:g} GB",
            f"{gpu.bandwidth_gbs:g}",
            f"{gpu.tflops['fp16']:g}" if "fp16" in gpu.tflops else "",
            f"{gpu.tflops['int8']:g}" if "int8" in gpu.tflops else "",
            "yes" if "tensorrt-rtx" in backends(gpu) else "on that GPU",
        )
        for gpu in gpus
    ]
    headers = ("name", "compute", "memory", "GB/s", "FP16 TF", "INT8 TOP", "build here")
    print_renderable(table(headers, rows, right=(1, 2, 3, 4, 5)))
    print(
        "\nRates are dense, in 1e12 operations per second. 'build here': TensorRT for RTX builds for that GPU on any"
        "\nmachine; the others are built with TensorRT on the GPU itself. 'portable' stands for Ampere and later."
    )


def _show(gpu: GpuSpec) -> None:
    from trtopt.report.text import pairs

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
    for rate in _RATES:
        if rate in gpu.tflops:
            rows.append((f"dense {rate.upper()}", f"{gpu.tflops[rate]:g} {'TOP/s' if rate == 'int8' else 'TFLOP/s'}"))
    rows.append(("2:4 sparsity", "doubles the Tensor Core rates" if gpu.sparse_2_4 else "no"))
    rows.append(("backends", ", ".join(backends(gpu))))
    rows.append(("source", gpu.source))
    print_renderable(pairs(rows))
