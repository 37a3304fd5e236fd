"""The recipes that are installed."""

from __future__ import annotations

import difflib
import importlib.metadata

from trtopt.errors import MissingDependencyError, UsageError
from trtopt.rewrite.protocol import Recipe

GROUP = "trtopt.recipes"
"""Entry-point group: each entry is a tuple of recipes in canonical order."""

_BUILTIN = "builtin"


def all_recipes() -> tuple[Recipe, ...]:
    """Every installed recipe by stage; within a stage trtopt's own first, then those of other packs by pack name.

    Raises:
        MissingDependencyError: A pack cannot be imported.
        UsageError: Two recipes have the same name, or a pack holds something that is not a recipe.
    """
    entries = sorted(
        importlib.metadata.entry_points(group=GROUP), key=lambda entry: (entry.name != _BUILTIN, entry.name)
    )
    recipes: dict[str, Recipe] = {}
    for entry in entries:
        for recipe in _load(entry):
            if not isinstance(recipe, Recipe):
                raise UsageError(
                    f"{recipe!r} is not a recipe", where=f"entry point {entry.value}", remedy="update the pack"
                )
            if recipe.name in recipes:
                raise UsageError(
                    f"Two recipes are named {recipe.name}",
                    where=f"entry point {entry.value}",
                    remedy="uninstall one of the packs",
                )
            recipes[recipe.name] = recipe
    return tuple(sorted(recipes.values(), key=lambda recipe: recipe.stage))


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
            near = difflib.get_close_matches(name, names, n=1)
            raise UsageError(
                f"There is no recipe named {name}",
                where="--recipes",
                remedy=(f"did you mean {near[0]}? " if near else "") + "trtopt recipe list shows them all",
            )
    return tuple(recipe for recipe in installed if recipe.name in wanted)


def _load(entry: importlib.metadata.EntryPoint) -> tuple[object, ...]:
    try:
        return tuple(entry.load())
    except (ImportError, AttributeError, TypeError) as error:
        raise MissingDependencyError(
            f"The recipe pack {entry.name} cannot be loaded: {error}",
            where=f"entry point {entry.value}",
            remedy="reinstall or uninstall the package that brings it",
        ) from error
