"""A model behind HTTP: dynamic batching, health, metrics, and a stop that loses nothing.

    python examples/serve/app.py digits digits.onnx
    python examples/serve/app.py text model.onnx --tokenizer tokenizer.json
    python examples/serve/app.py image resnet.rtx.engine --fallback resnet.int8.onnx --preprocess imagenet

The model is an engine of ``trtopt build``, or an ONNX model, which ONNX Runtime runs on the CPU. Where an engine's GPU
is not, ``--fallback`` names the model that ONNX Runtime runs in its place.
"""

# No `from __future__ import annotations`: FastAPI reads the types of the handlers, which are known at run time only.
import argparse
import asyncio
import math
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from batching import Batcher
from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from tasks import Digits, Images, RequestError, Row, Task, Texts, stacked

import trtopt
from trtopt.errors import ClosedError, QueueFullError, TrtoptError, UsageError

RETRY_AFTER_S = 1
_STOPPING_S = 30
"""How long requests that were accepted may take after the service stopped to accept."""
_KEEP_ALIVE_S = 120
"""Longer than those who send requests keep an idle connection: they have to close first, or a request may be on its way
meanwhile, and is lost unread."""


@dataclass(frozen=True)
class Settings:
    """How a model is served.

    Attributes:
        model: The engine or ONNX model.
        fallback: The ONNX model that runs where the engine cannot.
        max_batch: The largest batch.
        max_delay_ms: How long a request waits for others while nothing runs.
        max_queue: How many requests may wait; the next one gets 503.
        contexts: How many batches run at a time.
        drain_s: After SIGTERM, how long it goes on accepting while it says that it is not ready, so that whoever
            sends requests learns of it.
    """

    model: Path
    fallback: Path | None = None
    max_batch: int = 16
    max_delay_ms: float = 2.0
    max_queue: int = 64
    contexts: int = 2
    drain_s: float = 2.0

    def __post_init__(self) -> None:
        for name, least in {"max_batch": 1, "max_delay_ms": 0, "max_queue": 1, "contexts": 1, "drain_s": 0}.items():
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise UsageError(
                    f"{value} is too {'large' if value == math.inf else 'small'}",
                    where=f"--{name.replace('_', '-')}",
                    remedy=f"give at least {least}",
                )


