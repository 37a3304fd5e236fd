"""How much memory there is, by what the machine and its control groups say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trtopt.support.limits import available_bytes

MIB = 1 << 20


def _meminfo(folder: Path, text: str = "MemTotal: 9 kB\nMemAvailable:    4096 kB\nSwapFree: 1024 kB\n") -> Path:
    path = folder / "meminfo"
    path.write_text(text)
    return path


def _group(folder: Path, limit: str, current: int, inactive: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 7\n")
    return folder


def test_the_machine_gives_what_is_available_with_swap(tmp_path: Path) -> None:
    assert available_bytes(_meminfo(tmp_path), tmp_path / "none") == 5 * MIB


def test_a_control_group_and_those_around_it_limit(tmp_path: Path) -> None:
    meminfo, root = _meminfo(tmp_path), tmp_path / "cgroup"
    inner = _group(root / "a" / "b", "max", 0)
    assert available_bytes(meminfo, inner) == 5 * MIB
    _group(root / "a", str(3 * MIB), 2 * MIB, inactive=MIB // 2)
    assert available_bytes(meminfo, inner) == 3 * MIB // 2
    _group(root, str(MIB), 2 * MIB)
    assert available_bytes(meminfo, inner) == 0


@pytest.mark.parametrize("text", ["", "MemAvailable: many kB\nSwapFree: 0 kB\n", "MemAvailable 1\n", "SwapFree: 1\n"])
def test_a_machine_that_does_not_say_has_no_limit(tmp_path: Path, text: str) -> None:
    assert available_bytes(_meminfo(tmp_path, text), tmp_path / "none") is None
    assert available_bytes(tmp_path / "missing", tmp_path / "none") is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits private memory")
def test_a_process_gets_no_more_than_there_is() -> None:
    script = (
        "import resource\n"
        "from trtopt.support.limits import available_bytes, limit_memory\n"
        "limit_memory()\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_DATA)\n"
        "assert hard == resource.RLIM_INFINITY and 0 < soft < 1.1 * available_bytes()\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 28, hard))\n"
        "limit_memory()\n"
        "assert resource.getrlimit(resource.RLIMIT_DATA) == (1 << 28, hard), 'a limit of the user stays'\n"
        "try:\n    bytearray(1 << 28)\nexcept MemoryError:\n    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "refused\n", done.stderr
