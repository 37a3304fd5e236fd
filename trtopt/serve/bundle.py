"""``trtopt bundle``: an engine with all that belongs to it, as one folder that can be checked as a whole.

The same build gives the same bundle, to the byte: the report in it is without times of the run and without folders.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from trtopt.config import BuildConfig, options
from trtopt.config.words import command_words, given
from trtopt.engine.epcontext import engine_in
from trtopt.engine.manifest import (
    LARGEST_ENGINE_BYTES,
    LARGEST_MANIFEST_BYTES,
    Signer,
    VerifiedEngine,
    Verifier,
    beside,
    check_beside,
    load_engine,
    manifest_path,
    signature_path,
)
from trtopt.errors import IntegrityError, UsageError
from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.manifest import DIGEST, FileHash, Manifest, has_digest, with_digest
from trtopt.report.schema.read import LARGEST_BYTES, read_report
from trtopt.serve.sbom import bill_of_materials
from trtopt.support.files import hash_file, read_file, staged_folder, store
from trtopt.support.json_text import decoded, plain
from trtopt.support.version import VERSION

SCHEMA = "trtopt.bundle/1"
INDEX, SIGNATURE = "bundle.json", "bundle.sig"
REPORT, SBOM, PREPROCESSING, COMMAND = "report.json", "sbom.cdx.json", "preprocessing.json", "command.txt"

_OF_THE_CACHE = ("cache_dir", "cache_gb", "no_cache")
_OF_THE_RUN = (*_OF_THE_CACHE, "polygraphy", "sign", "report", "html", "markdown", "export_layer_info", "save_onnx")
"""Options that do not change what is delivered."""

_ALSO_TIMES = ("peak_rss_bytes", "cached")
"""Fields of a report beside ``seconds`` and ``*_seconds`` that differ from run to run."""


@dataclass(frozen=True)
class Bundle:
    """What a bundle holds.

    Attributes:
        trtopt: The version that made it.
        engine: The file that is loaded: the engine, or the ONNX model that has it.
        command: The command that builds it again, with the names of the files it reads.
        files: Every file but the index and its signature.
    """

    trtopt: str
    engine: str
    command: str
    files: tuple[FileHash, ...]
    schema: str = SCHEMA

    def to_json_dict(self) -> dict[str, Any]:
        """The index as JSON values."""
        return {"schema": self.schema, **asdict(self)}


def bundle(engine: str | Path, report: str | Path, output: str | Path, *, sign: str | Path | None = None) -> Bundle:
    """Write an engine and all that belongs to it into a new folder.

    Args:
        engine: The engine, or the ONNX model of ``--epcontext``, with its manifest, its signature and its part for the
            host beside it.
        report: The report of its build, schema ``trtopt.build/1``.
        output: The folder, which is not there yet; it appears whole or not at all.
        sign: A private Ed25519 key (PEM) to sign the bundle with.

    Returns:
        What was written.

    Raises:
        UsageError: A file cannot be read or written, the report is of another build, or the folder is there.
        IntegrityError: The engine is not what its manifest describes.
        MissingDependencyError: The package ``cryptography`` is not installed, and there is a key.

    Example:
        >>> trtopt.bundle("model.rtx.engine", "report.json", "model.bundle").engine
        'model.rtx.engine'
    """
    path, target = Path(engine), Path(output)
    signer = None if sign is None else Signer(Path(sign))
    found = load_engine(path)
    if found.manifest is None:
        raise ValueError("an engine without a manifest was refused")
    record, of_report = _report(Path(report), found.manifest)
    command = _command(record, found.manifest)
    if os.path.lexists(target):
        raise UsageError("The bundle is there already", where=str(target), remedy="name a folder that is not there")
    try:
        with staged_folder(target) as folder:
            files = [_stored(folder / source.name, source) for source in _sources(found)]
            texts = dict(_texts(found.manifest, record, of_report, files)) | {COMMAND: command + "\n"}
            files += [_stored(folder / name, text.encode()) for name, text in texts.items()]
            index = Bundle(VERSION, path.name, command, tuple(files))
            content = with_digest(plain(index.to_json_dict()))
            store(folder / INDEX, content)
            if signer is not None:
                store(folder / SIGNATURE, signer.sign(content))
            open_bundle(folder)  # what was copied, not what was read before
    except OSError as error:
        raise UsageError(
            f"The bundle cannot be written: {error.strerror}",
            where=str(error.filename or target),
            remedy="choose a folder that can be written, and a name of the engine that no other file of the bundle has",
        ) from error
    return index


def _stored(place: Path, content: bytes | Path) -> FileHash:
    store(place, content)
    return FileHash(place.name, *hash_file(place, "The file"))


def open_bundle(folder: str | Path, *, key: str | Path | None = None) -> tuple[Bundle, VerifiedEngine]:
    """Check a bundle, every file of it, and give its engine.

    Args:
        folder: The bundle.
        key: A public Ed25519 key (PEM): the bundle and the manifest in it have to be signed with it.

    Raises:
        IntegrityError: A file was altered, is missing, or is one more; or the bundle is not signed with the key.
        UsageError: It is no bundle, a file cannot be read, or the key is none.
        MissingDependencyError: The package ``cryptography`` is not installed, and there is a key.
    """
    folder = Path(folder)
    place = folder / INDEX
    if not os.path.lexists(place):
        raise UsageError(
            "The folder is no bundle: it has no index", where=str(place), remedy="name what `trtopt bundle` wrote"
        )
    content = read_file(place, "The index of the bundle", LARGEST_MANIFEST_BYTES)
    if key is not None:
        signature = folder / SIGNATURE
        if not os.path.lexists(signature):
            remedy = "write the bundle with --sign KEY.pem"
            raise IntegrityError("The bundle is not signed, and a key was given", where=str(signature), remedy=remedy)
        Verifier(Path(key)).check(content, read_file(signature, "The signature", 64), str(signature))
    index = _index(content, place)
    _check_names(folder, index)
    for file in index.files:
        check_beside(place, file, f"The file {file.name} of the bundle")
    return index, load_engine(folder / index.engine, key=key)


def engine_of(path: Path, key: str | Path | None = None) -> Path:
    """The engine that is meant: of a folder, which is a bundle and is checked, its engine; else ``path`` itself.

    Raises:
        IntegrityError, UsageError, MissingDependencyError: As of :func:`open_bundle`.
    """
    return open_bundle(path, key=key)[1].path if path.is_dir() else path


def _index(content: bytes, place: Path) -> Bundle:
    try:
        data = decoded(content) if has_digest(content) else None
        if not isinstance(data, dict) or data.pop(DIGEST, None) is None or data.get("schema") != SCHEMA:
            raise ValueError("it is not as it was written")
        return msgspec.convert(data, Bundle)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise _broken(f"The index of the bundle is damaged: {str(error)[:200]}", place) from error


def _check_names(folder: Path, index: Bundle) -> None:
    """Check that the folder has the files of the index and no others, and an engine among them."""
    listed = {file.name for file in index.files} | {INDEX, SIGNATURE}
    present = set(os.listdir(folder))
    more = sorted(present - listed)
    if more:
        raise _broken("The bundle has a file that its index does not name", folder / more[0])
    if index.engine not in listed - {INDEX, SIGNATURE}:
        raise _broken("The index of the bundle names no engine of it", folder / INDEX)


def _broken(what: str, place: Path) -> IntegrityError:
    return IntegrityError(what, where=str(place), remedy="copy the bundle again, or make it again")


def _report(path: Path, manifest: Manifest) -> tuple[BuildReport, dict[str, Any]]:
    """The report, which has to be of the engine, and its JSON values."""
    record = read_report(path)
    engine = record.engine if isinstance(record, BuildReport) else None
    if not isinstance(record, BuildReport) or engine is None or engine.sha256 != manifest.engine_sha256:
        raise UsageError(
            "The report is not of the build of this engine",
            where=str(path),
            remedy="give what --report wrote when the engine was built",
        )
    values = decoded(read_file(path, "The report", LARGEST_BYTES))
    return record, values


def _sources(engine: VerifiedEngine) -> Iterator[Path]:
    """The files that are delivered: what is loaded first; with the other form of the engine, where that is there."""
    manifest, path = engine.manifest, engine.path
    yield path
    yield from _with_signature(path)
    if manifest is None:
        return
    context = manifest.epcontext
    if engine.is_inside:
        named = engine_in(read_file(path, "The model", LARGEST_ENGINE_BYTES))
        if isinstance(named, str):
            yield beside(path, named)
    elif context is not None and os.path.lexists(model := beside(path, context.name)):
        check_beside(path, context, "The ONNX model of the engine")
        yield model
        yield from _with_signature(model)
    for file in () if manifest.host is None else manifest.host.files:
        check_beside(path, file, "The part of the model for the host")
        yield beside(path, file.name)


def _with_signature(path: Path) -> Iterator[Path]:
    yield manifest_path(path)
    if os.path.lexists(signature_path(path)):
        yield signature_path(path)


def _texts(
    manifest: Manifest, record: BuildReport, report: dict[str, Any], files: list[FileHash]
) -> Iterator[tuple[str, str]]:
    yield REPORT, _json(without_run(report))
    yield SBOM, _json(bill_of_materials(manifest, files, record.environment))
    how = {name: value for name, value in report.get("config", {}).items() if name.startswith("preprocess") and value}
    if how:
        yield PREPROCESSING, _json(_config_without_folders(how))


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def without_run(report: Any, name: str = "") -> Any:
    """The JSON values of a report without what differs from run to run: times are 0, paths are the files' names."""
    if isinstance(report, dict):
        if name == "config":
            return _config_without_folders(report)
        if name == "seconds":
            return dict.fromkeys(report, 0)
        return {key: without_run(value, key) for key, value in report.items()}
    if isinstance(report, list):
        return [without_run(item) for item in report]
    if name.endswith("seconds") or name in _ALSO_TIMES:
        return None if report is None else type(report)(0)
    if name in ("path", "manifest") and isinstance(report, str):
        return _bare(report)
    return report


