"""Help, version, and errors in the options."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import parse

import trtopt as package
from trtopt.cli import check
from trtopt.cli.main import COMMANDS
from trtopt.config import BuildConfig, flag, options
from trtopt.errors import UsageError
from trtopt.support.precision import PRECISIONS, Precision

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_the_top_help_names_every_command_and_every_exit_code(trtopt: Run) -> None:
    done = trtopt("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for name, summary in COMMANDS.items():
        assert name in done.stdout and summary in done.stdout
    for code in range(8):
        assert f"{code} " in done.stdout.partition("exit codes")[2]


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_printed(trtopt: Run, option: str) -> None:
    assert trtopt(option).stdout == f"trtopt {package.__version__}\n"


def test_help_is_a_command_and_what_no_command_prints(trtopt: Run) -> None:
    text = trtopt("--help").stdout
    assert trtopt("help").stdout == text
    assert trtopt("help", "gpu", "list").stdout == trtopt("gpu", "list", "--help").stdout
    assert "did you mean build?" in trtopt("help", "bild").stderr
    bare = trtopt()
    assert (bare.returncode, bare.stdout, bare.stderr) == (2, "", text)


@pytest.mark.parametrize("word", ["serve", "version", "inspect", "quantize", "run"])
def test_a_word_that_is_like_no_command_gets_all_of_them_for_an_answer(trtopt: Run, word: str) -> None:
    message = trtopt(word).stderr
    assert "did you mean" not in message and "choose one of build, optimize" in message


@pytest.mark.parametrize("command", ["build", "optimize", "analyze"])
def test_the_precision_is_named_alike_everywhere(trtopt: Run, command: str) -> None:
    assert "--precision P" in trtopt(command, "--help").stdout
    done = trtopt(command, "m.onnx", "--precision", "int9")
    assert done.returncode == 2 and "'int9' is not one of" in done.stderr


def test_precisions_that_contradict_one_another_do_so_in_either_spelling() -> None:
    assert parse("build", ["m.onnx", "--precision", "int8"])[1].precision == "int8"
    assert parse("build", ["m.onnx", "--precision", "int8", "--fp16"])[1].precision == "int8"
    assert parse("build", ["m.onnx", "--precision", "bf16", "--bf16"])[1].precision == "bf16"
    with pytest.raises(UsageError, match="not allowed with"):
        parse("build", ["m.onnx", "--precision", "bf16", "--int8"])


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("0.01", 0.01), ("2.5%", 0.025), ("100%", 1.0)])
def test_a_share_may_be_given_in_percent(text: str, value: float) -> None:
    config = parse("build", ["m.onnx", "--max-accuracy-drop", text, "--min-agreement", text])[1]
    assert (config.max_accuracy_drop, config.min_agreement) == (value, value)
    assert BuildConfig(max_accuracy_drop=text if "%" in text else value).max_accuracy_drop == value
    args = check.make_parser().parse(["r.json", "--max-latency-regress", text, "--min-share", f"int8={text}"])
    assert (args.max_latency_regress, args.min_share) == (value, [("int8", value)])


@pytest.mark.parametrize("text", ["%", "much%", "1%%", "nan%"])
def test_what_is_no_share_is_refused(trtopt: Run, text: str) -> None:
    assert trtopt("build", "m.onnx", "--max-accuracy-drop", text).returncode == 2
    with pytest.raises(UsageError, match="max_accuracy_drop must be a"):
        BuildConfig(max_accuracy_drop=text)


def test_more_and_less_said_exclude_each_other(trtopt: Run) -> None:
    assert "not allowed with argument" in trtopt("build", "m.onnx", "-v", "-q").stderr


@pytest.mark.parametrize("command", ["build", "optimize"])
def test_the_help_lists_every_option_of_the_configuration(trtopt: Run, command: str) -> None:
    text = trtopt(command, "--help").stdout
    names = [flag(name) for name in options(BuildConfig) if name != "precision"]
    for name in [*names, *(flag(precision) for precision in (*PRECISIONS, Precision.AUTO)), "--config", "--json"]:
        assert name in text


def test_the_help_fits_80_columns(trtopt: Run) -> None:
    for command in COMMANDS:
        text = trtopt(command, "--help", columns=80).stdout
        options_part = text.partition("options:")[2].partition("example")[0]
        assert max(len(line) for line in options_part.splitlines()) <= 80, command


@pytest.mark.parametrize(
    ("arguments", "message", "remedy"),
    [
        (["bild"], "no command 'bild'", "did you mean build?"),
        (["build"], "required: MODEL", "trtopt build --help"),
        (["build", "m.onnx", "n.onnx"], "too many: n.onnx", "trtopt build --help"),
        (["build", "m.onnx", "--calib-metod", "max"], "no option --calib-metod", "did you mean --calib-method?"),
        (["build", "m.onnx", "--calib-meth", "max"], "no option --calib-meth", "did you mean --calib-method?"),
        (["build", "m.onnx", "--savEngine=e"], "no option --savEngine", "did you mean --saveEngine?"),
        (["build", "--quux", "7", "m.onnx"], "no option --quux", "trtopt build --help"),
        (["build", "m.onnx", "--calib-method", "Entropi"], "'Entropi' is not one of", "trtopt build --help"),
        (["build", "m.onnx", "--bf16", "--int8"], "not allowed with", "trtopt build --help"),
        (["build", "m.onnx", "--tf32", "--noTF32"], "contradicts", "leave one of them out"),
        (["build", "m.onnx", "--min-sqnr-db", "high"], "invalid float value", "trtopt build --help"),
        (["build", "m.onnx", "--min-sqnr-db", "nan"], "must be a finite number", "docs/build.md"),
        (["build", "m.onnx", "--calib"], "expected one argument", "trtopt build --help"),
        (["build", "m.onnx", "--memPoolSize=dlaSRAM:1M"], "only workspace:SIZE", "a number without a unit is in MiB"),
        (["build", "m.onnx", "--sparsity=force"], "'force' is not supported", "it overwrites weights"),
        (["build", "m.onnx", "--config", "none.toml"], "No such file", "check the path"),
        (["gpu"], "required: list|show", "trtopt gpu --help"),
        (["gpu", "shwo"], "invalid choice", "did you mean show?"),
        (["recipe", "explain"], "required: NAME", "trtopt recipe"),
        (["export", "nets.py:net"], "required: -o/--output", "trtopt export --help"),
        (["export", "nets.py:net", "-o", "m.onnx", "--opset", "new"], "invalid int value", "trtopt export --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_option_is_one_message_with_a_remedy(
    trtopt: Run, tmp_path: Path, arguments: list[str], message: str, remedy: str
) -> None:
    done = trtopt(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert remedy in done.stderr.partition("remedy: ")[2]
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_is_no_error_message() -> None:
    writer = subprocess.Popen(
        [sys.executable, "-m", "trtopt", "gpu", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None and writer.stderr is not None
    writer.stdout.close()
    assert writer.stderr.read() == ""
    assert writer.wait(timeout=60) == 141
    writer.stderr.close()


def test_the_installed_command_is_the_module(trtopt: Run) -> None:
    script = Path(sys.executable).with_name("trtopt.exe" if os.name == "nt" else "trtopt")
    if not script.exists():
        pytest.skip("the package is not installed beside this interpreter")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == trtopt("--version").stdout
