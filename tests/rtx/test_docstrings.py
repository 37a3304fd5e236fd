"""The examples in the docstrings of public functions run, and give what they say."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from small_models import save_small

pytest.importorskip("tensorrt_rtx", reason="the examples build engines")
pytest.importorskip("onnxruntime", reason="the examples run models")
pytest.importorskip("torch", reason="the examples export modules")
pytest.importorskip("onnxscript", reason="the examples export modules")

import trtopt
from trtopt import sparsity

NET = """
import torch

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
"""
SWEEP = """
[matrix]
model = ["model.onnx"]
precision = ["fp32", "fp16"]
"""
PUBLIC = {
    **{name: item for name in trtopt.__all__ if inspect.isfunction(item := getattr(trtopt, name))},
    "Engine.load": trtopt.Engine.load,
    "sparsity.prepare": sparsity.prepare,
    "sparsity.finalize": sparsity.finalize,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("HOME", str(path))
        save_small(path)
        np.savez("samples.npz", x=np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32))
        Path("nets.py").write_text(NET)
        Path("sweep.toml").write_text(SWEEP)
        trtopt.build("model.onnx", output="model.rtx.engine", report="report.json", recipes="none")
        yield path


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_examples_of_a_public_function_run(folder: Path, name: str) -> None:
    found = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, globs={"trtopt": trtopt, "np": np})
    assert sum(len(item.examples) for item in found) >= 1, "no example"
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    out: list[str] = []
    for item in found:
        runner.run(item, out=out.append)
    assert runner.failures == 0, "".join(out)
