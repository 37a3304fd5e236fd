"""Options of a command that are the fields of a configuration, and the configuration read back from them."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trtopt.cli.parser import OneOf, Parser
from trtopt.config.base import GROUPS, Config, Option, field_kinds, flag, options, share
from trtopt.config.commands import AnalyzeConfig, BuildConfig, ProfileConfig, SensitivityConfig
from trtopt.errors import TrtoptError
from trtopt.support.precision import Precision


def from_zero(text: str) -> float:
    """A number from 0 on, ``0.01`` or ``1%``, as an argparse type."""
    with contextlib.suppress(ValueError):
        if 0 <= (value := share(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on, such as 0.01 or 1%")


_PRECISION_HELP: dict[str, str] = {
    Precision.FP32: "keep everything in FP32, without TF32",
    Precision.TF32: "FP32 tensors, TF32 multiplications",
    Precision.FP16: "FP16 where it is safe (default of build)",
    Precision.BF16: "BF16 where it is safe",
    Precision.INT8: "INT8 where it makes the engine faster, FP16 elsewhere",
    Precision.FP8: "FP8 where it makes the engine faster, FP16 elsewhere (compute capability 8.9 and later)",
    Precision.AUTO: "the fastest mix of FP16, BF16, INT8 and FP8 within --max-accuracy-drop (default 0.01)",
}
_IMPLIED_FP16 = {
    Precision.INT8: "what is not INT8 runs in FP16",
    Precision.FP8: "what is not FP8 runs in FP16",
    Precision.AUTO: "it chooses among all types",
}
"""The precisions that ``--fp16`` may stand beside, as in lines written for trtexec, and why it says nothing there."""
_FP16_NOTE = "--fp16 is implied by"

_Config = TypeVar("_Config", BuildConfig, AnalyzeConfig, SensitivityConfig, ProfileConfig)


def add_config_options(parser: Parser, config: type[Config]) -> None:
    """Add every field of a configuration class, its aliases, and ``--config``."""
    kinds, known = field_kinds(config), options(config)
    for title in GROUPS:
        if title not in {option.group for option in known.values()}:
            continue
        group = parser.add_argument_group(title)
        for name, option in known.items():
            if option.group != title:
                continue
            if name == "precision":
                _add_precisions(group, option, is_build=config is BuildConfig)
            elif name == "weights":
                _add_value(group, name, option, number=False)
                text = "short for --weights int4"
                own: dict[str, Any] = {"dest": name, "action": "store_const", "default": argparse.SUPPRESS}
                group.add_argument("--int4", const="int4", help=text, **own)
            elif kinds[name] == "flag":
                _add_flag(group, name, option)
            else:
                _add_value(group, name, option, number=kinds[name] == "number")
    parser.add_argument("--config", metavar="FILE.toml", help="read options from a TOML file; the command line wins")
    parser.set_defaults(notes=[])
    parser.add_argument("--json", action="store_true", help="print the report as JSON on stdout, and nothing else")
    volume = parser.add_mutually_exclusive_group()
    volume.add_argument(
        *("-v", "--verbose"), action="store_true", help="print a line on stderr when a stage starts or ends"
    )
    volume.add_argument("-q", "--quiet", action="store_true", help="print errors and failed gates only")


def _add_precisions(group: argparse._ArgumentGroup, option: Option, *, is_build: bool) -> None:
    """``--precision P``, and a switch for each precision, which the help of builds explains."""
    group.add_argument(
        flag("precision"),
        action=_SetPrecision,
        metavar="P",
        type=OneOf(option.choices),
        default=argparse.SUPPRESS,
        help=f"{option.help}: {', '.join(option.choices)}; {flag(option.choices[-1])} and so on are short for it",
    )
    spellings = {flag(name): (name, _PRECISION_HELP[name]) for name in option.choices}
    spellings["--best"] = (Precision.AUTO if is_build else Precision.INT8, argparse.SUPPRESS)
    for spelling, (name, text) in spellings.items():
        shown = text if is_build else argparse.SUPPRESS
        group.add_argument(
            spelling,
            dest="precision",
            action=_SetPrecision,
            nargs=0,
            const=name,
            default=argparse.SUPPRESS,
            help=shown,
        )


class _SetPrecision(argparse.Action):
    """Sets the precision. Two exclude each other, but for FP16 beside one that has FP16 in it, which a note says."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        name, spelling = self.const or values, self.option_strings[0]
        given: dict[str, str] = {**getattr(namespace, "spellings", {})}
        for known, other in given.items():
            is_implied = Precision.FP16 in (name, known) and (name in _IMPLIED_FP16 or known in _IMPLIED_FP16)
            if name != known and other != spelling and not is_implied:
                raise argparse.ArgumentError(self, f"not allowed with argument {other}")
        given = {known: other for known, other in given.items() if other != spelling} | {name: spelling}
        namespace.spellings = given
        namespace.precision = next((known for known in given if known != Precision.FP16), Precision.FP16)
        notes = getattr(namespace, "notes", [])
        if len(given) == 2 and not any(note.startswith(_FP16_NOTE) for note in notes):
            why = _IMPLIED_FP16[namespace.precision]
            namespace.notes = [*notes, f"{_FP16_NOTE} {given[namespace.precision]}: {why}"]


