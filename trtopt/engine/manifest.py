"""The manifest beside an engine: written last, and checked before a byte of the engine reaches the runtime.

An engine is code, so it is read once, and what was checked is what runs. Of a build that was killed the manifest is the
old one or missing, so that no mixture of old and new files fits it.

Manifests are signed with Ed25519 by the package ``cryptography``: a detached signature of 64 bytes, as
``openssl pkeyutl -sign -rawin`` writes it. Considered: sigstore (wants an identity provider and its servers), minisign
and gpg (programs and key stores of their own).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import ModuleType
from typing import Any, Literal

import msgspec

from trtopt.engine.backend import (
    BACKENDS,
    TENSORRT_RTX,
    Backend,
    EngineHeader,
    RuntimeOptions,
    Specialization,
    describe,
    identify,
)
from trtopt.errors import IntegrityError, MissingDependencyError, TargetError, UsageError
from trtopt.hardware.probe import Probe, probe
from trtopt.report.schema.manifest import SCHEMA, FileHash, Manifest, content_hash, has_digest, with_digest
from trtopt.report.schema.read import with_infinities
from trtopt.support._lazy import is_available, require
from trtopt.support.files import atomic_write, hash_file, open_file, read_file
from trtopt.support.json_text import decoded

_LARGEST_KEY_BYTES = 1 << 16
_EXTRA = "sign"


class Signer:
    """A private key.

    Args:
        path: A PEM file that ``openssl genpkey -algorithm ed25519`` wrote; without a passphrase.

    Raises:
        UsageError: It cannot be read, or is no such key.
        MissingDependencyError: The package ``cryptography`` is not installed.
    """

    def __init__(self, path: Path) -> None:
        library, ed25519 = _library("sign manifests")
        remedy = "make a key with `openssl genpkey -algorithm ed25519 -out key.pem`"
        read, kind = partial(library.load_pem_private_key, password=None), ed25519.Ed25519PrivateKey
        self._key: Any = _key(path, read, kind, "a private Ed25519 key in PEM without a passphrase", remedy)

    def sign(self, content: bytes) -> bytes:
        signature: bytes = self._key.sign(content)
        return signature


class Verifier:
    """A public key: a PEM file that ``openssl pkey -pubout`` wrote. Raises as :class:`Signer`."""

    def __init__(self, path: Path) -> None:
        library, ed25519 = _library("check signatures")
        self._path = path
        remedy = "take it from the private key with `openssl pkey -in key.pem -pubout -out key.pub.pem`"
        self._key: Any = _key(
            path, library.load_pem_public_key, ed25519.Ed25519PublicKey, "a public Ed25519 key in PEM", remedy
        )

    def check(self, content: bytes, signature: bytes, where: str) -> None:
        """Check that the owner of the private key signed ``content``.

        Raises:
            IntegrityError: Not this content, or not with this key.
        """
        invalid = require("cryptography.exceptions", _EXTRA, "check signatures").InvalidSignature
        try:
            self._key.verify(signature, content)
        except invalid as error:
            raise IntegrityError(
                f"The signature is not that of the key {self._path} for this manifest",
                where=where,
                remedy="do not load the engine: get it again from who signed it, with its manifest and signature",
            ) from error


def _library(why: str) -> tuple[ModuleType, ModuleType]:
    base = "cryptography.hazmat.primitives"
    return require(f"{base}.serialization", _EXTRA, why), require(f"{base}.asymmetric.ed25519", _EXTRA, why)


def _key(path: Path, read: Any, kind: type, name: str, remedy: str) -> Any:
    with open_file(path, "The key") as file:
        pem = file.read(_LARGEST_KEY_BYTES)
    unsupported = require("cryptography.exceptions", _EXTRA, "read keys").UnsupportedAlgorithm
    try:
        key = read(pem)
    except (ValueError, TypeError, unsupported):
        key = None
    if not isinstance(key, kind):
        raise UsageError(f"The key is not {name}", where=str(path), remedy=remedy)
    return key


LARGEST_MANIFEST_BYTES = 64 << 20
"""One with 100,000 nodes that stay in a wider type takes about 20 MB."""

LARGEST_ENGINE_BYTES = 256 << 30
"""More than the GPUs of today hold."""

_RELEASE = 3
"""How many parts of its version make a release. Engines are bound to theirs (NVIDIA's documentation, "Engine
Compatibility")."""

_AMPERE = 8
"""The first major compute capability that engines of ``hardware_compatibility=ampere+`` run on."""

_AGAIN = "build the engine again, or copy it again with its manifest and the files that its manifest names"


@dataclass(frozen=True)
class VerifiedEngine:
    """An engine that may be given to its runtime.

    Attributes:
        header: What its header says; of TensorRT, which tells no compute capability there, that of the manifest.
        manifest: What its manifest says, which fits it; None where there is none, and that was allowed.
        is_inside: Whether ``path`` is an ONNX model that has the engine, or names it.
    """

    path: Path
    data: bytes
    backend: Backend
    header: EngineHeader
    manifest: Manifest | None
    is_inside: bool = False

    @property
    def built(self) -> str:
        """What built it and for what: ``tensorrt-rtx 1.7.1.116 for compute capability 8.9 (L4)``."""
        return describe(self.backend, self.header) if self.manifest is None else _said(self.manifest)


def manifest_path(engine: Path) -> Path:
    """The manifest of an engine: ``ENGINE.manifest.json``."""
    return engine.with_name(engine.name + ".manifest.json")


def signature_path(engine: Path) -> Path:
    """The signature of an engine's manifest: ``ENGINE.manifest.sig``."""
    return engine.with_name(engine.name + ".manifest.sig")


def write_manifest(engine: Path, manifest: Manifest, signer: Signer | None = None) -> None:
    """Write the manifest of an engine; call it when the engine and all files that it names are in place.

    The signature follows, or that of an older manifest goes: until then it does not fit, and a key refuses both.

    Raises:
        UsageError: A file cannot be written.
    """
    content = with_digest(manifest.to_json_dict())
    atomic_write(manifest_path(engine), content)
    if signer is not None:
        atomic_write(signature_path(engine), signer.sign(content))
    else:
        signature_path(engine).unlink(missing_ok=True)


def verify(path: str | Path, *, key: str | Path | None = None) -> Manifest:
    """Check an engine against its manifest; needs neither a GPU nor the runtime.

    Args:
        path: The engine.
        key: A public Ed25519 key (PEM); then the manifest has to be signed with it.

    Returns:
        The manifest.

    Raises:
        IntegrityError: The engine, its manifest, its signature or its part for the host was altered, belongs to another
            build, or is missing; or the manifest is not signed with the key.
        UsageError: The engine has no manifest, a file cannot be read, or the key is none.
        MissingDependencyError: The package ``cryptography`` is not installed, and there is a key.

    Example:
        >>> trtopt.verify("model.rtx.engine").backend
        'tensorrt-rtx'
    """
    manifest = load_engine(path, key=key).manifest
    if manifest is None:
        raise _no_manifest(Path(path))
    return manifest


def load_engine(path: str | Path, *, key: str | Path | None = None, allow_unverified: bool = False) -> VerifiedEngine:
    """Read an engine and check that it is what its manifest says; needs neither a GPU nor the runtime.

    Args:
        path: The engine, with its manifest, and its part for the host, beside it; or the ONNX model of
            ``--epcontext``, with its manifest, and the engine unless it is embedded.
        key: As of :func:`verify`.
        allow_unverified: Take an engine without a manifest, as trtexec writes them; one with a manifest has to fit it,
            and a key refuses it still.

    Raises:
        IntegrityError, UsageError, MissingDependencyError: As :func:`verify`.
    """
    path = Path(path)
    if not path.name:  # ".", which no file lies beside
        raise UsageError("The engine is a folder, not a file", where=str(path), remedy="name the engine")
    verifier = None if key is None else Verifier(Path(key))
    place = manifest_path(path)
    if not os.path.lexists(place):
        data = read_file(path, "The engine", LARGEST_ENGINE_BYTES)
        engine = VerifiedEngine(path, data, *identify(data), None)
        if verifier is not None or not allow_unverified:
            raise _no_manifest(path)
        return engine
    content = read_file(place, "The manifest", LARGEST_MANIFEST_BYTES)
    if verifier is not None:
        verifier.check(content, _read_signature(path), str(signature_path(path)))
    manifest = _manifest(content, place)
    data, is_inside = _engine_bytes(path, manifest)
    backend, header = _header(path, data, manifest)
    if manifest.host is not None:
        # An ONNX model of the engine has the part for the host in it, but for weights in files of their own.
        for file in manifest.host.files[1:] if is_inside else manifest.host.files:
            check_beside(path, file, "The part of the model for the host")
    return VerifiedEngine(path, data, backend, header, manifest, is_inside)


def check_runs_here(engine: VerifiedEngine) -> str:
    """Check that this machine has the GPU and the runtime that an engine was built for; the version of the runtime.

    Raises:
        TargetError: It was built for another GPU or version than is here, or there is no GPU.
        MissingDependencyError: Its runtime is not installed.
    """
    check_gpu(engine, probe())
    backend = engine.backend
    if not is_available(backend.module):
        others = [other.name for other in BACKENDS.values() if is_available(other.module)]
        here = f"; installed is {', '.join(others)}" if others else ""
        raise MissingDependencyError(
            f"The engine was built by {engine.built}, and its runtime is not installed{here}",
            where=f"import {backend.module}",
            remedy=backend.install,
        )
    version = str(require(backend.module, "gpu", "run engines").__version__)
    check_version(engine, version)
    return version


def check_gpu(engine: VerifiedEngine, here: Probe) -> None:
    """Raise TargetError where an engine is for another GPU than is here, as far as its header and its manifest tell."""
    if here.gpu is None:
        raise TargetError(
            f"The engine was built by {engine.built}, and this machine has no GPU to run it: {here.reason}",
            where="the GPU",
            remedy="take it to a machine with that GPU; here, `trtopt profile` measures the model on the CPU with "
            "--backend onnxruntime, and reads what trtexec measured elsewhere with --layer-info and --layer-profile",
        )
    capability, targets = here.gpu.compute_capability, engine.header.compute_capabilities
    manifest, later = engine.manifest, int(capability.split(".")[0]) >= _AMPERE
    # TensorRT for RTX has no such option: the header of its engines says all.
    if (
        engine.backend != TENSORRT_RTX
        and manifest is not None
        and manifest.hardware_compatibility == "ampere+"
        and later
    ):
        return
    if targets and capability not in targets:
        raise TargetError(
            f"The engine was built by {engine.built}; here is {here.name}, compute capability {capability}",
            where=str(engine.path),
            remedy=f"build it with --gpu {here.gpu.name}, or take it to a machine with its GPU",
        )


def check_version(engine: VerifiedEngine, version: str) -> None:
    """Raise TargetError where an engine is of another release of its runtime than the installed one.

    TensorRT judges by itself where it is not known whether the engine was built to run in later versions too.
    """
    manifest, header = engine.manifest, engine.header
    if engine.backend != TENSORRT_RTX and (manifest is None or manifest.version_compatible):
        return
    if _release(header.version) != _release(version):
        raise TargetError(
            f"The engine was built by {engine.built}; installed is {engine.backend.name} {version}",
            where=str(engine.path),
            remedy=f"build it again, or install {engine.backend.module}=={header.version}",
        )


def runtime_options(
    engine: VerifiedEngine,
    plugins: Iterable[Path] = (),
    weight_budget: int | Literal["auto"] | None = None,
    specialization: Specialization | None = None,
    kernels: Path | None = None,
) -> RuntimeOptions:
    """How an engine is loaded: with code for the host as its manifest says, and what the user gives.

    Raises:
        IntegrityError: A library of plugins is none that the engine was built with.
        UsageError: A library cannot be read; or ``specialization`` is for an engine that compiles nothing as it runs.
    """
    is_rtx = engine.backend == TENSORRT_RTX
    if specialization is not None and not is_rtx:
        raise UsageError(
            "Only engines of TensorRT for RTX compile kernels as they run",
            where=f"specialization {specialization}",
            remedy="leave it out: an engine of TensorRT holds its kernels",
        )
    given, manifest = tuple(plugins), engine.manifest
    for library in given:
        found = hash_file(library, "The plugin library")
        if manifest is not None and found not in [(file.bytes, file.sha256) for file in manifest.files]:
            raise IntegrityError(
                "The plugin library is none of those that the engine was built with",
                where=str(library),
                remedy="give the library that `trtopt build --plugins` was given, or build the engine again",
            )
    host_code = manifest is not None and manifest.version_compatible
    return RuntimeOptions(host_code, given, weight_budget, specialization or "eager", kernels if is_rtx else None)


def _release(version: str) -> list[str]:
    return version.split(".")[:_RELEASE]


def _same_version(header: str, package: str) -> bool:
    """Whether a header's version, which has four parts, is a package's, which has at least those of a release."""
    parts = package.split(".")
    return len(parts) >= _RELEASE and all(a == b for a, b in zip(header.split("."), parts, strict=False))


def _said(manifest: Manifest) -> str:
    targets = ", ".join(manifest.compute_capabilities)
    return f"{manifest.backend} {manifest.backend_version} for compute capability {targets} ({manifest.gpu})"


def _no_manifest(path: Path) -> UsageError:
    return UsageError(
        "The engine has no manifest, so nobody knows whether it is what was built",
        where=str(manifest_path(path)),
        remedy="copy the manifest with the engine, or build it with `trtopt build`; `trtopt profile` takes engines "
        "without one",
    )


def _read_signature(path: Path) -> bytes:
    place = signature_path(path)
    if not os.path.lexists(place):
        raise IntegrityError(
            "The manifest is not signed, and a key was given", where=str(place), remedy="build with --sign KEY.pem"
        )
    return read_file(place, "The signature", LARGEST_MANIFEST_BYTES)


def _manifest(content: bytes, place: Path) -> Manifest:
    """The manifest in a file's content; raises IntegrityError where it was altered, is of another schema or wrong."""
    if not has_digest(content):
        raise _altered("The manifest is not as it was written", place)
    try:
        data = decoded(content)
        if not isinstance(data, dict):
            raise _altered("The manifest is not as it was written", place)
        if data.get("schema") != SCHEMA:
            raise IntegrityError(
                f"The manifest is of schema {data.get('schema')!r}, not {SCHEMA}",
                where=str(place),
                remedy="use the version of trtopt that wrote it, or build the engine again",
            )
        return msgspec.convert(with_infinities(data, Manifest), Manifest)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise _altered(f"The manifest is not as it was written: {str(error)[:200]}", place) from error


def _altered(what: str, place: Path) -> IntegrityError:
    return IntegrityError(what, where=str(place), remedy=_AGAIN)


def _engine_bytes(path: Path, manifest: Manifest) -> tuple[bytes, bool]:
    """The engine that the manifest describes, and whether it was taken out of an ONNX model, else IntegrityError; not
    read where its size is another one."""
    with open_file(path, "The engine") as file:
        size = os.fstat(file.fileno()).st_size
    known = [manifest.engine_bytes] if manifest.epcontext is None else [manifest.engine_bytes, manifest.epcontext.bytes]
    if size in known or size > LARGEST_ENGINE_BYTES:
        data = read_file(path, "The engine", LARGEST_ENGINE_BYTES)
        found = content_hash(path.name, data)
        if _is_engine_of(found, manifest):
            return data, False
        if manifest.epcontext is not None and found == dataclasses.replace(manifest.epcontext, name=path.name):
            return _taken_out(path, data, manifest), True
    raise _altered(f"The engine is not the one that its manifest describes, which was built by {_said(manifest)}", path)


def _is_engine_of(found: FileHash, manifest: Manifest) -> bool:
    return (found.bytes, found.sha256) == (manifest.engine_bytes, manifest.engine_sha256)


def _taken_out(path: Path, model: bytes, manifest: Manifest) -> bytes:
    """The engine of an ONNX model, which embeds it or names its file."""
    from trtopt.engine.epcontext import engine_in  # onnx, which engines by themselves do not need

    place = path
    try:
        found = engine_in(model)
        if isinstance(found, str):
            place = beside(path, found)
            found = read_file(place, "The engine", manifest.engine_bytes)
    except ValueError as error:  # a file name that is no text, too
        raise _altered(f"The model is none that an engine is loaded from: {error}", path) from error
    except UsageError as error:
        raise _altered(error.what, place) from error
    if not _is_engine_of(content_hash(place.name, found), manifest):
        raise _altered("The engine of the model is not the one that its manifest describes", place)
    return found


def _header(path: Path, data: bytes, manifest: Manifest) -> tuple[Backend, EngineHeader]:
    """Backend and header, which must say the same as the manifest."""
    try:
        backend, header = identify(data)
    except UsageError as error:
        raise _altered(f"The file that the manifest describes is no engine: {error.what}", path) from error
    version = header.version or manifest.backend_version
    targets = header.compute_capabilities or manifest.compute_capabilities
    same = _same_version(version, manifest.backend_version)
    if backend.name != manifest.backend or not same or targets != manifest.compute_capabilities:
        raise _altered(
            f"The engine was built by {describe(backend, header)}; its manifest says {_said(manifest)}", path
        )
    return backend, dataclasses.replace(header, version=version, compute_capabilities=targets)


def beside(path: Path, name: str) -> Path:
    """The file of that name beside another one.

    Raises:
        IntegrityError: It is no plain name: a file in another folder is none of those that were built.
    """
    if name in ("", ".", "..") or "\0" in name or not name == PurePosixPath(name).name == PureWindowsPath(name).name:
        raise _altered(f"A file is named that is not beside the engine: {name!r}", path)
    return path.with_name(name)


def check_beside(engine: Path, file: FileHash, what: str) -> None:
    """Check that a file beside an engine is the one that its manifest names.

    Raises:
        IntegrityError: It is another one, is missing, or would lie in another folder.
    """
    place = beside(engine, file.name)
    try:
        found = hash_file(place, what, at_most=file.bytes)
    except UsageError as error:
        raise _altered(error.what, place) from error
    if found != (file.bytes, file.sha256):
        raise _altered(f"{what} is not the one that belongs to the engine", place)
