"""How the process of a compiler starts, and when it is ended because nothing comes of it."""

from __future__ import annotations

import subprocess
import threading
from types import TracebackType

from trtopt.errors import EngineBuildError

START = (
    "import os, sys; os.environ.pop('NVIDIA_TF32_OVERRIDE', None); "
    "sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; "
)
"""What it runs first; its first argument is the folder that holds trtopt.

``''`` in ``sys.path`` is the folder that the user stands in: a ``json.py`` there is not Python's.

``NVIDIA_TF32_OVERRIDE`` turns TF32 on or off in every build, behind the options' back: ``--tf32`` is the option, and
the key of the cache knows no other. ``CUDA_MODULE_LOADING`` and ``TRT_INTERNAL_OPTIONS`` left the engines of TensorRT
for RTX 1.7.1 as they were, to the byte.
"""

STALL_S = 3600.0
"""Time without a step of progress after which a build is given up. TensorRT times kernels within one step, for minutes
on a large network; TensorRT for RTX, which times nothing, takes seconds for a whole one."""


class Stall:
    """Ends a process that makes no progress. Use it as a context manager around reading from the process.

    Args:
        process: The process.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._timer: threading.Timer | None = None
        self._expired = False

    def progress(self) -> None:
        """Wait anew."""
        self._stop()
        self._timer = threading.Timer(STALL_S, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def check(self) -> None:
        """Raise if the process was ended.

        Raises:
            EngineBuildError: It was.
        """
        if self._expired:
            raise EngineBuildError(
                f"The compiler made no progress for {STALL_S:g} seconds and was stopped",
                where="the compiler's process",
                remedy="lower --builder builder_optimization_level, or make the model smaller",
            )

    def _expire(self) -> None:
        self._expired = True
        self._process.kill()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def __enter__(self) -> Stall:
        self.progress()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
