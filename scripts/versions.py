#!/usr/bin/env python3
"""Run part of the tests on other Pythons, and with the oldest packages that pyproject.toml allows.

    scripts/versions.py --lowest --python python3.10
    scripts/versions.py --python python3.13

Makes a virtual environment for each interpreter, which is gone afterwards, and installs trtopt with the extras that the
tests need: with --lowest every package that pyproject.toml bounds from below at that very version. pip's resolver finds
bounds that other packages contradict, the tests those that are lies. Exits with 1 where one of them fails.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
EXTRAS = ("rtx", "cpu", "report", "sign", "serve")
_UNIT = ("existing_blocked", "graph_edit", "graph_dims", "keywords", "fleet_plan", "fleet_schedule", "temporary")
TESTS = (
    *(f"tests/unit/test_{name}.py" for name in _UNIT),
    *(f"tests/ort/test_{name}.py" for name in ("serve", "run_limit", "isolate")),
    "tests/cli/test_matrix.py",
)
TOOLS = ("pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6", "pyyaml>=6")
_BOUND = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)")


def lowest(project: dict[str, object]) -> list[str]:
    """The lower bounds of the dependencies and of :data:`EXTRAS` as exact versions."""
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(item for extra in EXTRAS for item in extras[extra])]  # type: ignore
    return [f"{found[1]}=={found[2]}.*" for item in wanted if (found := _BOUND.match(item))]


def tried(python: str, *, at_lowest: bool, tests: list[str]) -> bool:
    """Whether the tests pass on an interpreter."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = folder / "bin" / "python"
        subprocess.run([python, "-m", "venv", folder], check=True)
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(lowest(project) if at_lowest else []) + "\n")
        install = [own, "-m", "pip", "install", "--quiet", "-c", constraints]
        if subprocess.run([*install, f"{ROOT}[{','.join(EXTRAS)}]", *TOOLS], check=False).returncode:
            return False
        # What was installed is tested, not the folder that the tests are in.
        command = [own, "-P", "-m", "pytest"] if _version(own) >= (3, 11) else [own, "-m", "pytest"]
        return subprocess.run([*command, "-q", "-n", "2", *tests], cwd=ROOT, check=False).returncode == 0


def _version(python: Path) -> tuple[int, ...]:
    said = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in re.findall(r"\d+", said)[:2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters (default: this one)")
    parser.add_argument("--lowest", action="store_true", help="the oldest packages that are allowed")
    parser.add_argument("tests", nargs="*", help=f"tests (default: {' '.join(TESTS)})")
    arguments = parser.parse_args()
    failed = []
    for python in arguments.python:
        print(f"{python}{', the oldest packages' if arguments.lowest else ''}", flush=True)
        if not tried(python, at_lowest=arguments.lowest, tests=arguments.tests or list(TESTS)):
            failed.append(python)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
