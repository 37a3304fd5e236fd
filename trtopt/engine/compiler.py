"""A compiler that is asked many times what a graph becomes: one process builds engine after engine, none is kept."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from trtopt.engine import worker
from trtopt.engine.build import check_options, worker_request
from trtopt.engine.layers import parse_layers_log, resolve_nodes
from trtopt.engine.process import START, Stall, crash, refusal
from trtopt.engine.request import BuildRequest
from trtopt.report.schema.layers import LayerInfo
from trtopt.support.files import TEMPORARY
from trtopt.support.version import IMPORT_ROOT

_START = START + "from trtopt.engine.worker import serve; serve()"


class Compiler:
    """TensorRT for RTX in a process of its own, started at the first request and again after a failed one.

    Use it as a context manager: the process ends with it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._stderr: IO[bytes] | None = None

    def layers(self, request: BuildRequest) -> tuple[LayerInfo, ...]:
        """The layers of the engine that ``request`` would give.

        Args:
            request: A model of static shapes, or one profile; only the first profile's layers are meant to be read.

        Raises:
            EngineBuildError: The parser or the builder refused the model, or the process crashed.
            MissingDependencyError: TensorRT for RTX is not installed.
        """
        settings = check_options(request.builder, request.plugins, request.backend)
        with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY}look-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            content = worker_request(request, settings, keep_engine=False)
            (folder / worker.REQUEST).write_text(json.dumps(content), encoding="utf-8")
            self._build_in(folder)
            result = json.loads((folder / worker.RESULT).read_text(encoding="utf-8"))
            if not result["ok"]:
                self.close()
                messages = tuple((severity, text) for severity, text in result["messages"])
                raise refusal(result["stage"], result["details"], messages, request.name or str(request.onnx))
            found = parse_layers_log((folder / worker.LAYERS).read_bytes().decode())
            return resolve_nodes(found, request.nodes).layers

    def _build_in(self, folder: Path) -> None:
        process = self._process or self._start()
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the worker has no pipes")
        with suppress(BrokenPipeError):  # it has died; what it said is read below
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
        with Stall(process) as stall:
            for line in process.stdout:
                stall.progress()
                if json.loads(line)["kind"] == "done":
                    return
        code, said = process.wait(), self._said()
        self.close()
        stall.check()
        raise crash(code, said)

    def _start(self) -> subprocess.Popen[str]:
        root = IMPORT_ROOT
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            encoding="utf-8",
        )
        return self._process

    def _said(self) -> str:
        if self._stderr is None:
            return ""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def close(self) -> None:
        """End the process; the next request starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # a request that it did not live to read
                        pipe.close()
            self._process = None
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CompilerPool:
    """Several compilers that threads share; one is started when all others are busy.

    Args:
        size: How many.
    """

    def __init__(self, size: int) -> None:
        self._all = [Compiler() for _ in range(size)]
        self._idle: queue.LifoQueue[Compiler] = queue.LifoQueue()
        for compiler in self._all:
            self._idle.put(compiler)

    def layers(self, request: BuildRequest) -> tuple[LayerInfo, ...]:
        """As :meth:`Compiler.layers`."""
        compiler = self._idle.get()
        try:
            return compiler.layers(request)
        finally:
            self._idle.put(compiler)

    def __enter__(self) -> CompilerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for compiler in self._all:
            compiler.close()
