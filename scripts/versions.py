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
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
EXTRAS = ("rtx", "cpu", "report", "sign", "serve")
_UNIT = (
    *("existing_blocked", "graph_edit", "graph_dims", "keywords", "fleet_plan", "fleet_schedule", "temporary"),
    *("nms_plugins", "precision_rounding"),
)
TESTS = (
    *(f"tests/unit/test_{name}.py" for name in _UNIT),
    *(f"tests/ort/test_{name}.py" for name in ("fold_cases", "serve", "run_limit", "isolate")),
    "tests/cli/test_matrix.py",
)
TOOLS = ("pytest>=9", "pytest-xdist>=3.6", "hypothesis>=6", "pyyaml>=6", "scikit-learn>=1.4")
_BOUND = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)")


def lowest(project: dict[str, object], extras: Sequence[str]) -> list[str]:
    """The lower bounds of the dependencies and of ``extras``: ``>=13`` is ``==13.0.*``, ``>=1.20`` is ``==1.20.*``."""
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(item for extra in extras for item in optional[extra])]  # type: ignore
    bounds = [found.groups() for item in wanted if (found := _BOUND.match(item))]
    return [f"{name}=={version if '.' in version else version + '.0'}.*" for name, version in bounds]


def interpreter(python: str) -> str | None:
    """The command of an interpreter given as a path or as a version such as ``3.10``; None where it is not there."""
    if not re.fullmatch(r"3\.\d+", python):
        return python
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for command in (shutil.which(f"python{python}"), *sorted(pyenv.glob(f"{python}.*/bin/python{python}"))):
        # A shim of pyenv is on the path for versions that are not chosen, and fails.
        if command and subprocess.run([command, "--version"], capture_output=True, check=False).returncode == 0:
            return str(command)
    return None


def tried(python: str, extras: Sequence[str], tests: list[str], *, at_lowest: bool) -> bool:
    """Whether the tests pass on an interpreter."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = folder / "bin" / "python"
        subprocess.run([python, "-m", "venv", folder], check=True)
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(lowest(project, extras) if at_lowest else []) + "\n")
        install = [own, "-m", "pip", "install", "--quiet", "-c", constraints]
        if subprocess.run([*install, f"{ROOT}[{','.join(extras)}]", *TOOLS], check=False).returncode:
            return False
        # What was installed is tested, not the folder that the tests are in.
        command = [own, "-P", "-m", "pytest"] if _version(own) >= (3, 11) else [own, "-m", "pytest"]
        return subprocess.run([*command, "-n", "2", "-m", "not long", *tests], cwd=ROOT, check=False).returncode == 0


def _version(python: Path) -> tuple[int, ...]:
    said = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in re.findall(r"\d+", said)[:2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="path, or a version such as 3.10 (default: this one)")
    parser.add_argument("--lowest", action="store_true", help="the oldest packages that are allowed")
    parser.add_argument("--extras", default=",".join(EXTRAS), help="extras to install (default: %(default)s)")
    parser.add_argument("tests", nargs="*", help=f"tests (default: {' '.join(TESTS)})")
    arguments = parser.parse_args()
    python = interpreter(arguments.python)
    if python is None:
        print(f"Python {arguments.python} is not installed: {sys.executable} takes its place", file=sys.stderr)
        python = sys.executable
    print(f"{python}{', the oldest packages' if arguments.lowest else ''}", flush=True)
    extras, tests = arguments.extras.split(","), arguments.tests or list(TESTS)
    return not tried(python, extras, tests, at_lowest=arguments.lowest)


if __name__ == "__main__":
    sys.exit(main())
