"""Measured sensitivities kept in a file, found again by the hash of all they depend on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import msgspec

from trtopt.accuracy.sensitivity import Errors
from trtopt.cache.checksummed import read_sealed, write_sealed
from trtopt.cache.folder import FORMATS, SENSITIVITY, cache_folder, mark_used, warn_not_kept
from trtopt.errors import UsageError
from trtopt.events import Event, OnEvent
from trtopt.report.schema.sensitivity import GrowthStep, RegionError
from trtopt.support.json_text import check_text

_MAGIC = FORMATS[SENSITIVITY]
_VERSION = 1
"""Raised when the same inputs would give other figures."""
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
        key: What the figures depend on: the model, the 8-bit nodes with their ranges, the samples.
        folder: Where the file lies, named by the hash; made when missing. None for ``~/.cache/trtopt``.
        on_event: Told why a file was not used, or not written.
    """

    def __init__(self, key: str, *, folder: Path | None, on_event: OnEvent) -> None:
        self._identity = hashlib.sha256(f"{_MAGIC} {_VERSION} {key}".encode()).hexdigest()
        self._on_event = on_event
        self._folder = cache_folder(folder)
        self.path = self._folder / SENSITIVITY / f"{self._identity}.json"

    def load(self) -> tuple[Errors, tuple[GrowthStep, ...]] | None:
        """What was stored, or None; says why if the file is there and damaged."""
        try:
            identity, body = read_sealed(self.path, _MAGIC, _MAX_BYTES)
            if identity != self._identity:
                raise ValueError("it is that of another model")
            text = bytes(body)
            found = json.loads(text)  # which may hold infinities
            check_text(text, found)
            kept = msgspec.convert(found, _Kept)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError, msgspec.ValidationError) as error:
            self._warn(f"it cannot be read ({' '.join(str(error).split())[:120]})", "measuring anew")
            return None
        mark_used(self.path)
        return Errors({item.region: item for item in kept.regions}, kept.together, kept.samples), kept.growth

    def store(self, errors: Errors, growth: tuple[GrowthStep, ...]) -> None:
        """Write the figures, whole or not at all; where that fails, they were measured and a warning is enough."""
        value = {
            "samples": errors.samples,
            "regions": [dataclasses.asdict(item) for item in errors.regions.values()],
            "together": dataclasses.asdict(errors.together),
            "growth": [dataclasses.asdict(item) for item in growth],
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(self.path, _MAGIC, self._identity, [json.dumps(value).encode()])
        except (UsageError, OSError) as error:
            warn_not_kept(self._folder, error, self._on_event)

    def _warn(self, why: str, what: str) -> None:
        self._on_event(Event("warning", "sensitivity", text=f"sensitivity cache {self.path}: {why}; {what}"))
