"""``trtopt doctor``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtopt.cli.parser import Parser
from trtopt.cli.streams import own_stdout, print_json, print_renderable
from trtopt.errors import EngineBuildError, GateError, MissingDependencyError
from trtopt.report.text.blocks import pairs, table
from trtopt.support.files import atomic_write

if TYPE_CHECKING:
    from rich.console import RenderableType

_SCHEMA = "trtopt.doctor/1"
_DESCRIPTION = "Say what is installed here and what it can build for. Made to be attached to an issue."


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser("trtopt doctor", description=_DESCRIPTION)
    parser.add_argument(
        "--selftest",
        action="store_true",
        help="build a small network with each backend and, where a GPU is, run it and every kind of engine",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--report", metavar="FILE", help="write the JSON to a file too, after every check")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    args = make_parser().parse(argv)

    from trtopt.engine import doctor

    with own_stdout(quiet=args.json):
        result: dict[str, Any] = {"environment": doctor.diagnose()}
        _write(args.report, result)
        if args.selftest:
            result = doctor.selftest() | {"kinds": []}
            _run_kinds(args.report, result)
    if args.json:
        print_json({"schema": _SCHEMA, **result})
    else:
        print_renderable(render(result))
    return _exit_code(result) if args.selftest else 0


def _run_kinds(report: str | None, result: dict[str, Any]) -> None:
    """Add the checks of every kind of engine; the file has each before it runs: native code may end the process."""
    from trtopt.serve.selftest import selftest_kinds

    for check in selftest_kinds():
        if check not in result["kinds"]:
            result["kinds"].append(check)
        _write(report, {**result, "ok": False})
    result["ok"] = result["ok"] and all(check["ok"] for check in result["kinds"])
    _write(report, result)


def _write(report: str | None, result: Mapping[str, Any]) -> None:
    if report is not None:
        text = json.dumps({"schema": _SCHEMA, **result}, indent=2)
        atomic_write(Path(report), text.encode())


def _exit_code(result: Mapping[str, Any]) -> int:
    """0, or the code of what went wrong: no backend, a build, or an engine that computes something else."""
    if result["ok"]:
        return 0
    if not result["checks"]:
        return MissingDependencyError.exit_code
    built = all("error" not in check for check in (*result["checks"], *result["kinds"]))
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
        checks += [(str(check["backend"]), str(check["kind"]), _kind(check)) for check in result.get("kinds", ())]
        parts += [Text(""), table(("self-test", "of", "result"), checks)]
        verdict = "ok" if result["ok"] else "failed" if checks else "failed: no backend can be used"
        parts.append(Text(f"\nself-test: {verdict}", style="bold green" if result["ok"] else "bold red"))
    return Group(*parts)


def _backend(state: Mapping[str, Any]) -> str:
    if not state["usable"]:
        return f"cannot be used: {state['reason']}"
    runs = "engines run here" if state["runs_here"] else f"engines do not run here: {state['runs_here_note']}"
    return f"{state['version']}, builds for {', '.join(state['targets'])}; {runs}"


def _kind(check: Mapping[str, Any]) -> str:
    if "error" in check:
        return f"failed: {check['error']}"
    graphs = ", ".join(f"{count} {event}" for event, count in check["graphs"].items() if count) or "none"
    verdict = "ok" if check["ok"] else "failed"
    return (
        f"{verdict}: difference {check['difference_ratio']:.2g} of the output, {check['device_us']} us, "
        f"{check['layers']} layers, CUDA graphs {graphs}; {check['seconds']} s"
    )


def _check(check: Mapping[str, Any]) -> str:
    if "error" in check:
        return f"failed: {check['error']}"
    shares = ", ".join(f"{share:.0%} {dtype}" for dtype, share in check["flop_share"].items() if share)
    reason = check["not_run_because"]
    ran = f"not run: {reason}" if reason else f"run; difference {check['difference_ratio']:.2g} of the output"
    verdict = "ok" if check["ok"] else "failed"
    return f"{verdict}: built for {check['target']}, {check['kernels']} kernels, flop {shares}; {ran}"
