"""Tables in the README of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

README = Path(__file__).with_name("README.md")


def replace_table(mark: str, lines: Sequence[str]) -> None:
    """Put lines between ``<!-- mark -->`` and ``<!-- end of mark -->``."""
    before, rest = README.read_text(encoding="utf-8").split(f"<!-- {mark} -->\n")
    after = rest.split(f"<!-- end of {mark} -->")[1]
    table = "\n".join([f"<!-- {mark} -->", *lines, f"<!-- end of {mark} -->"])
    README.write_text(before + table + after, encoding="utf-8")
