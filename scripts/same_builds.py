"""Builds each trained model with two checkouts of trtopt and says where the results differ.

    python scripts/same_builds.py OLD NEW --minilm minilm.onnx --keep FOLDER [--expected FILE.json] [--report FILE.json]

Each ONNX file of the accuracy benchmarks (``benchmarks/accuracy/subjects.py``) is built in FP16 and in INT8 by
``python -m trtopt build`` of either checkout, with TensorRT for RTX, which needs no GPU. Engines, ONNX models and parts
for the host are compared byte for byte; the report, the manifest and the layers field by field, but for durations and
memory. A row is printed for each build. The exit code is 1 where a difference is not expected.

The compiler makes different engines of the same ONNX file from one process to the next: it numbers its own constants
(``__mye12348``) otherwise, and seldom it changes the order of outputs. An engine with other numbers is ``renumbered``
and counts as equal; where the ONNX files are equal and the engines are not, both checkouts build again, at most
``ATTEMPTS`` times, and the row shows the pair of builds that differs least.

Results in FOLDER are used again while the code of their checkout and the settings are the same, so that a comparison
that was stopped goes on where it was. FILE.json of ``--expected`` holds ``[{"difference": PATTERN, "reason": TEXT}]``;
a pattern is one of ``fnmatch`` for what is printed, such as ``*/int8 report.json:guard.regions.*``. The calibration
samples need pillow and tokenizers; MiniLM is assembled as ``benchmarks/recipes/README.md`` says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks" / "accuracy"))
from subjects import SUBJECTS, Bench, Subject  # noqa: E402 - in another folder

DEFAULT_MODELS = HERE.parents[1] / "shared" / "models"
PRECISIONS = ("fp16", "int8")
SAMPLES = 16
"""Fewest samples that 8-bit numbers are improved by; more would only take longer."""
SHOWN = 8
"""Differences of a build that the terminal shows."""
ATTEMPTS = 4
SECONDS = 3600
"""Longest that one build may take."""
ENGINE = "model.engine"
FILES = (
    "outcome.json",
    ENGINE,
    f"{ENGINE}.manifest.json",
    "model.host.onnx",
    "optimized.onnx",
    "report.json",
    "layers.json",
    "report.build.log",
)
IGNORED = frozenset({"seconds", "build_seconds", "peak_rss_bytes"})
"""Keys of JSON objects whose values differ from run to run; of an object the keys are compared."""


@dataclass(frozen=True)
class Settings:
    """What both checkouts are given.

    Attributes:
        models: The folder of the models, with ``evaluate.py``.
        minilm: MiniLM's ONNX file, which the folder has no weights for; None leaves it out.
        gpu: The target.
        work: Where samples and results lie.
    """

    models: Path
    minilm: Path | None
    gpu: str
    work: Path


def prepare(settings: Settings, subject: Subject) -> Path:
    """A folder with the subject's model and its first samples; it is filled once."""
    folder = settings.work / "inputs" / subject.label.replace("/", "-")
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    bench = Bench(settings.models, settings.minilm, settings.work / "inputs")
    shutil.copyfile(bench.model(subject), folder / "model.onnx")
    samples = bench.samples(subject)
    if samples != "synthetic":
        (folder / "calib").mkdir()
        copy_samples(Path(samples), folder / "calib")
    (folder / "complete").touch()
    return folder


def copy_samples(source: Path, target: Path) -> None:
    """Copy files of samples until there are enough."""
    copied = 0
    for path in sorted(source.glob("*.npz")):
        shutil.copyfile(path, target / path.name)
        with np.load(path) as arrays:
            copied += len(next(iter(arrays.values())))
        if copied >= SAMPLES:
            return


