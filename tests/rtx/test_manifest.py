"""Real engines are checked before the runtime sees them."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import rtx_nets
import tensorrt_rtx as trt

import trtopt
from trtopt.engine.backend import TENSORRT_RTX
from trtopt.engine.manifest import check_runs_here, check_version, load_engine, manifest_path
from trtopt.errors import IntegrityError, TargetError
from trtopt.hardware.probe import probe

FLIPS = 100
SAMPLES = {"x": np.random.default_rng(0).standard_normal((2, 16, 16, 16)).astype(np.float32)}
LOAD = """\
import sys
from trtopt.engine.manifest import load_engine
from trtopt.errors import IntegrityError
try:
    load_engine(sys.argv[1])
except IntegrityError:
    print("refused", "tensorrt_rtx" in sys.modules)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine for compute capability 8.9, with its manifest."""
    folder = tmp_path_factory.mktemp("built")
    onnx.save(rtx_nets.conv_net(batch="n"), folder / "net.onnx")
    report = trtopt.build(folder / "net.onnx", calib=SAMPLES, precision="fp16", recipes="none", gpu="L4")
    assert report.engine is not None and report.engine.manifest is not None
    assert Path(report.engine.manifest) == manifest_path(Path(str(report.engine.path)))
    return Path(str(report.engine.path))


def test_a_real_engine_is_what_its_manifest_says(built: Path) -> None:
    found = load_engine(built)
    assert found.backend == TENSORRT_RTX and found.header.version == trt.__version__
    assert found.manifest is not None and found.manifest.compute_capabilities == ("8.9",)
    check_version(found, trt.__version__)


def test_an_altered_engine_is_refused_before_the_runtime_is_loaded(built: Path, tmp_path: Path) -> None:
    path, content, dice = tmp_path / built.name, built.read_bytes(), random.Random(11)
    manifest_path(path).write_bytes(manifest_path(built).read_bytes())
    for _ in range(FLIPS):
        changed = bytearray(content)
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(IntegrityError, match="not the one that its manifest describes"):
            load_engine(path)
    done = subprocess.run([sys.executable, "-c", LOAD, path], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["refused", "False"]


def test_a_whole_engine_for_another_gpu_is_whole_but_does_not_run_here(built: Path) -> None:
    here = probe().gpu
    if here is not None and here.compute_capability == "8.9":
        pytest.skip("this machine has such a GPU")
    with pytest.raises(TargetError, match=r"for compute capability 8\.9 \(L4\)"):
        check_runs_here(load_engine(built))
