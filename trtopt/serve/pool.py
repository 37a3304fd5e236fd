"""Who may run: a pool of execution contexts, and a queue of bounded length before it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from trtopt.errors import ClosedError, QueueFullError

OVERTAKEN_S = 5e-3
"""How long a call in the queue may be overtaken by one that comes while a context is free: CPython's switch interval,
for which threads wait for each other anyway. A context that is handed on is idle until its thread has woken, which
takes longer than a small network."""


@dataclass(eq=False)
class Place:
    """A place in the queue.

    Attributes:
        wake: Called by the thread that gave ``context`` or ``error``, or that left a context free.
        until: Up to when it may be overtaken, by the monotonic clock: then its thread is woken to take a context by
            itself. From then on it is given one.
        is_woken: Whether its thread was woken to take one.
        context: The context that came.
        error: What came instead.
    """

    wake: Callable[[], object]
    until: float = 0.0
    is_woken: bool = False
    context: int | None = None
    error: Exception | None = None


class Turn:
    """What a call of :meth:`Pool.acquire` has, for :meth:`Pool.end` to give back.

    Attributes:
        context: The context that it holds.
        place: Its place in the queue.
        next: Who is to be woken.
    """

    context: int | None = None
    place: Place | None = None
    next: tuple[Place, ...] = ()


class Pool:
    """Execution contexts, by number, each of which one call holds at a time. Thread-safe.

    First come, first served, but for calls that come while a context is free and the first in the queue has waited for
    less than :data:`OVERTAKEN_S`.
    """

    def __init__(self, contexts: int, queue: int) -> None:
        self.contexts = contexts
        self._queue = queue
        self._free = list(range(contexts))
        self._waiting: deque[Place] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False

    def request(self, place: Place) -> int | None:
        """A context, which goes back with :meth:`release`; None where ``place`` is in the queue, until it is woken.

        Raises:
            QueueFullError: As many calls as may wait do.
            ClosedError: The pool is closed.
        """
        with self._lock:
            if self._has_context():
                return self._free.pop()
            self._waiting.append(place)
            return None

    def acquire(self, turn: Turn) -> int:
        """A context; waits for one. Whatever comes of it, :meth:`end` has to follow. Raises as :meth:`request`.

        In the main thread a signal handler may raise in here. CPython calls handlers after calls and jumps backwards:
        what is taken in one statement and noted in the next, with no call between, is not lost.
        """
        with self._lock:
            if self._has_context():
                context = turn.context = self._free[-1]
                del self._free[-1]
                return context
            came = threading.Lock()
            came.acquire()
            place = turn.place = Place(came.release, monotonic() + OVERTAKEN_S)
            self._waiting.append(place)
        while place.context is None and place.error is None:
            came.acquire()
            with self._lock:
                place.is_woken = False
                if place.context is None and place.error is None and self._free:
                    place.context = self._free[-1]
                    del self._free[-1]
                    del self._waiting[0]
                    self._offer(turn)
        if turn.next:
            self._wake(turn)
        if place.context is None:
            raise place.error or closed()
        turn.context = place.context
        turn.place = None
        return place.context

    def _has_context(self) -> bool:
        """Whether a context may be taken, or else there is a place in the queue; raises as :meth:`request`."""
        if self._closed:
            raise closed()
        if self._free and (not self._waiting or monotonic() < self._waiting[0].until):
            return True
        if len(self._waiting) >= self._queue:
            raise QueueFullError(
                f"{self.contexts} calls run and {self._queue} wait: the queue is full",
                where="queue",
                remedy="try again later, send fewer calls at once, or load with more contexts or a longer queue",
            )
        return False

    def _offer(self, turn: Turn) -> None:
        """Give free contexts to those that wait longest, or have the first of them take one; ``turn`` wakes them."""
        while self._free and self._waiting:
            first = self._waiting[0]
            if monotonic() < first.until:
                if not first.is_woken:
                    first.is_woken = True
                    turn.next = (*turn.next, first)
                return
            woken = () if first.is_woken else (first,)
            first.context = self._free[-1]
            del self._free[-1]
            del self._waiting[0]
            turn.next = (*turn.next, *woken)

    @staticmethod
    def _wake(turn: Turn) -> None:
        """Wake who is to be woken; without the lock, which they may take."""
        while turn.next:
            first = turn.next[0]
            turn.next = turn.next[1:]
            first.wake()

    def end(self, turn: Turn) -> None:
        """Give back what a turn has; does nothing the second time."""
        if turn.place is not None:
            self._leave(turn.place, turn)
            turn.context = turn.place.context
            turn.place = None
        if turn.context is not None:
            with self._lock:
                context = turn.context
                turn.context = None
                self._free.append(context)
                if self._waiting:
                    self._offer(turn)
                if self._closed:
                    self._changed.notify_all()
        if turn.next:
            self._wake(turn)

    def release(self, context: int) -> None:
        """Give a context back."""
        turn = Turn()
        turn.context = context
        self.end(turn)

    def leave(self, place: Place) -> None:
        """Leave the queue, where neither a context nor an error came before."""
        turn = Turn()
        self._leave(place, turn)
        self._wake(turn)

    def _leave(self, place: Place, turn: Turn) -> None:
        with self._lock:
            with contextlib.suppress(ValueError):
                self._waiting.remove(place)
            self._offer(turn)
            if self._closed:
                self._changed.notify_all()

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Give those that wait an error."""
        with self._lock:
            refused = list(self._waiting)
            for place in refused:
                place.error = error()
            self._waiting.clear()
        for place in refused:
            if not place.is_woken:
                place.wake()

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