def _config_without_folders(config: dict[str, Any]) -> dict[str, Any]:
    """The options, with the names of files for their paths, and those of the run alone at their default."""
    known, default = options(BuildConfig), asdict(BuildConfig())
    found = {}
    for name, value in config.items():
        if name in _OF_THE_CACHE:
            value = default[name]
        elif name in known and isinstance(value, list):
            value = [_bare(item) if known[name].is_path(item) else item for item in value]
        elif name in known and value is not None and known[name].is_path(value):
            value = _bare(value)
        found[name] = value
    return found


def _bare(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def _command(record: BuildReport, manifest: Manifest) -> str:
    """The command that builds the engine again, where the files that it reads are in the current folder."""
    known = {name: value for name, value in record.config.items() if name in options(BuildConfig) and value is not None}
    understood = {name: manifest.options.get(name) for name in ("precision", "gpu", "backend")}
    named = {"output": _bare(record.engine.path)} if record.engine is not None and record.engine.path else {}
    changes = {name: value for name, value in (understood | named).items() if value}
    config = BuildConfig(**_config_without_folders(known)).with_options(changes)
    names = [name for name in given(config) if name not in _OF_THE_RUN]
    model = record.model.get("path") or record.model.get("target") or "MODEL.onnx"
    return shlex.join(["trtopt", "build", _bare(str(model)), *command_words(vars(config), names)])
