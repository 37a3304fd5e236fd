"""Dynamic batching: requests that wait together run together."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from trtopt.errors import ClosedError, QueueFullError


@dataclass(eq=False)
class _Entry:
    """A request that waits: since when (seconds of the loop's clock), and for what."""

    item: Any
    key: Hashable
    since: float
    reply: asyncio.Future[Any]


class Batcher:
    """Makes batches of single requests. Belongs to one event loop; make it there.

    A batch starts when a call is free and either ``max_batch`` requests wait or the first one has waited for
    ``max_delay_s``. While all calls are busy requests gather, so that batches grow with the load.

    Args:
        run: Called with the items of a batch, all of one key; gives as many replies, in their order.
        max_batch: The largest batch.
        max_delay_s: How long a request waits for others while a call is free.
        max_queue: How many may wait; the next one is refused.
        calls: How many batches run at a time.
        on_batch: Called with the size of every batch.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], Awaitable[Sequence[Any]]],
        *,
        max_batch: int,
        max_delay_s: float,
        max_queue: int,
        calls: int,
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._run, self._on_batch = run, on_batch
        self._max_batch, self._max_delay_s, self._max_queue = max_batch, max_delay_s, max_queue
        self._waiting: deque[_Entry] = deque()
        self._some, self._enough = asyncio.Event(), asyncio.Event()
        self._closing = False
        self._workers = [asyncio.create_task(self._work()) for _ in range(calls)]

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether the next request would be refused."""
        return len(self._waiting) >= self._max_queue

    def submit(self, item: Any, key: Hashable = None) -> asyncio.Future[Any]:
        """Accept one request: the future is its reply, and cancelling it takes it out of the queue.

        Args:
            item: What ``run`` gets.
            key: Only items of equal keys share a batch.

        Raises:
            QueueFullError: As many requests as may wait do.
            ClosedError: :meth:`close` was called.
        """
        if self._closing:
            raise ClosedError("The service is stopping", where="the queue", remedy="send the request to another one")
        if self.is_full:
            raise QueueFullError(
                f"{self._max_queue} requests wait already", where="the queue", remedy="send the request again later"
            )
        loop = asyncio.get_running_loop()
        entry = _Entry(item, key, loop.time(), loop.create_future())
        entry.reply.add_done_callback(lambda reply: self._withdraw(entry) if reply.cancelled() else None)
        self._waiting.append(entry)
        self._some.set()
        if len(self._waiting) >= self._max_batch:
            self._enough.set()
        return entry.reply

    def _withdraw(self, entry: _Entry) -> None:
        with contextlib.suppress(ValueError):  # it runs already
            self._waiting.remove(entry)

    async def close(self) -> None:
        """Refuse new requests, and answer those that wait."""
        self._closing = True
        self._some.set()
        self._enough.set()
        await asyncio.gather(*self._workers)

    async def _work(self) -> None:
        """Run batches, one after the other. The next one starts in the turn of the loop in which the last one ended: a
        loop that is busy with refusing takes long turns, and the model would wait for each."""
        while await self._any():
            await self._gather()
            batch = self._take()
            if batch:  # else all were cancelled, or another worker was faster
                await self._answer(batch)

    async def _any(self) -> bool:
        """Wait for a request; False when there will be none."""
        while not self._waiting:
            if self._closing:
                return False
            self._some.clear()
            await self._some.wait()
        return True

    async def _gather(self) -> None:
        """Wait for more, as long as the first request may."""
        left = self._waiting[0].since + self._max_delay_s - asyncio.get_running_loop().time()
        if left > 0 and len(self._waiting) < self._max_batch and not self._closing:
            self._enough.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._enough.wait(), left)

    def _take(self) -> list[_Entry]:
        """The first request, and those after it that may share its batch."""
        batch: list[_Entry] = []
        others: list[_Entry] = []
        while self._waiting and len(batch) < self._max_batch:
            entry = self._waiting.popleft()
            (batch if not batch or entry.key == batch[0].key else others).append(entry)
        self._waiting.extendleft(reversed(others))
        return batch

    async def _answer(self, batch: list[_Entry]) -> None:
        self._on_batch(len(batch))
        try:
            replies = await self._run([entry.item for entry in batch])
            pairs = list(zip(batch, replies, strict=True))
        except Exception as error:  # noqa: BLE001  whatever it is, those who wait for the reply get it
            if len(batch) == 1:
                _settle(batch[0], error)
                return
            for entry in batch:  # one request's failure is not that of the others
                await self._answer([entry])
            return
        for entry, reply in pairs:
            _settle(entry, reply)


def _settle(entry: _Entry, reply: Any) -> None:
    if entry.reply.done():  # its client has gone
        return
    if isinstance(reply, Exception):
        entry.reply.set_exception(reply)
    else:
        entry.reply.set_result(reply)
