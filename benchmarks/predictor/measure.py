"""Times kernels of PyTorch, cuBLAS and cuDNN on the GPU that is here, for the performance model to be scored on.

    python measure.py OUT.csv [--seconds 400] [--seed 0] [--dry]

Needs PyTorch alone, none of trtopt. Every time is that of one call in a CUDA graph of many equal ones, replayed; the
median over the replays, so that what the host does is in none. Products take turns with five weights of their own, as
in the tables others published; attention takes turns with inputs that together exceed the L2 cache twice; all other
kernels run on the same data again and again. Values are random: zeros run faster. `nodes` counts the graph's nodes per
call (kernels, copies).

Of each kind the cases come in a random order and get their share of the seconds; what was not reached is not in the
file.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

Call = Callable[[], Any]
TYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
COLUMNS = ("kind", "op", "dtype", "sizes", "us", "low_us", "high_us", "nodes")


@dataclass(frozen=True)
class Case:
    """One kernel: what it is, its sizes, and how calls on one to many sets of data are made."""

    kind: str
    op: str
    dtype: str
    sizes: dict[str, int]
    make: Callable[[int], list[Call]]
    sets: int = 1


@dataclass(frozen=True)
class Kind:
    """Cases of one kind and their share of the time."""

    name: str
    share: float
    cases: list[Case] = field(default_factory=list)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, dtype: str) -> torch.Tensor:
    """Standard normal values; INT8 over its whole range."""
    if dtype == "int8":
        return torch.randint(-127, 128, shape, dtype=torch.int8, device=device())
    return torch.randn(shape, device=device(), dtype=torch.float16 if dtype == "fp8" else TYPES[dtype]).to(TYPES[dtype])


# Matrix products: m rows, weights [k, n] of networks' layers.
PAIRS = (
    (768, 768), (2304, 768), (3072, 768), (768, 3072), (1024, 1024), (4096, 1024), (1024, 4096), (1280, 1280),
    (5120, 1280), (2048, 2048), (8192, 2048), (4096, 4096), (14336, 4096), (4096, 14336), (512, 2048), (320, 1280),
)  # fmt: skip
ROWS = (1, 8, 16, 32, 64, 128, 197, 256, 512, 1024, 1576, 2048, 4096, 8192)


def products() -> Iterator[Case]:
    for (n, k), m, dtype in itertools.product(PAIRS, ROWS, ("bf16", "fp16", "fp8", "int8")):
        sizes = {"m": m, "n": n, "k": k}
        if dtype != "int8" or m > 16:
            yield Case("gemm", "matmul", dtype, sizes, _product(m, n, k, dtype), 5)
        if dtype == "fp16" and m % 8 == 0:
            yield Case("gemm", "sparse", dtype, sizes, _sparse(m, n, k), 5)


def _product(m: int, n: int, k: int, dtype: str) -> Callable[[int], list[Call]]:
    def make(sets: int) -> list[Call]:
        x = random(m, k, dtype=dtype)
        weights = [random(n, k, dtype=dtype).t() for _ in range(sets)]
        if dtype == "fp8":
            one = torch.ones((), device=device())
            return [
                lambda w=w: torch._scaled_mm(x, w, scale_a=one, scale_b=one, out_dtype=torch.bfloat16) for w in weights
            ]
        if dtype == "int8":
            return [lambda w=w: torch._int_mm(x, w) for w in weights]
        return [lambda w=w: x @ w for w in weights]

    return make


def _sparse(m: int, n: int, k: int) -> Callable[[int], list[Call]]:
    """cuSPARSELt's product with a 2:4 weight."""

    def make(sets: int) -> list[Call]:
        x, pattern = random(m, k, dtype="fp16"), torch.tensor([1, 0, 0, 1], device=device()).tile(n, k // 4)
        weights = [to_sparse_semi_structured(random(n, k, dtype="fp16") * pattern) for _ in range(sets)]
        return [lambda w=w: F.linear(x, w) for w in weights]

    return make


# Convolutions (c, k, size of the picture, kernel, stride, groups) of ResNet, MobileNet, ConvNeXt, YOLO, U-Net.
CONVS = (
    (3, 64, 224, 7, 2, 1), (64, 64, 56, 1, 1, 1), (64, 64, 56, 3, 1, 1), (64, 256, 56, 1, 1, 1),
    (256, 64, 56, 1, 1, 1), (256, 512, 56, 1, 2, 1), (128, 128, 28, 3, 1, 1), (128, 128, 56, 3, 2, 1),
    (512, 128, 28, 1, 1, 1), (256, 256, 14, 3, 1, 1), (1024, 256, 14, 1, 1, 1), (256, 1024, 14, 1, 1, 1),
    (512, 512, 7, 3, 1, 1), (512, 2048, 7, 1, 1, 1), (32, 64, 112, 3, 1, 1), (64, 128, 80, 3, 2, 1),
    (320, 320, 32, 3, 1, 1), (640, 640, 16, 3, 1, 1), (128, 128, 128, 3, 1, 1), (64, 64, 256, 3, 1, 1),
    (96, 384, 56, 1, 1, 1), (24, 144, 56, 1, 1, 1), (160, 960, 7, 1, 1, 1), (256, 256, 40, 3, 1, 1),
    (3, 96, 224, 4, 4, 1), (48, 48, 64, 5, 1, 1), (144, 144, 28, 3, 1, 9), (96, 96, 56, 7, 1, 96),
    (32, 32, 112, 3, 1, 32), (144, 144, 56, 3, 2, 144), (576, 576, 14, 3, 1, 576), (240, 240, 14, 5, 1, 240),
)  # fmt: skip


def convolutions() -> Iterator[Case]:
    for (c, k, size, kernel, stride, groups), batch in itertools.product(CONVS, (1, 8, 32)):
        sizes = {"n": batch, "c": c, "k": k, "h": size, "w": size, "r": kernel, "stride": stride, "groups": groups}
        op = "depthwise" if groups == c else "conv"
        for dtype in ("fp16", "tf32") if batch == 8 else ("fp16",):
            yield Case("conv", op, dtype, sizes, _convolution(sizes, dtype))


def _convolution(s: dict[str, int], dtype: str) -> Callable[[int], list[Call]]:
    def make(sets: int) -> list[Call]:
        last = torch.channels_last
        x = random(s["n"], s["c"], s["h"], s["w"], dtype=dtype).to(memory_format=last)
        w = random(s["k"], s["c"] // s["groups"], s["r"], s["r"], dtype=dtype).to(memory_format=last)
        padding = s["r"] // 2 if s["stride"] < s["r"] else 0
        return [lambda: F.conv2d(x, w, stride=s["stride"], padding=padding, groups=s["groups"])]

    return make


# Attention: batch, heads, heads of K and V, queries, keys, size of a head.
ENCODERS = tuple(itertools.product((1, 8), (6, 12, 16), (128, 197, 384, 512, 1024, 2048, 4096), (64, 80, 128)))
PROMPTS = tuple(itertools.product((1, 4), ((12, 12), (32, 8)), (256, 512, 1024, 2048, 4096, 8192), (64, 128)))
STEPS = tuple(itertools.product((1, 8, 32), ((12, 12), (32, 8), (32, 32)), (256, 1024, 2048, 4096, 8192), (64, 128)))


def attentions() -> Iterator[Case]:
    for backend in ("cudnn", "flash"):
        for batch, heads, length, size in ENCODERS:
            yield _attention("encoder", backend, batch, (heads, heads), (length, length), size)
        for batch, heads, length, size in PROMPTS:
            yield _attention("causal", backend, batch, heads, (length, length), size)
        for batch, (heads, kv_heads), length, size in STEPS:
            yield _attention("step", backend, batch, (heads, kv_heads), (1, length), size)


def _attention(op: str, backend: str, batch: int, heads: tuple[int, int], lengths: tuple[int, int], size: int) -> Case:
    queries, keys = lengths
    sizes = {"b": batch, "heads": heads[0], "kv_heads": heads[1], "q": queries, "keys": keys, "size": size}
    elements = 2 * batch * heads[1] * keys * size + 2 * batch * heads[0] * queries * size
    chosen = SDPBackend.CUDNN_ATTENTION if backend == "cudnn" else SDPBackend.FLASH_ATTENTION

    def make(sets: int) -> list[Call]:
        def one() -> Call:
            # [batch, length, heads, size] in memory, as the products before an attention write it
            q = random(batch, queries, heads[0], size, dtype="bf16").transpose(1, 2)
            k, v = (random(batch, keys, heads[1], size, dtype="bf16").transpose(1, 2) for _ in range(2))

            def call() -> torch.Tensor:
                with sdpa_kernel(chosen if q.is_cuda else SDPBackend.MATH):
                    return F.scaled_dot_product_attention(
                        q, k, v, is_causal=op == "causal", enable_gqa=heads[0] != heads[1]
                    )

            return call

        return [one() for _ in range(sets)]

    return Case("attention", f"{op} {backend}", "bf16", sizes, make, max(1, min(16, -(-240 * 2**20 // (2 * elements)))))


# Rows of a normalization, a softmax, a sum; elementwise kernels; changes of layout.
ROW_COUNTS, LENGTHS = (256, 1576, 4096, 16384, 65536), (64, 197, 384, 768, 1024, 2048, 4096, 8192)


def rows() -> Iterator[Case]:
    for op, dtype, count, length in itertools.product(
        ("layer_norm", "rms_norm", "softmax", "sum"), ("fp32", "fp16"), ROW_COUNTS, LENGTHS
    ):
        if count * length <= 2**28:
            yield Case(
                "rows", op, dtype, {"count": count, "length": length}, _simple(_ROW_CALLS[op], (count, length), dtype)
            )
    for dtype, (batch, channels, size) in itertools.product(
        ("fp32", "fp16"), itertools.product((1, 8), (32, 128, 320, 640), (16, 32, 64, 128))
    ):
        sizes = {"count": batch * 32, "length": channels // 32 * size * size, "c": channels}
        if channels >= 32:
            yield Case(
                "rows",
                "group_norm",
                dtype,
                sizes,
                _simple(lambda x: F.group_norm(x, 32), (batch, channels, size, size), dtype),
            )


_ROW_CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(-1),
}


def compiled() -> Iterator[Case]:
    """The same rows by torch.compile: one kernel each, which holds a row of up to 1024 elements."""
    for op, count, length in itertools.product(
        ("layer_norm", "rms_norm", "softmax"), (1576, 16384), (197, 384, 768, 1024, 2048, 4096, 8192)
    ):
        run = torch.compile(_ROW_CALLS[op], dynamic=False)
        sizes = {"count": count, "length": length}
        yield Case("rows", f"{op} compiled", "fp16", sizes, _simple(run, (count, length), "fp16"))


# Rows x columns of the RMS norms that cuDNN's authors timed, with the L2 cache flushed.
COLD_ROWS = (
    (16384, 4096), (8192, 8192), (4096, 16384), (8192, 5120), (8192, 4096), (4096, 6144), (4096, 8192), (2048, 4096),
    (131072, 128), (8192, 128), (4096, 2048), (16384, 128), (16384, 2048), (16384, 3072), (16384, 5120), (16384, 6144),
    (16384, 8192), (8192, 2048), (8192, 3072), (16384, 1024), (65536, 1024), (65536, 512),
)  # fmt: skip


def cold() -> Iterator[Case]:
    """RMS norms by torch.compile as a training step runs them (the inverse deviation is written too), BF16, on inputs
    in turn that exceed the L2 cache twice."""
    for count, length in COLD_ROWS:
        run = torch.compile(lambda x, w: F.rms_norm(x, x.shape[-1:], w), dynamic=False)
        sets = max(1, -(-120 * 2**20 // (2 * count * length)))
        yield Case("rows", "rms_norm cold", "bf16", {"count": count, "length": length}, _norm(run, count, length), sets)


def _norm(run: Callable[..., Any], count: int, length: int) -> Callable[[int], list[Call]]:
    def make(sets: int) -> list[Call]:
        weight = random(length, dtype="bf16").requires_grad_()
        inputs = [random(count, length, dtype="bf16") for _ in range(sets)]
        return [lambda x=x: run(x, weight) for x in inputs]

    return make


def _simple(run: Callable[[torch.Tensor], Any], shape: Sequence[int], dtype: str) -> Callable[[int], list[Call]]:
    def make(sets: int) -> list[Call]:
        x = random(*shape, dtype=dtype)
        return [lambda: run(x)]

    return make


def streams() -> Iterator[Case]:
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "relu": torch.relu,
        "gelu": F.gelu,
        "silu": F.silu,
        "add": lambda x: torch.add(x, x),
        "cast": lambda x: x.to(torch.float16 if x.dtype == torch.float32 else torch.float32),
        "copy": torch.clone,
    }
    for (op, run), dtype, exponent in itertools.product(calls.items(), ("fp32", "fp16"), range(12, 29, 2)):
        yield Case("memory", op, dtype, {"elements": 2**exponent}, _simple(run, (2**exponent,), dtype))


def layouts() -> Iterator[Case]:
    def last(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous(memory_format=torch.channels_last)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous()

    for dtype, batch, c, size in itertools.product(("fp32", "fp16"), (1, 8), (3, 24, 64, 256, 768), (14, 28, 56, 112)):
        yield Case(
            "layout",
            "channels last",
            dtype,
            {"n": batch, "c": c, "h": size, "w": size},
            _simple(last, (batch, c, size, size), dtype),
        )
    for batch, length, count, size in itertools.product((1, 8), (128, 197, 512, 2048), (12, 16), (64, 128)):
        sizes = {"n": batch, "length": length, "heads": count, "size": size}
        yield Case("layout", "heads", "fp16", sizes, _simple(heads, (batch, length, count, size), "fp16"))
    for m, n in itertools.product((197, 768, 1024, 4096), (64, 768, 3072)):
        yield Case(
            "layout", "transpose", "fp16", {"n": m, "c": n}, _simple(lambda x: x.t().contiguous(), (m, n), "fp16")
        )


def graphs() -> Iterator[Case]:
    """What a node of a graph costs: kernels of one element in a chain; the same with a second branch beside every other
    one, which the next waits for; with a copy of a few bytes to or from the host behind each."""

    def chain(sets: int) -> list[Call]:
        x = torch.ones(1, device=device())
        return [lambda: x.add_(1.0)]

    def forked(sets: int) -> list[Call]:
        x, y = torch.ones(1, device=device()), torch.ones(1, device=device())
        side = torch.cuda.Stream() if x.is_cuda else None

        def call() -> None:
            x.add_(1.0)
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    y.add_(1.0)
                x.add_(1.0)
                torch.cuda.current_stream().wait_stream(side)

        return [call]

    def copied(to_host: bool, count: int) -> Callable[[int], list[Call]]:
        def make(sets: int) -> list[Call]:
            x = torch.ones(1, device=device())
            near, far = torch.ones(count, device=device()), torch.ones(count, pin_memory=x.is_cuda)

            def call() -> None:
                x.add_(1.0)
                (far if to_host else near).copy_(near if to_host else far, non_blocking=True)

            return [call]

        return make

    yield Case("graph", "chain", "fp32", {}, chain)
    yield Case("graph", "forked", "fp32", {}, forked)
    for exponent in (0, 6, 10, 14, 18, 22):
        for to_host in (False, True):
            op = "kernel, then copy to host" if to_host else "kernel, then copy from host"
            yield Case("graph", op, "fp32", {"bytes": 4 * 2**exponent}, copied(to_host, 2**exponent))


# Products of layers and what follows them: what one more kernel costs behind a product.
BEFORE = (
    (1576, 768, 768), (1576, 3072, 768), (1024, 1024, 1024), (1024, 4096, 1024), (6272, 256, 256), (197, 768, 3072),
    (8192, 1280, 1280),
)  # fmt: skip
BEHIND: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda y: y,
    "relu": torch.relu,
    "gelu": F.gelu,
    "add": lambda y: torch.add(y, y),
    "cast": lambda y: y.to(torch.float32),
    "layer_norm": lambda y: F.layer_norm(y, y.shape[-1:]),
    "softmax": lambda y: y.softmax(-1),
    "heads": lambda y: y.view(y.shape[0], -1, 64).transpose(0, 1).contiguous(),
}


def pairs() -> Iterator[Case]:
    def behind(product: Case, run: Callable[[torch.Tensor], Any]) -> Callable[[int], list[Call]]:
        return lambda sets: [lambda call=call: run(call()) for call in product.make(sets)]

    for (m, n, k), (op, run) in itertools.product(BEFORE, BEHIND.items()):
        sizes = {"m": m, "n": n, "k": k}
        product = Case("pair", op, "fp16", sizes, _product(m, n, k, "fp16"), 5)
        yield Case("pair", op, "fp16", sizes, behind(product, run), 5)


def kinds(seed: int) -> list[Kind]:
    """All cases, those of a kind in a random order, the graph's first."""
    made = [
        Kind("graph", 0.03, list(graphs())),
        Kind("pair", 0.05, list(pairs())),
        Kind("gemm", 0.18, list(products())),
        Kind("conv", 0.2, list(convolutions())),
        Kind("attention", 0.19, list(attentions())),
        Kind("rows", 0.12, list(rows())),
        Kind("compiled", 0.06, list(compiled())),
        Kind("cold", 0.04, list(cold())),
        Kind("memory", 0.06, list(streams())),
        Kind("layout", 0.07, list(layouts())),
    ]
    for kind in made:
        if kind.name != "graph":
            Random(seed).shuffle(kind.cases)
    return made


def measure(case: Case, least_us: float = 3000.0) -> tuple[float, float, float, float]:
    """Median, quantiles of 10 and 90 % of a call's time over replays, in microseconds, and nodes per call."""
    calls = case.make(case.sets)
    pool = torch.cuda.Stream()
    with torch.cuda.stream(pool):
        for call in (*calls, *calls):
            call()
        pool.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for call in calls:
            call()
        end.record()
        pool.synchronize()
        rough = max(begin.elapsed_time(end) * 1e3 / len(calls), 2.0)
        rounds = max(1, min(400, round(least_us / rough)) // len(calls))
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, stream=pool):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.instantiate()
        count, times = rounds * len(calls), []
        graph.replay()
        for _ in range(11):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / count)
    ordered = sorted(times)
    return statistics.median(times), ordered[1], ordered[-2], _nodes(graph) / count


def _nodes(graph: torch.cuda.CUDAGraph) -> float:
    try:
        from cuda.bindings import runtime

        error, _, count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph())
    except (ImportError, TypeError, RuntimeError):
        return math.nan
    return float(count) if int(error) == 0 else math.nan


def about() -> list[str]:
    """The GPU, its driver and the versions, as lines of a comment."""
    p = torch.cuda.get_device_properties(0)
    lines = [
        f"gpu: {p.name}, compute capability {p.major}.{p.minor}, {p.multi_processor_count} SMs, "
        f"L2 {p.L2_cache_size} bytes, {p.total_memory} bytes",
        f"versions: torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
    ]
    asked = "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem"
    told = subprocess.run(["nvidia-smi", asked, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return [*lines, f"nvidia-smi: {told.stdout.strip() or told.stderr.strip()}", f"date: {time.strftime('%Y-%m-%d')}"]


def main() -> None:
    """Measure until the seconds are over and write the rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="kinds, separated by commas")
    parser.add_argument("--dry", action="store_true", help="call the smallest of each operator once, on any machine")
    args = parser.parse_args()
    if args.dry:
        _dry(args.seed)
        return
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.recompile_limit = 64  # a shape each
    SparseSemiStructuredTensor._FORCE_CUTLASS = False
    failures: dict[str, int] = {}
    with args.out.open("w", newline="") as file:
        file.writelines(f"# {line}\n" for line in about())
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for kind in (kind for kind in kinds(args.seed) if not args.only or kind.name in args.only):
            stop, done = time.monotonic() + kind.share * args.seconds, 0
            for case in kind.cases:
                if time.monotonic() > stop:
                    break
                sizes = " ".join(f"{name}:{value}" for name, value in case.sizes.items())
                try:
                    found = measure(case)
                except (RuntimeError, NotImplementedError) as problem:
                    key = f"{case.kind} {case.op} {case.dtype}: {str(problem).splitlines()[0][:100]}"
                    failures[key] = failures.get(key, 0) + 1
                    continue
                writer.writerow((case.kind, case.op, case.dtype, sizes, *(f"{value:.4f}" for value in found)))
                done += 1
            file.flush()
            print(f"{kind.name}: {done} of {len(kind.cases)}", flush=True)
    for key, times in failures.items():
        print(f"failed {times} times: {key}", file=sys.stderr)


def _dry(seed: int) -> None:
    seen = set()
    for kind in kinds(seed):
        for case in sorted(kind.cases, key=lambda case: sum(case.sizes.values())):
            if (case.kind, case.op, case.dtype) not in seen:
                seen.add((case.kind, case.op, case.dtype))
                if case.op != "sparse":
                    case.make(1)[0]()
                print(case.kind, case.op, case.dtype, case.sizes)


if __name__ == "__main__":
    main()
