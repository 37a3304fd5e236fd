"""The recipes that are installed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Container
from pathlib import Path

from trtopt.errors import UsageError
from trtopt.report.schema.steps import Refusal
from trtopt.rewrite.protocol import Recipe
from trtopt.support.files import hash_file
from trtopt.support.words import nearest

GROUP = "trtopt.recipes"
"""Entry-point group: each entry is a tuple of recipes in canonical order."""

_BUILTIN = "builtin"


def all_recipes() -> tuple[Recipe, ...]:
    """Every installed recipe by stage; within a stage trtopt's own first, then those of other packs by pack name.

    A pack that fails is left out: :func:`broken_packs` names it.
    """
    recipes = [recipe for _, pack, _ in _packs() for recipe in pack]
    return tuple(sorted(recipes, key=lambda recipe: recipe.stage))


def broken_packs() -> tuple[Refusal, ...]:
    """Packs that are installed and cannot be used, each with the reason."""
    return tuple(Refusal(f"pack {name}", reason) for name, _, reason in _packs() if reason)


def pack_hashes() -> dict[str, str]:
    """The packs of others by name, each with the SHA-256, hex, of the Python files of its package; none is run."""
    found = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name != _BUILTIN:
            spec = importlib.util.find_spec(entry.value.partition(":")[0].partition(".")[0])
            folders = [] if spec is None else spec.submodule_search_locations or []
            files = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
            if spec is not None and spec.origin is not None and not files:
                files = [Path(spec.origin)]
            hashes = [hash_file(path, "A pack of recipes")[1] for path in files]
            found[entry.name] = hashlib.sha256("".join(hashes).encode()).hexdigest()
    return found


def _packs() -> list[tuple[str, tuple[Recipe, ...], str]]:
    """Name, recipes and what is wrong of every installed pack, trtopt's own first."""
    entries = sorted(
        importlib.metadata.entry_points(group=GROUP), key=lambda entry: (entry.name != _BUILTIN, entry.name)
    )
    packs: list[tuple[str, tuple[Recipe, ...], str]] = []
    taken: set[str] = set()
    for entry in entries:
        try:
            recipes = _load(entry, taken)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a pack is somebody else's code: whatever it raises
            packs.append(
                (entry.name, (), f"{entry.value}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            )
        else:
            taken.update(recipe.name for recipe in recipes)
            packs.append((entry.name, recipes, ""))
    return packs


def select(recipes: str) -> tuple[Recipe, ...]:
    """The recipes that ``all``, ``none`` or a comma-separated list of names stands for, in the order they run.

    Raises:
        UsageError: A name is unknown; the message has the nearest one.
    """
    if recipes == "none":
        return ()
    installed = all_recipes()
    if recipes == "all":
        return installed
    names = {recipe.name for recipe in installed}
    wanted = [name.strip() for name in recipes.split(",") if name.strip()]
    for name in wanted:
        if name not in names:
            meant = name.lower().replace("_", "-")
            near = nearest(meant, names) or next(iter(sorted(known for known in names if meant in known)), "")
            raise UsageError(
                f"There is no recipe named {name}",
                where="--recipes",
                remedy=(f"did you mean {near}? " if near else "") + "trtopt recipe list shows them all",
            )
    return tuple(recipe for recipe in installed if recipe.name in wanted)


def _load(entry: importlib.metadata.EntryPoint, taken: Container[str]) -> tuple[Recipe, ...]:
    recipes = tuple(entry.load())
    for recipe in recipes:
        if not isinstance(recipe, Recipe):
            raise TypeError(f"{recipe!r} is not a recipe")
        if recipe.name in taken:
            raise ValueError(f"there is already a recipe named {recipe.name}")
    return recipes
