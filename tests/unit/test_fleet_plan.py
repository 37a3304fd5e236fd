"""A sweep's file read: names, keys, and what is refused before anything runs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from sweep_samples import result

from trtopt.errors import UsageError
from trtopt.fleet.executor import LocalExecutor
from trtopt.fleet.plan import Job, check_distinct, check_recipes, check_unchanged, job_key, load_plan, model_names
from trtopt.fleet.ray_executor import _fits
from trtopt.fleet.store import Entry
from trtopt.fleet.sweep import Planned, _estimate
from trtopt.rewrite.registry import pack_hashes

MODEL = "<ir_version: 8, opset_import: ['': 17]> net (float[N,4] x) => (float[N,4] y) { y = Relu(x) }".replace("'", '"')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models of different content, samples, and a script."""
    for name, operator in (("a.onnx", "Relu"), ("b.onnx", "Neg")):
        onnx.save(onnx.parser.parse_model(MODEL.replace("Relu", operator)), tmp_path / name)
    np.savez(tmp_path / "calib.npz", x=np.zeros((4, 4), np.float32))
    (tmp_path / "metric.py").write_text("def score(run):\n    return 1.0\n")
    return tmp_path


def _jobs(folder: Path, matrix: str, build: str = "", sweep: str = "") -> tuple[Job, ...]:
    path = folder / "sweep.toml"
    path.write_text(f"[build]\n{build}\n[matrix]\n{matrix}\n{sweep}\n", encoding="utf-8")
    return load_plan(path).jobs


def _key(job: Job) -> str:
    return job_key(job, "0.1.0", "1.7", {})


def test_the_matrix_gives_a_job_for_each_combination(folder: Path) -> None:
    matrix = 'model = ["a.onnx", "b.onnx"]\ngpu = ["L4", "rtx 4090", "V100"]\nopt_shapes = ["x:1x4", "x:8x4"]'
    jobs = _jobs(folder, matrix, 'calib = "calib.npz"')
    assert len(jobs) == 12 and len({_key(job) for job in jobs}) == 12
    assert jobs[3].varied == {"model": "a", "gpu": "rtx-4090", "opt_shapes": "x-8x4"}
    assert (jobs[3].gpu, jobs[3].config.backend, jobs[3].place) == ("RTX-4090", "tensorrt-rtx", "")
    assert jobs[3].config.opt_shapes == ({"x": (8, 4)},)
    # TensorRT for RTX does not target Volta: TensorRT builds there, on a machine that has the GPU.
    assert (jobs[4].config.backend, jobs[4].place) == ("tensorrt", "V100-SXM2-16GB")
    assert jobs[0].task().model == str(folder / "a.onnx")
    assert jobs[0].task().options["calib"] == str(folder / "calib.npz")


def test_keys_are_of_contents_and_options_not_of_names(folder: Path) -> None:
    (before,) = _jobs(folder, 'model = ["a.onnx"]', 'calib = "calib.npz"\nmetric = "metric.py:score"')
    os.rename(folder / "a.onnx", folder / "other.onnx")
    os.rename(folder / "metric.py", folder / "moved.py")
    (after,) = _jobs(folder, 'model = ["other.onnx"]', 'calib = "calib.npz"\nmetric = "moved.py:score"')
    assert _key(before) == _key(after)
    changes = {
        "a precision": ('calib = "calib.npz"\nmetric = "moved.py:score"\nprecision = "int8"', ""),
        "a function": ('calib = "calib.npz"\nmetric = "moved.py:other"', ""),
        "no samples": ('metric = "moved.py:score"', ""),
        "a shape": ('calib = "calib.npz"\nmetric = "moved.py:score"\nopt_shapes = ["x:2x4"]', ""),
        "on its GPU": ('calib = "calib.npz"\nmetric = "moved.py:score"', "[sweep]\non_gpu = true"),
        "measured": ('calib = "calib.npz"\nmetric = "moved.py:score"', "[sweep]\nmeasure = true"),
    }
    keys = {_key(_jobs(folder, 'model = ["other.onnx"]', build, sweep)[0]) for build, sweep in changes.values()}
    assert len(keys - {_key(after)}) == len(changes)
    np.savez(folder / "calib.npz", x=np.ones((4, 4), np.float32))
    assert _key(_jobs(folder, 'model = ["other.onnx"]', 'calib = "calib.npz"\nmetric = "moved.py:score"')[0]) != _key(
        after
    )
    assert job_key(after, "0.1.1", "1.7", {}) != _key(after) != job_key(after, "0.1.0", "1.8", {})


