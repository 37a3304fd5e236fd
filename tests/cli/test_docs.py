"""The pages of the commands name every option, and nothing that does not exist."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_line import parse
from small_models import samples, save_small

from trtopt.config import BuildConfig, field_kinds, flag, options
from trtopt.config.toml_file import load
from trtopt.engine.backend import TENSORRT, TENSORRT_RTX
from trtopt.engine.options import parse_builder_options
from trtopt.errors import TargetError, TrtoptError, UsageError
from trtopt.hardware.spec import BEST_KNOWN
from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.manifest import DIGEST, Manifest
from trtopt.roofline.constants import GENERIC, fit_for
from trtopt.support.precision import PRECISIONS, Precision

Run = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).parents[2]
BUILD = (ROOT / "docs" / "build.md").read_text(encoding="utf-8")
OPTION_ROWS = re.findall(r"^\| (?:`-\w(?: FILE)?`, )?`(--[\w-]+)[^`]*` \|(.*)\|$", BUILD, flags=re.MULTILINE)
BUILDER_ROWS = re.findall(r"^\| `([a-z0-9_]+)` \| (.+?) \| (\w[\w ]*) \| (\w[\w ]*) \|$", BUILD, flags=re.MULTILINE)


def test_the_page_of_build_has_each_option_once() -> None:
    names = [flag(name) for name in options(BuildConfig) if name != "precision"]
    names += [flag(name) for name in (*PRECISIONS, Precision.AUTO)] + [
        "--precision",
        "--config",
        "--json",
        "--verbose",
        "--quiet",
    ]
    assert sorted(name for name, _ in OPTION_ROWS) == sorted(names)


def test_the_page_of_build_gives_the_defaults_that_hold() -> None:
    written = {name: rest.split("|")[0].strip().strip("`") for name, rest in OPTION_ROWS}
    config, kinds = BuildConfig(), field_kinds(BuildConfig)
    for name in options(BuildConfig):
        value = getattr(config, name)
        if kinds[name] == "flag":
            assert written[flag(name)] == ("on" if value else "off"), name
        elif isinstance(value, str):
            assert written[flag(name)] == value, name


def test_the_page_of_build_has_each_builder_key() -> None:
    with pytest.raises(UsageError) as caught:
        parse_builder_options(["no-such-key=1"], TENSORRT, gpu_present=True)
    known = caught.value.remedy.partition("There are: ")[2].split(", ")
    assert [row[0] for row in BUILDER_ROWS] == known


@pytest.mark.parametrize(("key", "values", "tensorrt", "rtx"), BUILDER_ROWS, ids=lambda text: text)
def test_a_builder_key_does_what_the_page_says(key: str, values: str, tensorrt: str, rtx: str) -> None:
    assert tensorrt == "takes"
    for value in re.findall(r"`([^`]+)`", values):
        assert not parse_builder_options([f"{key}={value}"], TENSORRT, gpu_present=True).ignored
    setting = [f"{key}={re.findall(r'`([^`]+)`', values)[0]}"]
    if rtx in ("takes", "ignores"):
        ignored = parse_builder_options(setting, TENSORRT_RTX, gpu_present=False).ignored
        assert bool(ignored) == (rtx == "ignores")
        return
    with pytest.raises(TargetError):
        parse_builder_options(setting, TENSORRT_RTX, gpu_present=False)
    if rtx == "needs a GPU":
        assert not parse_builder_options(setting, TENSORRT_RTX, gpu_present=True).ignored


def test_the_example_of_a_configuration_file_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", BUILD, flags=re.DOTALL)
    (tmp_path / "trtopt.toml").write_text(example)
    args, config = parse("build", ["model.onnx", "--config", str(tmp_path / "trtopt.toml")])
    assert config.precision == "int8"
    assert config.opt_shapes == ({"input": (8, 3, 224, 224)},)
    assert set(load(Path(args.config), "build")) == set(re.findall(r"^(\w+) =", example, flags=re.MULTILINE))


@pytest.mark.parametrize("page", ["README.md", "docs/build.md", "docs/migrating-from-tensorrt-10.md"])
def test_the_commands_on_a_page_parse(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^\s*(?:- run: )?trtopt (build|optimize) (.*?)(?:\s+#.*)?$", text, flags=re.MULTILINE)
    assert commands
    for command, rest in commands:
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', rest)]
        parse(command, words)


@pytest.mark.parametrize("command", ["check", "export", "doctor"])
def test_the_page_of_a_command_has_the_options_of_its_help(trtopt: Run, command: str) -> None:
    page = (ROOT / "docs" / f"{command}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \|", page, flags=re.MULTILINE)
    written = {name for row in rows for name in re.findall(r"--[a-z]+", row)}
    help_text = trtopt(command, "--help").stdout.partition("options:")[2].partition("example:")[0]
    assert written == set(re.findall(r"--[a-z]+", help_text)) - {"--help"}


@pytest.mark.long
def test_the_python_examples_of_the_readme_run(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = "".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    save_small(tmp_path)
    np.savez(tmp_path / "calib.npz", x=samples(8))
    np.savez(tmp_path / "eval.npz", x=samples(2))
    done = subprocess.run(
        [sys.executable, "-c", example.replace("max_accuracy_drop=0.01", "max_accuracy_drop=1.0")],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"INT8 on |FP16 on ", done.stdout), done.stdout
    assert (tmp_path / "model.rtx.engine").exists()
    assert re.search(r"^\[\d\] (onnxruntime|tensorrt-rtx) ", done.stdout, flags=re.MULTILINE)


def test_every_exit_code_is_on_the_page() -> None:
    written = {int(code) for code in re.findall(r"^\| (\d) \|", BUILD, flags=re.MULTILINE)}
    kinds = [TrtoptError, *TrtoptError.__subclasses__()]
    assert written == {0} | {kind.exit_code for kind in kinds}


def test_the_fields_of_the_report_are_on_the_page() -> None:
    for name in BuildReport.__dataclass_fields__:
        assert f"`{name}`" in BUILD or name == "schema"


def test_the_fields_of_a_manifest_are_on_its_page() -> None:
    page = (ROOT / "docs" / "manifest.md").read_text(encoding="utf-8")
    rows = "".join(re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE))
    written = set(re.findall(r"`(\w+)`", rows))
    assert written == {*Manifest.__dataclass_fields__, DIGEST} - {"schema"}


@pytest.mark.parametrize("script", ["recipe_docs", "trtexec_docs"])
def test_a_page_that_is_written_from_the_code_is_as_the_code_says(script: str) -> None:
    spec = importlib.util.spec_from_file_location(script, ROOT / "scripts" / f"{script}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.PAGE.read_text(encoding="utf-8")
    assert module.page(text) == text, f"run scripts/{script}.py"


def test_the_page_of_gpus_says_what_each_compute_capability_stands_for() -> None:
    page = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
    for capability, name in BEST_KNOWN.items():
        constants = fit_for("", capability).name.replace(GENERIC, "the mean of all")
        assert f"| `{capability}`, `sm_{capability.replace('.', '')}` | {name} | {constants} |" in page
