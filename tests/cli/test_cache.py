"""``trtopt cache``, and builds that find their engine in the cache."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import environment_in, run_here
from small_models import samples, save_small

from trtopt.cache.folder import FORMATS, KINDS, cache_folder
from trtopt.cli.cache import run
from trtopt.errors import UsageError

Run = Callable[..., "subprocess.CompletedProcess[str]"]

PLAIN = ("--fp32", "--recipes", "none")
DAY = 86400


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and a cache with an engine of it and statistics."""
    folder = tmp_path_factory.mktemp("filled")
    save_small(folder)
    np.savez(folder / "calib.npz", x=samples())
    options = ("--int8", "--keep-all-int8", "--recipes", "none", "--calib", "calib.npz", "--cache-dir", "cache")
    first = report_of(run_here(["build", "model.onnx", *options, "--json"], folder, environment_in(folder)))
    assert first["engine"]["cached"] is False
    (folder / "cache" / "engines" / "notes.txt").write_text("not ours")
    return folder


@pytest.fixture
def built(filled: Path, tmp_path: Path) -> Path:
    """A cache with an engine and statistics; the model lies beside it."""
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    return tmp_path / "cache"


def paths(listed: dict[str, Any]) -> list[str]:
    return [file["path"] for file in listed["files"]]


