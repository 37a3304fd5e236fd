"""Each option of trtexec means what docs/migrating-from-tensorrt-10.md says it means."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import parse

from trtopt.cli import trtexec
from trtopt.config import BuildConfig, flag, options
from trtopt.errors import UsageError
from trtopt.support.precision import PRECISIONS

DOCUMENT = Path(__file__).parents[2] / "docs" / "migrating-from-tensorrt-10.md"
_ROW = re.compile(r"\| `(?P<trtexec>--[^`]+)` \| (?P<trtopt>[^|]+?) \| (?P<note>[^|]*?) ?\|")
_SAME_NAME = {"--fp16", "--bf16", "--int8", "--fp8", "--plugins", "--verbose"}
"""Options that trtexec and trtopt spell alike."""

ROWS = [
    (match["trtexec"], match["trtopt"].strip(), match["note"].strip())
    for match in map(_ROW.fullmatch, DOCUMENT.read_text(encoding="utf-8").splitlines())
    if match
]
MEANT = [(row[0], row[1].strip("`")) for row in ROWS if row[1].startswith("`")]
NO_EFFECT = [(row[0], row[2]) for row in ROWS if row[1] == "no effect"]
REFUSED = [(row[0], row[2]) for row in ROWS if row[1] == "not supported"]


def _parse(text: str) -> tuple[BuildConfig, list[str], str, bool]:
    """The configuration, notes, model and verbosity of a command line, which names a model if ``text`` does not."""
    words = text.split()
    has_model = text.startswith("--onnx") or not text.startswith("-")
    args, config = parse("build", words if has_model else ["model.onnx", *words])
    return config, args.notes, args.model, args.verbose


def test_the_table_has_a_row_for_every_spelling_and_no_other() -> None:
    names = [row[0].partition("=")[0] for row in ROWS]
    known = {"--onnx", "--best", "--noTF32", "--shapes"} | _SAME_NAME
    known |= {alias for option in options(BuildConfig).values() for alias in option.aliases}
    for table in (
        trtexec.BUILDER_FLAGS,
        trtexec.BUILDER_VALUES,
        trtexec.NO_EFFECT,
        trtexec.NO_EFFECT_VALUES,
        trtexec.REFUSED,
    ):
        known |= set(table)
    assert sorted(names) == sorted(known)
    assert len(ROWS) == len(MEANT) + len(NO_EFFECT) + len(REFUSED)


def test_options_with_the_same_name_exist() -> None:
    names = {flag(name) for name in (*options(BuildConfig), *PRECISIONS)} | {"--verbose"}
    assert names >= _SAME_NAME


@pytest.mark.parametrize(("old", "new"), MEANT, ids=lambda text: text)
def test_an_alias_means_its_option(old: str, new: str) -> None:
    config, notes, model, verbose = _parse(old)
    assert (config, notes, model, verbose) == _parse(new)
    assert config != BuildConfig() or verbose or old.startswith("--onnx")


@pytest.mark.parametrize("old", [row[0] for row in MEANT if "=" in row[0]], ids=lambda text: text)
def test_an_alias_takes_its_value_after_a_space_too(old: str) -> None:
    name, _, value = old.partition("=")
    args, config = parse("build", [*([] if name == "--onnx" else ["model.onnx"]), name, value])
    assert (config, args.notes, args.model, args.verbose) == _parse(old)


@pytest.mark.parametrize(("old", "why"), NO_EFFECT, ids=lambda text: text)
def test_an_option_without_effect_is_accepted_with_a_note(old: str, why: str) -> None:
    config, notes, _, _ = _parse(old)
    assert config == BuildConfig()
    assert notes == [f"{old.partition('=')[0]} has no effect: {why}"]


@pytest.mark.parametrize(("old", "remedy"), REFUSED, ids=lambda text: text)
@pytest.mark.parametrize("value", ["", "=1"])
def test_a_refused_option_says_what_to_do_instead(old: str, remedy: str, value: str) -> None:
    with pytest.raises(UsageError, match="is not supported") as caught:
        _parse(old + value)
    assert caught.value.where == old
    assert caught.value.remedy == remedy


def test_several_profiles_are_repeated_shape_options() -> None:
    config, notes, _, _ = _parse(
        "--profile=0 --minShapes=x:1x3 --optShapes=x:2x3 --maxShapes=x:4x3"
        " --profile=1 --minShapes=x:8x3 --optShapes=x:8x3 --maxShapes=x:8x3"
    )
    assert config.min_shapes == ({"x": (1, 3)}, {"x": (8, 3)})
    assert config.max_shapes == ({"x": (4, 3)}, {"x": (8, 3)})
    assert len(notes) == 2


def test_inference_shapes_yield_to_those_of_the_profile() -> None:
    config, notes, _, _ = _parse("--optShapes=x:2x3 --shapes=x:4x3")
    assert config.opt_shapes == ({"x": (2, 3)},)
    assert "--shapes has no effect" in notes[0]


def test_no_tf32_yields_to_a_narrower_precision() -> None:
    assert _parse("--noTF32 --fp16")[0] == BuildConfig(precision="fp16")


@pytest.mark.parametrize("eight", ["--int8", "--fp8", "--auto", "--best"])
def test_fp16_beside_an_8_bit_type_is_implied(eight: str) -> None:
    alone = _parse(f"--onnx=m.onnx {eight} --saveEngine=m.engine")
    for words in (f"{eight} --fp16", f"--fp16 {eight}"):
        config, notes, model, _ = _parse(f"--onnx=m.onnx {words} --saveEngine=m.engine")
        assert (config, model) == (alone[0], "m.onnx")
        (note,) = notes
        assert note.startswith(f"--fp16 is implied by {eight}: ")


@pytest.mark.parametrize(
    ("words", "first", "second"),
    [
        ("--bf16 --int8", "--bf16", "--int8"),
        ("--fp16 --bf16", "--fp16", "--bf16"),
        ("--int8 --fp8", "--int8", "--fp8"),
        ("--int8 --best", "--int8", "--best"),
        ("--auto --fp8", "--auto", "--fp8"),
        ("--int8 --fp16 --bf16", "--int8", "--bf16"),
        ("--fp16 --int8 --fp8", "--int8", "--fp8"),
        ("--fp32 --tf32", "--fp32", "--tf32"),
    ],
)
def test_other_precisions_exclude_each_other(words: str, first: str, second: str) -> None:
    with pytest.raises(UsageError, match=f"argument {second}: not allowed with argument {first}") as caught:
        _parse(words)
    assert caught.value.where == second


def test_a_precision_may_be_given_twice() -> None:
    assert _parse("--int8 --int8")[:2] == (BuildConfig(precision="int8"), [])


@pytest.mark.parametrize(
    ("old", "setting"),
    [
        ("--memPoolSize=workspace:4096", "workspace=4096M"),
        ("--memPoolSize=workspace:1G", "workspace=1G"),
        ("--tilingOptimizationLevel=0", "tiling=none"),
        ("--tilingOptimizationLevel=3", "tiling=full"),
        ("--hardwareCompatibilityLevel=sameComputeCapability", "hardware_compatibility=same_compute_capability"),
        ("--sparsity=disable", "sparsity=disable"),
    ],
)
def test_values_are_translated(old: str, setting: str) -> None:
    assert _parse(old)[0].builder == (setting,)


def test_every_builder_option_that_an_alias_makes_exists() -> None:
    from trtopt.engine.backend import TENSORRT
    from trtopt.engine.options import parse_builder_options

    settings = {setting for old, _ in MEANT for setting in _parse(old)[0].builder}
    assert settings
    for setting in settings:
        assert not parse_builder_options([setting], TENSORRT, gpu_present=True).ignored


def test_aliases_do_not_stand_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("build", ["--help"])
    text = capsys.readouterr().out
    assert "--save-onnx" in text
    assert not re.search(r"--[a-z]+[A-Z]", text)
