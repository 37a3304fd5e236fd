"""The manifest that ``trtopt build`` writes, its signature, and what ``trtopt profile`` does with it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import detectors
import numpy as np
import onnx
import pytest
from small_models import samples, save_external, save_small

import trtopt as package
from trtopt.engine.manifest import manifest_path, signature_path
from trtopt.errors import IntegrityError

pytest.importorskip("tensorrt_rtx", reason="needs TensorRT for RTX")

Run = Callable[..., "subprocess.CompletedProcess[str]"]

PLAIN = ("--calib", "calib.npz", "--recipes", "none")
INT8 = ("--int8", "--keep-all-int8", *PLAIN)
METRIC = "def flat(run):\n    return 1.0\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_small(tmp_path)
    np.savez(tmp_path / "calib.npz", x=samples())
    np.savez(tmp_path / "eval.npz", x=samples(2))
    (tmp_path / "metric.py").write_text(METRIC)
    return tmp_path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def built(trtopt: Run, folder: Path, *options: str, name: str = "m.engine") -> dict[str, Any]:
    """The manifest of a build in ``folder``."""
    done = trtopt("build", "model.onnx", "-o", name, *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(manifest_path(folder / name).read_bytes()))


def test_a_manifest_says_what_the_engine_is_and_what_it_was_made_from(trtopt: Run, folder: Path) -> None:
    options = ("--eval", "eval.npz", "--metric", "metric.py:flat", "--io", "x:fp16:hwc4", "--gpu", "RTX 4090")
    done = trtopt("build", "model.onnx", *INT8, *options, "--report", "r.json")
    assert done.returncode == 0, done.stderr
    engine = folder / "model.rtx.engine"
    assert f"\n  {manifest_path(engine).name}\n" in done.stdout
    report = json.loads((folder / "r.json").read_text())
    assert report["engine"]["manifest"] == manifest_path(engine).name
    found = json.loads(manifest_path(engine).read_bytes())
    assert (found["schema"], found["trtopt"]) == ("trtopt.manifest/1", package.__version__)
    assert (found["engine_sha256"], found["engine_bytes"]) == (sha256(engine), engine.stat().st_size)
    for name in ("backend", "backend_version", "compute_capabilities"):
        assert found[name] == report["engine"][name]
    assert (found["gpu"], found["compute_capabilities"]) == ("RTX-4090", ["8.9"])
    assert found["model_sha256"] == sha256(folder / "model.onnx") == report["model"]["sha256"]
    assert found["calibration"]["source"] == found["evaluation"]["source"] == "user"
    assert found["calibration"]["sha256"] != found["evaluation"]["sha256"]
    script = folder / "metric.py"
    assert found["files"] == [{"name": "metric.py:flat", "bytes": len(METRIC), "sha256": sha256(script)}]
    assert found["options"] == {
        "gpu": "RTX-4090", "precision": "int8", "backend": "tensorrt-rtx", "keep_all_int8": True, "recipes": "none",
        "io": ["x:fp16:hwc4"],
    }  # fmt: skip
    canonical = json.dumps(found["options"], sort_keys=True, separators=(",", ":"))
    assert found["options_sha256"] == hashlib.sha256(canonical.encode()).hexdigest()
    assert found["precision"] == report["precision"]
    assert {"conv1", "conv2"} & set(found["eight_bit"])
    (fed,), (given,) = found["inputs"], found["outputs"]
    assert (fed["name"], fed["dtype"], fed["shape"], fed["layout"]) == ("x", "float16", ["N", 4, 8, 8], "hwc4")
    assert fed["ranges"] == [{"min": [1, 4, 8, 8], "opt": [8, 4, 8, 8], "max": [16, 4, 8, 8]}]
    assert (given["name"], given["dtype"], given["layout"], given["ranges"]) == ("scores", "float32", "chw", [])
    assert found["accuracy"] == report["accuracy"] and found["accuracy"]["metric"]["name"]
    assert found["host"] is None
    assert package.verify(engine).gpu == "RTX-4090"


def test_the_same_inputs_give_the_same_bytes_wherever_they_lie(trtopt: Run, folder: Path) -> None:
    first = built(trtopt, folder, *INT8)
    content = manifest_path(folder / "m.engine").read_bytes()
    assert built(trtopt, folder, *INT8, "--report", "r.json", "--cache-dir", "kept", name="again.engine") == first
    (other := folder / "other").mkdir()
    for name in ("model.onnx", "calib.npz"):
        shutil.copy(folder / name, other / name)
    built(trtopt, other, *INT8)
    assert manifest_path(other / "m.engine").read_bytes() == content
    assert (other / "m.engine").read_bytes() == (folder / "m.engine").read_bytes()
    assert str(folder).encode() not in content


def test_what_a_build_is_made_from_shows(trtopt: Run, folder: Path) -> None:
    plain = built(trtopt, folder, *PLAIN)
    for options, changed in (
        (("--calib", "eval.npz"), {"calibration", "evaluation"}),
        (("--eval", "eval.npz"), {"evaluation"}),
        (("--gpu", "T4"), {"gpu", "compute_capabilities", "options", "options_sha256"}),
        (("--metric", "metric.py:flat"), {"files"}),
        (("--fp32",), {"precision", "options", "options_sha256"}),
    ):
        found = built(trtopt, folder, *PLAIN, *options)
        assert {name for name in changed if found[name] == plain[name]} == set(), options
        assert {
            name for name in ("model_sha256", "inputs", "outputs", "backend") if found[name] != plain[name]
        } == set()


def test_weights_beside_the_model_are_part_of_its_hash(trtopt: Run, folder: Path) -> None:
    save_external(folder)
    before = built(trtopt, folder, *PLAIN)
    data = np.fromfile(folder / "weights.bin", np.float32)
    (data * np.float32(0.5)).tofile(folder / "weights.bin")
    after = built(trtopt, folder, *PLAIN)
    assert before["model_sha256"] != after["model_sha256"]


def test_the_part_for_the_host_is_in_the_manifest(trtopt: Run, tmp_path: Path) -> None:
    onnx.save(detectors.detector(), tmp_path / "model.onnx")
    np.savez(tmp_path / "calib.npz", image=detectors.images())
    found = built(trtopt, tmp_path, "--fp16", *PLAIN)
    part = tmp_path / "m.host.onnx"
    assert found["host"] == {
        "files": [{"name": part.name, "bytes": part.stat().st_size, "sha256": sha256(part)}],
        "inputs": ["boxes", "scores"],
        "outputs": ["detections", "selected"],
        "model_outputs": ["detections", "selected", "scores"],
    }
    assert [item["name"] for item in found["outputs"]] == ["scores", "boxes"]
    package.verify(tmp_path / "m.engine")
    part.write_bytes(part.read_bytes() + b"\0")
    with pytest.raises(IntegrityError, match="part of the model for the host"):
        package.verify(tmp_path / "m.engine")


def test_a_failed_gate_leaves_engine_and_manifest_of_before(trtopt: Run, folder: Path) -> None:
    before = built(trtopt, folder, *PLAIN)
    done = trtopt("build", "model.onnx", "-o", "m.engine", *INT8, "--min-sqnr-db", "200", "--json")
    assert done.returncode == 7 and json.loads(done.stdout)["engine"] is None
    assert json.loads(manifest_path(folder / "m.engine").read_bytes()) == before
    package.verify(folder / "m.engine")


@pytest.mark.parametrize("taken", ["m.engine.manifest.json", "m.engine.manifest.sig"])
def test_no_output_and_no_input_is_overwritten_by_a_manifest(trtopt: Run, folder: Path, taken: str) -> None:
    done = trtopt("build", "model.onnx", "-o", "m.engine", "--report", taken)
    assert done.returncode == 2 and "would overwrite" in done.stderr
    (folder / "model.onnx").rename(folder / taken)
    before = (folder / taken).read_bytes()
    done = trtopt("build", taken, "-o", "m.engine")
    assert done.returncode == 2 and "would overwrite the model" in done.stderr
    assert (folder / taken).read_bytes() == before and not (folder / "m.engine").exists()


def keys(folder: Path) -> None:
    """Write ``key.pem`` and ``key.pub.pem``."""
    reason = "needs trtopt[sign]"
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization", reason=reason)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, pem = Ed25519PrivateKey.generate(), serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "key.pub.pem").write_bytes(public)


def test_a_signed_build_is_known_by_its_key(trtopt: Run, folder: Path) -> None:
    keys(folder)
    unsigned = built(trtopt, folder, *PLAIN)
    engine = folder / "m.engine"
    with pytest.raises(IntegrityError, match="not signed"):
        package.verify(engine, key=folder / "key.pub.pem")
    done = trtopt("build", "model.onnx", "-o", "m.engine", *PLAIN, "--sign", "key.pem")
    assert done.returncode == 0 and f"\n  {signature_path(engine).name}\n" in done.stdout
    assert json.loads(manifest_path(engine).read_bytes()) == unsigned
    package.verify(engine, key=folder / "key.pub.pem")
    built(trtopt, folder, *INT8)
    assert not signature_path(engine).exists()


def test_a_key_that_is_none_ends_the_run_before_the_work(trtopt: Run, folder: Path) -> None:
    keys(folder)
    for key, words in (("none.pem", "cannot be read"), ("key.pub.pem", "not a private Ed25519 key")):
        done = trtopt("build", "model.onnx", "--sign", key, "--verbose")
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
        assert "start load" not in done.stderr
    done = trtopt("optimize", "model.onnx", "-o", "o.onnx", "--sign", "key.pem")
    assert done.returncode == 2 and "no engine to sign" in done.stderr
    assert not (folder / "o.onnx").exists()


def test_profile_refuses_what_was_altered_and_takes_what_has_no_manifest(trtopt: Run, folder: Path) -> None:
    from trtopt.hardware.probe import present_gpu

    if present_gpu() is not None:
        pytest.skip("this machine has a GPU")
    built(trtopt, folder, *PLAIN, "--gpu", "L4")
    engine = folder / "m.engine"
    done = trtopt("profile", "m.engine")
    assert done.returncode == 4 and "8.9 (L4)" in done.stderr and "warning" not in done.stderr
    keys(folder)
    done = trtopt("profile", "m.engine", "--key", "key.pub.pem")
    assert done.returncode == 3 and "not signed" in done.stderr
    content = engine.read_bytes()
    engine.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = trtopt("profile", "m.engine")
    assert done.returncode == 3 and "not the one that its manifest describes" in done.stderr
    assert "8.9 (L4)" in done.stderr and "Traceback" not in done.stderr
    engine.write_bytes(content)
    manifest_path(engine).unlink()
    done = trtopt("profile", "m.engine")
    assert done.returncode == 4 and "warning: m.engine has no manifest" in done.stderr


def test_check_verifies_an_engine(trtopt: Run, folder: Path) -> None:
    keys(folder)
    found = built(trtopt, folder, *PLAIN, "--gpu", "L4", "--sign", "key.pem")
    done = trtopt("check", "m.engine", "--key", "key.pub.pem")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "The engine is what was built"
    for text in (f"tensorrt-rtx {found['backend_version']}", "L4, compute capability 8.9", found["engine_sha256"]):
        assert text in done.stdout
    assert "fits the key key.pub.pem" in done.stdout
    assert "not looked at" in trtopt("check", "m.engine").stdout
    fields = {name: value for name, value in found.items() if name != "digest"}
    assert json.loads(trtopt("check", "m.engine", "--json").stdout) == fields
    done = trtopt("check", "m.engine", "--max-bytes", "5")
    assert done.returncode == 2 and "--max-bytes" in done.stderr
    signature_path(folder / "m.engine").unlink()
    done = trtopt("check", "m.engine", "--key", "key.pub.pem")
    assert done.returncode == 3 and "not signed" in done.stderr and done.stdout == ""
    (folder / "m.engine").write_text("{}")
    done = trtopt("check", "m.engine")
    assert done.returncode == 3 and "not the one that its manifest describes" in done.stderr
    manifest_path(folder / "m.engine").rename(folder / "other")
    assert trtopt("check", "m.engine").returncode == 2  # taken for a report, which it is not either


def test_a_key_is_for_engines_alone(trtopt: Run, folder: Path) -> None:
    keys(folder)
    (folder / "report.json").write_text("{}")
    for arguments in (("check", "report.json"), ("profile", "model.onnx"), ("check", "model.onnx")):
        done = trtopt(*arguments, "--key", "key.pub.pem")
        assert done.returncode == 2 and "Only an engine is signed" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_file_is_in_the_manifest_as_it_was_before_the_work(trtopt: Run, folder: Path) -> None:
    script = folder / "changes.py"
    script.write_text("def score(run):\n    open(__file__, 'a').write('# later')\n    return 1.0\n")
    before = sha256(script)
    found = built(trtopt, folder, *PLAIN, "--metric", "changes.py:score")
    assert [item["sha256"] for item in found["files"]] == [before] != [sha256(script)]


def test_the_folder_of_a_metric_is_not_in_the_manifest(trtopt: Run, tmp_path: Path) -> None:
    """The same inputs in another folder give the same manifest, and so does a build that uses no cache."""
    found = []
    for name, options in (("first", ()), ("second", ("--no-cache",))):
        folder = tmp_path / name
        folder.mkdir()
        save_small(folder)
        (folder / "mine.py").write_text("def score(run):\n    return 1.0\n")
        metric = ("--metric", f"{folder / 'mine.py'}:score")
        done = trtopt("build", "model.onnx", "--fp32", "--recipes", "none", *metric, *options, cwd=folder)
        assert done.returncode == 0, done.stderr
        found.append((folder / "model.rtx.engine.manifest.json").read_text())
    assert found[0] == found[1] and str(tmp_path) not in found[0] and "mine.py:score" in found[0]
