"""The wheel holds all of trtopt and its recipes and nothing else; `scripts/release` stops where versions disagree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import trtopt
from trtopt_recipes import PACK

ROOT = Path(__file__).parents[2]
COMMIT = ("-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "--all", "--message", "one")
SOURCES = {"trtopt": ROOT / "trtopt", "trtopt_recipes": ROOT / "recipes" / "trtopt_recipes"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"  # setuptools writes into the source
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for source in SOURCES.values():
        shutil.copytree(source, copy / source.relative_to(ROOT), ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.long
def test_the_wheel_has_every_file_of_the_source_and_no_other(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {
        f"{package}/{path.relative_to(source).as_posix()}"
        for package, source in SOURCES.items()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == files


@pytest.mark.long
def test_its_version_is_that_of_the_package(wheel: Path) -> None:
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(zipfile.ZipFile(wheel).read(name).decode())
    assert metadata["Version"] == trtopt.__version__ and trtopt.__version__ in wheel.name


@pytest.mark.long
def test_installed_alone_it_lists_every_recipe(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = "import trtopt, sys; from trtopt.cli.main import main; print(trtopt.__file__); sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "recipe", "list"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert {recipe.name for recipe in PACK} <= set(done.stdout.split())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with what `scripts/release` reads before it builds, one commit old."""
    environment = ROOT / ".venv"
    if not (environment / "installed").exists() or shutil.which("bash") is None:
        pytest.skip("scripts/ has made no environment here")
    folder = tmp_path / "checkout"
    for name in ("scripts/env.sh", "scripts/release", "pyproject.toml", "constraints.txt", "trtopt/support/version.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(environment)
    (folder / ".gitignore").write_text(".venv\n")
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{trtopt.__version__}] - 2026-01-01\n")
    _git(folder, "init", "--quiet")
    _git(folder, "add", "--all")
    _git(folder, *COMMIT)
    return folder


def _git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


def _release(folder: Path) -> str:
    command = ["bash", str(folder / "scripts" / "release"), "--tested"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not (folder / "dist").exists()
    return done.stderr


def test_a_release_of_a_changed_tree_is_refused(checkout: Path) -> None:
    (checkout / "trtopt" / "new.py").touch()
    assert "the working tree differs from the last commit" in _release(checkout)


def test_a_release_that_the_changelog_does_not_have_is_refused(checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")
    _git(
        checkout, "-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "--all", "--message", "x"
    )
    assert f"CHANGELOG.md has no section '## [{trtopt.__version__}] - DATE'" in _release(checkout)


def test_a_release_under_the_tag_of_another_version_is_refused(checkout: Path) -> None:
    _git(checkout, "tag", "v99.0.0")
    assert f"the commit has the tag v99.0.0, and the version is {trtopt.__version__}" in _release(checkout)


@pytest.mark.skipif(shutil.which("bash") is None, reason="the scripts need bash")
def test_docker_files_are_clean() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed")
    files = sorted(str(path) for path in ROOT.glob("Dockerfile*"))
    done = subprocess.run([hadolint, *files], capture_output=True, text=True, check=False)
    assert files and done.returncode == 0, done.stdout


def test_the_docker_files_get_what_they_copy() -> None:
    """.dockerignore leaves out everything but what is named."""
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for file in ROOT.glob("Dockerfile*"):
        lines = [line.split()[1:-1] for line in file.read_text().splitlines() if line.startswith("COPY ")]
        copied = [part for parts in lines if not parts[0].startswith("--from") for part in parts]
        assert copied
        for part in copied:
            assert (ROOT / part).exists()
            assert {part, *map(str, Path(part).parents)} & let_through, f"{file.name}: {part}"
