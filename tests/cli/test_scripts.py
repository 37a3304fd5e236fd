"""The scripts install what each needs, and stop with the reason where TensorRT for RTX has no wheels."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("bash") is None, reason="the scripts need bash")
@pytest.mark.parametrize("name", ["quickstart", "test", "check"])
@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "aarch64")])
def test_other_machines_get_the_reason_and_nothing_is_installed(
    tmp_path: Path, name: str, system: str, machine: str
) -> None:
    uname = tmp_path / "bin" / "uname"
    uname.parent.mkdir()
    uname.write_text(f'#!/bin/sh\n[ "$1" = -s ] && echo {system} || echo {machine}\n')
    uname.chmod(0o755)
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", checkout / "scripts")
    environment = {**os.environ, "PATH": f"{uname.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(checkout / "scripts" / name)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"{name}: TensorRT for RTX comes for x86-64 Linux and Windows only, and this machine is {system} on {machine}"
    )
    assert [path.name for path in checkout.iterdir()] == ["scripts"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone whose .venv has an interpreter that writes down what it is asked for, and does nothing."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$*" >>asked\n[ "$2" != "import torch" ]\n')
    python.chmod(0o755)
    (folder / ".venv" / "pyvenv.cfg").touch()
    return folder


def _installed(checkout: Path, script: str) -> tuple[str, str]:
    """What a script has pip install, and what it says on stderr."""
    (checkout / "asked").unlink(missing_ok=True)
    done = subprocess.run(["bash", f"scripts/{script}"], cwd=checkout, capture_output=True, text=True, check=True)
    lines = (checkout / "asked").read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("-m pip install")), done.stderr


@pytest.mark.skipif(platform.system() != "Linux" or platform.machine() != "x86_64", reason="no wheels for this machine")
def test_the_quickstart_installs_what_it_needs_and_the_tests_the_rest(checkout: Path) -> None:
    asked, said = _installed(checkout, "quickstart")
    assert ".[rtx,cpu,torch] scikit-learn" in asked and "+cpu" in asked
    assert not any(name in asked for name in ("dev", "polygraphy", "ray", "report", "sign", "sweep"))
    assert re.search(r"about \d+ MB .*about \d+ min", said)
    assert _installed(checkout, "quickstart") == ("", "")
    asked, said = _installed(checkout, "test")
    assert ".[rtx,cpu,torch,report,sign,ray,sweep,polygraphy,dev]" in asked
    assert re.search(r"about \d+ MB .*about \d+ min", said)
    for script in ("test", "check", "quickstart"):
        assert _installed(checkout, script) == ("", "")


@pytest.mark.skipif(platform.system() != "Linux" or platform.machine() != "x86_64", reason="no wheels for this machine")
def test_who_has_run_the_tests_installs_nothing_for_the_quickstart(checkout: Path) -> None:
    assert _installed(checkout, "check")[0]
    assert _installed(checkout, "quickstart") == ("", "")
