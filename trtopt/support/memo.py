"""What was found of a large array, remembered as long as the array lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

T = TypeVar("T")
P = ParamSpec("P")

_SMALL = 1024
"""Elements up to which it is sooner found again than looked up."""


def once_per_array(find: Callable[Concatenate[np.ndarray, P], T]) -> Callable[Concatenate[np.ndarray, P], T]:
    """Call ``find`` once for each array and the other arguments, which are hashable.

    For constants of models, which nobody writes into: all clones of a model share them.

    Example::

        @once_per_array
        def largest(array: np.ndarray) -> float:
            return float(np.abs(array).max())
    """
    found: dict[int, tuple[weakref.ref[np.ndarray], dict[Hashable, T]]] = {}

    @wraps(find)
    def ask(array: np.ndarray, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if array.size <= _SMALL:
            return find(array, *args, **kwargs)
        key = id(array)
        entry = found.get(key)
        if entry is None or entry[0]() is not array:
            entry = found[key] = weakref.ref(array, forget(key)), {}
        of_array, asked = entry[1], (args, tuple(kwargs.items()))
        if asked not in of_array:
            of_array[asked] = find(array, *args, **kwargs)
        return of_array[asked]

    def forget(key: int) -> Callable[[weakref.ref[np.ndarray]], None]:
        def gone(reference: weakref.ref[np.ndarray]) -> None:
            if key in found and found[key][0] is reference:
                del found[key]

        return gone

    return ask
