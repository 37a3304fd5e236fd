"""The version of trtopt, and the folder that it is imported from."""

from __future__ import annotations

from pathlib import Path

VERSION = "0.1.0"
IMPORT_ROOT = Path(__file__).resolve().parents[2]
"""What a process that is started by trtopt puts on its path to import the same trtopt."""
