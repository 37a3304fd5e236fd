"""Work shared among threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

_T = TypeVar("_T")


def in_threads(items: Iterable[_T], work: Callable[[int, _T], None], threads: int, name: str) -> int:
    """Call ``work`` with each item and its number; memory holds the items in work only. Returns how many there were.

    The first exception of an item or of ``work`` is raised, and no further item is taken.
    """
    iterator, lock = iter(enumerate(items)), threading.Lock()
    stop = threading.Event()

    def worker() -> int:
        done = 0
        while not stop.is_set():
            with lock:
                item = next(iterator, None)
            if item is None:
                break
            work(*item)
            done += 1
        return done

    with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:
        futures = [pool.submit(worker) for _ in range(threads)]
        try:
            return sum(future.result() for future in as_completed(futures))
        finally:
            stop.set()
