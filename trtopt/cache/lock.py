"""A lock for each key, so that several processes do not do the same at once.

It is the kernel's (``filelock``, flock), so it ends with the process that holds it, however that ends. Nothing but
saved work rests on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from trtopt.cache.folder import LOCKS, why


@contextmanager
def locked(folder: Path, key: str, longest_wait_s: float, on_wait: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Hold the lock of a key; where that cannot be had, go on without it.

    Args:
        folder: The cache folder.
        key: 64 hexadecimal digits.
        longest_wait_s: For another process that holds it.
        on_wait: Called before waiting.

    Yields:
        Why the lock is not held; empty where it is.
    """
    # A soft lock stays when its holder is killed: worse than none.
    lock = filelock.FileLock(folder / LOCKS / f"{key}.lock", fallback_to_soft=False)
    refused = ""
    try:
        (folder / LOCKS).mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            on_wait()
            lock.acquire(timeout=longest_wait_s)
    except filelock.Timeout:
        refused = f"another process held it longer than {longest_wait_s:g} s"
    except (OSError, NotImplementedError) as error:
        refused = why(error)
    try:
        yield refused
    finally:
        lock.release()
