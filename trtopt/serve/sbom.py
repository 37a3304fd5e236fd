"""What a bundle was made from and with, as a bill of materials: CycloneDX 1.6 in JSON.

Written plainly: the parts are known, and few. The package ``cyclonedx-python-lib`` would be a dependency of every
installation for it; the tests check the result with that package's validator.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from trtopt.report.schema.manifest import FileHash, Manifest

_NO_PACKAGES = ("python", "platform")
_NAMESPACE = uuid.UUID("b6a7b2a4-0f0c-5a0e-9d0e-6d1f3f0f5a51")
"""Of the serial numbers, so that the same engine has the same."""


def bill_of_materials(manifest: Manifest, files: Sequence[FileHash], versions: Mapping[str, str]) -> dict[str, Any]:
    """The bill of materials of an engine; it holds no time, so that the same engine gives the same.

    Args:
        manifest: What the engine is.
        files: The files it is delivered in: the engine first.
        versions: Of the packages that it was built with, by name (``environment`` of the report).

    Returns:
        JSON values by the schema of CycloneDX 1.6.
    """
    needs = [_package(manifest.backend, manifest.backend_version, scope="required")]
    if manifest.host is not None and "onnxruntime" in versions:
        needs.append(_package("onnxruntime", versions["onnxruntime"], scope="required"))
    model = _data("machine-learning-model", "model", manifest.model_sha256)
    samples = [
        _data("data", f"{what} samples ({found.source})", found.sha256)
        for what, found in (("calibration", manifest.calibration), ("evaluation", manifest.evaluation))
        if found.sha256
    ]
    read = [_file(item) for item in manifest.files]
    tools = [_package(name, version) for name, version in sorted(versions.items()) if name not in _NO_PACKAGES]
    main = {**_file(files[0]), "type": "machine-learning-model", "bom-ref": "engine"}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, manifest.engine_sha256)}",
        "version": 1,
        "metadata": {"component": main, "tools": {"components": tools}},
        "components": [model, *samples, *read, *map(_file, files[1:]), *needs],
    }


def _package(name: str, version: str, **more: str) -> dict[str, Any]:
    # A local part (+cpu) is written as the specification of package URLs has it.
    purl = f"pkg:pypi/{name.replace('_', '-').lower()}@{version.replace('+', '%2B')}"
    return {"type": "library", "name": name, "version": version, "purl": purl, **more}


def _file(item: FileHash) -> dict[str, Any]:
    return _data("file", item.name, item.sha256)


def _data(kind: str, name: str, sha256: str) -> dict[str, Any]:
    return {"type": kind, "name": name, "hashes": [{"alg": "SHA-256", "content": sha256}]}
