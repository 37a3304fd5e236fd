"""A runner that remembers what it gave: the reference of many comparisons on the same samples."""

from __future__ import annotations

import hashlib

import numpy as np

from trtopt.accuracy.compare import Runner
from trtopt.support.ort_session import Feeds

_MOST_BYTES = 1 << 29
"""Of outputs that are held; what is beyond is computed again."""


class Remembered:
    """Runs each sample once.

    Args:
        runner: Who computes.

    Attributes:
        output_names: As of ``runner``.
        rows: Entries along the first axis of all different samples so far.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.output_names = runner.output_names
        self.rows = 0
        self._known: dict[bytes, list[np.ndarray]] = {}
        self._seen: set[bytes] = set()
        self._held = 0

    def run(self, feeds: Feeds) -> list[np.ndarray]:
        """Outputs in the order of ``output_names``; copies, which the caller may change."""
        key = _digest(feeds)
        known = self._known.get(key)
        if known is not None:
            return [array.copy() for array in known]
        outputs = self._runner.run(feeds)
        if key not in self._seen:
            self._seen.add(key)
            self.rows += max((array.shape[0] for array in feeds.values() if np.ndim(array)), default=1)
        size = sum(array.nbytes for array in outputs)
        if self._held + size <= _MOST_BYTES:
            self._known[key], self._held = [array.copy() for array in outputs], self._held + size
        return outputs


def _digest(feeds: Feeds) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(feeds):
        array = np.ascontiguousarray(feeds[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.digest()
