"""The word that a user may have meant."""

from __future__ import annotations

from collections.abc import Iterable

_NEAR = 0.65
"""Share of letters that agree from which on a suggestion helps: ``shwo`` is ``show`` (0.75), ``serve`` no ``sweep``."""


def nearest(word: str, words: Iterable[str]) -> str:
    """The one of ``words`` most like ``word``, or nothing when none is near."""
    import difflib  # not for --help

    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=_NEAR)), "")


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """``did you mean X?`` for the nearest of ``words``, or nothing when none is near."""
    near = nearest(word, words)
    return f"did you mean {near}?" if near else ""
