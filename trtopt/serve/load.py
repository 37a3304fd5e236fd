"""What :meth:`trtopt.Engine.load` loads: an engine, or a model, with its part for the host."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import ml_dtypes
import numpy as np
import onnx_ir as ir

from trtopt.accuracy.emulation import fp32_emulation
from trtopt.engine.backend import SPECIALIZATIONS, Specialization, is_engine
from trtopt.engine.kernel_cache import kernels_folder
from trtopt.engine.manifest import VerifiedEngine, check_runs_here, load_engine, manifest_path, runtime_options
from trtopt.errors import IntegrityError, InvalidModelError, MissingDependencyError, TargetError, UsageError
from trtopt.graph.edit import all_nodes
from trtopt.graph.states import find_states
from trtopt.hardware.cpu import available_threads
from trtopt.report.schema.manifest import HostFiles, Manifest
from trtopt.serve.bundle import engine_of
from trtopt.serve.gpu import GpuRunner
from trtopt.serve.runner import FilledRunner, ServingRunner
from trtopt.serve.tensors import Arrays, TensorSpec, said, spec_of
from trtopt.source.onnx_file import load as load_model
from trtopt.support._lazy import require
from trtopt.support.ort_session import ServingSession
from trtopt.support.words import did_you_mean


class CpuRunner:
    """A model in ONNX Runtime; any number of threads may run it at once.

    ONNX Runtime has few BF16 kernels on a CPU: a model with BF16 in it is computed in FP32, and rounded after every
    node as verification does it.

    Args:
        callers: How many calls run at a time. Each brings a thread, and only cores that these leave help within
            operators.

    Raises:
        InvalidModelError: ONNX Runtime cannot load it, or an input or output is no tensor.
        MissingDependencyError: ONNX Runtime is not installed.
    """

    takes_gpu = False

    def __init__(self, model: ir.Model, callers: int) -> None:
        states = {str(state.input.name): str(state.output.name) for state in find_states(model)}
        self.inputs = tuple(
            dataclasses.replace(spec, state=states.get(spec.name, "")) for spec in specs_of(model.graph.inputs)
        )
        self.outputs = specs_of(model.graph.outputs)
        self.runtime = f"onnxruntime {require('onnxruntime', 'cpu', 'serve models on the CPU').__version__} on the CPU"
        threads = max(1, available_threads() - callers + 1)
        self._session = ServingSession(fp32_emulation(model) if _has_bf16(model) else model, threads=threads)
        self._bf16_inputs, self._bf16_outputs = (
            tuple(spec.name for spec in specs if spec.dtype == ml_dtypes.bfloat16)
            for specs in (self.inputs, self.outputs)
        )

    def run(self, context: int, feeds: Arrays) -> Arrays:
        """Outputs by name; BF16 is computed from and to FP32 at the border, without loss."""
        session = self._session
        if self._bf16_inputs:
            feeds = {**feeds, **{name: feeds[name].astype(np.float32) for name in self._bf16_inputs}}
        found = dict(zip(session.output_names, session.run_exactly(feeds)))  # noqa: B905 - as many as were asked for
        for name in self._bf16_outputs:
            found[name] = found[name].astype(ml_dtypes.bfloat16)
        return found

    @property
    def graph_counts(self) -> dict[str, int]:
        """Nothing: there are no CUDA graphs on a CPU."""
        return {}

    def close(self) -> None:
        self._session.close()


def _has_bf16(model: ir.Model) -> bool:
    return any(
        value is not None and value.dtype is ir.DataType.BFLOAT16
        for node in all_nodes(model.graph)
        for value in (*node.inputs, *node.outputs)
    )


def specs_of(values: Sequence[ir.Value]) -> tuple[TensorSpec, ...]:
    """What the inputs or outputs of a graph are.

    Raises:
        InvalidModelError: One is no tensor, or of a type that numpy has no word for.
    """
    found = []
    for value in values:
        if not isinstance(value.type, ir.TensorType):
            raise InvalidModelError(
                f"{value.name!r} is no tensor: sequences, maps and optional values are not served",
                where=str(value.name),
                remedy="give the model inputs and outputs that are tensors",
            )
        shape = value.shape
        dims = None if shape is None else tuple(dim if isinstance(dim, int) else (dim.value or "?") for dim in shape)
        dtype: np.dtype[Any] = np.dtype(value.type.dtype.numpy())
        found.append(TensorSpec(str(value.name), dtype, dims))
    return tuple(found)


class WholeRunner:
    """A first part, then the part for the host, behind the same call.

    Args:
        names: Outputs of the whole model in its order; None where they are not known: then all outputs of both parts.

    Raises:
        IntegrityError: The parts do not fit each other.
    """

    takes_gpu = False

    def __init__(self, first: ServingRunner, host: CpuRunner, names: Sequence[str] | None = None) -> None:
        made = {spec.name: spec for spec in first.outputs}
        given = {spec.name: spec for spec in first.inputs}
        own = tuple(spec for spec in host.inputs if spec.name not in made and spec.name not in given)
        outputs = {**made, **{spec.name: spec for spec in host.outputs}}
        for spec in host.inputs:
            source = made.get(spec.name) or given.get(spec.name)
            if source is not None and source.dtype != spec.dtype:
                raise _unfit(f"it takes {spec.name!r} as {spec.dtype}, and the first part has {source.dtype}")
        if not any(spec.name in made for spec in host.inputs):
            raise _unfit("it reads no output of the first part")
        if names is not None and not set(names) <= outputs.keys():
            raise _unfit(f"nothing gives {', '.join(set(names) - outputs.keys())}")
        self.runtime = first.runtime
        self.inputs = (*first.inputs, *own)
        self.outputs = tuple(outputs.values()) if names is None else tuple(outputs[name] for name in names)
        self._first, self._host = first, host
        self._between = tuple(spec.name for spec in host.inputs if spec.name in made)
        self._from_caller = tuple(spec.name for spec in host.inputs if spec.name not in made)
        self._own = frozenset(spec.name for spec in own)

    def run(self, context: int, feeds: dict[str, Any]) -> dict[str, Any]:
        found = self._first.run(context, {name: array for name, array in feeds.items() if name not in self._own})
        taken = {name: found[name] for name in self._between}
        taken.update((name, feeds[name]) for name in self._from_caller)
        found.update(self._host.run(context, taken))
        return {spec.name: found[spec.name] for spec in self.outputs}

    @property
    def graph_counts(self) -> dict[str, int]:
        return self._first.graph_counts

    def close(self) -> None:
        self._first.close()
        self._host.close()


def _unfit(why: str) -> IntegrityError:
    return IntegrityError(
        f"The part of the model for the host does not belong to the first part: {why}",
        where="the host part",
        remedy="build again, or copy both files of one build",
    )


_LOG = logging.getLogger("trtopt.serve")

_HOST_SUFFIX = ".host.onnx"


class EngineOptions(TypedDict, total=False):
    """What only engines have.

    Attributes:
        key: A public Ed25519 key (PEM): the engine's manifest has to be signed with it.
        allow_unverified: Take an engine that has no manifest.
        cuda_graphs: How many shapes have a CUDA graph, in each context; 0 for none.
        plugins: Libraries of its plugins, each one that it was built with: their code runs in this process.
        weight_budget: Bytes of its weights that stay on the GPU, or ``auto``, for an engine of ``--builder
            weight_streaming=true``; the others are streamed at every call. None for all.
        specialization: When TensorRT for RTX compiles kernels for the very shapes of a call: ``eager``, ``lazy`` or
            ``none``; None for ``eager``.
        cache_dir: The cache folder, which keeps them for the next process; None for ``~/.cache/trtopt``.
    """

    key: str | Path | None
    allow_unverified: bool
    cuda_graphs: int
    plugins: Sequence[str | Path]
    weight_budget: int | Literal["auto"] | None
    specialization: Specialization | None
    cache_dir: str | Path | None


@dataclass(frozen=True)
class LoadSettings:
    """How an engine is loaded."""

    contexts: int
    fallback: Path | None
    key: str | Path | None = None
    allow_unverified: bool = False
    cuda_graphs: int = 8
    plugins: Sequence[str | Path] = ()
    weight_budget: int | Literal["auto"] | None = None
    specialization: Specialization | None = None
    cache_dir: str | Path | None = None

    @classmethod
    def of(cls, contexts: int, fallback: Path | None, options: EngineOptions) -> LoadSettings:
        """The settings, with what was given of the options of engines. Raises UsageError: one is unknown or wrong."""
        known = tuple(EngineOptions.__annotations__)
        for name in options:
            if name not in known:
                meant = did_you_mean(name, ("path", "fallback", "contexts", "queue", "nan", *known))
                meant = meant or f"for engines there are {', '.join(known)}"
                raise UsageError(f"Engine.load has no option {name!r}", where=name, remedy=meant)
        found = cls(contexts, fallback, **options)
        if not isinstance(found.cuda_graphs, int) or found.cuda_graphs < 0:
            raise UsageError(
                f"cuda_graphs is {found.cuda_graphs!r}", where="cuda_graphs", remedy="give a whole number, 0 for none"
            )
        budget = found.weight_budget
        if budget not in (None, "auto") and (not isinstance(budget, int) or budget < 0):
            raise UsageError(f"weight_budget is {budget!r}", where="weight_budget", remedy="give bytes, or 'auto'")
        if found.specialization not in (None, *SPECIALIZATIONS):
            said, remedy = f"specialization is {found.specialization!r}", f"give one of {', '.join(SPECIALIZATIONS)}"
            raise UsageError(said, where="specialization", remedy=remedy)
        if isinstance(found.plugins, (str, Path)):
            raise UsageError("plugins is one path", where="plugins", remedy="give a list of paths")
        return found


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        inputs: What a call gives: the runner's, with the engine's profiles where there is an engine.
        fallback_reason: Why the engine does not run and its model runs in its place; else empty.
    """

    name: str
    runner: ServingRunner
    inputs: tuple[TensorSpec, ...]
    fallback_reason: str = ""


