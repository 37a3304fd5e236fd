"""Manifests signed with Ed25519: a detached signature of 64 bytes, as ``openssl pkeyutl -sign -rawin`` writes it.

By the package ``cryptography``. Considered: sigstore (wants an identity provider and its servers), minisign and gpg
(programs and key stores of their own).
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from trtopt.errors import IntegrityError, UsageError
from trtopt.support._lazy import require
from trtopt.support.files import open_file

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
        self._key: Any = _key(
            path,
            lambda pem: library.load_pem_private_key(pem, password=None),
            ed25519.Ed25519PrivateKey,
            "a private Ed25519 key in PEM without a passphrase",
            remedy,
        )

    def sign(self, content: bytes) -> bytes:
        """The signature of ``content``, 64 bytes."""
        signature: bytes = self._key.sign(content)
        return signature


class Verifier:
    """A public key.

    Args:
        path: A PEM file that ``openssl pkey -pubout`` wrote.

    Raises:
        UsageError: It cannot be read, or is no such key.
        MissingDependencyError: The package ``cryptography`` is not installed.
    """

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
