"""With a key, an engine is loaded only where its manifest was signed with that key."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from engine_files import manifest, reseal, rtx_engine, save

from trtopt.engine.manifest import Signer, Verifier, load_engine, manifest_path, signature_path, verify
from trtopt.errors import IntegrityError, UsageError
from trtopt.report.schema.manifest import Manifest

serialization: Any = pytest.importorskip("cryptography.hazmat.primitives.serialization", reason="needs trtopt[sign]")
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa  # noqa: E402

DATA = rtx_engine()
PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
PLAIN = serialization.NoEncryption()


def write_keys(folder: Path, key: Any, *, encryption: Any = PLAIN) -> tuple[Path, Path]:
    private, public = folder / "key.pem", folder / "key.pub.pem"
    private.write_bytes(key.private_bytes(PEM, PKCS8, encryption))
    public.write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return write_keys(tmp_path, ed25519.Ed25519PrivateKey.generate())


@pytest.fixture
def engine(tmp_path: Path, keys: tuple[Path, Path]) -> Path:
    return save(tmp_path, DATA, manifest(DATA), signer=Signer(keys[0]))


def refused(engine: Path, key: Path, words: str) -> None:
    with pytest.raises(IntegrityError, match=words) as caught:
        load_engine(engine, key=key, allow_unverified=True)
    assert caught.value.exit_code == 3 and caught.value.remedy


def test_a_signed_engine_is_loaded_with_the_key_and_without(engine: Path, keys: tuple[Path, Path]) -> None:
    assert load_engine(engine, key=keys[1]).data == DATA
    assert verify(engine, key=str(keys[1])) == verify(engine)


def test_the_same_key_gives_the_same_signature(engine: Path, keys: tuple[Path, Path]) -> None:
    before = signature_path(engine).read_bytes()
    save(engine.parent, DATA, manifest(DATA), signer=Signer(keys[0]))
    assert signature_path(engine).read_bytes() == before and len(before) == 64


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Manifest)])
def test_a_field_altered_by_somebody_who_knows_the_format_is_refused(
    engine: Path, keys: tuple[Path, Path], name: str
) -> None:
    reseal(engine, **{name: "altered"})
    refused(engine, keys[1], "signature is not that of the key")


def test_a_build_made_elsewhere_is_refused(engine: Path, keys: tuple[Path, Path]) -> None:
    """Engine and manifest fit each other, and the signature is that of the old one, of another key, or missing."""
    other = rtx_engine(seed=1)
    signature = signature_path(engine).read_bytes()
    save(engine.parent, other, manifest(other))
    refused(engine, keys[1], "not signed")
    signature_path(engine).write_bytes(signature)
    refused(engine, keys[1], "signature is not that of the key")
    (folder := engine.parent / "other").mkdir()
    private, public = write_keys(folder, ed25519.Ed25519PrivateKey.generate())
    save(engine.parent, other, manifest(other), signer=Signer(private))
    refused(engine, keys[1], "signature is not that of the key")
    assert load_engine(engine, key=public).data == other


@pytest.mark.parametrize("change", [b"", b"\0", b"\0" * 64], ids=len)
def test_a_signature_that_is_none_is_refused(engine: Path, keys: tuple[Path, Path], change: bytes) -> None:
    signature_path(engine).write_bytes(change)
    refused(engine, keys[1], "signature is not that of the key")
    signature_path(engine).write_bytes(b"x" + signature_path(engine).read_bytes())
    refused(engine, keys[1], "signature is not that of the key")


def test_an_engine_without_a_manifest_has_no_signature(engine: Path, keys: tuple[Path, Path]) -> None:
    manifest_path(engine).unlink()
    with pytest.raises(UsageError, match="no manifest"):
        load_engine(engine, key=keys[1], allow_unverified=True)


def test_the_engine_itself_is_checked_behind_a_good_signature(engine: Path, keys: tuple[Path, Path]) -> None:
    engine.write_bytes(DATA[:-1] + b"\0")
    refused(engine, keys[1], "not the one that its manifest describes")


def test_an_unsigned_build_takes_the_old_signature_away(engine: Path) -> None:
    save(engine.parent, DATA, manifest(DATA))
    assert not signature_path(engine).exists()


def test_what_is_no_such_key_is_a_usage_error(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    (tmp_path / "noise.pem").write_bytes(b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    (locked := tmp_path / "locked").mkdir()
    (of_rsa := tmp_path / "rsa").mkdir()
    encryption = serialization.BestAvailableEncryption(b"secret")
    locked_key = write_keys(locked, ed25519.Ed25519PrivateKey.generate(), encryption=encryption)[0]
    private, public = write_keys(of_rsa, rsa.generate_private_key(65537, 2048))
    for path in (tmp_path / "noise.pem", keys[1], locked_key, private):
        with pytest.raises(UsageError, match="not a private Ed25519 key"):
            Signer(path)
    for path in (tmp_path / "noise.pem", keys[0], public):
        with pytest.raises(UsageError, match="not a public Ed25519 key"):
            Verifier(path)
    with pytest.raises(UsageError, match="cannot be read"):
        Signer(tmp_path / "none.pem")


def test_openssl_makes_the_keys_and_checks_the_signature(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=60)

    openssl("genpkey", "-algorithm", "ed25519", "-out", "k.pem")
    openssl("pkey", "-in", "k.pem", "-pubout", "-out", "k.pub.pem")
    engine = save(tmp_path, DATA, manifest(DATA), signer=Signer(tmp_path / "k.pem"))
    load_engine(engine, key=tmp_path / "k.pub.pem")
    files = ("-in", manifest_path(engine).name, "-sigfile", signature_path(engine).name)
    openssl("pkeyutl", "-verify", "-pubin", "-inkey", "k.pub.pem", "-rawin", *files)
