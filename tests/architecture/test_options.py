"""One option of a build, followed from the command line to where it acts."""

from __future__ import annotations

import ast

import pytest
from house import MODULES, module_graph, part_of, room_graph

OTHER_COMMANDS = frozenset({"analysis", "gates", "fleet"})
"""Rooms of commands whose options have the same names: ``sensitivity``, ``check``, ``sweep``."""

MOST_ROOMS = 5


def names_it(node: ast.AST, option: str) -> bool:
    """Whether code (no text) names the option: reads it, passes it, takes it."""
    names = {ast.Attribute: "attr", ast.Name: "id", ast.arg: "arg", ast.keyword: "arg", ast.AnnAssign: "target"}
    return getattr(node, names.get(type(node), "_"), None) == option


FRONT = frozenset({"cli", "api"})
"""Every option passes them, as a field of the configuration."""


@pytest.mark.parametrize("option", ["max_accuracy_drop", "calib", "eval"])
def test_an_option_enters_few_rooms_and_goes_down(option: str) -> None:
    naming = {
        part_of(module.name) for module in MODULES if any(names_it(node, option) for node in ast.walk(module.tree))
    }
    rooms = (naming | FRONT) - OTHER_COMMANDS
    imported = room_graph(module_graph())
    print(f"{option}: {', '.join(sorted(rooms))}")
    assert "config" in naming and "pipeline" in naming
    assert len(rooms) <= MOST_ROOMS
    assert rooms - {"cli"} <= {other for room in rooms for other in imported[room]}, "no room above hands it on"
