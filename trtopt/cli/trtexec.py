"""Command lines written for trtexec, in the options of trtopt: as :mod:`trtopt.cli.trtexec_flags` has them."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from trtopt.cli.trtexec_flags import FLAGS, Flag
from trtopt.errors import UsageError
from trtopt.support.files import open_file
from trtopt.support.precision import Precision

_CACHE_START = b"TRT-"


def translated(
    argv: Sequence[str], command: Literal["build", "profile"], own: Collection[str]
) -> tuple[list[str], list[str]]:
    """The arguments with trtexec's spellings turned into those of trtopt, and notes about what has no effect.

    Args:
        argv: The arguments as given.
        command: What they are given to.
        own: The options that the command has itself; they stay.

    Raises:
        UsageError: An option is not supported, has no value or one too many, or a value that is not supported.
    """
    kept: list[str] = []
    notes: list[str] = []
    rest = iter(argv)
    for argument in rest:
        name, equals, value = argument.partition("=")
        flag = FLAGS.get(name)
        if flag is None or name in own:
            kept.append(argument)
            continue
        if flag.value and not equals:
            value = next(rest, "")
        try:
            _check(flag, command, value or flag.value)
            if bool(value) != bool(flag.value):
                what = f"{name} needs a value" if flag.value else f"{name} takes no value"
                raise UsageError(what, where=argument, remedy=f"write {flag.example}")
            if flag.command not in (command, "both"):
                notes.append(f"{name} has no effect: {_elsewhere(flag, value)}")
                continue
            kept += flag.arguments(value)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"argument {name}: {error}", where=argument, remedy=flag.note or "see --help") from error
        if not flag.means:
            notes.append(f"{name} has no effect: {flag.note}")
    return kept, notes


def _check(flag: Flag, command: str, value: str) -> None:
    """Raise for what the command does not do, with ``value``."""
    if flag.command in (command, "both"):
        if flag.is_refused:
            raise UsageError(f"{flag.name} is not supported", where=flag.name, remedy=flag.note)
    elif command == "profile" or flag.is_result:
        raise UsageError(f"{flag.name} is not supported", where=flag.name, remedy=_elsewhere(flag, value))


def _elsewhere(flag: Flag, value: str) -> str:
    """Where an option of the other command belongs, with its value."""
    if flag.command == "build":
        return f"give it to `trtopt build MODEL {flag.name}{f'={value}' if value else ''}`"
    if flag.is_refused or not flag.means:
        return "a build times nothing, `trtopt profile ENGINE` does"
    arguments = " ".join(flag.arguments(value))
    return f"a build times nothing; `trtopt profile {'' if flag.means == ('{}',) else 'ENGINE '}{arguments}` does"


def add_aliases(parser: argparse.ArgumentParser) -> None:
    """Add the spellings whose meaning depends on others."""
    parser.add_argument("--noTF32", dest="no_tf32", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shapes", action="append", help=argparse.SUPPRESS)


def resolve(args: argparse.Namespace) -> None:
    """Turn ``--noTF32`` and ``--shapes`` into options, as trtexec does: they yield to more precise ones."""
    if args.no_tf32 and getattr(args, "precision", Precision.FP32) == Precision.TF32:
        raise UsageError("--noTF32 contradicts --tf32", where="--noTF32", remedy="leave one of them out")
    if args.no_tf32 and not hasattr(args, "precision"):
        args.precision = Precision.FP32
    if args.shapes and not any(hasattr(args, name) for name in ("min_shapes", "opt_shapes", "max_shapes")):
        args.opt_shapes = args.shapes
    elif args.shapes:
        args.notes = [*args.notes, "--shapes has no effect beside --minShapes, --optShapes or --maxShapes"]


def check_calibration(source: str | None) -> None:
    """Refuse a calibration cache of TensorRT, which ``--calib`` of trtexec takes and which holds no samples."""
    if source is None or not Path(source).is_file():
        return
    try:
        with open_file(Path(source), "The samples") as file:
            start = file.read(len(_CACHE_START))
    except UsageError:
        return  # whoever opens the samples says what is wrong
    if start == _CACHE_START:
        raise UsageError(
            "A calibration cache of TensorRT holds no samples",
            where=f"--calib {source}",
            remedy="give it to --calib-cache, which takes its INT8 ranges, and samples (such as an .npz) to --calib",
        )
