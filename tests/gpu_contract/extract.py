"""Write the table of a release: what its Python interface has, read from the release itself.

A table is JSON: of each class its methods with every overload and its properties (``r`` or ``rw``), of each enum its
members, and the functions. Sources: the signatures that pybind11 writes into the docstrings of TensorRT's wheels
(``tensorrt_cu12_bindings``, ``tensorrt_cu13_bindings``, ``tensorrt_rtx``), and those that Cython writes into
cuda-bindings'. Such a wheel imports without its libraries of gigabytes where empty ones of their names
(``libnvinfer.so.10``, ...) define the ten functions that it links.

    python tests/gpu_contract/extract.py tensorrt_rtx > tests/gpu_contract/tables/tensorrt_rtx-1.7.1.116.json
    python tests/gpu_contract/extract.py tensorrt_bindings.tensorrt 11.4.0.106 > .../tensorrt-11.4.0.106.json
    python tests/gpu_contract/extract.py cuda.bindings.runtime 13.0.3 > .../cuda-13.0.3.json
"""

from __future__ import annotations

import enum
import importlib
import json
import re
import sys
from types import ModuleType
from typing import Any

CLASSES = (
    *("Runtime", "ICudaEngine", "IExecutionContext", "EngineInspector", "IRuntimeConfig", "IRuntimeCache"),
    *("ILogger", "IOutputAllocator", "IProfiler", "IHostMemory", "IPluginRegistry", "IOptimizationProfile"),
)
ENUMS = (
    *("TensorIOMode", "TensorLocation", "TensorFormat", "DataType", "ExecutionContextAllocationStrategy"),
    *("LayerInformationFormat", "DynamicShapesKernelSpecializationStrategy", "CudaGraphStrategy"),
)
FUNCTIONS = ("init_libnvinfer_plugins", "get_plugin_registry")
CUDA_FUNCTIONS = (
    *("cudaMalloc", "cudaFree", "cudaMallocHost", "cudaFreeHost", "cudaMemcpy", "cudaMemcpyAsync"),
    *("cudaStreamCreate", "cudaStreamCreateWithFlags", "cudaStreamDestroy", "cudaStreamSynchronize"),
    *("cudaStreamWaitEvent", "cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate"),
    *("cudaGraphLaunch", "cudaGraphDestroy", "cudaGraphExecDestroy", "cudaEventCreate", "cudaEventCreateWithFlags"),
    *("cudaEventRecord", "cudaEventSynchronize", "cudaEventElapsedTime", "cudaEventDestroy", "cudaGetDevice"),
    *("cudaSetDevice", "cudaGetLastError", "cudaDeviceGetPCIBusId", "cudaDeviceSynchronize"),
)
CUDA_ENUMS = ("cudaError_t", "cudaMemcpyKind", "cudaStreamCaptureMode")
CUDA_CONSTANTS = ("cudaStreamNonBlocking", "cudaEventDisableTiming", "cudaStreamLegacy")

_WORDS = (
    (re.compile(r"[\w.]*\btensorrt\w*\.|nvinfer1::(?:v_\d_\d::)?|typing_extensions\.|collections\.abc\.|typing\."), ""),
    (re.compile(r"\bSupportsInt\b|\bSupportsIndex\b"), "int"),
    (re.compile(r"\bSupportsFloat\b"), "float"),
    (re.compile(r"\bBuffer\b"), "buffer"),
    (re.compile(r"\b(?:Sequence|list)\b"), "List"),
    (re.compile(r"<\w+\.(\w+): -?\d+>"), r"\1"),
    (re.compile(r"<[^<>]* object at 0x[0-9a-f]+>"), "..."),
)


def signatures(function: Any) -> list[str]:
    """Every overload that a docstring of pybind11 begins with, without the name and ``self``."""
    text = function.__doc__ or ""
    found = re.findall(rf"^(?:\d+\. )?{function.__name__}(\(.*\) -> .*)$", text, re.MULTILINE)
    cleaned = []
    for signature in found:
        for pattern, word in _WORDS:
            signature = pattern.sub(word, signature)
        cleaned.append(re.sub(r"^\(self: \w+(?:, )?|^\(self(?:, )?", "(", signature.strip()))
    return cleaned


def of_class(cls: type) -> dict[str, Any]:
    """The methods and properties of a class of pybind11."""
    methods, properties = {}, {}
    for name in dir(cls):
        member = getattr(cls, name)
        if isinstance(member, property):
            properties[name] = "r" if member.fset is None else "rw"
        elif (name == "__init__" or not name.startswith("_")) and callable(member) and signatures(member):
            methods[name] = signatures(member)
    return {"methods": methods, "properties": properties}


def members(found: Any) -> dict[str, int]:
    """The members of an enum, of pybind11 or of Python."""
    every = found.__members__
    return {name: int(member) if not isinstance(member, enum.Enum) else member.value for name, member in every.items()}


def of_tensorrt(module: ModuleType) -> dict[str, Any]:
    """The table of a module with TensorRT's interface."""
    every = {name: getattr(module, name, None) for name in (*CLASSES, *ENUMS, *FUNCTIONS)}
    return {
        "classes": {name: of_class(every[name]) for name in CLASSES if every[name] is not None},
        "enums": {
            **{name: members(every[name]) for name in ENUMS if every[name] is not None},
            "Severity": members(module.ILogger.Severity),
        },
        "functions": {name: signatures(every[name]) for name in FUNCTIONS},
    }


def of_cuda(module: ModuleType) -> dict[str, Any]:
    """The table of ``cuda.bindings.runtime``: the docstring's first line is the signature."""
    lines = {name: (getattr(module, name).__doc__ or "").split("\n")[0] for name in CUDA_FUNCTIONS}
    return {
        "functions": {name: [line[len(name) :]] for name, line in lines.items()},
        "enums": {name: members(getattr(module, name)) for name in CUDA_ENUMS},
        "constants": {name: int(getattr(module, name)) for name in CUDA_CONSTANTS},
    }


def main(name: str, version: str = "") -> None:
    """Print the table of an installed module."""
    module = importlib.import_module(name)
    table = of_cuda(module) if name.startswith("cuda") else of_tensorrt(module)
    source = f"{name.split('.')[0].replace('_bindings', '')} {version or module.__version__}"
    json.dump({"source": source, **table}, sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
