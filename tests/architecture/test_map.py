"""The pages on the code name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from house import ROOT
from test_layers import ORDER

PAGES = ("architecture", "decisions", "precision")
_PATH = re.compile(r"`((?:[a-z_]+/)+[a-z_]*)((?:\.[a-z_]+)?)`")
_FOLDERS = ("trtopt", "trtopt/precision", "trtopt/report", "trtopt/graph", "trtopt/roofline", "recipes", ".")


@pytest.mark.parametrize("page", PAGES)
def test_every_module_that_a_page_names_is_there(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    missing = [path + suffix for path, suffix in _PATH.findall(text) if not _is_there(path, suffix)]
    assert not missing


def _is_there(path: str, suffix: str) -> bool:
    for folder in (ROOT / name for name in _FOLDERS):
        if path.endswith("/") and (folder / path).is_dir():
            return True
        # Behind a module may stand a name of it: `support/files.atomic_path`.
        if (folder / f"{path}.py").is_file() and _holds(folder / f"{path}.py", suffix):
            return True
        if (folder / f"{path}{suffix}").is_file() or (folder / path).is_dir():
            return True
    return False


def _holds(file: Path, suffix: str) -> bool:
    return suffix in ("", ".py") or suffix[1:] in file.read_text(encoding="utf-8")


def test_the_map_lists_the_rooms_in_their_order() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("## The rooms")[2].partition("## ")[0]
    rows = [re.findall(r"`(?:recipes/)?([a-z_]+)/?`", line.split("|")[1]) for line in table.splitlines() if "|" in line]
    listed = [name for row in rows for name in row if name != "trtopt_recipes"]
    places = [ORDER.index(name) for name in listed]
    assert set(ORDER) - set(listed) == {"__init__", "__main__"}
    assert places == sorted(places)
