"""Measured sensitivities kept in a file, found again by the hash of all they depend on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtopt.accuracy.sensitivity import Errors
from trtopt.errors import UsageError
from trtopt.events import Event, OnEvent
from trtopt.files import atomic_write
from trtopt.report.sensitivity import GrowthStep, OutputError, RegionError

_MAGIC = "trtopt.sensitivity-cache/1"
_VERSION = 1
"""Raised when the same inputs would give other figures."""
_MAX_BYTES = 256 << 20


class SensitivityCache:
    """The cache file of one model, one plan and one set of samples.

    Args:
        key: What the figures depend on: the model, the 8-bit nodes with their ranges, the samples.
        folder: Where the file lies, named by the hash; made when missing. None for ``~/.cache/trtopt``.
        on_event: Told why a file was not used, or not written.
    """

    def __init__(self, key: str, *, folder: Path | None, on_event: OnEvent) -> None:
        self._identity = hashlib.sha256(f"{_MAGIC} {_VERSION} {key}".encode()).hexdigest()
        self._must_write = folder is not None
        self._on_event = on_event
        self.path = (folder or Path.home() / ".cache" / "trtopt") / "sensitivity" / f"{self._identity}.json"

    def load(self) -> tuple[Errors, tuple[GrowthStep, ...]] | None:
        """What was stored, or None; says why if the file is there and damaged."""
        try:
            if self.path.stat().st_size > _MAX_BYTES:
                raise ValueError("the file is too large")
            head, _, body = self.path.read_bytes().partition(b"\n")
            header = json.loads(head)
            if header != self._header(body):
                raise ValueError("its content is not what was written")
            found = json.loads(body)
            regions = [_region(item) for item in found["regions"]]
            errors = Errors({item.region: item for item in regions}, _region(found["together"]), int(found["samples"]))
            return errors, tuple(GrowthStep(**item) for item in found["growth"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._warn(f"it cannot be read ({' '.join(str(error).split())[:120]})", "measuring anew")
            return None

    def store(self, errors: Errors, growth: tuple[GrowthStep, ...]) -> None:
        """Write the figures, whole or not at all. The default folder being read-only is a warning only.

        Raises:
            UsageError: The folder asked for cannot be written.
        """
        value = {
            "samples": errors.samples,
            "regions": [dataclasses.asdict(item) for item in errors.regions.values()],
            "together": dataclasses.asdict(errors.together),
            "growth": [dataclasses.asdict(item) for item in growth],
        }
        body = json.dumps(value).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path, json.dumps(self._header(body)).encode() + b"\n" + body)
        except (UsageError, OSError) as error:
            if self._must_write:
                what = error.what if isinstance(error, UsageError) else str(error.strerror)
                raise UsageError(
                    f"The sensitivity cache cannot be written: {what}",
                    where=str(self.path),
                    remedy="give --cache-dir DIR that can be written",
                ) from error
            self._warn(str(error), "the figures are not kept")

    def _header(self, body: bytes) -> dict[str, str]:
        return {"format": _MAGIC, "identity": self._identity, "sha256": hashlib.sha256(body).hexdigest()}

    def _warn(self, why: str, what: str) -> None:
        self._on_event(Event("warning", "sensitivity", text=f"sensitivity cache {self.path}: {why}; {what}"))


def _region(value: Mapping[str, Any]) -> RegionError:
    outputs = {name: OutputError(**item) for name, item in value["outputs"].items()}
    return RegionError(**{**value, "nodes": tuple(value["nodes"]), "outputs": outputs})
