"""An argument parser that raises: a wrong option becomes the same what, where, remedy as every other error."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from trtopt.errors import UsageError
from trtopt.support.words import did_you_mean, nearest


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations whose errors are :class:`UsageError`.

    Args:
        refused: Options of another tool that users may type, and what to do instead.
        kwargs: As for ``argparse.ArgumentParser``.
    """

    def __init__(self, *, refused: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)
        self._refused = dict(refused or {})

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The options of ``argv``.

        Raises:
            UsageError: An option is unknown, or its value is wrong.
        """
        for argument in argv:
            name = argument.partition("=")[0]
            if name in self._refused:
                raise UsageError(f"{name} is not supported", where=name, remedy=self._refused[name])
        args, rest = self.parse_known_args(argv)
        unknown = next((argument for argument in rest if argument.startswith("-")), rest[0] if rest else "")
        if unknown:
            raise self._unknown(unknown)
        return args

    def _unknown(self, argument: str) -> UsageError:
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            return UsageError(f"One argument too many: {argument}", where=self.prog, remedy=f"see {self.prog} --help")
        bare = {option.lstrip("-"): option for option in self.option_names()}
        near = nearest(name.lstrip("-"), bare)
        return UsageError(
            f"{self.prog} has no option {name}",
            where=argument,
            remedy=f"did you mean {bare[near]}?" if near else f"see {self.prog} --help",
        )

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        named = re.match(r"argument ([^:]+): ", message)
        remedy = f"see {self.prog} --help"
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            remedy = did_you_mean(wrong.group(1), re.findall(r"[\w-]+", wrong.group(2))) or remedy
        raise UsageError(message, where=named.group(1) if named else self.prog, remedy=remedy)

    def option_names(self) -> list[str]:
        """Every long option."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, max_help_position=30, **kwargs)


def one_of(choices: Iterable[str]) -> Callable[[str], str]:
    """An argparse type for one of ``choices``, whose error names the nearest."""
    allowed = tuple(choices)

    def check(text: str) -> str:
        if text not in allowed:
            near = did_you_mean(text.lower(), allowed)
            raise argparse.ArgumentTypeError(
                f"{text!r} is not one of {', '.join(allowed)}" + (f"; {near}" if near else "")
            )
        return text

    return check