def load(path: Path, settings: LoadSettings) -> Loaded:
    """Load an engine, that of a bundle, or a model; raises as :meth:`trtopt.Engine.load`."""
    path = engine_of(path, settings.key)
    if not (is_engine(path) or os.path.lexists(manifest_path(path))):
        _check_no_engine_settings(path, settings)
        model = _model(path, settings.contexts)
        return Loaded(path.name, model, model.inputs)
    engine = load_engine(path, key=settings.key, allow_unverified=settings.allow_unverified)
    if engine.manifest is not None:
        _check_tensors(engine.manifest, path)
    try:
        check_runs_here(engine)
    except (TargetError, MissingDependencyError) as error:
        if settings.fallback is None:
            raise type(error)(
                error.what,
                where=error.where,
                remedy="give fallback=MODEL.onnx, the optimized model of --save-onnx, which ONNX Runtime runs on any "
                f"machine; or {error.remedy}",
            ) from error
        return _fallback(engine, settings.fallback, settings.contexts, error.what)
    kernels = kernels_folder(settings.cache_dir)
    plugins = map(Path, settings.plugins)
    access = runtime_options(engine, plugins, settings.weight_budget, settings.specialization, kernels)
    runner: ServingRunner = GpuRunner(engine, access, settings.contexts, settings.cuda_graphs)
    if engine.manifest is not None and engine.manifest.host is not None:
        runner = _with_host(runner, engine.path, engine.manifest.host, settings.contexts)
    return _filled(Loaded(path.name, runner, runner.inputs), engine.manifest)


