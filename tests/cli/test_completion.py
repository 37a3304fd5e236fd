"""The scripts that complete command lines, of the parsers of all commands."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import Run

from trtopt.cli.main import COMMANDS
from trtopt.config import BuildConfig, flag, options

pytest.importorskip("shtab", reason="completion scripts need shtab")

ASK = """\
source completion.bash
COMP_LINE="$1"
read -ra COMP_WORDS <<< "$COMP_LINE"
[[ "$COMP_LINE" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
COMP_POINT=${#COMP_LINE}
_shtab_trtopt
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(folder: Path, line: str) -> set[str]:
    """What bash offers at the end of a line."""
    command = ["bash", "--norc", "-c", ASK, "bash", line]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_offers_commands_options_values_gpus_and_files(trtopt: Run, tmp_path: Path) -> None:
    (tmp_path / "completion.bash").write_text(trtopt("completion", "bash").stdout)
    (tmp_path / "model.onnx").touch()
    assert completed(tmp_path, "trtopt ") >= set(COMMANDS)
    assert completed(tmp_path, "trtopt build --calib-m") == {"--calib-method"}
    assert completed(tmp_path, "trtopt build --calib-method e") == {"entropy"}
    assert completed(tmp_path, "trtopt build --gpu RTX-409") == {"RTX-4090", "RTX-4090-Laptop"}
    assert completed(tmp_path, "trtopt build mod") == {"model.onnx"}
    assert completed(tmp_path, "trtopt gpu s") == {"show"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_has_every_command_and_every_option_of_a_build(trtopt: Run, shell: str) -> None:
    done = trtopt("completion", shell)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert name in done.stdout
    for name in options(BuildConfig):
        assert flag(name).removeprefix("--") in done.stdout


def test_an_unknown_shell_is_refused(trtopt: Run) -> None:
    done = trtopt("completion", "zish")
    assert done.returncode == 2 and "did you mean zsh?" in done.stderr


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_a_parser(command: str) -> None:
    module = importlib.import_module(f"trtopt.cli.{command.replace('-', '_')}")
    assert module.make_parser().prog == f"trtopt {command}"
