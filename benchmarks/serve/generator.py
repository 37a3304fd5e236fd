"""Load for an HTTP service from one core: connections that are reused, replies checked byte for byte.

On plain sockets: a general HTTP client costs more per request than the service, and would be what is measured.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

CONNECTIONS = 256
"""As many as a load balancer would keep: more than the service has requests waiting and running. When all are in use a
request waits in the generator, and its latency still counts from when it was due."""


@dataclass
class Tally:
    """What came back.

    Attributes:
        statuses: Replies by status; ``lost`` are requests whose connection ended without one.
        refused: Connections that nobody accepted: the service has stopped.
        wrong: Replies of status 200 that are not those of the serial run.
        without_retry_after: Replies of status 503 without the header.
        latencies_s: Of replies of status 200, from the moment the request was due.
        late_s: The longest that a request was sent after it was due.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    wrong: int = 0
    without_retry_after: int = 0
    latencies_s: list[float] = field(default_factory=list)
    late_s: float = 0.0

    def percentile_ms(self, share: float) -> float:
        """A percentile of the latencies."""
        ordered = sorted(self.latencies_s)
        return 1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._due = 0.0
        self._kind = 0
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, kind: int, due: float) -> None:
        self._kind, self._due, self._busy = kind, due, True
        cast(asyncio.Transport, self._transport).write(self._load.requests[kind])

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        headers = head.lower()
        length = int(headers.split(b"content-length:")[1].split(b"\r\n")[0])
        if len(body) < length:
            return
        self._buffer, self._busy = b"", False
        self._load.replied(self._kind, self._due, headers, body)
        if b"connection: close" in headers:
            cast(asyncio.Transport, self._transport).close()
        else:
            self._load.idle.append(self)
        self._load.go_on()

    def connection_lost(self, error: Exception | None) -> None:
        self._load.disconnected(while_busy=self._busy)


class Load:
    """Sends requests and counts what comes back.

    Args:
        host: Where the service is.
        port: Its port.
        bodies: JSON bodies that are sent in turn.
    """

    def __init__(self, host: str, port: int, bodies: Sequence[bytes]) -> None:
        self._host, self._port = host, port
        start = f"POST /predict HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: "
        self.requests = [start.encode() + f"{len(body)}\r\n\r\n".encode() + body for body in bodies]
        self.idle: deque[_Connection] = deque()
        self.serial: dict[int, bytes] = {}
        self.tally = Tally()
        self._pending = 0
        self._backlog: deque[tuple[int, float]] = deque()
        self._connections = self._connecting = 0
        self._tasks: set[asyncio.Future[None]] = set()
        self._closed_until = 0.0
        self._sent = 0

    def replied(self, kind: int, due: float, headers: bytes, body: bytes) -> None:
        """Count a reply."""
        status = headers[9:12].decode()
        self._pending -= 1
        self.tally.statuses[status] += 1
        if status == "200":
            self.tally.latencies_s.append(time.perf_counter() - due)
            if self.serial.setdefault(kind, body) != body:
                self.tally.wrong += 1
        elif status == "503" and b"\r\nretry-after: " not in headers:
            self.tally.without_retry_after += 1

    def disconnected(self, *, while_busy: bool) -> None:
        """Count a connection that ended, and the request that had no reply on it yet."""
        self._connections -= 1
        if while_busy:
            self._pending -= 1
            self.tally.statuses["lost"] += 1
        self._dispatch()

    def go_on(self) -> None:
        """A connection is free: in a closed loop, there is a next request."""
        if time.perf_counter() < self._closed_until:
            self._next()
        else:
            self._dispatch()

    async def run_serially(self) -> None:
        """Ask for each body once, alone: the replies that all others have to equal."""
        for kind in range(len(self.requests)):
            self._next(kind)
            await self._settled()

    async def run_closed(self, seconds: float, clients: int) -> float:
        """Keep ``clients`` requests under way; gives the replies of status 200 per second."""
        self.tally = Tally()
        began = time.perf_counter()
        self._closed_until = began + seconds
        for _ in range(clients):
            self._next()
        await asyncio.sleep(seconds)
        rate = self.tally.statuses["200"] / (time.perf_counter() - began)
        await self._settled()
        return rate

    async def run_open(self, seconds: float, rate: float) -> Tally:
        """Send ``rate`` requests per second, whatever comes back."""
        tally = self.tally = Tally()
        began = time.perf_counter()
        for index in range(int(seconds * rate)):
            due = began + index / rate
            now = time.perf_counter()
            if due > now:
                await asyncio.sleep(due - now)
            elif index % 16 == 0:
                await asyncio.sleep(0)
            self._next(due=due)
        await self._settled()
        return tally

    def _next(self, kind: int | None = None, due: float | None = None) -> None:
        kind = self._sent % len(self.requests) if kind is None else kind
        self._sent += 1
        self._pending += 1
        self._backlog.append((kind, time.perf_counter() if due is None else due))
        self._dispatch()

    def _dispatch(self) -> None:
        """Send what waits, as far as there are connections."""
        while self._backlog:
            while self.idle and not self.idle[-1].is_open:
                self.idle.pop()
            if self.idle:
                self._send(self.idle.pop())
                continue
            in_use = self._connections + self._connecting
            if in_use < CONNECTIONS and self._connecting < len(self._backlog):
                self._connecting += 1
                task = asyncio.ensure_future(self._connect())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                continue
            return

    def _send(self, connection: _Connection) -> None:
        kind, due = self._backlog.popleft()
        self.tally.late_s = max(self.tally.late_s, time.perf_counter() - due)
        connection.send(kind, due)

    async def _connect(self) -> None:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(self), self._host, self._port
            )
        except OSError:
            self._connecting -= 1
            if self._backlog:
                self._backlog.popleft()
                self._pending -= 1
                self.tally.refused += 1
            self._dispatch()
            return
        self._connecting -= 1
        self._connections += 1
        self.idle.append(connection)
        self._dispatch()

    async def _settled(self, seconds: float = 120) -> None:
        until = time.perf_counter() + seconds
        while self._pending:
            if time.perf_counter() > until:
                raise RuntimeError(f"no reply to {self._pending} requests within {seconds:.0f} s")
            await asyncio.sleep(0.001)