def _filled(loaded: Loaded, manifest: Manifest | None) -> Loaded:
    """The same for calls of fewer rows, where the manifest says that rows are alone."""
    if manifest is None or not manifest.filled_rows:
        return loaded
    runner = FilledRunner(loaded.runner, loaded.inputs, manifest.filled_rows)
    return dataclasses.replace(loaded, runner=runner, inputs=runner.inputs)


def _check_tensors(manifest: Manifest, path: Path) -> None:
    """Check that a manifest's inputs and outputs can be those of an engine. Raises IntegrityError: they cannot."""
    for item in (*manifest.inputs, *manifest.outputs):
        try:
            known = not spec_of(item).dtype.hasobject
        except TypeError:
            known = False
        if not known:
            raise _impossible(path, f"{item.name!r} has the type {item.dtype!r}")
    dynamic = [item for item in manifest.inputs if item.ranges]
    fit = all(
        item.shape is None or len(shape) == len(item.shape)
        for item in dynamic
        for one in item.ranges
        for shape in (one.min, one.opt, one.max)
    )
    if not fit or len({len(item.ranges) for item in dynamic}) > 1:
        raise _impossible(path, "the optimization profiles of its inputs do not fit each other or the shapes")
    given = {item.name for item in manifest.outputs}
    if any(item.state and (item.state not in given or item.shape is None) for item in manifest.inputs):
        raise _impossible(path, "it has states that are no outputs, or of no known rank")
    least = [min((one.min for one in item.ranges), default=item.shape or ()) for item in manifest.inputs]
    rows, has_rows = manifest.filled_rows, all(item.shape for item in manifest.outputs)
    if rows and (manifest.host is not None or not has_rows or rows not in [shape[0] for shape in least if shape]):
        raise _impossible(path, f"its inputs or outputs have not the {rows} rows that calls are filled up to")


