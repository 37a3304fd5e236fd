"""``trtopt triton``: an engine or a model into a repository of Triton, whole or not at all, and never over another."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from trtopt.engine.backend import TENSORRT_RTX, is_engine
from trtopt.engine.manifest import load_engine, manifest_path
from trtopt.engine.request import plan_profiles
from trtopt.errors import InvalidModelError, TargetError, UsageError
from trtopt.graph.artifact import input_spec
from trtopt.report.schema.manifest import EngineTensor, Manifest, ShapeRange
from trtopt.serve.bundle import engine_of
from trtopt.serve.tensors import check
from trtopt.serve.triton import (
    CONFIG,
    FILES,
    ServedModel,
    TritonConfig,
    batch_axis,
    config_text,
    ensemble_text,
    max_batch,
)
from trtopt.source.check import all_tensors, check_external_data
from trtopt.source.onnx_file import load
from trtopt.support.files import open_file, staged_folder, store

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
"""Triton leaves out folders of other names."""


@dataclass(frozen=True)
class RepositoryEntry:
    """A model to write.

    Attributes:
        files: What its version holds, by path in there: content, or the file to copy. Empty for an ensemble.
    """

    name: str
    config: str
    files: Mapping[str, bytes | Path] = field(default_factory=dict)


def check_name(name: str) -> None:
    """Check the name of a model, which becomes that of a folder. Raises UsageError: it is no plain name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"Not a name for a model: {name!r}",
            where="--name",
            remedy="give one of letters, digits, '_', '-' and '.', which does not begin with '-' or '.'",
        )


def write(repository: Path, entries: Sequence[RepositoryEntry], version: int | None) -> int:
    """Write models as one version each; returns the version, by default the one after the latest of them all.

    A new model appears with its version, a new version with its files, in order, when all are written. A model of the
    same name must have the same configuration already.

    Raises:
        UsageError: A model of that name has another configuration or that version already, a file cannot be read or
            written.
    """
    for entry in entries:
        check_name(entry.name)
    try:
        return _write_all(repository, entries, version)
    except (OSError, ValueError) as error:  # a name may hold what no file system takes
        raise UsageError(
            f"The repository cannot be written: {error.strerror if isinstance(error, OSError) else error}",
            where=repr(str((error.filename if isinstance(error, OSError) else None) or repository))[1:-1],
            remedy="choose a folder that is writable, with room for the model",
        ) from error


def _write_all(repository: Path, entries: Sequence[RepositoryEntry], version: int | None) -> int:
    for entry in entries:
        _check_config(repository / entry.name, entry.config)
    present = {number for entry in entries for number in _versions(repository / entry.name)}
    number = version if version is not None else max(present, default=0) + 1
    if number in present:
        raise UsageError(
            f"The repository has version {number} already",
            where=str(repository / entries[0].name),
            remedy="give another --version, or leave it out",
        )
    repository.mkdir(parents=True, exist_ok=True)
    with ExitStack() as staged:  # which renames the last one first
        for entry in reversed(entries):
            _write_one(staged, repository, entry, str(number))
    return number


def _check_config(folder: Path, config: str) -> None:
    if not os.path.lexists(folder):
        return
    try:
        with open_file(folder / CONFIG, "The configuration of the model") as file:
            same = file.read(len(config.encode()) + 1) == config.encode()
    except UsageError:
        same = False
    if not same:
        raise UsageError(
            "The repository has a model of this name with another configuration",
            where=str(folder / CONFIG),
            remedy="give the new one another --name, or remove the old one",
        )


def _versions(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if _VERSION.fullmatch(path.name)] if folder.is_dir() else []


def _write_one(staged: ExitStack, repository: Path, entry: RepositoryEntry, version: str) -> None:
    model = repository / entry.name
    if model.is_dir():
        _fill(staged.enter_context(staged_folder(model / version)), entry)
        return
    folder = staged.enter_context(staged_folder(model))
    (folder / version).mkdir()
    _fill(folder / version, entry)
    store(folder / CONFIG, entry.config.encode())


def _fill(folder: Path, entry: RepositoryEntry) -> None:
    for name, content in entry.files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        store(place, content)


SCHEMA = "trtopt.triton/1"

_HOST_SUFFIX = ".host.onnx"
_SUFFIXES = (TENSORRT_RTX.suffix, ".engine", ".plan", ".trt", ".onnx")


