"""``trtopt completion``: what a shell loads to complete command lines; nothing of it runs when ``trtopt`` does."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from trtopt.cli.parser import OneOf, Parser
from trtopt.cli.streams import say

SHELLS = ("bash", "zsh", "fish")
_DESCRIPTION = "Print the script that completes commands, options, their values and GPUs in a shell."
_EPILOG = """\
examples:
  trtopt completion bash > ~/.local/share/bash-completion/completions/trtopt
  trtopt completion zsh > ~/.zfunc/_trtopt
  trtopt completion fish > ~/.config/fish/completions/trtopt.fish

Make the folder where it is not there; zsh needs fpath=(~/.zfunc $fpath) in front of compinit in ~/.zshrc.
"""
_FOLDERS = ("DIR", "MODEL_REPOSITORY")
_FILES = ("FILE", "MODEL", "ENGINE", "REPORT", "SRC", "LIB", "KEY", "SWEEP", "PROFILE", "TARGET")
"""How placeholders of paths begin."""


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("trtopt completion", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("shell", metavar="SHELL", type=OneOf(SHELLS), help=", ".join(SHELLS))
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    shell = make_parser().parse(argv).shell
    say(script(shell))
    return 0


def script(shell: str) -> str:
    """The script for a shell, of the parsers of all commands.

    Raises:
        MissingDependencyError: shtab is not installed.
    """
    from trtopt.cli.main import COMMANDS
    from trtopt.hardware.spec import all_gpus
    from trtopt.support._lazy import require

    shtab: Any = require("shtab", "completion", "write completion scripts")
    gpus = [gpu.name for gpu in all_gpus()]
    root = argparse.ArgumentParser(prog="trtopt")
    root.add_argument("-V", "--version", action="store_true", help="show the version")
    commands = root.add_subparsers()
    for name, summary in COMMANDS.items():
        made: Parser = importlib.import_module(f"trtopt.cli.{name.replace('-', '_')}").make_parser()
        for action in _actions(made):
            word = str(action.metavar)
            if isinstance(action.type, OneOf):
                action.choices = action.type.choices
            elif "--gpu" in action.option_strings:
                action.choices = gpus
            elif word.startswith(_FOLDERS):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif word.startswith(_FILES):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        commands.add_parser(name, parents=[made], add_help=False, help=summary)
    return str(shtab.complete(root, shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a parser, and of the parsers of its own commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
