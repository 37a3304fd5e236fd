"""Writes the table of trtexec's options in docs/migrating-from-tensorrt-10.md anew, from trtopt/cli/trtexec_flags.py.

python scripts/trtexec_docs.py
"""

from __future__ import annotations

from pathlib import Path

from trtopt.cli.trtexec_flags import FLAGS, Flag

PAGE = Path(__file__).parents[1] / "docs" / "migrating-from-tensorrt-10.md"
MARK = "<!-- below: written by scripts/trtexec_docs.py -->\n"


def page(text: str) -> str:
    """The page with everything after the mark written anew."""
    table = ["| trtexec | command | trtopt | |", "|---|---|---|---|", *(_row(flag) for flag in FLAGS.values())]
    return text.partition(MARK)[0] + MARK + "\n" + "\n".join(table).replace("[on|off]", "[on\\|off]") + "\n"


def _row(flag: Flag) -> str:
    if flag.means:
        arguments = [argument.replace("=", " ", 1) for argument in flag.arguments(flag.value)]
        meant = f"`{' '.join(arguments)}`"
    else:
        meant = "not supported" if flag.is_refused else "no effect"
    command = "build, profile" if flag.command == "both" else flag.command
    return f"| `{flag.example}` | {command} | {meant} | {flag.note.replace('|', chr(92) + '|')} |".replace(
        "|  |", "| |"
    )


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