def test_the_second_build_takes_the_engine_and_says_so(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    first = report_of(trtopt("build", "model.onnx", *PLAIN, "--json"))["engine"]
    engine = (tmp_path / first["path"]).read_bytes()
    done = trtopt("build", "model.onnx", *PLAIN, "-o", "again.engine")
    assert "from the cache, " in done.stdout and "of building saved" in done.stdout and "cache" not in done.stderr
    again = report_of(trtopt("build", "model.onnx", *PLAIN, "-o", "again.engine", "--json"))["engine"]
    assert (first.pop("cached"), again.pop("cached")) == (False, True)
    manifests = [(tmp_path / record["manifest"]).read_bytes() for record in (first, again)]
    unnamed = dict.fromkeys(("path", "manifest"))
    assert {**first, **unnamed} == {**again, **unnamed} and manifests[0] == manifests[1]
    assert (tmp_path / "again.engine").read_bytes() == engine
    assert report_of(trtopt("build", "model.onnx", *PLAIN, "--no-cache", "--json"))["engine"]["cached"] is False


def test_no_cache_keeps_no_engine(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    report_of(trtopt("build", "model.onnx", *PLAIN, "--no-cache", "--json"))
    (tmp_path / "trtopt.toml").write_text("[build]\nno_cache = true\n")
    report_of(trtopt("build", "model.onnx", *PLAIN, "--config", "trtopt.toml", "--json"))
    assert json.loads(trtopt("cache", "list", "--kind", "engines", "--json").stdout)["files"] == []
    report_of(trtopt("build", "model.onnx", *PLAIN, "--config", "trtopt.toml", "--cache", "--json"))
    assert len(json.loads(trtopt("cache", "list", "--kind", "engines", "--json").stdout)["files"]) == 1


def test_the_files_are_listed_with_kind_size_and_age(trtopt: Run, built: Path) -> None:
    for kind, days in (("calibration", 3), ("outputs", 2), ("prices", 1)):
        long_ago = time.time() - days * DAY
        for path in (built / kind).iterdir():
            os.utime(path, (long_ago, long_ago))
    text = trtopt("cache", "list", "--cache-dir", "cache").stdout
    rows = [line.split() for line in text.splitlines()[1:-1]]
    assert [row[0] for row in rows] == ["engines", "prices", "outputs", "calibration"] and rows[3][-3:] == [
        "3",
        "d",
        "ago",
    ]
    listed = json.loads(trtopt("cache", "list", "--cache-dir", "cache", "--json").stdout)
    assert listed["schema"] == "trtopt.cache/1" and listed["bytes"] == sum(file["bytes"] for file in listed["files"])
    assert [file["kind"] for file in listed["files"]] == ["engines", "prices", "outputs", "calibration"]
    assert all((built.parent / file["path"]).stat().st_size == file["bytes"] for file in listed["files"])
    only = json.loads(trtopt("cache", "verify", "--cache-dir", "cache", "--kind", "calibration", "--json").stdout)
    assert paths(only) == paths(listed)[3:] and only["files"][0]["damage"] is None  # a real run keeps whole files


def test_an_empty_cache_is_no_error_and_a_missing_folder_is(trtopt: Run) -> None:
    assert trtopt("cache", "list").stdout.startswith("0 files")
    assert trtopt("cache", "verify").returncode == trtopt("cache", "prune", "--all").returncode == 0
    done = trtopt("cache", "list", "--cache-dir", "nowhere")
    assert done.returncode == 2 and "no such folder" in done.stderr.lower()


def test_pruning_by_age_kind_and_size(trtopt: Run, built: Path) -> None:
    (calibration,) = (built / "calibration").iterdir()
    (engine,) = (built / "engines").glob("*.entry")
    prune = ("cache", "prune", "--cache-dir", "cache")
    assert paths(json.loads(trtopt(*prune, "--older-than", "30d", "--json").stdout)) == []
    long_ago = time.time() - 40 * DAY
    os.utime(engine, (long_ago, long_ago))
    assert paths(json.loads(trtopt(*prune, "--older-than", "30d", "--kind", "calibration", "--json").stdout)) == []
    assert paths(json.loads(trtopt(*prune, "--max-size", "1G", "--json").stdout)) == []
    size = sum(
        path.stat().st_size for path in (calibration, *(built / "outputs").iterdir(), *(built / "prices").iterdir())
    )
    assert [
        Path(path).name for path in paths(json.loads(trtopt(*prune, "--max-size", f"{size}B", "--json").stdout))
    ] == [engine.name]
    assert calibration.exists() and not engine.exists()
    assert trtopt(*prune, "--all").stdout.startswith("3 files")
    assert (built / "engines" / "notes.txt").read_text() == "not ours"


@pytest.mark.parametrize(
    ("arguments", "message", "remedy"),
    [
        (("prune",), "what may go", "--older-than"),
        (("prune", "--older-than", "soon"), "'soon'", "30d"),
        (("prune", "--max-size", "-5G"), "--max-size", "cache prune"),
        (("prune", "--max-size", "5"), "'5'", "5G or 200M"),
        (("list", "--kind", "engine"), "'engine'", "did you mean engines?"),
        (("lst",), "lst", "list"),
    ],
)
def test_a_wrong_option_names_what_is_right(trtopt: Run, arguments: tuple[str, ...], message: str, remedy: str) -> None:
    done = trtopt("cache", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and remedy in done.stderr.partition("remedy: ")[2]


def test_damage_is_found_in_each_kind_and_removed_when_asked(trtopt: Run, tmp_path: Path) -> None:
    from trtopt.cache.checksummed import to_line, write_checksummed

    for kind, suffix in KINDS.items():
        name = "NVIDIA-L4-8.9-10.3.0" if kind == "timing" else 64 * "0"
        path = tmp_path / "cache" / kind / f"{name}{suffix}"
        path.parent.mkdir(parents=True)
        if suffix == ".jsonl":
            path.write_bytes(to_line({"key": "a"}) + to_line({"key": "b"}) + b'{"torn": ')
        else:
            write_checksummed(path, FORMATS[kind], path.stem, [b"content"])
    verify = ("cache", "verify", "--cache-dir", "cache")
    whole = trtopt(*verify)
    assert whole.returncode == 0 and "0 damaged" in whole.stdout
    for file in (tmp_path / "cache").glob("*/*"):
        data = bytearray(file.read_bytes())
        data[10] ^= 4
        file.write_bytes(data)
    found = json.loads(trtopt(*verify, "--json").stdout)
    assert {file["kind"] for file in found["files"] if file["damage"]} == set(KINDS)
    assert trtopt(*verify).returncode == 2
    removed = trtopt(*verify, "--remove")
    assert removed.returncode == 0 and removed.stdout.count("(removed)") == len(KINDS)
    assert trtopt("cache", "list", "--cache-dir", "cache").stdout.startswith("0 files")


def test_the_cache_stays_within_its_bound(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    options = (*PLAIN, "--cache-dir", "cache", "--json")
    report_of(trtopt("build", "model.onnx", *options))
    (engine,) = (tmp_path / "cache" / "engines").glob("*.entry")
    bound = str(1.5 * engine.stat().st_size / 1e9)
    report_of(trtopt("build", "model.onnx", *options, "--gpu", "A10", "--cache-gb", bound))
    (left,) = (tmp_path / "cache" / "engines").glob("*.entry")
    assert left.name != engine.name
    small = report_of(trtopt("build", "model.onnx", *options, "--cache-gb", "0.000001"))
    assert any("larger than the cache may be" in text for text in small["warnings"])
    assert list((tmp_path / "cache" / "engines").glob("*.entry")) == []


def test_a_cache_folder_that_cannot_be_made_is_an_error_before_the_work(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    (tmp_path / "file").write_text("in the way")
    done = trtopt("build", "model.onnx", *PLAIN, "--cache-dir", "file/cache")
    assert done.returncode == 2 and "cache folder cannot be made" in done.stderr
    assert trtopt("optimize", "model.onnx", "-o", "o.onnx", "--cache-dir", "file/cache").returncode == 2
    assert not (tmp_path / "model.rtx.engine").exists()


def test_a_default_folder_that_cannot_be_written_is_a_warning(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    (tmp_path / ".cache").write_text("in the way")
    done = trtopt("build", "model.onnx", *PLAIN)
    assert done.returncode == 0 and done.stderr.count("is not kept") == 1
    assert (tmp_path / "model.rtx.engine").exists()


def test_a_full_disk_costs_the_entry_and_not_the_engine(trtopt: Run, tmp_path: Path) -> None:
    """A real one: a file system in memory, smaller than the entry, that only this process and its children see."""
    save_small(tmp_path)
    done = mounted(tmp_path, f"{build(*PLAIN)}; echo $?; find small -name '*entry*'", "200k")
    assert done.stderr.count("(No space left on device)") == 1
    report, code = done.stdout.rstrip().rsplit("\n", 1)
    assert code == "0" and json.loads(report)["engine"]["cached"] is False  # and nothing is left in the folder
    assert (tmp_path / "model.rtx.engine").exists()


@pytest.mark.long
def test_a_full_disk_ends_no_search_and_no_calibration(trtopt: Run, tmp_path: Path) -> None:
    """Statistics, prices, the journal of a search and the engine: none can be kept, and one warning says so."""
    save_small(tmp_path)
    np.savez(tmp_path / "calib.npz", x=samples())
    options = ("--int8", "--calib", "calib.npz", "--max-accuracy-drop", "0.5")
    done = mounted(tmp_path, f"dd if=/dev/zero of=small/full 2>/dev/null; {build(*options)}", "32k")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("what is made now is not kept") == 1 and "No space left on device" in done.stderr
    assert json.loads(done.stdout)["calibration"]["cached"] is False


@pytest.mark.long
def test_a_folder_that_became_read_only_is_used_and_not_pruned(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    prune = shlex.join([sys.executable, "-m", "trtopt", "cache", "prune", "--all", "--cache-dir", "small"])
    script = f"{build(*PLAIN)} >first.json && mount -o remount,ro small && {build(*PLAIN)}; {prune}; echo $?"
    done = mounted(tmp_path, script, "20m")
    report, removed, code = done.stdout.rstrip().rsplit("\n", 2)
    assert json.loads(report)["engine"]["cached"] is True
    assert done.stderr.count("what is made now is not kept") == 1
    assert removed.startswith("0 files") and code == "2" and "could not be removed" in done.stderr


def build(*options: str) -> str:
    """The shell's command for a build with a cache in the folder ``small``."""
    command = [sys.executable, "-m", "trtopt", "build", "model.onnx", *options, "--cache-dir", "small", "--json"]
    return shlex.join(command)


def mounted(folder: Path, script: str, size: str) -> subprocess.CompletedProcess[str]:
    """What a shell's script does beside a file system of its own in ``small``, of which nobody else knows."""
    (folder / "small").mkdir()
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("there is no unshare")
    script = f"mount -t tmpfs -o size={size} none small || exit 99; {script}"
    done = subprocess.run(
        [unshare, "--mount", "sh", "-c", script], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    return done


def test_without_the_cache_nothing_of_it_is_evicted(trtopt: Run, built: Path) -> None:
    before = sorted(path.name for path in built.rglob("*.*"))
    options = (*PLAIN, "--cache-dir", "cache", "--no-cache", "--cache-gb", "0.000001")
    report_of(trtopt("build", "model.onnx", *options, "--json"))
    assert sorted(path.name for path in built.rglob("*.*")) == before


def test_files_of_another_version_are_said_and_pruned(trtopt: Run, built: Path) -> None:
    (engine,) = (built / "engines").glob("*.entry")
    engine.write_bytes(engine.read_bytes().replace(b"engine-cache/2", b"engine-cache/1", 1))
    verify = ("cache", "verify", "--cache-dir", "cache")
    done = trtopt(*verify, "--remove")
    assert done.returncode == 0 and "0 damaged, 1 of another version of trtopt" in done.stdout
    listed = {file["kind"]: file for file in json.loads(trtopt(*verify, "--json").stdout)["files"]}
    assert listed["engines"]["outdated"] is True and listed["engines"]["damage"] is None
    assert listed["calibration"]["outdated"] is False
    assert trtopt("cache", "prune", "--cache-dir", "cache", "--max-size", "1G").stdout.startswith("1 file,")
    assert not engine.exists()


def test_files_of_others_are_neither_listed_nor_removed(trtopt: Run, tmp_path: Path) -> None:
    """In a folder that holds more than a cache."""
    theirs = ["prices/2024.jsonl", "search/results.jsonl", "sensitivity/study.json", "engines/x.entry"]
    theirs += ["timing/of-mine.entry", "locks/server.key", "engines/download.partial"]
    for name in theirs:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(b"x" * 1000)
        os.utime(tmp_path / "data" / name, (1e9, 1e9))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"{64 * 'a'}.calib").write_bytes(b"x")
    (tmp_path / "data" / "calibration").symlink_to(tmp_path / "elsewhere")
    assert json.loads(trtopt("cache", "list", "--cache-dir", "data", "--json").stdout)["files"] == []
    assert trtopt("cache", "prune", "--all", "--cache-dir", "data").returncode == 0
    assert trtopt("cache", "prune", "--all", "--cache-dir", "").returncode == 2
    save_small(tmp_path)
    assert trtopt("build", "model.onnx", *PLAIN, "--cache-dir", "data", "--cache-gb", "0.0001").returncode == 0
    assert all((tmp_path / "data" / name).exists() for name in theirs)
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_an_environment_variable_changes_no_engine(
    trtopt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small(tmp_path)
    engines = []
    for value in ("0", "1"):
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
        assert trtopt("build", "model.onnx", *PLAIN, "--no-cache", "-o", f"{value}.engine").returncode == 0
        engines.append((tmp_path / f"{value}.engine").read_bytes())
    assert engines[0] == engines[1]


def test_without_a_home_the_option_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(UsageError) as caught:
        cache_folder(None)
    assert "--cache-dir" in caught.value.remedy and cache_folder(tmp_path) == tmp_path


def test_an_option_of_tensorrt_about_timing_is_reported_as_ignored(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    found = report_of(trtopt("build", "model.onnx", *PLAIN, "--errorOnTimingCacheMiss", "--json"))
    assert found["config"]["error_on_timing_cache_miss"] is True
    assert found["engine"]["ignored_options"] == ["error_on_timing_cache_miss"]


def test_the_default_folder_is_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder(None) == tmp_path / ".cache" / "trtopt" and cache_folder("x") == Path("x")


def test_a_reader_that_goes_early_is_no_damaged_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("trtopt.cli.cache._list", gone)
    with pytest.raises(BrokenPipeError):
        run(["list", "--cache-dir", str(tmp_path)])
