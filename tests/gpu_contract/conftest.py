"""A process with a GPU and a release of TensorRT, as stand-ins."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec

import pytest
from fake_cuda import cuda_module
from fake_tensorrt import tensorrt_module
from machine import Machine

from trtopt.engine import loaded, native_log
from trtopt.hardware.probe import Probe
from trtopt.hardware.spec import find_gpu


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Of TensorRT 10.13, or of the release that a test names with an indirect parameter."""
    found = Machine(release=getattr(request, "param", "tensorrt-10.13.3.9"))
    cuda, bindings = types.ModuleType("cuda"), types.ModuleType("cuda.bindings")
    cuda.__path__, bindings.__path__ = [], []
    for module in (tensorrt_module(found), cuda, bindings, cuda_module(found.device)):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    here = Probe(find_gpu("L4"), "NVIDIA L4", "580.1")
    for name in ("engine.run", "engine.loaded", "engine.manifest", "serve.gpu"):
        monkeypatch.setattr(f"trtopt.{name}.probe", lambda: here)
    monkeypatch.setattr(native_log, "_LOGGERS", {})
    monkeypatch.setattr(loaded, "_PLUGINS", set())
    return found
