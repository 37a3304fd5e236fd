"""The scripts stop with the reason where TensorRT for RTX has no wheels."""

from __future__ import annotations

import os
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