def _impossible(path: Path, why: str) -> IntegrityError:
    return IntegrityError(f"The manifest is of no engine: {why}", where=str(path), remedy="build the engine again")


def _with_host(first: ServingRunner, path: Path, host: HostFiles, contexts: int) -> WholeRunner:
    place = path.with_name(host.files[0].name)
    return WholeRunner(first, CpuRunner(load_model(place).model, contexts), host.model_outputs or None)


def _check_no_engine_settings(path: Path, settings: LoadSettings) -> None:
    """Settings that protect engines must not be taken for protection of a model."""
    for name in ("fallback", "key", "plugins", "weight_budget", "specialization", "cache_dir"):
        if getattr(settings, name) not in (None, ()):
            raise UsageError(
                f"{name} is for engines, and the file is none",
                where=str(path),
                remedy="give an engine, or leave it out",
            )


def _model(path: Path, contexts: int) -> ServingRunner:
    """A model and, where it lies beside it, its part for the host.

    A build of ``det.onnx`` leaves ``det.host.onnx`` beside the whole model, whose part it is not.
    """
    first = CpuRunner(load_model(path).model, contexts)
    host = path.with_name(path.stem + _HOST_SUFFIX)
    if not host.exists():
        return first
    behind = CpuRunner(load_model(host).model, contexts)
    known = {spec.name for spec in (*first.inputs, *first.outputs)}
    if unknown := [spec.name for spec in behind.inputs if spec.name not in known]:
        behind.close()
        _LOG.info("%s is not of %s, which has no %s: the model runs alone", host.name, path.name, ", ".join(unknown))
        return first
    _LOG.info("the part of %s for the host runs behind it: %s", path.name, host.name)
    return WholeRunner(first, behind)


def _fallback(engine: VerifiedEngine, path: Path, contexts: int, reason: str) -> Loaded:
    artifact = load_model(path)
    manifest = engine.manifest
    runner: ServingRunner = CpuRunner(artifact.model, contexts)
    inputs = runner.inputs
    if manifest is not None:
        _check_model_of(manifest, path, artifact.sha256, runner)
        profiles = {item.name: item.ranges for item in manifest.inputs}
        if manifest.host is not None:
            runner = _with_host(runner, engine.path, manifest.host, contexts)
        inputs = tuple(dataclasses.replace(spec, profiles=profiles.get(spec.name, ())) for spec in runner.inputs)
    runner.runtime += f", in place of {engine.built}"
    _LOG.warning("%s does not run here, and %s runs in its place: %s", engine.path.name, path.name, reason)
    return _filled(Loaded(engine.path.name, runner, inputs, reason), manifest)


def _check_model_of(manifest: Manifest, path: Path, sha256: str, model: ServingRunner) -> None:
    """Check that a model is the one an engine was made from. Raises IntegrityError: it is not."""
    if manifest.onnx_sha256 and manifest.onnx_sha256 != sha256:
        raise _other(path, "its hash is not the one in the manifest")
    for what, own, built in (
        ("input", model.inputs, manifest.inputs),
        ("output", model.outputs, manifest.outputs),
    ):
        found = {spec.name: spec for spec in own}
        wanted = {item.name: spec_of(item) for item in built}
        if found.keys() != wanted.keys():
            raise _other(path, f"its {what}s are {', '.join(found)}, those of the engine {', '.join(wanted)}")
        for name, spec in wanted.items():
            if found[name].dtype != spec.dtype or not _same_shape(found[name], spec):
                raise _other(
                    path,
                    f"its {what} {name!r} is {found[name].dtype}{said(found[name].shape)}, that of the engine "
                    f"{spec.dtype}{said(spec.shape)}",
                )


def _same_shape(one: TensorSpec, two: TensorSpec) -> bool:
    if one.shape is None or two.shape is None:
        return True
    return [isinstance(dim, int) and dim for dim in one.shape] == [isinstance(dim, int) and dim for dim in two.shape]


def _other(path: Path, why: str) -> IntegrityError:
    return IntegrityError(
        f"The fallback is not the model that the engine was made from: {why}",
        where=str(path),
        remedy="give the file that `trtopt build --save-onnx` wrote together with the engine",
    )
