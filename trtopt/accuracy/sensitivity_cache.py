"""Measured sensitivities kept in a file, found again by all they depend on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from trtopt.accuracy.sensitivity import Errors
from trtopt.cache.entries import Blobs
from trtopt.cache.folder import SENSITIVITY
from trtopt.events import OnEvent
from trtopt.report.schema.sensitivity import GrowthStep, RegionError
from trtopt.support.json_text import converted

_MAX_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What a file holds."""

    samples: int
    regions: tuple[RegionError, ...]
    together: RegionError
    growth: tuple[GrowthStep, ...]


class SensitivityCache:
    """The cache file of one model, one plan and one set of samples.

    Args:
        key: A hash of what the figures depend on: the model, the 8-bit nodes with their ranges, the samples, the code.
        folder: Where the file lies, named by the key; made when missing. None for ``~/.cache/trtopt``.
        on_event: Told why a file was not used, or not written.
    """

    def __init__(self, key: str, *, folder: str | Path | None, on_event: OnEvent) -> None:
        words = ("sensitivity", "sensitivity cache", "measuring anew")
        self._key = key
        self._blobs = Blobs(SENSITIVITY, folder, on_event, words=words, max_bytes=_MAX_BYTES)
        self.path = self._blobs.path(key)

    def load(self) -> tuple[Errors, tuple[GrowthStep, ...]] | None:
        """What was stored, or None; says why if the file is there and damaged."""
        kept = self._blobs.load(self._key, lambda content: converted(bytes(content), _Kept))
        if kept is None:
            return None
        return Errors({item.region: item for item in kept.regions}, kept.together, kept.samples), kept.growth

    def store(self, errors: Errors, growth: tuple[GrowthStep, ...]) -> None:
        """Write the figures, whole or not at all; where that fails, they were measured and a warning is enough."""
        kept = _Kept(errors.samples, tuple(errors.regions.values()), errors.together, growth)
        self._blobs.store(self._key, [json.dumps(dataclasses.asdict(kept)).encode()])