def test_others_recipes_are_in_the_key_by_their_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (with_recipes,) = _jobs(folder, 'model = ["a.onnx"]')
    (without,) = _jobs(folder, 'model = ["a.onnx"]', 'recipes = "none"')
    pack, info = folder / "site" / "their_pack", folder / "site" / "their_pack-1.0.dist-info"
    pack.mkdir(parents=True)
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their_pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trtopt.recipes]\ntheirs = their_pack.recipes:PACK\n")
    monkeypatch.syspath_prepend(folder / "site")
    keys = [_key(with_recipes)]
    for code in ("raise RuntimeError", "PACK = ()"):
        (pack / "__init__.py").write_text("")
        (pack / "recipes.py").write_text(code)
        packs = pack_hashes()
        assert list(packs) == ["theirs"], "nothing of it is run"
        keys.append(job_key(with_recipes, "0.1.0", "1.7", packs))
        assert job_key(without, "0.1.0", "1.7", packs) == _key(without)
    assert len(set(keys)) == 3


def test_the_cache_and_the_number_of_workers_are_not_in_the_key(folder: Path) -> None:
    (plain,) = _jobs(folder, 'model = ["a.onnx"]')
    (other,) = _jobs(folder, 'model = ["a.onnx"]', 'cache_dir = "here"\nno_cache = true', "[sweep]\nworkers = 3")
    assert _key(plain) == _key(other)


