"""``trtopt doctor``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trtopt.cli.options import Parser
from trtopt.cli.streams import own_stdout, print_json, print_renderable
from trtopt.errors import EngineBuildError, GateError, MissingDependencyError
from trtopt.report.text.format import pairs, table

if TYPE_CHECKING:
    from rich.console import RenderableType

_SCHEMA = "trtopt.doctor/1"
_DESCRIPTION = "Say what is installed here and what it can build for. Made to be attached to an issue."


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = Parser(prog="trtopt doctor", description=_DESCRIPTION)
    parser.add_argument(
        "--selftest",
        action="store_true",
        help="build a small network with each backend and, where a GPU is, run it and compare",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse(argv)

    from trtopt.engine import doctor

    with own_stdout(quiet=args.json):
        result: dict[str, Any] = doctor.selftest() if args.selftest else {"environment": doctor.diagnose()}
    if args.json:
        print_json({"schema": _SCHEMA, **result})
    else:
        print_renderable(render(result))
    return _exit_code(result) if args.selftest else 0


def _exit_code(result: Mapping[str, Any]) -> int:
    """0, or the code of what went wrong: no backend, a build, or an engine that computes something else."""
    if result["ok"]:
        return 0
    if not result["checks"]:
        return MissingDependencyError.exit_code
    built = all("error" not in check for check in result["checks"])
    return GateError.exit_code if built else EngineBuildError.exit_code


def render(result: Mapping[str, Any]) -> RenderableType:
    """What was found, to be printed by a ``rich`` console."""
    from rich.console import Group
    from rich.text import Text

    found = result["environment"]
    rows = [
        ("trtopt", str(found["trtopt"])),
        ("python", str(found["python"])),
        ("platform", str(found["platform"])),
        ("gpu", str(found["gpu"] or "none") + (f": {found['gpu_note']}" if found["gpu_note"] else "")),
        ("driver", str(found["driver"] or "none")),
    ]
    rows += [(name, _backend(state)) for name, state in found["backends"].items()]
    rows += [(name, str(version or "not installed")) for name, version in found["packages"].items()]
    parts: list[RenderableType] = [pairs(rows)]
    parts += [Text(f"\nproblem: {problem}", style="bold red") for problem in found["problems"]]
    if "checks" in result:
        checks = [(str(check["backend"]), str(check["precision"]), _check(check)) for check in result["checks"]]
        parts += [Text(""), table(("self-test", "precision", "result"), checks)]
        verdict = "ok" if result["ok"] else "failed" if checks else "failed: no backend can be used"
        parts.append(Text(f"\nself-test: {verdict}", style="bold green" if result["ok"] else "bold red"))
    return Group(*parts)


def _backend(state: Mapping[str, Any]) -> str:
    if not state["usable"]:
        return f"cannot be used: {state['reason']}"
    runs = "engines run here" if state["runs_here"] else f"engines do not run here: {state['runs_here_note']}"
    return f"{state['version']}, builds for {', '.join(state['targets'])}; {runs}"


def _check(check: Mapping[str, Any]) -> str:
    if "error" in check:
        return f"failed: {check['error']}"
    shares = ", ".join(f"{share:.0%} {dtype}" for dtype, share in check["flop_share"].items() if share)
    reason = check["not_run_because"]
    ran = f"not run: {reason}" if reason else f"run; difference {check['difference_ratio']:.2g} of the output"
    verdict = "ok" if check["ok"] else "failed"
    return f"{verdict}: built for {check['target']}, {check['kernels']} kernels, flop {shares}; {ran}"
