"""Compilers of other versions than the installed one, each in an environment of its own, and builds in them.

An environment is made by ``uv`` where that is installed, else by ``venv`` and pip, and holds the compiler alone: all
other packages are those of the running Python, behind its own on the path. It is kept in the cache folder, and used
without a network from then on. Considered: ``virtualenv`` and ``nox`` (packages more, and no more to it), one
environment with everything (gigabytes, and another numpy or ONNX Runtime would differ too).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import filelock

from trtopt.cache.folder import make_cache_folder
from trtopt.errors import MissingDependencyError, UsageError
from trtopt.events import Event, OnEvent
from trtopt.fleet.executor import available_cores
from trtopt.fleet.job_process import JobProcess, Lost
from trtopt.fleet.task import EXECUTE, REPORT, Task
from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.read import read_report
from trtopt.report.schema.sweep import Failure
from trtopt.support.files import staged_folder
from trtopt.support.temporary import TemporaryFolder

INSTALLED = "installed"
FOLDER = "compilers"

_SPEC = re.compile(r"(tensorrt-rtx)==(\d+(?:\.\d+){1,3})")
_FOUR_PARTS = 4
_LAST_LINES = 12


def check_compiler(spec: str) -> None:
    """Check what names a compiler: ``installed``, or ``tensorrt-rtx==1.6``. Raises UsageError: it is neither."""
    if spec != INSTALLED and not _SPEC.fullmatch(spec):
        raise UsageError(
            f"{spec!r} names no compiler",
            where="--compiler",
            remedy="give tensorrt-rtx==1.6 (two to four parts), 'installed', or the report of a build",
        )


def python_of(spec: str, cache_dir: str | None, on_event: OnEvent) -> Path:
    """The Python in which a compiler is installed; its environment is made where it is not there.

    Raises:
        UsageError: ``spec`` names no compiler, or the cache folder cannot be made.
        MissingDependencyError: The version cannot be installed.
    """
    check_compiler(spec)
    if spec == INSTALLED:
        return Path(sys.executable)
    parent = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    about = json.dumps([sys.version, sys.prefix, parent])
    folder = make_cache_folder(cache_dir).absolute() / FOLDER
    place = folder / f"{spec.replace('==', '-')}-{sha256(about.encode()).hexdigest()[:8]}"
    try:
        folder.mkdir(exist_ok=True)
        with filelock.FileLock(folder / f"{place.name}.lock"):
            if not _python(place).exists():
                on_event(Event("detail", "environment", text=f"{spec} is installed into {place}"))
                with staged_folder(place) as staged:
                    _make(staged, spec, parent)
    except OSError as error:
        raise UsageError(
            f"The environment cannot be made: {error.strerror}", where=str(place), remedy="give another --cache-dir"
        ) from error
    return _python(place)


def _python(place: Path) -> Path:
    return place / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def _make(place: Path, spec: str, parent: list[str]) -> None:
    name, version = spec.split("==")
    wanted = f"{name}=={version}" + (".*" if version.count(".") + 1 < _FOUR_PARTS else "")
    uv = shutil.which("uv")
    if uv is not None:
        _run([uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(place)], spec)
        _run([uv, "pip", "install", "--quiet", "--python", str(_python(place)), wanted], spec)
    else:
        _run([sys.executable, "-m", "venv", str(place)], spec)
        pip = [str(_python(place)), "-m", "pip", "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", wanted], spec)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([_python(place), "-c", code], capture_output=True, encoding="utf-8", check=True).stdout
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in parent)
    Path(packages.strip(), "trtopt_parent.pth").write_text(lines, encoding="utf-8")


def _run(command: list[str], spec: str) -> None:
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        said = [line for line in lines if line.strip() and not line.startswith("WARNING")][-_LAST_LINES:]
        raise MissingDependencyError(
            f"{spec} cannot be installed: {' | '.join(said)}"[:1500],
            where=" ".join(command[:4]),
            remedy="name a version that the package index has for this Python, and install it once with a network",
        )


def build_in(python: Path, task: Task) -> BuildReport | Failure:
    """Build a model in another Python, and give the report, or why there is none; nothing else stays of it."""
    with TemporaryFolder() as name, closing(JobProcess(EXECUTE, available_cores(), 0, python)) as process:
        outcome = process.run(task, Path(name))
        if isinstance(outcome, Lost):
            return Failure(f"The build was lost: {outcome.reason}", str(python), "build with that version alone", 6)
        if outcome.failure is not None:
            return outcome.failure
        report = read_report(Path(name, REPORT))
        if not isinstance(report, BuildReport):
            raise ValueError("a build writes the report of a build")
        return report
