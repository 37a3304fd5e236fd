"""The judge of each backend. Neither speaks for the other's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from trtopt.engine.backend import TENSORRT_RTX, Backend, choose_backend
from trtopt.engine.compiler import CompilerPool
from trtopt.hardware.spec import DEFAULT_GPU, GpuSpec, find_gpu
from trtopt.judge.compiler import CompilerJudge
from trtopt.judge.memo import AT_ONCE, PriceFile, Prices
from trtopt.judge.model import ModelJudge
from trtopt.judge.protocol import Judge
from trtopt.judge.target import nearest_target
from trtopt.judge.written import WritingJudge
from trtopt.precision.fp16.network_io import IoRequest
from trtopt.support.precision import Precision


@contextmanager
def judge_for(
    backend: Backend,
    gpu: GpuSpec | None,
    precision: Precision | None,
    plugins: tuple[str, ...] = (),
    io: tuple[IoRequest, ...] = (),
    prices: Callable[[Sequence[str]], PriceFile] | None = None,
) -> Iterator[Judge]:
    """The judge of a backend.

    Args:
        backend: The backend.
        gpu: The GPU; None for every GPU from Ampere on, judged on the default one.
        precision: The precision asked for; None for the types the graph has.
        plugins: Libraries the compiler loads.
        io: Types and layouts of the whole network's inputs and outputs.
        prices: The file of the prices that depend on the judge and what it is asked; None to keep none.

    Raises:
        MissingDependencyError: TensorRT for RTX is asked for and not installed.
        UsageError: A plugin library cannot be read.
    """
    chip = gpu or find_gpu(DEFAULT_GPU)

    def kept(judge: Judge) -> Judge:
        """With what other runs were told: by what the judge is asked, after its precision is written."""
        if prices is None:
            return judge
        return Prices(judge, prices((judge.name, repr((gpu, precision, io)))), by_name=bool(io))

    if backend != TENSORRT_RTX:
        yield kept(ModelJudge(chip, precision))
        return
    target = nearest_target(chip)
    choose_backend(TENSORRT_RTX.name, target, None)
    with CompilerPool(AT_ONCE) as compiler:
        judge = CompilerJudge(compiler, (target, chip), plugins, io, tf32=precision == "tf32")
        yield WritingJudge(kept(judge), precision, io)
