"""The versions that a report must carry to be reproducible."""

from __future__ import annotations

import platform
from importlib import metadata

from trtopt.support.version import VERSION

_PACKAGES = "numpy onnx onnx_ir onnxruntime onnxruntime-gpu tensorrt-rtx tensorrt torch".split()


def environment() -> dict[str, str]:
    """Versions of trtopt, Python, the platform, and the packages that are installed."""
    found = {"trtopt": VERSION, "python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