def _add_flag(group: argparse._ArgumentGroup, name: str, option: Option) -> None:
    """A switch, its hidden aliases, and its hidden opposite, which overrides a configuration file."""
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    group.add_argument(flag(name), action="store_true", help=option.help, **common)
    if option.aliases:
        group.add_argument(*option.aliases, action="store_true", help=argparse.SUPPRESS, **common)
    bare = flag(name).removeprefix("--")
    off = bare.removeprefix("no-") if bare.startswith("no-") else f"no-{bare}"
    group.add_argument(f"--{off}", action="store_false", help=argparse.SUPPRESS, **common)


def _add_value(group: argparse._ArgumentGroup, name: str, option: Option, *, number: bool) -> None:
    read: Any = OneOf(option.choices) if option.choices else share if option.share else float if number else str
    shown = option.metavar or "|".join(option.choices)
    names = ["-o", flag(name)] if name == "output" else [flag(name)]
    action = "append" if option.repeatable else "store"
    common: dict[str, Any] = {"dest": name, "action": action, "type": read, "default": argparse.SUPPRESS}
    group.add_argument(*names, metavar=shown, help=option.help, **common)
    if option.aliases:
        group.add_argument(*option.aliases, metavar=shown, help=argparse.SUPPRESS, **common)


def as_typed(error: TrtoptError, config: type[Config], argv: Sequence[str]) -> None:
    """Let an error name options as they were typed: ``--opt-shapes`` where that stands for ``--shapes``."""
    typed = {word.partition("=")[0] for word in argv}
    for name, option in options(config).items():
        for alias in typed.intersection(option.aliases) if flag(name) not in typed else ():
            for part in ("what", "where", "remedy"):
                text = re.sub(rf"(?<![\w-]){flag(name)}(?![\w-])", alias, getattr(error, part))
                setattr(error, part, text)


def config_from(
    args: argparse.Namespace, config: type[_Config], command: str, varied: Mapping[str, Any] | None = None
) -> _Config:
    """The configuration: the file's values, then those of a build of its matrix, then those of the command line.

    Raises:
        UsageError: A value, a shape or the configuration file is wrong.
    """
    values: dict[str, Any] = {}
    if args.config is not None:
        from trtopt.config.toml_file import load

        values = {**load(Path(args.config), command), **(varied or {})}
    kinds = field_kinds(config)
    values.update((name, value) for name, value in vars(args).items() if name in kinds)
    for name, value in values.items():
        if kinds.get(name) == "shapes":
            from trtopt.engine.request import parse_shapes

            values[name] = tuple(parse_shapes(text) for text in value)
    return config(**values)
