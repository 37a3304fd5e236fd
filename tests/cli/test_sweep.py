"""``trtopt sweep``, and what ``trtopt report`` answers from its report."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_models import samples, save_small

Run = Callable[..., "subprocess.CompletedProcess[str]"]

SWEEP = """\
[build]
calib = "calib.npz"
recipes = "none"
opt_shapes = ["x:1x3x8x8"]
[matrix]
gpu = ["L4", "V100"]
precision = ["fp16", "fp32"]
model = ["model.onnx"]
backend = ["tensorrt-rtx"]
[sweep]
store = "store"
workers = 1
currency = "EUR"
[prices]
L4 = 0.7
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, samples and a sweep, half of whose jobs cannot be built."""
    save_small(tmp_path)
    np.savez(tmp_path / "calib.npz", x=samples())
    (tmp_path / "sweep.toml").write_text(SWEEP, encoding="utf-8")
    return tmp_path


def test_a_sweep_from_its_plan_to_the_answer(trtopt: Run, folder: Path) -> None:
    planned = trtopt("sweep", "sweep.toml", "--dry-run")
    assert planned.returncode == 0 and not (folder / "store").exists()
    assert "4 jobs, 0 in the store, 4 to build" in planned.stdout and "time: unknown" in planned.stdout

    forms = ("--report", "r.json", "--markdown", "r.md", "--csv", "r.csv", "--html", "r.html")
    done = trtopt("sweep", "sweep.toml", "--workers", "2", *forms)
    assert done.returncode == 4, "what a job failed with"
    assert "2 built, 2 failed" in done.stdout and done.stdout.count("failed, exit code 4") == 2
    assert "trtopt report r.json --take engines" in done.stdout
    assert "gpu V100, precision fp32 TensorRT for RTX cannot build for V100" in " ".join(done.stdout.split())
    assert "4 of 4: gpu" in done.stderr
    found = json.loads((folder / "r.json").read_text())
    rows = {(row["gpu"], row["precision"]): row for row in found["rows"]}
    assert [row["status"] for row in rows.values()] == ["done", "done", "failed", "failed"]
    assert rows["V100-SXM2-16GB", "fp16"]["failure"]["remedy"] and rows["L4", "fp16"]["cost"] > 0
    assert all((folder / f"r.{form}").stat().st_size for form in ("md", "csv", "html"))
    verified = trtopt("check", str(Path(rows["L4", "fp16"]["engine"]).with_name("report.json")), "--max-kernels", "99")
    assert verified.returncode == 0 and "gates passed" in verified.stdout

    shutil.rmtree(Path(rows["L4", "fp32"]["engine"]).parent)
    planned = trtopt("sweep", "sweep.toml", "--dry-run", "--json")
    plan = json.loads(planned.stdout)
    assert [job["in_store"] for job in plan["jobs"]] == [True, False, False, False] and plan["estimate_s"] > 0
    again = json.loads(trtopt("sweep", "sweep.toml", "--json").stdout)
    assert [row["status"] for row in again["rows"]] == ["cached", "done", "failed", "failed"]
    assert again["rows"][1]["result"]["engine_sha256"] == rows["L4", "fp32"]["result"]["engine_sha256"]

    answer = trtopt("report", "r.json", "--max-latency-ms", "5", "--max-drop", "0.01")
    cheapest = min(("fp16", "fp32"), key=lambda precision: rows["L4", precision]["cost"])
    assert answer.returncode == 0 and answer.stdout.startswith(f"model: gpu L4, precision {cheapest}")
    assert "EUR per million inferences" in answer.stdout and "dearer" in answer.stdout
    nothing = trtopt("report", "r.json", "--max-latency-ms", "0.000001", "--json")
    assert json.loads(nothing.stdout)["models"][0]["best"] is None

    taken = trtopt("report", "r.json", "--max-drop", "1%", "--take", "taken")
    place = Path("taken") / f"model-L4-{cheapest}"
    assert taken.returncode == 0 and f"taken: {place / 'model.rtx.engine'}" in taken.stdout, taken.stderr
    found = sorted(path.name for path in (folder / place).iterdir())
    assert found == ["model.rtx.engine", "model.rtx.engine.manifest.json", "report.build.log", "report.json"]
    assert trtopt("check", str(place / "model.rtx.engine")).returncode == 0
    other = trtopt("report", "r.json", "--gpu", "v100 sxm2 16gb")
    assert other.returncode == 0 and "L4" not in other.stdout and "TensorRT for RTX cannot build" in other.stdout
    absent = trtopt("report", "r.json", "--gpu", "T4")
    assert absent.returncode == 2 and "The sweep has no GPU 'T4'" in absent.stderr
    again = trtopt("report", "r.json", "--take", "taken")
    assert again.returncode == 2 and "is there already" in again.stderr
    none = trtopt("report", "r.json", "--max-latency-ms", "0.000001", "--take", "none")
    assert none.returncode == 2 and "no engine to take" in none.stderr and not (folder / "none").exists()
    engine = Path(rows["L4", cheapest]["engine"])
    engine.write_bytes(engine.read_bytes()[:-1] + b"!")
    altered = trtopt("report", "r.json", "--take", "altered")
    assert altered.returncode == 3 and list((folder / "altered").iterdir()) == []


def test_a_failed_gate_is_kept_and_not_tried_again(trtopt: Run, folder: Path) -> None:
    (folder / "metric.py").write_text("seen = []\ndef score(run):\n    seen.append(1)\n    return 1.0 / len(seen)\n")
    text = SWEEP.replace('"L4", "V100"', '"L4"').replace('"fp16", "fp32"', '"fp32"')
    gate = 'metric = "metric.py:score"\nmax_accuracy_drop = 0.1\n[matrix]'
    (folder / "sweep.toml").write_text(text.replace("[matrix]", gate), encoding="utf-8")
    for _ in range(2):
        done = trtopt("sweep", "sweep.toml", "--json")
        (row,) = json.loads(done.stdout)["rows"]
        assert done.returncode == 7 and row["status"] == "gate" and row["engine"] == ""
        assert "more than the 0.1 of --max-accuracy-drop" in row["result"]["failures"][0]
    assert row["attempts"] == 0 and "0 to build" in done.stderr


def test_scripts_of_one_worker_import_the_modules_beside_themselves(trtopt: Run, folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "helper.py").write_text(f"NAME = {name!r}\n")
        score = "def score(run):\n    assert __file__.split('/')[-2] == helper.NAME, helper.NAME\n    return 1.0\n"
        (folder / name / "metric.py").write_text(f"import helper\n# of {name}\n{score}")
    matrix = 'model = ["model.onnx"]\nmetric = ["one/metric.py:score", "two/metric.py:score"]\n[sweep]\nworkers = 1\n'
    build = '[build]\nrecipes = "none"\nopt_shapes = ["x:1x3x8x8"]\ncalib = "calib.npz"\n'
    (folder / "sweep.toml").write_text(f"{build}[matrix]\n{matrix}", encoding="utf-8")
    done = trtopt("sweep", "sweep.toml")
    assert done.returncode == 0, done.stdout


def test_a_script_that_leaves_the_folder_takes_no_results_along(trtopt: Run, folder: Path) -> None:
    """Of a sweep and of a build: names of outputs are relative to where the run began, and stay as they were given."""
    for name in ("stays", "leaves"):
        moves = "    os.chdir(os.path.dirname(__file__) + '/elsewhere')\n" if name == "leaves" else ""
        (folder / f"{name}.py").write_text(f"import os\n# {name}\ndef score(run):\n{moves}    return 1.0\n")
    (folder / "elsewhere").mkdir()
    build = '[build]\nrecipes = "none"\nopt_shapes = ["x:1x3x8x8"]\ncalib = "calib.npz"\n'
    matrix = 'model = ["model.onnx"]\nmetric = ["stays.py:score", "leaves.py:score"]\n[sweep]\nworkers = 1\n'
    (folder / "sweep.toml").write_text(f"{build}[matrix]\n{matrix}", encoding="utf-8")
    done = json.loads(trtopt("sweep", "sweep.toml", "--json").stdout)
    assert [row["status"] for row in done["rows"]] == ["done", "done"], done["rows"][1]["failure"]
    for row in done["rows"]:
        report = json.loads(Path(row["engine"]).with_name("report.json").read_bytes())
        assert report["engine"]["path"] == report["config"]["output"] == "model.rtx.engine"

    options = ("--metric", "leaves.py:score", "-o", "out.engine", "--report", "out.json", "--shapes", "x:1x3x8x8")
    built = trtopt("build", "model.onnx", *options, "--calib", str(folder / "calib.npz"))
    assert built.returncode == 0, built.stderr
    assert json.loads((folder / "out.json").read_bytes())["engine"]["path"] == "out.engine"
    assert (folder / "out.engine").exists() and not list((folder / "elsewhere").iterdir())


def test_more_jobs_than_the_limit_need_a_yes(trtopt: Run, folder: Path) -> None:
    (folder / "sweep.toml").write_text(SWEEP.replace("[sweep]", "[sweep]\nlimit = 3"), encoding="utf-8")
    refused = trtopt("sweep", "sweep.toml")
    assert (
        refused.returncode == 2 and "4 jobs, more than its limit of 3" in refused.stderr and "--yes" in refused.stderr
    )
    assert trtopt("sweep", "sweep.toml", "--dry-run").returncode == 0
    assert not (folder / "store").exists()
    (folder / "sweep.toml").write_text(SWEEP.replace("[sweep]", "[sweep]\nlimit = 3").replace('"L4", "V', '"H100", "V'))
    assert trtopt("sweep", "sweep.toml", "--yes").returncode == 4, "TensorRT for RTX has neither"


@pytest.mark.parametrize(
    ("arguments", "change", "code", "message"),
    [
        (("--address", "127.0.0.1:1"), ("", ""), 2, "An address is that of a Ray cluster"),
        (("--workers", "0"), ("", ""), 2, "give 1 or more"),
        (("--executor", "slurm"), ("", ""), 2, "'slurm' is not one of local, ray"),
        (("--report", "sweep.toml"), ("", ""), 2, "would overwrite the sweep's file"),
        (("--report", "model.onnx"), ("", ""), 2, "would overwrite the model"),
        (("--csv", "calib.npz"), ("", ""), 2, "would overwrite --calib"),
        (("--report", "none/r.json"), ("", ""), 2, "The output folder does not exist"),
        ((), ('"L4", "V100"', '"L4", "nvidia l4"'), 2, "have one output"),
        ((), ('recipes = "none"', 'recipes = "fold"'), 2, "There is no recipe named fold"),
        ((), ('recipes = "none"', 'builder = ["x=1"]'), 2, "sweep.toml: [build] builder"),
        ((), ('store = "store"', 'store = "/proc/store"'), 2, "The store cannot be written"),
        ((), ('store = "store"', "on_gpu = true"), 4, "Jobs need a machine with the GPU"),
    ],
)
def test_wrong_input_ends_before_the_first_job(
    trtopt: Run, folder: Path, arguments: tuple[str, ...], change: tuple[str, str], code: int, message: str
) -> None:
    (folder / "sweep.toml").write_text(SWEEP.replace(*change), encoding="utf-8")
    done = trtopt("sweep", "sweep.toml", *arguments)
    assert done.returncode == code and message in done.stderr and "remedy: " in done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr and "of 4:" not in done.stderr


@pytest.mark.long
def test_a_cluster_that_does_not_answer_is_exit_code_4(trtopt: Run, folder: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    done = trtopt("sweep", "sweep.toml", "--executor", "ray", "--address", address)
    assert done.returncode == 4 and "The Ray cluster cannot be reached" in done.stderr and address in done.stderr
    wrong = trtopt("sweep", "sweep.toml", "--executor", "ray", "--address", "somewhere")
    assert wrong.returncode == 2 and "'somewhere' is no address of a Ray cluster" in wrong.stderr
    assert not (folder / "store").exists()


def test_questions_are_for_sweeps(trtopt: Run, folder: Path) -> None:
    trtopt("analyze", "model.onnx", "--shapes", "x:1x3x8x8", "--report", "a.json")
    refused = trtopt("report", "a.json", "--max-drop", "0.01")
    assert refused.returncode == 2 and "are for the report of a sweep" in refused.stderr
