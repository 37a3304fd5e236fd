"""The keywords of Python callers are the fields of the configurations, in types that these take."""

from __future__ import annotations

import builtins
import inspect
import os
import subprocess
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import pytest

import trtopt
from trtopt import errors
from trtopt.config import AnalyzeConfig, BuildConfig, Config, ProfileConfig, SensitivityConfig, field_kinds, options
from trtopt.config import keywords as kw
from trtopt.config.keywords import AnalyzeOptions, BuildOptions, ProfileOptions, SensitivityOptions
from trtopt.gates.check import LimitOptions, Limits
from trtopt.support.precision import Precision

ROOT = Path(__file__).parents[2]
OBJECTS = {"example_inputs", "evaluation"}
PAIRS = (
    (BuildConfig, BuildOptions),
    (AnalyzeConfig, AnalyzeOptions),
    (SensitivityConfig, SensitivityOptions),
    (ProfileConfig, ProfileOptions),
)


@pytest.mark.parametrize(("config", "keywords"), PAIRS, ids=lambda item: item.__name__)
def test_every_field_of_a_configuration_is_a_keyword_of_its_type(config: type[Config], keywords: type) -> None:
    hints, kinds = typing.get_type_hints(keywords), field_kinds(config)
    assert set(hints) - OBJECTS == {item.name for item in fields(config)}
    for name, option in options(config).items():
        hint, default = hints[name], getattr(config(), name)
        members = set(typing.get_args(hint)) or {hint}
        if hint is not Any:
            assert (type(None) in members) == (default is None), name
        if option.choices and name != "builder":
            (choices,) = (typing.get_args(item) for item in members | {hint} if typing.get_origin(item) is Literal)
            texts = [choice for choice in choices if isinstance(choice, str)]
            assert sorted(texts) == sorted(option.choices), name
            numbers = {choice for choice in choices if not isinstance(choice, str)}
            assert {str(number) for number in numbers} <= set(texts), name
        elif hint is not Any and not option.path:
            wanted: dict[str, Any] = {"flag": bool, "number": float, "texts": kw.Texts, "shapes": kw.Shapes}
            wanted |= {"batches": str | Sequence[int], "text": str}
            expected = set(typing.get_args(wanted[kinds[name]])) or {wanted[kinds[name]]}
            assert expected <= members, name
        elif hint is not Any and kinds[name] == "text" and option.path not in ("source", "script"):
            assert {str, os.PathLike[str]} <= members, name


def test_the_keywords_of_check_are_its_limits() -> None:
    assert list(LimitOptions.__annotations__) == [item.name for item in fields(Limits)]


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    name: found for name in trtopt.__all__ if inspect.isfunction(found := getattr(trtopt, name))
}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_no_parameter_hides_a_builtin(name: str) -> None:
    assert not [
        parameter for parameter in inspect.signature(FUNCTIONS[name]).parameters if hasattr(builtins, parameter)
    ]


def test_completion_sees_the_public_names_all_errors_among_them() -> None:
    names = {name for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, Exception)}
    assert names | {"Event", "Limits", "build"} <= set(trtopt.__all__)
    assert set(dir(trtopt)) == {*trtopt.__all__, "__version__"}
    assert all(getattr(trtopt, name) is not None for name in trtopt.__all__)


GOOD = """
from pathlib import Path

import numpy as np

import trtopt


def listener(event: trtopt.Event) -> None:
    print(event.kind)


def main(path: Path) -> None:
    report = trtopt.build(
        path,
        precision="int8",
        calib={"x": np.zeros((4, 3), np.float32)},
        max_accuracy_drop="1%",
        opt_shapes={"x": (8, 3)},
        output=path.with_suffix(".engine"),
        on_event=listener,
    )
    report.raise_for_gate()
    if report.engine is not None:
        print(report.engine.bytes)
    analysis = trtopt.analyze(path, gpu="L4", batch_sweep=[1, 2, 4])
    print(analysis.totals.predicted_us, analysis.to_dataframe())
    try:
        trtopt.check("report.json", limits=trtopt.Limits(max_kernels=7)).raise_for_gate()
    except trtopt.GateError as error:
        print(error.remedy)
    record: trtopt.ExportRecord = trtopt.export("nets.py:net", "net.onnx", inputs=["x:float32:1x3"])
    print(record.outputs, trtopt.profile(path, backend="onnxruntime").totals, trtopt.sensitivity(path, precision="fp8"))
    trtopt.optimize(path, trtopt.BuildConfig(no_cache=True), output="o.onnx")
"""
WRONG = {
    'trtopt.build("m.onnx", precison="int8")': 'Unexpected keyword argument "precison"',
    'trtopt.build("m.onnx", precision="int9")': "has incompatible type \"Literal['int9']\"",
    'trtopt.analyze("m.onnx", compile="yes")': "incompatible type",
    'trtopt.check("r.json", max_kernels="7")': "incompatible type",
    'trtopt.build("m.onnx").egnine': 'has no attribute "egnine"',
}


@pytest.mark.long
def test_types_of_a_users_file_are_checked(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="types are checked by mypy")
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "wrong.py").write_text("import trtopt\n" + "\n".join(WRONG) + "\n")
    options = ("--strict", "--cache-dir", str(ROOT / ".mypy_cache" / "users"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "good.py", "wrong.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": f"{ROOT}{os.pathsep}{ROOT / 'recipes'}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    own = [line for line in done.stdout.splitlines() if line.startswith(("good.py", "wrong.py")) and ": error:" in line]
    assert len(own) == len(WRONG), done.stdout
    for number, (line, message) in enumerate(zip(own, WRONG.values(), strict=True), 2):
        assert line.startswith(f"wrong.py:{number}:") and message in line


def test_samples_and_metric_may_be_objects_or_what_the_options_take(tmp_path: Path) -> None:
    with pytest.raises(trtopt.UsageError, match="does not exist") as caught:
        trtopt.build(tmp_path / "m.onnx", evaluation=[], precision=Precision.FP16)
    assert "m.onnx" in caught.value.where
    with pytest.raises(trtopt.UsageError, match="no option 'precison'"):
        trtopt.build("m.onnx", precison="int8")  # type: ignore[call-arg]