@dataclass(frozen=True)
class TritonModel:
    """A model that was written.

    Attributes:
        backend: ``tensorrt``, ``onnxruntime`` or ``ensemble``.
        files: What its version holds.
    """

    name: str
    path: str
    backend: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class TritonReport:
    """What was written into a repository.

    Attributes:
        repository: The repository.
        name: What clients ask for.
        version: The version of every model.
        max_batch: The largest batch; 0 where Triton makes none.
        batch_axis: The name of the batch axis; None without batches, or where the axes differ in name.
        profiles: How many optimization profiles the first model has.
        models: The models: one, or the steps of an ensemble and the ensemble.
        notes: What the user should know.
    """

    repository: str
    name: str
    version: int
    max_batch: int
    batch_axis: str | None
    profiles: int
    models: tuple[TritonModel, ...]
    notes: tuple[str, ...]

    def to_json_dict(self) -> dict[str, Any]:
        """The report as JSON values, schema ``trtopt.triton/1``."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class _Parts:
    """A model, or its two parts, and what to say about it.

    Attributes:
        outputs: The outputs of the whole; None where that is not known.
    """

    steps: list[_Step]
    notes: list[str]
    outputs: tuple[str, ...] | None = None


@dataclass(frozen=True)
class _Step:
    model: ServedModel
    files: dict[str, bytes | Path]


def triton(
    model: str | Path, repository: str | Path, config: TritonConfig | None = None, **options: Any
) -> TritonReport:
    """Write an engine or an ONNX model into a repository of Triton Inference Server.

    An engine of TensorRT is checked against its manifest and served by Triton's TensorRT backend; an ONNX model by
    its ONNX Runtime backend, with TensorRT inside it on a GPU. Where the model was cut, with a part for the host, an
    ensemble runs both.

    Args:
        model: The engine with its manifest, or the ONNX model, with its part for the host beside it; or a bundle.
        repository: The folder; it is made if it is not there.
        config: The options; ``options`` override its fields by name.
        **options: Fields of :class:`~trtopt.serve.triton.TritonConfig`.

    Returns:
        What was written.

    Raises:
        TargetError: It is an engine of TensorRT for RTX, which Triton does not run.
        UsageError: A file cannot be read or written; an option is wrong or does not fit the model; the repository has
            another model of that name, or that version.
        IntegrityError: The engine is not what its manifest describes.
        InvalidModelError: The model is invalid, or Triton has no tensors like its.

    Example:
        >>> written = trtopt.triton("model.onnx", "repository", device="cpu")
        >>> written.name, written.version, written.max_batch
        ('model', 1, 16)
    """
    settings = _settings(config, options)
    path = engine_of(Path(model))
    suffix = next((suffix for suffix in _SUFFIXES if path.name.endswith(suffix)), "")
    name = settings.name if settings.name is not None else path.name.removesuffix(suffix)
    check_name(name)
    if is_engine(path) or os.path.lexists(manifest_path(path)):
        parts = _engine(path, name, settings)
    else:
        parts = _onnx(path, name, settings)
    steps = parts.steps
    batch = max_batch([step.model for step in steps], settings.max_batch)
    entries = [RepositoryEntry(step.model.name, config_text(step.model, batch, settings), step.files) for step in steps]
    if len(steps) > 1:
        entries.append(RepositoryEntry(name, _ensemble(name, parts, batch)))
    version = write(Path(repository), entries, settings.version)
    backends = [*(step.model.runtime for step in steps), "ensemble"]
    tensors = [tensor for step in steps for tensor in step.model.tensors]
    return TritonReport(
        repository=str(repository),
        name=name,
        version=version,
        max_batch=batch,
        batch_axis=batch_axis(tensors) if batch else None,
        profiles=steps[0].model.profiles,
        models=tuple(
            TritonModel(entry.name, str(Path(repository) / entry.name), backend, tuple(entry.files))
            for entry, backend in zip(entries, backends, strict=False)
        ),
        notes=(*parts.notes, *_notes(steps[0].model, batch)),
    )


def _settings(config: TritonConfig | None, options: dict[str, Any]) -> TritonConfig:
    known = [field.name for field in dataclasses.fields(TritonConfig)]
    for name in options:
        if name not in known:
            raise UsageError(f"There is no option {name!r}", where=name, remedy=f"choose from {', '.join(known)}")
    return dataclasses.replace(config or TritonConfig(), **options)


def _engine(path: Path, name: str, config: TritonConfig) -> _Parts:
    engine = load_engine(path, allow_unverified=True)
    if engine.backend == TENSORRT_RTX:
        raise TargetError(
            "Triton runs engines of TensorRT, and this one is of TensorRT for RTX",
            where=str(path),
            remedy="write the model with `trtopt optimize MODEL -o MODEL.opt.onnx --backend tensorrt` and give that to "
            "`trtopt triton`: TensorRT runs it inside ONNX Runtime; or build with --backend tensorrt on the GPU",
        )
    manifest = engine.manifest
    if manifest is None:
        raise UsageError(
            "The engine has no manifest, which tells its inputs and outputs",
            where=str(manifest_path(path)),
            remedy="copy the manifest with the engine, or build it with `trtopt build`",
        )
    check(manifest.inputs, manifest.outputs)
    given = [option for option in ("min_shapes", "opt_shapes", "max_shapes", "engine_cache") if getattr(config, option)]
    given += ["device"] if config.device == "cpu" else []
    if given:
        raise UsageError(
            "The option is for ONNX models, and the file is an engine of TensorRT",
            where=f"--{given[0].replace('_', '-')}",
            remedy="leave it out: the engine has its profiles, and runs on its GPU",
        )
    host = None if manifest.host is None else path.with_name(manifest.host.files[0].name)
    first = ServedModel(name if host is None else f"{name}_engine", "tensorrt", manifest.inputs, manifest.outputs)
    step, notes = _Step(first, {FILES["tensorrt"]: engine.data}), _engine_notes(manifest)
    if host is None or manifest.host is None:
        return _Parts([step], notes)
    return _Parts([step, _host_step(host, name)], notes, manifest.host.model_outputs or None)


def _engine_notes(manifest: Manifest) -> list[str]:
    built = f"the engine runs on compute capability {', '.join(manifest.compute_capabilities)} ({manifest.gpu}) in"
    if manifest.version_compatible:
        return [
            f"{built} TensorRT {manifest.backend_version} and later; start the server with"
            " --backend-config=tensorrt,version-compatible=true"
        ]
    return [f"{built} TensorRT {manifest.backend_version}: take the release of Triton that has it"]


def _onnx(path: Path, name: str, config: TritonConfig) -> _Parts:
    model = load(path, hash_weights=False).model
    beside = path.with_name(path.name.removesuffix(".onnx") + _HOST_SUFFIX)
    notes: list[str] = []
    host = None
    if beside.exists() and beside != path:
        host = _host_step(beside, name)
        made = {str(value.name) for value in model.graph.outputs}
        if not any(tensor.name in made for tensor in host.model.inputs):
            notes.append(f"{beside.name} is not the end of this model, and is left out")
            host = None
    inputs, more = _with_ranges(model, config)
    outputs = tuple(_tensor(value) for value in model.graph.outputs)
    first = ServedModel(name if host is None else f"{name}_engine", "onnxruntime", inputs, outputs, config.device)
    steps = [_Step(first, _onnx_files(path))]
    return _Parts(steps if host is None else [*steps, host], notes + more)


def _host_step(path: Path, name: str) -> _Step:
    graph = load(path, hash_weights=False).model.graph
    inputs, outputs = (tuple(map(_tensor, values)) for values in (graph.inputs, graph.outputs))
    return _Step(ServedModel(f"{name}_host", "onnxruntime", inputs, outputs, "cpu"), _onnx_files(path))


def _onnx_files(path: Path) -> dict[str, bytes | Path]:
    """The model's file under Triton's name, and the files of its weights under their own."""
    folder = Path(os.path.abspath(path)).parent
    proto = onnx.load(path, load_external_data=False)
    weights = check_external_data(proto, folder)
    found: dict[str, bytes | Path] = {FILES["onnxruntime"]: path}
    for tensor, owner in all_tensors(proto):
        for item in tensor.external_data:
            if item.key == "location" and ".." in item.value.split("/"):
                raise InvalidModelError(
                    f"The way to the weights leads through another folder: {item.value}",
                    where=owner,
                    remedy="save the model again, with its weights beside it",
                )
    for file in weights:
        name = file.relative_to(folder).as_posix()
        if name in found:
            raise InvalidModelError(
                f"The weights are in a file called {name}, the name that Triton wants for the model",
                where=str(file),
                remedy="save the model again, with its weights in a file of another name",
            )
        found[name] = file
    return found


def _tensor(value: ir.Value) -> EngineTensor:
    is_tensor = value.dtype is not None and isinstance(value.type, ir.TensorType)
    dtype = str(value.dtype.numpy()) if value.dtype is not None and is_tensor else ""
    shape = value.shape
    dims = None if shape is None else tuple(dim if isinstance(dim, int) else (dim.value or "?") for dim in shape)
    return EngineTensor(str(value.name), dtype, dims)


def _with_ranges(model: ir.Model, config: TritonConfig) -> tuple[tuple[EngineTensor, ...], list[str]]:
    """The inputs with the shapes that TensorRT is to build for, as far as they are known."""
    specs = [input_spec(value) for value in model.graph.inputs]
    tensors = tuple(_tensor(value) for value in model.graph.inputs)
    outputs = [_tensor(value) for value in model.graph.outputs]
    given = [{} if shapes is None else shapes for shapes in (config.min_shapes, config.opt_shapes, config.max_shapes)]
    unknown = sorted({str(dim) for spec in specs for dim in spec.shape[1:] if not isinstance(dim, int)})
    if any(given):
        lists = [[shapes] if shapes else [] for shapes in given]
        plan = plan_profiles(specs, min_shapes=lists[0], opt_shapes=lists[1], max_shapes=lists[2], observed=[])
        ranges = {name: ShapeRange(*shapes) for profile in plan.profiles for name, shapes in profile.shapes.items()}
        return tuple(_ranged(tensor, ranges) for tensor in tensors), list(plan.notes)
    if unknown:
        note = f"the range of the axes {', '.join(unknown)} is not known: no warm-up"
        if config.device == "gpu":
            note += ", and TensorRT builds again when a request goes beyond what it has seen; give --opt-shapes and"
            note += " --max-shapes"
        return tensors, [note]
    batch = max_batch([ServedModel("", "onnxruntime", tensors, tuple(outputs))], config.max_batch)
    if not batch:
        return tensors, []
    full = {
        spec.name: ShapeRange(*((size, *(dim for dim in spec.shape[1:] if isinstance(dim, int))) for size in sizes))
        for spec in specs
        for sizes in [(1, batch, batch)]
    }
    return tuple(_ranged(tensor, full) for tensor in tensors), []


def _ranged(tensor: EngineTensor, ranges: dict[str, ShapeRange]) -> EngineTensor:
    return dataclasses.replace(tensor, ranges=(ranges[tensor.name],)) if tensor.name in ranges else tensor


def _ensemble(name: str, parts: _Parts, batch: int) -> str:
    """The ensemble of a cut model.

    Where it is not known which outputs are the whole model's own, they are those of both parts, also what passes
    between them: Triton computes no more for it, and sends what a client asks for.
    """
    engine, host = steps = [step.model for step in parts.steps]
    made = {tensor.name: tensor.dtype for tensor in engine.outputs}
    for tensor in host.inputs:
        if made.get(tensor.name, tensor.dtype) != tensor.dtype:
            raise InvalidModelError(
                f"The first part gives {made[tensor.name]}, and the part for the host takes {tensor.dtype}",
                where=f"tensor {tensor.name}",
                remedy="write both parts again, with `trtopt optimize` or `trtopt build`",
            )
    inputs = [tensor.name for tensor in engine.inputs]
    inputs += [tensor.name for tensor in host.inputs if tensor.name not in made and tensor.name not in inputs]
    every = dict.fromkeys(tensor.name for tensor in (*host.outputs, *engine.outputs))
    for output in parts.outputs or ():
        if output not in every:
            raise InvalidModelError(
                "Neither part makes an output that the manifest names",
                where=f"output {output}",
                remedy="build the engine again",
            )
    return ensemble_text(name, steps, inputs, list(parts.outputs or every), batch)


def _notes(model: ServedModel, batch: int) -> list[str]:
    least = min((shape.min[0] for tensor in model.inputs for shape in tensor.ranges if shape.min), default=1)
    if batch and least > 1 and model.runtime == "tensorrt":
        return [f"the optimization profiles begin at a batch of {least}: a single smaller request fails"]
    return []
