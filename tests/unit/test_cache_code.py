"""The rule of age: what counts as the code of an answer, and what does not."""

from __future__ import annotations

import ast
import importlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trtopt.cache import code
from trtopt.cache.code import SourceFiles, code_hash, entry_key
from trtopt.support._script import script_hash
from trtopt.support.version import IMPORT_ROOT

PACKAGE = Path(code.__file__).parents[1]
MAKERS = (
    "trtopt.judge",
    "trtopt.pipeline.search",
    "trtopt.precision.observe.calibrate",
    "trtopt.analysis.sensitivity",
    "trtopt.profiling.gpu",
    "trtopt.engine.worker",
    "trtopt.fleet.run",
)
"""Who makes what is kept: prices, answers of a search, statistics, sensitivities, times, engines, results of jobs."""
ALSO = {"trtopt.pipeline.search": ("trtopt.judge",)}
"""What a search is handed, whose answers it keeps too."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code") / "trtopt"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__", "vendor"))
    return folder


def changed(copy: Path, file: str) -> set[str]:
    """Whose hash is another one when a line is added to a file of the package."""

    def hashes() -> dict[str, str]:
        found = SourceFiles(copy)
        return {maker: found.hash_of(maker, *ALSO.get(maker, ())) for maker in MAKERS}

    path, before = copy / file, hashes()
    content = path.read_bytes()
    path.write_bytes(content + b"# changed\n")
    after = hashes()
    path.write_bytes(content)
    return {maker for maker in MAKERS if before[maker] != after[maker]}


@pytest.mark.parametrize(
    "file",
    [
        *("cli/main.py", "cache/folder.py", "errors.py", "events.py", "support/version.py"),
        *("report/html/page.py", "report/text/build.py", "report/files.py", "report/assets/profile.js"),
    ],
)
def test_what_shows_or_keeps_answers_ends_none(copy: Path, file: str) -> None:
    assert changed(copy, file) == set()


@pytest.mark.parametrize(
    ("file", "makers"),
    [
        ("accuracy/compare.py", "search sensitivity gpu run"),
        ("accuracy/segments.py", "search sensitivity run"),
        ("precision/observe/statistics.py", "judge search calibrate sensitivity run"),
        ("judge/judges.py", "judge search run"),
        ("roofline/gemm.py", "judge search run"),
        ("roofline/constants.toml", "judge search run"),
        ("hardware/gpus.toml", "judge search sensitivity gpu run"),
        ("sparsity/prune.py", "run"),
        ("support/limits.py", "judge search worker run"),
        ("gates/check.py", ""),
    ],
)
def test_a_changed_module_ends_the_answers_that_it_makes(copy: Path, file: str, makers: str) -> None:
    assert {maker.rpartition(".")[2] for maker in changed(copy, file)} == set(makers.split())


def test_every_import_is_seen() -> None:
    """Those of Python's own parser, in functions and for type checkers too."""
    for package in ("trtopt", "trtopt_recipes"):
        folder = Path(next(iter(importlib.import_module(package).__path__)))
        for path in folder.rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_bytes())))
            plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
            wanted = {
                f"{node.module}.{alias.name}"
                for node in nodes
                if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "trtopt"
                for alias in node.names
            }
            wanted = {name for name in wanted if not f"{name}.".startswith(code._WITHOUT_ANSWERS)}
            assert wanted <= set(code._imports(path.read_bytes())), path
            assert not any(name.partition(".")[0] in ("trtopt", "trtopt_recipes") for name in plain), path


def test_the_hash_is_that_of_the_installed_package_and_of_a_zip_file(copy: Path, tmp_path: Path) -> None:
    place = tmp_path / "code.zip"
    with zipfile.ZipFile(place, "w") as archive:
        for path in copy.rglob("*"):
            archive.write(path, path.relative_to(copy.parent))
    script = f"from trtopt.cache import code; print(code.__file__, code.code_hash({MAKERS[0]!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": str(place)}, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(place / "trtopt" / "cache" / "code.py"), code_hash(MAKERS[0])], done.stderr
    assert SourceFiles(copy).hash_of(MAKERS[0]) == code_hash(MAKERS[0])


def test_a_room_stands_for_its_modules_and_others_are_no_names(copy: Path) -> None:
    room = SourceFiles(copy).hash_of("trtopt.judge")
    assert room not in (
        SourceFiles(copy).hash_of("trtopt.judge.protocol"),
        SourceFiles(copy).hash_of("trtopt.judge", "trtopt.cli"),
    )
    with pytest.raises(ValueError, match="no module"):
        SourceFiles(copy).hash_of("trtopt.judge", "trtopt.judg")
    assert code_hash("trtopt_recipes") != code_hash("trtopt_recipes.mish")


def test_the_question_is_in_the_key() -> None:
    keys = {entry_key("trtopt.judge", *question) for question in (("a", "b"), ("ab",), ("b", "a"), ("a", "b", ""))}
    assert len(keys) == 4 and entry_key("trtopt.judge", "a") != entry_key("trtopt.engine", "a")


def test_a_file_of_code_is_read_once_for_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 ms of CPU for prices, and 3 more for a search; a table is read for each module that names it."""
    read_bytes, read = Path.read_bytes, list[Path]()
    monkeypatch.setattr(Path, "read_bytes", lambda file: read.append(file) or read_bytes(file))
    found = SourceFiles(IMPORT_ROOT / "trtopt")
    assert len({found.hash_of(maker) for maker in MAKERS[:5]}) == 5
    modules = [file for file in read if file.suffix == ".py"]
    assert len(modules) == len(set(modules)) > 100


SCRIPT = (
    "import os, helpers\nfrom numpy import array\nif True: from losses import (\n    one,\n    two)\ndef f(): pass\n"
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "metric.py").write_text(SCRIPT)
    (tmp_path / "helpers.py").write_text("def late():\n    import deep; import far\n    from bare import part\n")
    for name in ("losses/__init__", "losses/part", "bare/part", "deep", "far", "other", "os_path"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text("raise SystemExit('it is not run')\n")
    return tmp_path / "metric.py"


@pytest.mark.parametrize("name", ["metric", "helpers", "deep", "far", "losses/__init__", "losses/part", "bare/part"])
def test_a_module_that_a_script_imports_counts(script: Path, name: str) -> None:
    before = script_hash(f"{script}:f")
    file = script.parent / f"{name}.py"
    file.write_text(file.read_text() + "x = 1\n")
    assert script_hash(f"{script}:f") != before
    file.unlink()
    assert script_hash(f"{script}:f") != before


def test_nothing_else_beside_a_script_counts(script: Path) -> None:
    before = script_hash(f"{script}:f")
    for name in ("other.py", "os_path.py", "data.npz"):
        script.with_name(name).write_text("x = 1\n")
    assert script_hash(f"{script}:f") == before != script_hash(f"{script}:g")
    script.write_text("import metric\nimport \\\n    helpers\n")
    again = script_hash(f"{script}:f")
    script.with_name("far.py").write_text("")
    assert script_hash(f"{script}:f") != again
    script.write_bytes(b"\xff\xfeno Python: (")
    assert script_hash(f"{script}:f")