class Service:
    """The model, loaded and warmed up at once, and its queue, which lives as long as the event loop serves.

    Args:
        task: What it does.
        settings: How.

    Raises:
        TrtoptError: The model cannot be loaded, or is not one for the task.
    """

    def __init__(self, task: Task, settings: Settings) -> None:
        self.task, self.settings = task, settings
        self.draining = False
        self.batcher: Batcher | None = None
        self.registry = CollectorRegistry()
        self.requests = Counter("app_requests", "Requests by what became of them", ["result"], registry=self.registry)
        sizes = [2**power for power in range(settings.max_batch.bit_length() + 1)]
        self.sizes = Histogram("app_batch_size", "Requests in a batch", buckets=sizes, registry=self.registry)
        Gauge("app_queue_length", "Requests that wait", registry=self.registry).set_function(
            lambda: self.batcher.waiting if self.batcher else 0
        )
        self.engine = trtopt.Engine.load(settings.model, fallback=settings.fallback, contexts=settings.contexts)
        self._busy = error_response(
            503, f"{settings.max_queue} requests wait already", "the queue", "send the request again later"
        )
        self._busy.headers["Retry-After"] = str(RETRY_AFTER_S)
        task.fit(self.engine.inputs)
        row = task.prepare(task.example)
        for size in (1, settings.max_batch):
            rows = [row] * size
            self._split(rows, self.engine.run(self._stacked(rows)))

    @property
    def is_ready(self) -> bool:
        """Whether to send requests here."""
        return self.batcher is not None and not self.draining

    @asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """Make batches; at the end answer what waits, and free the model."""
        settings = self.settings
        self.batcher = Batcher(
            self._run,
            max_batch=settings.max_batch,
            max_delay_s=settings.max_delay_ms / 1000,
            max_queue=settings.max_queue,
            calls=settings.contexts,
            on_batch=self.sizes.observe,
        )
        print(f"ready: {settings.model.name} in {self.engine.runtime}", flush=True)
        yield
        batcher, self.batcher = self.batcher, None
        await batcher.close()
        await self.engine.aclose()
        print(f"stopped: {self._count('accepted')} requests accepted, {self._count('answered')} answered", flush=True)

    def busy(self) -> JSONResponse:
        """What a request gets that there is no room for. Made once: under load this is what most requests get."""
        self.requests.labels("rejected").inc()
        return self._busy

    def _count(self, result: str) -> int:
        return int(self.registry.get_sample_value("app_requests_total", {"result": result}) or 0)

    async def predict(self, body: Any) -> Any:
        """The reply to one request."""
        row = self.task.prepare(body)
        if self.batcher is None:
            raise ClosedError("The service is not ready", where="the service", remedy="send the request again later")
        reply = self.batcher.submit(row, tuple(array.shape for array in row.values()))
        self.requests.labels("accepted").inc()
        outputs = await reply
        self.requests.labels("answered").inc()
        return self.task.answer(row, outputs)

    async def _run(self, rows: list[Row]) -> Sequence[Row]:
        return self._split(rows, await self.engine.run_async(self._stacked(rows)))

    def _stacked(self, rows: list[Row]) -> Row:
        names = [spec.name for spec in self.engine.inputs]
        unknown = [name for name in names if name not in rows[0]]
        if unknown:
            raise UsageError(
                f"The model has the input {unknown[0]}, and the task gives {', '.join(rows[0])}",
                where=str(self.settings.model),
                remedy="give the model of the task, or another task",
            )
        return stacked(rows, names)

    def _split(self, rows: list[Row], found: Row) -> Sequence[Row]:
        for name, array in found.items():
            if array.shape[:1] != (len(rows),):
                raise UsageError(
                    f"For {len(rows)} requests the output {name} has the shape {list(array.shape)}",
                    where=str(self.settings.model),
                    remedy="give a model whose outputs begin with the axis of the batch",
                )
        return [{name: array[index] for name, array in found.items()} for index in range(len(rows))]


Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Admission:
    """Refuses what would only cost time, before its body is read; says `Connection: close` while the service drains."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and self._service.draining:
            send = _closing(send)
        is_request = scope["type"] == "http" and scope["method"] == "POST"
        refusal = self._refusal(dict(scope["headers"])) if is_request else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, headers: dict[bytes, bytes]) -> JSONResponse | None:
        length, limit = headers.get(b"content-length", b""), self._service.task.largest_request_bytes
        if not length.isdigit():
            return error_response(411, "The request does not say how long it is", "Content-Length", "send the header")
        if int(length[:20]) > limit:
            response = error_response(413, f"The request has more than {limit} bytes", "the body", "send a shorter one")
            response.headers["connection"] = "close"
            return response
        if self._service.batcher is None or self._service.batcher.is_full:
            return self._service.busy()
        return None


def _closing(send: Send) -> Send:
    async def closing(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        await send(message)

    return closing


def error_response(status: int, what: str, where: str, remedy: str) -> JSONResponse:
    """An error as trtopt says it."""
    return JSONResponse({"error": {"what": what, "where": where, "remedy": remedy}}, status)


def create_app(service: Service) -> FastAPI:
    """The application of a service."""
    app = FastAPI(title="trtopt", lifespan=service.running)
    task = service.task

    @app.post("/predict", response_model=task.reply)
    async def predict(body: task.request) -> Any:  # type: ignore[name-defined]
        return await service.predict(body)

    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/health/ready")
    async def ready() -> JSONResponse:
        if service.is_ready:
            return JSONResponse({"status": "ready"})
        return error_response(503, "The service is stopping or not yet loaded", "the service", "ask another one")

    @app.get("/metrics")
    async def metrics() -> Response:
        own = generate_latest(service.registry).decode()
        return Response(own + service.engine.metrics(), media_type="text/plain; version=0.0.4")

    @app.exception_handler(RequestValidationError)
    async def wrong_request(request: Any, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        service.requests.labels("invalid").inc()
        return error_response(422, first["msg"], where, "see /docs for what a request holds")

    @app.exception_handler(HTTPException)
    async def refused(request: Any, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:  # FastAPI cannot read the body at all
            service.requests.labels("invalid").inc()
        response = error_response(error.status_code, error.detail, request.url.path, "see /docs for what there is")
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestError)
    async def unfit(request: Any, error: RequestError) -> JSONResponse:
        service.requests.labels("invalid").inc()
        return error_response(422, error.what, error.where, error.remedy)

    @app.exception_handler(TrtoptError)
    async def failed(request: Any, error: TrtoptError) -> JSONResponse:
        if isinstance(error, (QueueFullError, ClosedError)):
            return service.busy()
        service.requests.labels("failed").inc()
        return error_response(500, error.what, error.where, error.remedy)

    return app


class Server(uvicorn.Server):
    """On SIGTERM it says that it is not ready, goes on for a while, stops accepting, and answers what it accepted."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def serve(self, sockets: Any = None) -> None:
        """Serve until a signal."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first SIGTERM drains; another signal does not wait."""
        if sig != signal.SIGTERM or self._service.draining:
            super().handle_exit(sig, frame)
            return
        self._service.draining = True
        stop = super().handle_exit
        self._loop.call_soon_threadsafe(self._loop.call_later, self._service.settings.drain_s, stop, sig, frame)


def bound(host: str, port: int) -> socket.socket:
    """A socket at the address. Nobody can connect before the service listens there, which it does when it is ready.

    Raises:
        UsageError: The address is not to be had.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((address[0], port, *address[2:]))  # getaddrinfo takes a port above 65535 for another one
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"The service cannot have this address: {error}", where=f"{host}:{port}", remedy="give another --port"
        ) from error
    return found


def main() -> None:
    """Run the service."""
    # Until uvicorn takes signals, a process that is the first of a container would not end: it has no default action.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    default = Settings(Path())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("digits", "text", "image"))
    parser.add_argument("model", type=Path, help="an engine or an ONNX model")
    parser.add_argument("--fallback", type=Path, help="the ONNX model that runs where the engine cannot")
    parser.add_argument("--preprocess", default="imagenet", help="for image: what trtopt build --preprocess was given")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of the model, for text")
    parser.add_argument("--max-batch", type=int, default=default.max_batch)
    parser.add_argument("--max-delay-ms", type=float, default=default.max_delay_ms)
    parser.add_argument("--max-queue", type=int, default=default.max_queue)
    parser.add_argument("--contexts", type=int, default=default.contexts)
    parser.add_argument("--drain-s", type=float, default=default.drain_s)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    if args.task == "text" and args.tokenizer is None:
        parser.error("text needs --tokenizer")
    options = {name: value for name, value in vars(args).items() if name in Settings.__dataclass_fields__}
    try:
        place = bound(args.host, args.port)
        tasks = {"digits": Digits, "text": lambda: Texts(args.tokenizer), "image": lambda: Images(args.preprocess)}
        service = Service(tasks[args.task](), Settings(**options))
    except TrtoptError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    config = uvicorn.Config(
        Admission(create_app(service), service),
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_STOPPING_S,
    )
    try:
        Server(config, service).run(sockets=[place])
    except KeyboardInterrupt:  # uvicorn stopped in order, and passes the signal on
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
