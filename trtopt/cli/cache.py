"""``trtopt cache list``, ``trtopt cache prune`` and ``trtopt cache verify``."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtopt.cli.parser import Parser
from trtopt.cli.streams import print_json, print_renderable, say
from trtopt.errors import UsageError
from trtopt.report.text.blocks import table
from trtopt.report.text.format import bytes_text, count

if TYPE_CHECKING:
    from trtopt.cache.folder import CachedFile

_SCHEMA = "trtopt.cache/1"
_DAMAGED = 2
_SIZES = {"B": 1, "K": 1e3, "KB": 1e3, "M": 1e6, "MB": 1e6, "G": 1e9, "GB": 1e9, "T": 1e12, "TB": 1e12}
_TIMES = {"S": 1, "M": 60, "H": 3600, "D": 86400, "W": 7 * 86400}
_LONGEST = 12


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code: 2 where ``verify`` finds damage and leaves it."""
    args = make_parser().parse(argv)

    from trtopt.cache.folder import cache_folder

    folder = cache_folder(args.cache_dir)
    if args.cache_dir is not None and (not args.cache_dir or not folder.is_dir()):
        raise UsageError("There is no such folder", where=str(folder), remedy="check the path of --cache-dir")
    action: Callable[[argparse.Namespace, Path], int] = {"list": _list, "prune": _prune, "verify": _verify}[args.action]
    try:
        return action(args, folder)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(
            f"The cache cannot be read: {error.strerror}",
            where=str(error.filename or folder),
            remedy="check its rights",
        ) from error


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        prog="trtopt cache", description="The folder that keeps engines, statistics and searches (docs/cache.md)."
    )
    commands = parser.add_subparsers(dest="action", metavar="list|prune|verify", required=True, parser_class=Parser)
    listing = commands.add_parser("list", help="list its files", description="List its files, the latest used first.")
    pruning = commands.add_parser(
        "prune", help="remove files", description="Remove files, those used longest ago first."
    )
    verifying = commands.add_parser("verify", help="check its files", description="Check the checksums of its files.")
    pruning.add_argument("--older-than", metavar="AGE", help="those not used for 30d, 12h, ...")
    pruning.add_argument("--max-size", metavar="SIZE", help="as many as are above 5G, 200M, ...")
    pruning.add_argument("--all", action="store_true", help="all of them")
    verifying.add_argument("--remove", action="store_true", help="remove those that are damaged")
    for command in (listing, pruning, verifying):
        command.add_argument(
            "--kind", action="append", metavar="KIND", help="only engines, calibration, ...; repeat for several"
        )
        command.add_argument("--cache-dir", metavar="DIR", help="the folder (default: ~/.cache/trtopt)")
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _kinds(args: argparse.Namespace) -> Sequence[str]:
    from trtopt.cache.folder import KINDS
    from trtopt.support.words import did_you_mean

    for kind in args.kind or ():
        if kind not in KINDS:
            remedy = did_you_mean(kind, KINDS) or f"choose one of {', '.join(KINDS)}"
            raise UsageError(f"There is no kind {kind!r}", where="--kind", remedy=remedy)
    return args.kind or tuple(KINDS)


def _chosen(args: argparse.Namespace, folder: Path) -> list[CachedFile]:
    from trtopt.cache.folder import files

    kinds = _kinds(args)
    return [file for file in files(folder) if file.kind in kinds][::-1]


def _list(args: argparse.Namespace, folder: Path) -> int:
    found = _chosen(args, folder)
    if args.json:
        return _print_json(folder, found)
    now = time.time()
    rows = [
        (file.kind, file.path.stem[:_LONGEST], bytes_text(file.bytes), _age_text(now - file.used)) for file in found
    ]
    if rows:
        print_renderable(table(("kind", "name", "size", "used"), rows))
    _sum(found, f"in {folder}")
    return 0


def _prune(args: argparse.Namespace, folder: Path) -> int:
    from trtopt.cache.folder import prune

    age = None if args.older_than is None else _read(args.older_than, _TIMES, "--older-than", "30d or 12h")
    size = None if args.max_size is None else _read(args.max_size, _SIZES, "--max-size", "5G or 200M")
    if args.all:
        size = 0.0
    if age is None and size is None:
        raise UsageError(
            "Nothing says what may go", where="trtopt cache prune", remedy="give --older-than, --max-size or --all"
        )
    done = prune(folder, max_bytes=size, older_than_s=age, kinds=_kinds(args), outdated=True)
    if args.json:
        _print_json(folder, done.removed)
    else:
        _sum(done.removed, f"removed from {folder}")
    if done.stuck:
        raise UsageError(
            f"{len(done.stuck)} files that should go could not be removed",
            where=str(done.stuck[0].path),
            remedy="run it as their owner, where the folder can be written",
        )
    return 0


def _verify(args: argparse.Namespace, folder: Path) -> int:
    from trtopt.cache.folder import damage, is_outdated, remove

    found, damaged, outdated, unread = [], {}, set(), set()
    for file in _chosen(args, folder):
        try:
            why = damage(file)
            if why and is_outdated(file):
                outdated.add(file.path)
                why = ""
        except FileNotFoundError:
            continue  # pruned meanwhile
        except OSError as error:
            why = f"it cannot be read: {error.strerror}"
            unread.add(file.path)
        found.append(file)
        if why:
            damaged[file.path] = why
    removed = {path for path in damaged.keys() - unread if args.remove and remove(path)}
    if args.json:
        facts = {path: {"damage": damaged.get(path), "outdated": path in outdated} for path in (f.path for f in found)}
        _print_json(folder, found, facts)
    else:
        for path, why in damaged.items():
            say(f"{path}: {why}{' (removed)' if path in removed else ''}")
        old = f", {len(outdated)} of another version of trtopt, which prune removes" if outdated else ""
        _sum(found, f"checked, {len(damaged) - len(unread)} damaged{old}")
    return _DAMAGED if set(damaged) - removed else 0


def _print_json(
    folder: Path, found: Sequence[CachedFile], facts: Mapping[Path, Mapping[str, object]] | None = None
) -> int:
    entries = [
        {"path": str(file.path), "kind": file.kind, "bytes": file.bytes, "used": file.used}
        | dict(facts[file.path] if facts else {})
        for file in found
    ]
    print_json({"schema": _SCHEMA, "folder": str(folder), "bytes": sum(f.bytes for f in found), "files": entries})
    return 0


def _sum(found: Sequence[CachedFile], what: str) -> None:
    say(f"{count(len(found), 'file')}, {bytes_text(sum(file.bytes for file in found))} {what}")


def _read(text: str, units: Mapping[str, float], option: str, example: str) -> float:
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*([A-Z]?B?)", text.upper())
    if match is None or match[2] not in units:
        raise UsageError(f"Not a value of {option}: {text!r}", where=option, remedy=f"write {example}")
    return float(match[1]) * units[match[2]]


def _age_text(seconds: float) -> str:
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / unit:.0f} {name} ago"
    return f"{seconds / 86400:.0f} d ago"
