"""``trtopt bundle``: everything of an engine in one folder, checked as a whole, and taken by what loads engines."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import detectors
import numpy as np
import onnx
import pytest
from drawn_cases import few_or
from small_models import samples, save_small

import trtopt as package
from trtopt.errors import IntegrityError, UsageError
from trtopt.serve.bundle import open_bundle

pytest.importorskip("tensorrt_rtx", reason="needs TensorRT for RTX")

Run = Callable[..., "subprocess.CompletedProcess[str]"]

BUILD = ("build", "model.onnx", "--int8", "--keep-all-int8", "--calib", "calib.npz", "--recipes", "none")
MORE = (
    "--epcontext",
    "ctx.onnx",
    "--save-onnx",
    "o.onnx",
    "--report",
    "r.json",
    "--html",
    "p.html",
    "--markdown",
    "p.md",
)
BUNDLE = ("bundle", "model.rtx.engine", "--report", "r.json", "-o", "b")


def made(trtopt: Run, folder: Path, *options: str) -> Path:
    """The bundle of a build in a folder of its own."""
    folder.mkdir(exist_ok=True)
    save_small(folder)
    np.savez(folder / "calib.npz", x=samples())
    for command in ((*BUILD, *MORE, *options), BUNDLE):
        done = trtopt(*command, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder / "b"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def bundle(trtopt: Run, tmp_path: Path) -> Path:
    return made(trtopt, tmp_path / "work")


def test_a_bundle_made_twice_is_the_same_to_the_byte(trtopt: Run, tmp_path: Path) -> None:
    first = made(trtopt, tmp_path / "one")
    second = made(trtopt, tmp_path / "two", "--no-cache")
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert names == sorted(
        "bundle.json command.txt ctx.onnx ctx.onnx.manifest.json model.rtx.engine model.rtx.engine.manifest.json"
        " report.json sbom.cdx.json".split()
    )
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_how_pictures_are_prepared_is_in_it(trtopt: Run, tmp_path: Path) -> None:
    """A script by its name and not its folder; nothing where the samples are arrays, as in the other tests."""
    work = tmp_path / "work"
    made(trtopt, work)
    script = tmp_path / "elsewhere" / "own.py"
    script.parent.mkdir()
    script.write_text("def prepare(picture):\n    raise AssertionError\n")
    for index, (given, said) in enumerate(((str(script) + ":prepare", "own.py:prepare"), ("imagenet:8", "imagenet:8"))):
        done = trtopt(*BUILD, "--preprocess", given, "--report", "r.json", cwd=work)
        assert done.returncode == 0, done.stderr
        done = trtopt("bundle", "model.rtx.engine", "--report", "r.json", "-o", f"p{index}", cwd=work)
        assert done.returncode == 0, done.stderr
        assert json.loads((work / f"p{index}" / "preprocessing.json").read_text()) == {"preprocess": said}
        assert open_bundle(work / f"p{index}")[0].engine == "model.rtx.engine"


def test_the_command_in_it_builds_the_same_engine(trtopt: Run, bundle: Path, tmp_path: Path) -> None:
    command = (bundle / "command.txt").read_text()
    assert command.startswith("trtopt build model.onnx --gpu L4 --output model.rtx.engine --int8 --calib calib.npz")
    again = tmp_path / "again"
    again.mkdir()
    for name in ("model.onnx", "calib.npz"):
        shutil.copy(bundle.parent / name, again)
    words = shlex.split(command)
    assert trtopt(*words[1:], cwd=again).returncode == 0
    assert (again / "model.rtx.engine").read_bytes() == (bundle / "model.rtx.engine").read_bytes()


def test_the_bill_of_materials_is_one_by_the_schema(bundle: Path) -> None:
    validation = pytest.importorskip("cyclonedx.validation.json", reason="needs cyclonedx-python-lib")
    from cyclonedx.schema import SchemaVersion

    text = (bundle / "sbom.cdx.json").read_text()
    assert validation.JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found = json.loads(text)
    names = {item["name"] for item in found["components"]}
    assert {"model", "tensorrt-rtx", "calibration samples (user)"} <= names
    manifest = package.verify(bundle / "model.rtx.engine")
    assert found["metadata"]["component"]["hashes"][0]["content"] == manifest.engine_sha256


def test_the_report_in_it_is_read_like_any_other(trtopt: Run, bundle: Path) -> None:
    done = trtopt("check", "b/report.json", "--baseline", "r.json", cwd=bundle.parent)
    assert done.returncode == 0, done.stderr
    text = (bundle / "report.json").read_text()
    assert str(bundle.parent) not in text


@pytest.mark.parametrize("flips", few_or(1000))
def test_a_bit_flipped_in_any_file_is_noticed(bundle: Path, flips: int) -> None:
    dice, places = random.Random(3), sorted(bundle.iterdir())
    for number in range(flips):
        place = places[number % len(places)]
        content = place.read_bytes()
        changed = bytearray(content)
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        place.write_bytes(changed)
        with pytest.raises(IntegrityError):
            open_bundle(bundle)
        place.write_bytes(content)
    open_bundle(bundle)


def test_a_file_more_or_less_is_noticed(trtopt: Run, bundle: Path) -> None:
    (bundle / "more.txt").write_text("more")
    done = trtopt("check", "b", cwd=bundle.parent)
    assert done.returncode == 3 and "does not name" in done.stderr
    (bundle / "more.txt").unlink()
    (bundle / "sbom.cdx.json").unlink()
    done = trtopt("check", "b", cwd=bundle.parent)
    assert done.returncode == 3 and "cannot be read" in done.stderr


def test_check_says_what_is_in_it(trtopt: Run, bundle: Path) -> None:
    done = trtopt("check", "b", cwd=bundle.parent)
    assert done.returncode == 0 and "The bundle is what was made" in done.stdout
    assert "sbom.cdx.json" in done.stdout and "trtopt build model.onnx" in done.stdout
    done = trtopt("check", "b", "--json", cwd=bundle.parent)
    assert json.loads(done.stdout)["schema"] == "trtopt.bundle/1"
    done = trtopt("check", "b", "--max-kernels", "3", cwd=bundle.parent)
    assert done.returncode == 2 and "no gates" in done.stderr


def test_engines_are_loaded_from_it(bundle: Path) -> None:
    with package.Engine.load(bundle, fallback=bundle.parent / "o.onnx") as engine:
        assert engine.run({"x": samples(1)})
    with pytest.raises(IntegrityError):
        (bundle / "command.txt").write_text("trtopt build another.onnx\n")
        package.Engine.load(bundle, fallback=bundle.parent / "o.onnx")


def test_a_signed_bundle_is_checked_with_its_key(trtopt: Run, tmp_path: Path) -> None:
    subprocess.run("openssl genpkey -algorithm ed25519 -out k.pem".split(), cwd=tmp_path, check=True)
    subprocess.run("openssl pkey -in k.pem -pubout -out p.pem".split(), cwd=tmp_path, check=True)
    key = str(tmp_path / "k.pem")
    folder = made(trtopt, tmp_path / "work", "--sign", key).parent
    done = trtopt("check", "b", "--key", "../p.pem", cwd=folder)
    assert done.returncode == 3 and "bundle is not signed" in done.stderr
    assert trtopt(*BUNDLE[:-1], "s", "--sign", key, cwd=folder).returncode == 0
    assert trtopt("check", "s", "--key", "../p.pem", cwd=folder).returncode == 0
    assert (folder / "s" / "model.rtx.engine.manifest.sig").exists()
    subprocess.run("openssl genpkey -algorithm ed25519 -out other.pem".split(), cwd=tmp_path, check=True)
    subprocess.run("openssl pkey -in other.pem -pubout -out q.pem".split(), cwd=tmp_path, check=True)
    assert trtopt("check", "s", "--key", "../q.pem", cwd=folder).returncode == 3


def test_the_part_for_the_host_is_in_it(trtopt: Run, tmp_path: Path) -> None:
    onnx.save(detectors.detector(), tmp_path / "det.onnx")
    options = ("--recipes", "none", "--report", "r.json", "--epcontext", "ctx.onnx", "--epcontext-embed")
    assert trtopt("build", "det.onnx", *options).returncode == 0
    assert trtopt("bundle", "det.rtx.engine", "--report", "r.json", "-o", "b").returncode == 0
    assert (tmp_path / "b" / "det.host.onnx").exists()
    assert trtopt("bundle", "ctx.onnx", "--report", "r.json", "-o", "c").returncode == 0
    index, engine = open_bundle(tmp_path / "c")
    assert index.engine == "ctx.onnx" and engine.data == (tmp_path / "det.rtx.engine").read_bytes()
    assert not (tmp_path / "c" / "det.rtx.engine").exists()


def test_wrong_requests_write_nothing(trtopt: Run, bundle: Path) -> None:
    folder = bundle.parent
    report = json.loads((folder / "r.json").read_text())
    report["engine"]["sha256"] = "0" * 64
    (folder / "other.json").write_text(json.dumps(report))
    (folder / "no.json").write_text("{}")
    for options, code, words in (
        (("model.rtx.engine", "--report", "r.json", "-o", "b"), 2, "there already"),
        (("model.rtx.engine", "--report", "other.json", "-o", "c"), 2, "not of the build of this engine"),
        (("model.rtx.engine", "--report", "no.json", "-o", "c"), 2, "not a trtopt report"),
        (("model.rtx.engine", "--report", "r.json", "-o", "none/c"), 2, "cannot be written"),
        (("model.onnx", "--report", "r.json", "-o", "c"), 2, "Neither an engine"),
        (("none.engine", "--report", "r.json", "-o", "c"), 2, "cannot be read"),
        (("model.rtx.engine", "-o", "c"), 2, "--report"),
    ):
        done = trtopt("bundle", *options, cwd=folder)
        assert (done.returncode, words in done.stderr) == (code, True), (options, done.stderr)
        assert not (folder / "c").exists() and not list(folder.glob(".c.*"))


@pytest.mark.parametrize("name", ["", "trtopt"])
def test_a_folder_that_is_no_bundle_is_said_to_be_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(exist_ok=True)
    with pytest.raises(UsageError, match="no bundle"):
        open_bundle(tmp_path / name)
