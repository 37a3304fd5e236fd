"""Who may run: a pool of execution contexts, and a queue of bounded length before it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from trtopt.errors import ClosedError, QueueFullError


@dataclass
class Turn:
    """What a call of :meth:`Pool.acquire` has, a context or a place in the queue, for :meth:`Pool.end` to give back."""

    context: int | None = None
    place: Future[int] | None = None


class Pool:
    """Execution contexts, by number, each of which one call holds at a time. Thread-safe; first come, first served."""

    def __init__(self, contexts: int, queue: int) -> None:
        self.contexts = contexts
        self._queue = queue
        self._free = list(range(contexts))
        self._waiting: deque[Future[int]] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False

    def request(self) -> int | Future[int]:
        """A context, which goes back with :meth:`release`, or a future of one, which may :meth:`leave` until it comes.

        The future's callbacks run in the thread that gives the context back.

        Raises:
            QueueFullError: As many calls as may wait do.
            ClosedError: The pool is closed.
        """
        return self._request(Turn())

    def acquire(self, turn: Turn) -> int:
        """A context; waits for one. Whatever comes of it, :meth:`end` has to follow. Raises as :meth:`request`.

        In the main thread a signal handler may raise in here. CPython calls handlers after calls and jumps backwards:
        what is taken in one statement and noted in the next, with no call between, is not lost.
        """
        found = self._request(turn)
        if isinstance(found, int):
            return found
        context = turn.context = found.result()
        turn.place = None
        return context

    def _request(self, turn: Turn) -> int | Future[int]:
        with self._lock:
            if self._closed:
                raise closed()
            if self._free:
                context = turn.context = self._free[-1]
                del self._free[-1]
                return context
            if len(self._waiting) >= self._queue:
                raise QueueFullError(
                    f"{self.contexts} calls run and {self._queue} wait: the queue is full",
                    where="queue",
                    remedy="try again later, send fewer calls at once, or load with more contexts or a longer queue",
                )
            place: Future[int] = Future()
            turn.place = place
            self._waiting.append(place)
            return place

    def end(self, turn: Turn) -> None:
        """Give back what a turn has; does nothing the second time."""
        if turn.context is None and turn.place is None:
            return
        place = turn.place
        if place is not None:
            if not self.leave(place) and place.exception() is None:
                turn.context = place.result()
            turn.place = None
        with self._lock:
            context = turn.context
            if context is None:
                return
            first = self._first()
            turn.context = None
            if first is None:
                self._free.append(context)
                if self._closed:
                    self._changed.notify_all()
        if first is not None:  # without the lock: its callbacks may call the pool
            first.set_result(context)

    def release(self, context: int) -> None:
        """Give a context back: to the one who waits longest, if there is one."""
        self.end(Turn(context))

    def _first(self) -> Future[int] | None:
        """Who waits longest, taken out of the queue."""
        while self._waiting:
            first = self._waiting.popleft()
            if first.set_running_or_notify_cancel():
                return first
        return None

    def leave(self, future: Future[int]) -> bool:
        """Leave the queue; whether that came before the context did."""
        with self._lock:
            with contextlib.suppress(ValueError):
                self._waiting.remove(future)
            if self._closed:
                self._changed.notify_all()
        return future.cancel()

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Give those that wait an error."""
        with self._lock:
            refused = [future for future in self._waiting if future.set_running_or_notify_cancel()]
            self._waiting.clear()
        for future in refused:
            future.set_exception(error())

    def close(self, *, drain: bool) -> None:
        """Refuse new calls, wait for those that run, and with ``drain`` for those that wait, which else are refused."""
        with self._lock:
            self._closed = True
        if not drain:
            self.refuse(closed)
        with self._lock:
            self._changed.wait_for(lambda: len(self._free) == self.contexts and not self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether no call runs or waits."""
        with self._lock:
            return len(self._free) == self.contexts and not self._waiting

    @property
    def state(self) -> tuple[int, int]:
        """How many contexts are busy, and how many calls wait."""
        with self._lock:
            return self.contexts - len(self._free), len(self._waiting)


def closed() -> ClosedError:
    """What a call to a closed engine gets."""
    return ClosedError("The engine is closed", where="engine.close()", remedy="load it again with trtopt.Engine.load")
