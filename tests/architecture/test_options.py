"""One option of a build, followed from the command line to where it acts."""

from __future__ import annotations

import ast
import functools

import pytest
from house import MODULES, Module, module_graph, part_of, room_graph

OTHER_COMMANDS = frozenset({"analysis", "gates", "fleet"})
"""Rooms of commands whose options have the same names: ``sensitivity``, ``check``, ``sweep``."""

MOST_ROOMS = 5


_NAMES = {ast.Attribute: "attr", ast.Name: "id", ast.arg: "arg", ast.keyword: "arg", ast.AnnAssign: "target"}


@functools.cache
def names_in(module: Module) -> frozenset[str]:
    """What code (no text) reads, passes or takes."""
    return frozenset(
        name
        for node in ast.walk(module.tree)
        if isinstance(name := getattr(node, _NAMES.get(type(node), "_"), None), str)
    )


FRONT = frozenset({"cli", "api"})
"""Every option passes them, as a field of the configuration."""


@pytest.mark.parametrize("option", ["max_accuracy_drop", "calib", "eval"])
def test_an_option_enters_few_rooms_and_goes_down(option: str) -> None:
    naming = {part_of(module.name) for module in MODULES if option in names_in(module)}
    rooms = (naming | FRONT) - OTHER_COMMANDS
    imported = room_graph(module_graph())
    print(f"{option}: {', '.join(sorted(rooms))}")
    assert "config" in naming and "pipeline" in naming
    assert len(rooms) <= MOST_ROOMS
    assert rooms - {"cli"} <= {other for room in rooms for other in imported[room]}, "no room above hands it on"