def test_weights_of_their_own_are_part_of_the_model(folder: Path) -> None:
    added = MODEL.replace("{ y = Relu(x) }", "<float[4] w = {1, 1, 1, 1}> { y = Add(x, w) }")
    model = onnx.parser.parse_model(added)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones(4, np.float32), "w"))  # as raw bytes
    onnx.save(model, folder / "w.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    (before,) = _jobs(folder, 'model = ["w.onnx"]')
    assert [file.name for file in before.inputs[0].files] == ["w.onnx", "w.bin"]
    (folder / "w.bin").write_bytes(np.full(4, 2, np.float32).tobytes())
    assert _key(_jobs(folder, 'model = ["w.onnx"]')[0]) != _key(before)
    with pytest.raises(UsageError, match="changed since the sweep was planned"):
        os.utime(folder / "w.bin", ns=(0, 0))
        check_unchanged(before.inputs)


def test_models_of_one_name_are_told_apart_by_their_folders_and_find_their_samples(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "model.onnx").write_bytes((folder / "a.onnx").read_bytes())
        np.savez(folder / f"{name}-model.npz", x=np.zeros((1, 4), np.float32))
    jobs = _jobs(folder, 'model = ["one/model.onnx", "two/model.onnx"]', 'calib = "{model}.npz"')
    assert [job.model for job in jobs] == ["one-model", "two-model"]
    assert [Path(str(job.config.calib)).name for job in jobs] == ["one-model.npz", "two-model.npz"]
    assert model_names(["/a/x.onnx", "/b/y.onnx"]) == {"/a/x.onnx": "x", "/b/y.onnx": "y"}


def test_models_find_samples_by_their_names_as_they_stand_and_are_told_apart(folder: Path) -> None:
    os.rename(folder / "a.onnx", folder / "my net.onnx")
    np.savez(folder / "my net.npz", x=np.zeros((1, 4), np.float32))
    (job,) = _jobs(folder, 'model = ["my net.onnx"]', 'calib = "{model}.npz"')
    assert Path(str(job.config.calib)).name == "my net.npz" and job.model == "my-net"
    os.rename(folder / "b.onnx", folder / "my-net.onnx")
    with pytest.raises(UsageError, match="Two models have one name"):
        _jobs(folder, 'model = ["my net.onnx", "my-net.onnx"]')
    assert len(_jobs(folder, 'model = ["my net.onnx", "./my net.onnx"]')) == 2, "that they are one is said later"


class _Cluster(LocalExecutor):
    """Ten CPUs; of GPUs, two L4 and one A10."""

    def at_once(self, place: str) -> int:
        return {"L4": 2, "A10": 1, "T4": 0}.get(place, self.workers)


@pytest.mark.parametrize(
    ("missing", "seconds"),
    [
        ({}, 0.0),
        ({"": 5}, 10.0),
        ({"": 20}, 20.0),
        ({"L4": 6}, 30.0),
        ({"L4": 1, "A10": 1, "": 1}, 10.0),
        ({"L4": 6, "A10": 4}, 40.0),
        ({"A10": 1, "": 29}, 30.0),
        ({"T4": 2}, 20.0),
    ],
)
def test_the_time_of_a_sweep_is_that_of_its_busiest_place(
    folder: Path, missing: dict[str, int], seconds: float
) -> None:
    """Jobs of 10 s each, as the one in the store; of the T4 there is none any more."""
    (job,) = _jobs(folder, 'model = ["a.onnx"]')
    places = [place for place, count in missing.items() for _ in range(count)]
    planned = [Planned(dataclasses.replace(job, place=place), "", None) for place in places]
    done = Planned(job, "", Entry({}, result(seconds=10.0)))
    assert _estimate((done, *planned), _Cluster(workers=10)) == seconds
    assert _estimate(tuple(planned), _Cluster(workers=10)) == (None if planned else 0.0)


def test_two_jobs_with_one_output_are_refused(folder: Path) -> None:
    jobs = _jobs(folder, 'model = ["a.onnx"]\ngpu = ["L4", "NVIDIA L4"]')
    with pytest.raises(
        UsageError, match="Two jobs of the matrix have one output: model a, gpu L4; and model a, gpu NV"
    ):
        check_distinct(jobs, [_key(job) for job in jobs])


@pytest.mark.parametrize(
    ("matrix", "build", "sweep", "message", "remedy"),
    [
        ('gpu = ["L4"]', "", "", "There is no model", "model.onnx"),
        ('model = ["none.onnx"]', "", "", "The model cannot be read", "check the path"),
        ('model = ["a.onnx"]', 'calib = "none.npz"', "", "--calib cannot be read", "check the path"),
        ('model = ["a.onnx"]\ngpu = ["L5"]', "", "", "No GPU is called 'L5'", "did you mean L4"),
        ('model = ["a.onnx"]', 'output = "x.engine"', "", "--output has no place in a sweep", "the store keeps"),
        ('model = ["a.onnx"]\nreport = ["x.json"]', "", "", "--report has no place", "the store keeps"),
        ('model = ["a.onnx"]', 'sign = "key.pem"', "", "--sign has no place", "leave it out"),
        ('model = ["a.onnx"]', 'calib_cache = "x.calib"', "", "cannot share a file of statistics", "cache folder"),
        ('model = ["a.onnx"]\ngpu = ["portable"]', "", "[sweep]\non_gpu = true", "A portable engine", "name a GPU"),
        ('model = ["a.onnx"]', "", "[sweep]\nworker = 2", "Unknown setting 'worker'", "did you mean workers?"),
        ('model = ["a.onnx"]', "", '[sweep]\nworkers = "2"', "workers must be a whole number", "sweep.md"),
        ('model = ["a.onnx"]', "", "[sweep]\nworkers = true", "workers must be a whole number", "sweep.md"),
        ('model = ["a.onnx"]', "", "[sweep]\nretries = -1", "retries is -1", "sweep.md"),
        ('model = ["a.onnx"]', "", '[sweep]\nstore = ""', "store is ''", "sweep.md"),
        ('model = ["a.onnx"]', "", '[sweep]\nstore = "file://store"', "is relative", "file:///"),
        ('model = ["a.onnx"]', "", '[sweep]\nstore = "simplecache::file://~/store"', "is relative", "file:///"),
        ('model = ["a.onnx"]', "", '[sweep]\nstore = "~nobody-here/store"', "There is no home folder", "whole path"),
        ('model = ["a.onnx"]', "", "[prices]\nL5 = 1", "No GPU is called 'L5'", "did you mean L4"),
        ('model = ["a.onnx"]', "", "[prices]\nL4 = -1", "-1 is no price", "one hour"),
        ('model = ["a.onnx"]', "", "[prices]\nL4 = nan", "nan is no price", "one hour"),
        ('model = ["a.onnx"]', "", '[prices]\nL4 = 1\n"NVIDIA L4" = 2', "L4 has two prices", "leave one out"),
        ('modell = ["a.onnx"]', "", "", "Unknown option 'modell'", "did you mean model?"),
        ('model = ["a.onnx"]\nopt_shapes = ["x=1"]', "", "", "Not a shape", "write name"),
    ],
)
def test_a_wrong_file_is_refused(folder: Path, matrix: str, build: str, sweep: str, message: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        _jobs(folder, matrix, build, sweep)
    assert message in caught.value.what and remedy in caught.value.remedy and caught.value.where


@pytest.mark.parametrize(
    ("matrix", "build", "message", "where"),
    [
        ('gpu = ["L4", "L5"]', "", "No GPU is called 'L5'", "[matrix] gpu"),
        ("", 'gpu = "L5"', "No GPU is called 'L5'", "[build] gpu"),
        ("", 'builder = ["tilling=full"]', "There is no builder option 'tilling'", "[build] builder"),
        ('builder = [[], ["tiling=ful"]]', "", "Not a value of this", "[matrix] builder: tiling=ful"),
        ('opt_shapes = ["x=1"]', "", "Not a shape", "[matrix] opt_shapes: x=1"),
    ],
)
def test_a_wrong_value_is_found_in_the_file(folder: Path, matrix: str, build: str, message: str, where: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        _jobs(folder, f'model = ["a.onnx"]\n{matrix}', build)
    assert caught.value.where == f"{folder / 'sweep.toml'}: {where}"


def test_what_a_compiler_cannot_do_is_left_to_its_job(folder: Path) -> None:
    matrix = 'model = ["a.onnx"]\nbackend = ["tensorrt", "tensorrt-rtx"]'
    assert len(_jobs(folder, matrix, 'builder = ["version_compatible=true", "refit=true"]')) == 2


def test_an_unknown_recipe_is_found_in_the_file_unless_others_may_have_it(folder: Path) -> None:
    path = folder / "sweep.toml"
    jobs = _jobs(folder, 'model = ["a.onnx"]\nrecipes = ["none", "fold-constant"]')
    with pytest.raises(UsageError, match="There is no recipe named fold-constant") as caught:
        check_recipes(path, jobs, {})
    assert caught.value.where == f"{path}: [matrix] recipes" and "did you mean" in caught.value.remedy
    check_recipes(path, jobs, {"theirs": "0" * 64})
    check_recipes(path, _jobs(folder, 'model = ["a.onnx"]', 'recipes = "all"'), {})


def test_a_store_is_below_the_file_or_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    places = {"a/b": str(folder / "a/b"), "~/b": "/home/me/b", "./~": str(folder / "~"), "file:///b": "file:///b"}
    for written, place in places.items():
        path = folder / "sweep.toml"
        path.write_text(f'[matrix]\nmodel = ["a.onnx"]\n[sweep]\nstore = "{written}"\n', encoding="utf-8")
        assert load_plan(path).settings.store == place


def test_a_file_without_a_matrix_is_refused(folder: Path) -> None:
    (folder / "sweep.toml").write_text("[build]\n")
    with pytest.raises(UsageError, match="There is nothing to sweep over"):
        load_plan(folder / "sweep.toml")


@pytest.mark.parametrize(
    ("label", "gpu", "fits"),
    [
        ("L4", "L4", True),
        ("A100", "A100-SXM4-80GB", True),
        ("A100-SXM4-80GB", "A100-SXM4-80GB", True),
        ("A100-SXM4-40GB", "A100-SXM4-80GB", False),
        ("A10", "A100-SXM4-80GB", False),
        ("L4", "L40S", False),
        ("L40S", "L4", False),
        ("GeForce-RTX-4090", "RTX-4090", True),
        ("RTX-PRO-6000", "RTX-PRO-6000-BW-WS", True),
        ("", "L4", False),
        ("NVIDIA", "L4", False),
    ],
)
def test_the_accelerator_types_of_ray_that_fit_a_gpu(label: str, gpu: str, fits: bool) -> None:
    assert _fits(label, gpu) is fits
