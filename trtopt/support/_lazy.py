"""Heavy packages are imported here, when they are needed and not before."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from trtopt.errors import MissingDependencyError


def require(module: str, extra: str, why: str) -> ModuleType:
    """Import ``module``, or say which extra of trtopt brings it.

    Args:
        extra: The extra of trtopt that installs it, for example ``"cpu"``.
        why: What it is needed for, as the end of "... is needed to".

    Raises:
        MissingDependencyError: The module cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{module} is needed to {why}, and cannot be imported: {error}",
            where=f"import {module}",
            remedy=f'pip install "trtopt[{extra}]"',
        ) from error


def is_available(module: str) -> bool:
    """Whether ``module`` can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False
