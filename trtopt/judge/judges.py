"""The judge of each backend. Neither speaks for the other's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trtopt.engine.backend import TENSORRT_RTX, Backend, choose_backend
from trtopt.engine.compiler import CompilerPool
from trtopt.hardware.spec import DEFAULT_GPU, GpuSpec, find_gpu
from trtopt.judge.compiler import CompilerJudge
from trtopt.judge.memo import AT_ONCE
from trtopt.judge.model import ModelJudge
from trtopt.judge.protocol import Judge
from trtopt.judge.target import nearest_target
from trtopt.precision.fp16.network_io import IoRequest
from trtopt.support.precision import Precision


@contextmanager
def judge_for(
    backend: Backend,
    gpu: GpuSpec | None,
    precision: Precision | None,
    plugins: tuple[str, ...] = (),
    io: tuple[IoRequest, ...] = (),
) -> Iterator[Judge]:
    """The judge of a backend.

    Args:
        backend: The backend.
        gpu: The GPU; None for every GPU from Ampere on, judged on the default one.
        precision: The precision asked for; None for the types the graph has.
        plugins: Libraries the compiler loads.
        io: Types and layouts of the whole network's inputs and outputs.

    Raises:
        MissingDependencyError: TensorRT for RTX is asked for and not installed.
    """
    chip = gpu or find_gpu(DEFAULT_GPU)
    if backend != TENSORRT_RTX:
        yield ModelJudge(chip, precision)
        return
    target = nearest_target(chip)
    choose_backend(TENSORRT_RTX.name, target, None)
    with CompilerPool(AT_ONCE) as compiler:
        yield CompilerJudge(compiler, (target, chip), precision, plugins, io)
