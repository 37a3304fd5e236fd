"""The house as its source shows it: modules, what they import, rooms and the floors they stand on.

A room is a folder or a loose module of ``trtopt/``. Imports in functions and under ``TYPE_CHECKING`` count.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"trtopt": ROOT / "trtopt", "trtopt_recipes": ROOT / "recipes" / "trtopt_recipes"}

Graph = Mapping[str, frozenset[str]]
"""What each node imports."""


@dataclass(frozen=True)
class Module:
    """A source file: ``name`` with dots, and whether it is a package's ``__init__``."""

    name: str
    path: Path
    is_package: bool

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))


def modules() -> list[Module]:
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            found.append(Module(".".join(parts[:-1] if is_package else parts), path, is_package))
    return found


MODULES = modules()
NAMES = frozenset(module.name for module in MODULES)


def part_of(name: str) -> str:
    """``engine`` for ``trtopt.engine.build``; ``__init__`` for ``trtopt``; ``trtopt_recipes`` for its modules."""
    package, *rest = name.split(".")
    if package != "trtopt":
        return package
    return rest[0] if rest else "__init__"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_of(module: Module, *, in_functions: bool, for_types: bool = False) -> Iterator[tuple[int, str]]:
    """Line and dotted name of what ``module`` imports; a name imported from a package names its module.

    ``from trtopt import pipeline`` gives ``trtopt.pipeline``; ``from trtopt import build`` gives ``trtopt``.
    """
    waiting: list[ast.AST] = [module.tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in NAMES else base
        elif is_type_checking(node) and not for_types:
            continue
        elif in_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    base = parts[: len(parts) - node.level + (1 if module.is_package else 0)]
    return ".".join([*base, node.module] if node.module else base)


@functools.cache
def module_graph() -> Graph:
    """What each module of ``trtopt`` imports of it, wherever the import stands; the public names of ``trtopt`` itself
    are left out: they are looked up when they are used."""
    inside = [module for module in MODULES if module.name.startswith("trtopt.")]
    known = {module.name for module in inside}
    return {
        module.name: frozenset(
            name for _, name in imports_of(module, in_functions=True, for_types=True) if name in known
        )
        - {module.name}
        for module in inside
    }


def room_graph(modules: Graph) -> Graph:
    """What each room imports of other rooms."""
    rooms: dict[str, set[str]] = {}
    for name, imported in modules.items():
        rooms.setdefault(part_of(name), set()).update(part_of(other) for other in imported)
    return {room: frozenset(others - {room}) for room, others in rooms.items()}


def circles(graph: Graph) -> list[list[str]]:
    """Every node that imports itself by way of others, with the way back, one circle for each such node."""
    return [way for node in sorted(graph) if (way := _way_back(graph, node))]


def _way_back(graph: Graph, start: str) -> list[str]:
    came_from: dict[str, str] = {}
    waiting = [start]
    while waiting:
        node = waiting.pop()
        for other in sorted(graph[node]):
            if other == start:
                way = [start, node]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1]
            if other not in came_from:
                came_from[other] = node
                waiting.append(other)
    return []


def heights(graph: Graph) -> dict[str, int]:
    """The floor of each node of a graph without circles: one above the highest that it imports."""

    @functools.cache
    def height(node: str) -> int:
        return 1 + max((height(other) for other in graph[node]), default=0)

    return {node: height(node) for node in graph}


def longest_chain(graph: Graph) -> list[str]:
    """The longest chain of imports, from its top."""
    height = heights(graph)
    chain = [max(graph, key=lambda node: (height[node], node))]
    while graph[chain[-1]]:
        chain.append(max(graph[chain[-1]], key=lambda node: (height[node], node)))
    return chain