def code_hash(checkout: Path) -> str:
    """A hash of all that the checkout computes with."""
    digest = hashlib.sha256()
    for path in sorted([*checkout.glob("trtopt/**/*"), *checkout.glob("recipes/**/*")]):
        if path.suffix in {".py", ".toml"}:
            digest.update(f"{path.relative_to(checkout)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build_all(settings: Settings, checkout: Path, subject: Subject, attempt: int) -> Path:
    """The folder of the checkout's results for this subject: one folder for each precision."""
    stamp = json.dumps([code_hash(checkout), settings.gpu, SAMPLES, subject.options])
    name = subject.label.replace("/", "-") + (f"-{attempt}" if attempt else "")
    folder = settings.work / str(checkout).strip("/").replace("/", "-") / name
    complete = folder / "complete"
    if complete.exists() and complete.read_text() == stamp:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(prepare(settings, subject), folder, ignore=shutil.ignore_patterns("complete"))
    for precision in PRECISIONS:
        build(settings.gpu, checkout, subject, folder, precision)
    shutil.rmtree(folder / "cache")
    complete.write_text(stamp)
    return folder


def build(gpu: str, checkout: Path, subject: Subject, folder: Path, precision: str) -> None:
    """Build once; paths are relative, so that two checkouts see the same ones."""
    (folder / precision).mkdir()
    command = [sys.executable, "-m", "trtopt", "build", "model.onnx", f"--{precision}", "--backend", "tensorrt-rtx"]
    command += ["--gpu", gpu, "--calib", "calib" if (folder / "calib").exists() else "synthetic"]
    command += ["--cache-dir", "cache", "-o", f"{precision}/model.engine", "--save-onnx", f"{precision}/optimized.onnx"]
    command += ["--report", f"{precision}/report.json", "--export-layer-info", f"{precision}/layers.json"]
    paths = os.pathsep.join((str(checkout), str(checkout / "recipes")))
    environment = {**os.environ, "PYTHONPATH": paths, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    done = subprocess.run(
        [*command, *subject.options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    outcome: dict[str, Any] = {"exit_code": done.returncode, "seconds": round(time.perf_counter() - started, 1)}
    outcome["error"] = done.stderr[done.stderr.find("error: ") :] if done.returncode else ""
    (folder / precision / "outcome.json").write_text(json.dumps(outcome))


def json_differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """The paths at which two JSON values differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            inner = f"{path}.{key}" if path else key
            if key not in new or key not in old:
                yield f"{inner}: only in {'old' if key in old else 'new'}"
            else:
                yield from json_differences(old[key], new[key], inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from json_differences(*pair, f"{path}.{index}")
    elif isinstance(old, list) and isinstance(new, list):
        yield f"{path}: {len(old)} -> {len(new)} entries"
    elif old != new or type(old) is not type(new):
        yield f"{path}: {shortened(old)} -> {shortened(new)}"


def shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:100] + "..."


def without_numbers(content: bytes) -> bytes:
    """The content without the numbers that the compiler gives its own constants."""
    return re.sub(rb"__mye\d+", lambda found: b"__mye" + b"0" * (len(found.group()) - 5), content)


def is_renumbered(old: Path, new: Path) -> bool:
    """Whether two engines differ, in nothing but the compiler's numbers."""
    if not (old.exists() and new.exists()):
        return False
    before, after = old.read_bytes(), new.read_bytes()
    return before != after and without_numbers(before) == without_numbers(after)


def json_content(path: Path, renumbered: bool) -> Any:
    """A JSON file without what differs from run to run; paths are relative to the folder of the subject."""
    text = without_numbers(path.read_bytes()).decode().replace(f"{path.parents[1]}{os.sep}", "")
    if renumbered:
        text = text.replace(hashlib.sha256((path.parent / ENGINE).read_bytes()).hexdigest(), "hash of the engine")
    ignored = {*IGNORED, "digest"} if renumbered else IGNORED

    def hidden(value: Any) -> Any:
        return sorted(value) if isinstance(value, dict) else None if value is None else "some"

    return json.loads(text, object_hook=lambda pairs: {k: hidden(v) if k in ignored else v for k, v in pairs.items()})


def file_differences(old: Path, new: Path, renumbered: bool) -> Iterator[str]:
    """What differs between two files; both may be missing. The engines of the two builds may be ``renumbered``."""
    if not (old.exists() and new.exists()):
        if old.exists() != new.exists():
            yield f": only in {'old' if old.exists() else 'new'}"
    elif old.suffix == ".json":
        contents = (json_content(path, renumbered) for path in (old, new))
        yield from (f":{found}" for found in json_differences(*contents))
    elif without_numbers(old.read_bytes()) != without_numbers(new.read_bytes()):
        yield f": {old.stat().st_size} and {new.stat().st_size} bytes differ"


def compare(old: Path, new: Path, label: str, expected: Sequence[dict[str, str]]) -> dict[str, Any]:
    """A row of the table: for each file ``equal`` or what differs, unexpected and expected."""
    row: dict[str, Any] = {"build": label, "files": {}, "differences": [], "expected": []}
    renumbered = is_renumbered(old / ENGINE, new / ENGINE)
    for name in FILES:
        found = [f"{label} {name}{difference}" for difference in file_differences(old / name, new / name, renumbered)]
        equal = "renumbered" if renumbered and name == ENGINE else "equal" if (old / name).exists() else "-"
        row["files"][name] = f"{len(found)} differ" if found else equal
        for difference in found:
            reason = next((e["reason"] for e in expected if fnmatchcase(difference, e["difference"])), None)
            row["expected" if reason else "differences"].append(f"{difference} ({reason})" if reason else difference)
    for side, folder in (("old", old), ("new", new)):
        outcome = json.loads((folder / "outcome.json").read_text())
        row |= {f"{side}_seconds": outcome["seconds"], f"{side}_exit_code": outcome["exit_code"]}
    return row


def compare_all(
    settings: Settings, checkouts: Sequence[Path], subject: Subject, expected: Sequence[dict[str, str]]
) -> list[dict[str, Any]]:
    """A row for each precision, of the two attempts that differ least."""
    attempts: list[list[Path]] = []
    rows: list[dict[str, Any]] = []
    for attempt in range(ATTEMPTS):
        attempts.append([build_all(settings, checkout, subject, attempt) for checkout in checkouts])
        rows = []
        for precision in PRECISIONS:
            pairs = product(*([folder / precision for folder in folders] for folders in zip(*attempts, strict=True)))
            found = [compare(old, new, f"{subject.label}/{precision}", expected) for old, new in pairs]
            rows.append(min(found, key=lambda row: len(row["differences"])))
        if not any(is_compilers(row) for row in rows):
            break
    return [{**row, "attempts": len(attempts)} for row in rows]


def is_compilers(row: dict[str, Any]) -> bool:
    """Whether the engines differ and what the compiler was given does not."""
    same_onnx = row["files"]["optimized.onnx"] == "equal"
    return same_onnx and any(f" {ENGINE}:" in difference for difference in row["differences"])


def show(row: dict[str, Any]) -> None:
    verdict = "DIFFERENT" if row["differences"] else "as expected" if row["expected"] else "equal"
    states = [f"{name} {state}" for name, state in row["files"].items() if state not in {"equal", "-"}]
    states.insert(0, f"{sum(state == 'equal' for state in row['files'].values())} files equal")
    if row["attempts"] > 1:
        states.append(f"{row['attempts']} attempts")
    seconds = f"{row['old_seconds']:6.1f} s {row['new_seconds']:6.1f} s"
    print(f"{row['build']:30} exit {row['new_exit_code']} {seconds}  {verdict}: {', '.join(states)}", flush=True)
    for difference in [*row["differences"], *row["expected"]][:SHOWN]:
        print(f"    {difference}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--models", type=Path, default=DEFAULT_MODELS)
    parser.add_argument("--minilm", type=Path, help="MiniLM's ONNX file; without it MiniLM is left out")
    parser.add_argument("--gpu", default="L4")
    parser.add_argument("--keep", type=Path, help="folder that keeps samples and results")
    parser.add_argument("--only", help="names of models, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="models that are built at once")
    parser.add_argument("--expected", type=Path, help="JSON file of differences that are accepted")
    parser.add_argument("--report", type=Path, help="JSON file with all rows")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    if hasattr(os, "nice"):
        os.nice(10)
    expected = json.loads(given.expected.read_text()) if given.expected else []
    with tempfile.TemporaryDirectory() as temporary:
        work = (given.keep or Path(temporary)).resolve()
        settings = Settings(given.models.resolve(), given.minilm and given.minilm.resolve(), given.gpu, work)
        names = given.only.split(",") if given.only else [subject.name for subject in SUBJECTS]
        subjects = [subject for subject in SUBJECTS if subject.name in names]
        if settings.minilm is None:
            print("minilm_l6_sts is left out: --minilm is not given")
            subjects = [subject for subject in subjects if subject.name != "minilm_l6_sts"]
        for subject in subjects:
            prepare(settings, subject)

        def compared(subject: Subject) -> list[dict[str, Any]]:
            return compare_all(settings, [given.old.resolve(), given.new.resolve()], subject, expected)

        rows: list[dict[str, Any]] = []
        with ThreadPoolExecutor(given.jobs) as pool:
            for found in pool.map(compared, subjects):
                rows += found
                for row in found:
                    show(row)
    different = sum(bool(row["differences"]) for row in rows)
    print(f"{len(rows)} builds, {different} with differences that are not expected")
    if given.report:
        given.report.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
