"""Each option of trtexec means what the table of trtopt/cli/trtexec_flags.py says, which has all of the help texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomllib
from command_line import parse

from trtopt.cli.options import add_config_options
from trtopt.cli.parser import Parser
from trtopt.cli.trtexec import translated
from trtopt.cli.trtexec_flags import FLAGS, Flag
from trtopt.config import BuildConfig, ProfileConfig
from trtopt.errors import UsageError

HELP = tomllib.loads((Path(__file__).parent / "trtexec_help.toml").read_text(encoding="utf-8"))
LISTED = {
    f"--{name}" for texts in HELP.values() for group in texts if group != "source" for name in texts[group].split()
}

BUILD = [flag for flag in FLAGS.values() if flag.command != "profile" and not flag.is_refused]
PROFILE = [flag for flag in FLAGS.values() if flag.command != "build" and not flag.is_refused]
REFUSED = [flag for flag in FLAGS.values() if flag.is_refused]
ALL_MEANT = [flag for flag in FLAGS.values() if flag.means]


def _parse(*words: str) -> tuple[BuildConfig, list[str], str, bool]:
    """The configuration, notes, model and verbosity of a command line, which names a model if ``words`` do not."""
    has_model = words[0].startswith("--onnx") or not words[0].startswith("-")
    args, config = parse("build", words if has_model else ["model.onnx", *words])
    return config, args.notes, args.model, args.verbose


def _own(config: type[ProfileConfig]) -> list[str]:
    parser = Parser()
    add_config_options(parser, config)
    return parser.option_names()


def _id(flag: Flag) -> str:
    return flag.name


def test_the_table_has_every_option_of_the_help_texts_and_no_other() -> None:
    assert set(FLAGS) == LISTED
    assert len(HELP["10"]["build"].split()) > 60 and len(HELP["11"]["tuning"].split()) == 10


@pytest.mark.parametrize("flag", [flag for flag in BUILD if flag.means], ids=_id)
def test_an_option_of_a_build_means_its_arguments(flag: Flag) -> None:
    found = _parse(flag.example)
    assert found == _parse(*flag.arguments(flag.value))
    assert found[0] != BuildConfig() or flag.name in ("--verbose", "--onnx")
    if flag.value:
        args, config = parse("build", [*([] if flag.name == "--onnx" else ["model.onnx"]), flag.name, flag.value])
        assert (config, args.notes, args.model, args.verbose) == found


@pytest.mark.parametrize("flag", [flag for flag in PROFILE if flag.means], ids=_id)
def test_an_option_of_a_profile_means_its_arguments(flag: Flag) -> None:
    parser = Parser()
    parser.add_argument("target", nargs="?")
    add_config_options(parser, ProfileConfig)
    own = parser.option_names()
    arguments, notes = translated([flag.example], "profile", own)
    assert notes == []
    assert vars(parser.parse(arguments)) == vars(parser.parse(flag.arguments(flag.value))) != vars(parser.parse([]))
    if flag.name not in own:
        assert translated([*([flag.name, flag.value] if flag.value else [flag.name])], "profile", own)[0] == arguments


@pytest.mark.parametrize("flag", [flag for flag in BUILD if not flag.means], ids=_id)
def test_an_option_without_effect_is_accepted_with_a_note(flag: Flag) -> None:
    config, notes, _, _ = _parse(flag.example)
    assert config == BuildConfig()
    assert notes == [f"{flag.name} has no effect: {flag.note}"]


@pytest.mark.parametrize("flag", [flag for flag in PROFILE if not flag.means], ids=_id)
def test_an_option_without_effect_on_a_profile_is_accepted_with_a_note(flag: Flag) -> None:
    assert translated([flag.example], "profile", ()) == ([], [f"{flag.name} has no effect: {flag.note}"])


@pytest.mark.parametrize("flag", REFUSED, ids=_id)
@pytest.mark.parametrize("value", ["", "=1"])
def test_a_refused_option_says_what_to_do_instead(flag: Flag, value: str) -> None:
    with pytest.raises(UsageError, match="is not supported") as caught:
        translated([flag.name + value], "profile" if flag.command == "profile" else "build", ())
    assert caught.value.where == flag.name
    assert caught.value.remedy == flag.note


def test_a_build_notes_what_times_an_engine_and_refuses_what_gives_a_file() -> None:
    config, notes, _, _ = _parse("--warmUp=500", "--iterations", "100", "--useCudaGraph", "--sleepTime=3", "--fp16")
    assert config == BuildConfig(precision="fp16")
    assert notes[0] == "--warmUp has no effect: a build times nothing; `trtopt profile ENGINE --warmup=500` does"
    assert len(notes) == 4
    with pytest.raises(UsageError) as caught:
        _parse("--exportTimes=t.json")
    assert caught.value.remedy == "a build times nothing; `trtopt profile ENGINE --export-times=t.json` does"
    with pytest.raises(UsageError) as caught:
        _parse("--loadEngine=m.engine")
    assert "`trtopt profile m.engine` does" in caught.value.remedy


def test_a_value_that_profile_refuses_is_refused_of_a_build_too() -> None:
    with pytest.raises(UsageError, match="'50%' is not supported"):
        _parse("--weightStreamingBudget=50%")


def test_a_profile_refuses_what_is_of_a_build() -> None:
    with pytest.raises(UsageError, match="--saveEngine is not supported") as caught:
        translated(["--saveEngine=m.engine"], "profile", _own(ProfileConfig))
    assert caught.value.remedy == "give it to `trtopt build MODEL --saveEngine=m.engine`"


def test_several_profiles_are_repeated_shape_options() -> None:
    config, notes, _, _ = _parse(
        *"--profile=0 --minShapes=x:1x3 --optShapes=x:2x3 --maxShapes=x:4x3".split(),
        *"--profile=1 --minShapes=x:8x3 --optShapes=x:8x3 --maxShapes=x:8x3".split(),
    )
    assert config.min_shapes == ({"x": (1, 3)}, {"x": (8, 3)})
    assert config.max_shapes == ({"x": (4, 3)}, {"x": (8, 3)})
    assert len(notes) == 2


def test_inference_shapes_yield_to_those_of_the_profile() -> None:
    config, notes, _, _ = _parse("--optShapes=x:2x3", "--shapes=x:4x3")
    assert config.opt_shapes == ({"x": (2, 3)},)
    assert "--shapes has no effect" in notes[0]


def test_no_tf32_yields_to_a_narrower_precision() -> None:
    assert _parse("--noTF32", "--fp16")[0] == BuildConfig(precision="fp16")


@pytest.mark.parametrize("eight", ["--int8", "--fp8", "--auto", "--best"])
def test_fp16_beside_an_8_bit_type_is_implied(eight: str) -> None:
    alone = _parse("--onnx=m.onnx", eight, "--saveEngine=m.engine")
    for words in ((eight, "--fp16"), ("--fp16", eight)):
        config, notes, model, _ = _parse("--onnx=m.onnx", *words, "--saveEngine=m.engine")
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
        _parse(*words.split())
    assert caught.value.where == second


def test_a_precision_may_be_given_twice() -> None:
    assert _parse("--int8", "--int8")[:2] == (BuildConfig(precision="int8"), [])


@pytest.mark.parametrize(
    ("old", "setting"),
    [
        ("--memPoolSize=workspace:4096", "workspace=4096M"),
        ("--memPoolSize=workspace:1G", "workspace=1G"),
        ("--tilingOptimizationLevel=0", "tiling=none"),
        ("--tilingOptimizationLevel=3", "tiling=full"),
        ("--hardwareCompatibilityLevel=sameComputeCapability", "hardware_compatibility=same_compute_capability"),
        ("--sparsity=disable", "sparsity=disable"),
        ("--tacticSources=-JIT_CONVOLUTIONS,-EDGE_MASK_CONVOLUTIONS", "tactic_sources=none"),
        ("--tacticSources=+JIT_CONVOLUTIONS", "tactic_sources=all"),
        ("--setBuildRoute=-a=on -b=1", "build_route=-a=on -b=1"),
    ],
)
def test_values_are_translated(old: str, setting: str) -> None:
    assert _parse(old)[0].builder == (setting,)


@pytest.mark.parametrize(
    ("command", "old", "words"),
    [
        ("build", "--sparsity=force", "'force' is not supported"),
        ("build", "--tacticSources=+CUDNN", "'+CUDNN': only"),
        ("build", "--tacticSources=", "needs a value"),
        ("build", "--memPoolSize=dlaSRAM:1M", "only workspace:SIZE"),
        ("build", "--saveEngine", "needs a value"),
        ("build", "--refit=1", "takes no value"),
        ("profile", "--useProfile=1", "'1' is not supported"),
        ("profile", "--allocationStrategy=runtime", "'runtime' is not supported"),
        ("profile", "--weightStreamingBudget=50%", "'50%' is not supported"),
    ],
)
def test_values_that_are_not_supported_are_said(command: str, old: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        translated([old], "build" if command == "build" else "profile", ())
    assert words in caught.value.what and caught.value.where == old


def test_every_builder_option_that_an_alias_makes_exists() -> None:
    from trtopt.engine.backend import TENSORRT
    from trtopt.engine.options import parse_builder_options

    settings = [_parse(flag.example)[0].builder for flag in BUILD]
    assert any(settings)
    for items in settings:
        assert not parse_builder_options(items, TENSORRT, gpu_present=True).ignored


def test_aliases_do_not_stand_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("build", ["--help"])
    text = capsys.readouterr().out
    assert "--save-onnx" in text
    assert not re.search(r"--[a-z]+[A-Z]", text)
