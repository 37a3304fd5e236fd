"""The parser of a command, whose errors say what, where and remedy; it loads nothing that ``--help`` can do without."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from trtopt.errors import UsageError
from trtopt.support.words import did_you_mean, nearest


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations whose errors are :class:`UsageError`.

    ``usage`` is what follows the command; ``hints`` are options of another tool that users may type, and mistype;
    ``elsewhere`` is where to say what no option of the command does.
    """

    def __init__(
        self,
        prog: str | None = None,
        usage: str = "",
        description: str | None = None,
        epilog: str | None = None,
        *,
        hints: Iterable[str] = (),
        elsewhere: str = "",
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        whole = f"%(prog)s {usage}" if usage else None
        super().__init__(prog, whole, description, epilog, allow_abbrev=False, **kwargs)
        self._hints = tuple(hints)
        self._elsewhere = elsewhere

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args, rest = self.parse_known_args(argv)
        unknown = next((argument for argument in rest if argument.startswith("-")), rest[0] if rest else "")
        if unknown:
            before = argv[argv.index(unknown) - 1] if unknown in argv[1:] else ""
            raise self._unknown(unknown, before)
        return args

    def _unknown(self, argument: str, before: str) -> UsageError:
        name = argument.partition("=")[0]
        if not name.startswith("-") and before in self._option_string_actions:
            to_file = before == "--json" and "--report" in self._option_string_actions
            return UsageError(
                f"{before} takes no value",
                where=f"{before} {argument}",
                remedy=f"--report {argument} writes the JSON to a file" if to_file else f"see {self.prog} --help",
            )
        if not name.startswith("-"):
            return UsageError(f"One argument too many: {argument}", where=self.prog, remedy=f"see {self.prog} --help")
        bare = {option.lstrip("-"): option for option in (*self.option_names(), *self._hints)}
        near = nearest(name.lstrip("-"), bare)
        return UsageError(
            f"{self.prog} has no option {name}",
            where=argument,
            remedy=f"did you mean {bare[near]}?" if near else self._elsewhere or f"see {self.prog} --help",
        )

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        named = re.match(r"argument ([^:]+): ", message)
        remedy = f"see {self.prog} --help"
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if message.startswith("the following arguments are required"):
            remedy = f"such as: {self._example()}; {remedy}"
        if wrong:
            remedy = did_you_mean(wrong.group(1), re.findall(r"[\w-]+", wrong.group(2))) or remedy
        raise UsageError(message, where=named.group(1) if named else self.prog, remedy=remedy)

    def _example(self) -> str:
        """A line that runs this command: of the help's examples, else its actions, or it, with what they require."""
        lines = (line.strip() for line in (self.epilog or "").splitlines())
        groups = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        commands = [command for group in groups for command in group.choices.values()] or [self]
        least = (" ".join([own.prog, *(str(it.metavar) for it in own._actions if it.required)]) for own in commands)
        return next((line for line in lines if line.startswith(f"{self.prog} ")), ", ".join(least))

    def option_names(self) -> list[str]:
        """Every long option."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, max_help_position=30, **kwargs)


class OneOf:
    """An argparse type for one of ``choices``, whose error names the nearest."""

    def __init__(self, choices: Iterable[str]) -> None:
        self.choices = tuple(choices)

    def __call__(self, text: str) -> str:
        if text not in self.choices:
            near = did_you_mean(text.lower(), self.choices)
            raise argparse.ArgumentTypeError(
                f"{text!r} is not one of {', '.join(self.choices)}" + (f"; {near}" if near else "")
            )
        return text
