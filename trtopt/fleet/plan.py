"""A sweep's file: settings, prices, and jobs, each with what it reads and the key that its results are kept under."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from trtopt.config import BuildConfig, field_kinds, flag, options
from trtopt.config.paths import source_file
from trtopt.config.toml_file import (
    GPUS,
    MATRIX,
    MODEL,
    PRICES,
    SWEEP,
    load,
    load_matrix,
    load_plain,
    matrix_word,
    path_in,
)
from trtopt.engine.backend import TENSORRT, backend_of_rules
from trtopt.engine.options import parse_builder_options
from trtopt.engine.request import parse_shapes
from trtopt.errors import InvalidModelError, TargetError, UsageError
from trtopt.fleet.task import Task
from trtopt.hardware.spec import DEFAULT_GPU, PORTABLE, GpuSpec, choose_gpu, find_gpu, normalized
from trtopt.hardware.user import gpu_table
from trtopt.pipeline.manifest import chosen_options
from trtopt.precision.observe.trt_cache import statistics_file
from trtopt.rewrite.registry import pack_hashes, select
from trtopt.source.check import check_external_data
from trtopt.support._script import DECODE
from trtopt.support.files import open_file
from trtopt.support.precision import Precision
from trtopt.support.words import did_you_mean

_CHUNK_BYTES = 4 << 20
_ARRAYS = (".npz", ".npy")


@dataclass(frozen=True)
class InputFile:
    """A file by its name within its folder; ``stamp`` is its size and modification time when it was hashed."""

    name: str
    path: Path
    sha256: str
    stamp: tuple[int, int]


@dataclass(frozen=True)
class Input:
    """What one option names, ``model`` or a field of :class:`~trtopt.config.BuildConfig`.

    ``files`` are the file itself first, then those that belong to it; ``sha256`` is of their names and contents.
    """

    option: str
    path: Path
    function: str
    files: tuple[InputFile, ...]
    sha256: str

    def value(self, folder: Path | None = None) -> str:
        """What the option is given: the path here, or where the files lie in ``folder``."""
        path = self.path if folder is None else (folder if self.path.is_dir() else folder / self.files[0].name)
        if self.function == DECODE:
            return f"{DECODE}{path}"
        return f"{path}:{self.function}" if self.function else str(path)


class Hashes:
    """Hashes of files, each read once."""

    def __init__(self) -> None:
        self._known: dict[Path, InputFile] = {}
        self.inputs: dict[tuple[str, str], Input] = {}
        """What options name, by option and value: many jobs share them."""

    def file(self, path: Path, name: str, what: str) -> InputFile:
        if path not in self._known:
            stamp, digest = stamp_of(path, what), hashlib.sha256()
            with open_file(path, what) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
            self._known[path] = InputFile(name, path, digest.hexdigest(), stamp)
        return self._known[path]


def stamp_of(path: Path, what: str) -> tuple[int, int]:
    """Size in bytes and modification time in nanoseconds."""
    try:
        found = path.stat()
    except OSError as error:
        raise UsageError(
            f"{what} cannot be read: {error.strerror}", where=str(path), remedy="check the path"
        ) from error
    return found.st_size, found.st_mtime_ns


def check_unchanged(inputs: Iterable[Input]) -> None:
    """Raise where a file is not the one that was hashed when the sweep was planned.

    Raises:
        UsageError: See above.
    """
    for item in (file for found in inputs for file in found.files):
        if stamp_of(item.path, "An input") != item.stamp:
            raise UsageError(
                "The file changed since the sweep was planned", where=str(item.path), remedy="start the sweep again"
            )


def inputs_of(model: Path, config: BuildConfig, hashes: Hashes) -> tuple[Input, ...]:
    """Everything a job reads: the model with its weights, samples, scripts, plugins.

    Of a script only the file itself is known: modules and data that it reads are not.

    Raises:
        UsageError: A file cannot be read.
    """
    found = [_known(MODEL, str(model), hashes)]
    for name, option in options(BuildConfig).items():
        value = getattr(config, name)
        if not option.path or not value:
            continue
        for item in (value,) if isinstance(value, str) else value:
            if option.is_read(item) or name == "calib_cache":
                found.append(_known(name, item, hashes))
    return tuple(found)


def _known(option: str, value: str, hashes: Hashes) -> Input:
    if (option, value) not in hashes.inputs:
        hashes.inputs[option, value] = _input(option, value, hashes)
    return hashes.inputs[option, value]


def _input(option: str, value: str, hashes: Hashes) -> Input:
    what = "The model" if option == MODEL else f"The file of {flag(option)}"
    path = source_file(value).absolute()
    function = value.rpartition(":")[2] if str(path) != str(Path(value).absolute()) else ""
    function = DECODE if value.startswith(DECODE) else function
    folder = path if path.is_dir() else path.parent
    paths = _model_files(path) if option == MODEL else _files(path)
    files = tuple(hashes.file(item, str(item.relative_to(folder)), what) for item in paths)
    named = [function, *((file.name, file.sha256) for file in files)]
    return Input(option, path, function, files, hashlib.sha256(json.dumps(named).encode()).hexdigest())


def _files(path: Path) -> list[Path]:
    path = path.absolute()
    if not path.is_dir():
        return [path]
    arrays = [item for item in path.iterdir() if item.suffix in _ARRAYS and item.name[0] != "." and item.is_file()]
    return sorted(arrays) or sorted(item for item in path.rglob("[!.]*") if item.is_file())


def _model_files(path: Path) -> list[Path]:
    """The model and the files of its weights; what is wrong with it is for the build to say."""
    path = path.absolute()
    stamp_of(path, "The model")
    try:
        return [path, *check_external_data(onnx.load(path, load_external_data=False), path.parent)]
    except (OSError, DecodeError, InvalidModelError):
        return [path]


_RELATIVE_URL = re.compile(r"(?:^|::)(?:file|local)://(?!/)")
"""One that fsspec would take from the current folder."""


@dataclass(frozen=True)
class Settings:
    """What ``[sweep]`` and ``[prices]`` say.

    Attributes:
        store: Folder or fsspec URL that keeps results.
        workers: Builds at once in processes of this machine; 0 for one on each core.
        limit: Jobs from which ``--yes`` is needed.
        retries: How often a job whose worker was lost is started again.
        time_limit: Seconds that a job may take; 0 for no limit.
        on_gpu: Whether every job runs on a machine that has its GPU.
        measure: Whether engines are timed there; implies ``on_gpu``.
        currency: What prices are in.
        prices: What an hour of a GPU costs, by the GPU's name in trtopt's table.
    """

    store: str = "sweep-store"
    workers: int = 0
    limit: int = 200
    retries: int = 2
    time_limit: int = 6 * 3600
    on_gpu: bool = False
    measure: bool = False
    currency: str = "USD"
    prices: dict[str, float] = field(default_factory=dict)


def load_settings(path: Path, gpus: tuple[GpuSpec, ...]) -> Settings:
    """The settings of a sweep's file; a relative store is in the file's folder, ``~`` is the home folder.

    Raises:
        UsageError: A key is unknown, a value has the wrong type, the store is a relative URL or in no home folder,
            or a price is of no known GPU.
    """
    found = load_plain(path, SWEEP)
    known = {item.name: item for item in dataclasses.fields(Settings) if item.name != PRICES}
    for key, value in found.items():
        where = f"{path}: [{SWEEP}] {key}"
        if key not in known:
            remedy = did_you_mean(key, known) or "see docs/sweep.md"
            raise UsageError(f"Unknown setting {key!r}", where=where, remedy=remedy)
        _check(key, known[key].default, value, where)
    settings = Settings(**found, prices=_prices(path, gpus))
    return dataclasses.replace(settings, store=_place(settings.store, path))


def _place(store: str, path: Path) -> str:
    """The store as a path from the root, or its URL."""
    where = f"{path}: [{SWEEP}] store"
    if _RELATIVE_URL.search(store):
        remedy = "write file:/// and the whole path; or the path alone, which is relative to this file"
        raise UsageError("The file:// URL is relative", where=where, remedy=remedy)
    return store if "://" in store else path_in(path, store, where)


def _check(key: str, default: Any, value: Any, where: str) -> None:
    if type(value) is not type(default):
        kind = {bool: "true or false", int: "a whole number", str: "a text"}[type(default)]
        raise UsageError(f"{key} must be {kind}, not {value!r}", where=where, remedy="see docs/sweep.md")
    if (isinstance(value, int) and value < 0) or value == "":
        raise UsageError(f"{key} is {value!r}", where=where, remedy="see docs/sweep.md")


def _prices(path: Path, gpus: tuple[GpuSpec, ...]) -> dict[str, float]:
    prices: dict[str, float] = {}
    for name, value in load_plain(path, PRICES).items():
        where = f"{path}: [{PRICES}] {name}"
        try:
            gpu = PORTABLE if normalized(name) == PORTABLE else find_gpu(name, gpus).name
        except UsageError as error:
            raise UsageError(error.what, where=where, remedy=error.remedy) from error
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise UsageError(f"{value!r} is no price", where=where, remedy="give what one hour costs, such as 0.71")
        if gpu in prices:
            raise UsageError(f"{gpu} has two prices", where=where, remedy="leave one out")
        prices[gpu] = float(value)
    return prices


BUILD = "build"
"""The table of the options of every job."""

MOST_JOBS = 100_000
_FORMAT = 1
"""Of the key: another one makes every job new."""

_OF_THE_STORE = ("output", "report", "html", "markdown", "save_onnx", "export_layer_info", "timing_cache", "sign")
"""Options that name files of one build: in a sweep, the store keeps them; a private key does not travel."""


@dataclass(frozen=True)
class Job:
    """One build.

    Attributes:
        varied: What the matrix varies, by option, as names of files have it.
        model: The model's file name without its suffix.
        config: The options; backend and GPU are said by name, and output options are left out.
        inputs: What it reads.
        gpu: The target's name; ``portable`` for every one from Ampere on.
        place: The GPU of the machine it runs on; empty where any machine will do.
        measure: Whether the engine is timed there.
    """

    varied: dict[str, str]
    model: str
    config: BuildConfig
    inputs: tuple[Input, ...]
    gpu: str
    place: str
    measure: bool

    @property
    def precision(self) -> str:
        """As asked for."""
        return self.config.precision or Precision.FP16

    @property
    def words(self) -> str:
        """``gpu L4, precision fp16``; the model's name where the matrix varies nothing."""
        return ", ".join(f"{axis} {value}" for axis, value in self.varied.items()) or self.model

    def named(self, option: str) -> list[Input]:
        return [item for item in self.inputs if item.option == option]

    def task(self, folders: Mapping[str, Path] | None = None) -> Task:
        """What its worker is asked; ``folders`` are those of the inputs by hash, None where they lie as here."""
        default = BuildConfig()
        changed = {
            item.name: getattr(self.config, item.name)
            for item in dataclasses.fields(BuildConfig)
            if getattr(self.config, item.name) != getattr(default, item.name)
        }
        for name in {item.option for item in self.inputs if item.option != MODEL}:
            values = [self._path(item, folders) for item in self.named(name)]
            changed[name] = tuple(values) if isinstance(getattr(default, name), tuple) else values[0]
        model = next((self._path(item, folders) for item in self.named(MODEL)), "")
        return Task(model, changed, self.measure)

    @staticmethod
    def _path(item: Input, folders: Mapping[str, Path] | None) -> str:
        return item.value(None if folders is None else folders[item.sha256])


@dataclass(frozen=True)
class Plan:
    """A sweep's file, read: its jobs in the order of the matrix, the last list varying fastest."""

    path: Path
    settings: Settings
    jobs: tuple[Job, ...]


def load_plan(path: Path) -> Plan:
    """Read a sweep's file and hash what its jobs read.

    Raises:
        UsageError: A key, a value, a GPU or a builder option is wrong, there is no model, or a file cannot be read.
    """
    path = path.absolute()
    tables = gpu_table(load_plain(path, GPUS))
    settings = load_settings(path, tables)
    combinations = load_matrix(path, BUILD, MOST_JOBS)
    if not combinations:
        raise UsageError("There is nothing to sweep over", where=str(path), remedy=f"add [{MATRIX}], with lists")
    given = load(path, BUILD) if any(load_plain(path, name) for name in (BUILD, GPUS)) else {}
    wrong = next((name for name in _OF_THE_STORE for item in (given, *combinations) if name in item), None)
    if wrong is not None:
        remedy = "leave it out: the store keeps what a job makes"
        raise UsageError(f"{flag(wrong)} has no place in a sweep", where=f"{path}: {wrong}", remedy=remedy)
    if any(MODEL not in item for item in combinations):
        raise UsageError("There is no model", where=str(path), remedy=f'give model = ["model.onnx"] in [{MATRIX}]')
    names = model_names(list({item[MODEL]: None for item in combinations}))
    made = _Made(path, given, settings, tables, names, Hashes())
    return Plan(path, settings, tuple(made.job(item) for item in combinations))


def model_names(paths: Sequence[str]) -> dict[str, str]:
    """A name for each model: its file name without the suffix, behind as many folders as tell them apart.

    Raises:
        UsageError: No folder tells two of them apart: ``my net.onnx`` and ``my-net.onnx``.
    """
    parts = {path: (*Path(path).absolute().parent.parts[1:], Path(path).stem) for path in paths}
    models = len({Path(path).absolute() for path in paths})
    for length in range(1, max(map(len, parts.values())) + 1):
        names = {path: "-".join(words[-length:]) for path, words in parts.items()}
        if len({matrix_word(name) for name in names.values()}) == models:
            return names
    raise UsageError(
        "Two models have one name, in the report and for {model}",
        where=f"[{MATRIX}] {MODEL}",
        remedy="rename one: suffixes do not count, nor which character stands between words",
    )


@dataclass(frozen=True)
class _Made:
    path: Path
    given: Mapping[str, Any]
    settings: Settings
    gpus: Sequence[GpuSpec]
    names: Mapping[str, str]
    hashes: Hashes

    def job(self, varied: Mapping[str, Any]) -> Job:
        values = {**self.given, **varied}
        model = str(values.pop(MODEL))
        config, gpu = self._config(values, self.names[model], varied)
        settings = self.settings
        needs = settings.on_gpu or settings.measure or config.backend == TENSORRT.name
        if gpu is None and needs:
            remedy = "name a GPU, or leave on_gpu and measure out and use the backend tensorrt-rtx"
            raise UsageError("A portable engine belongs to no machine's GPU", where=f"{self.path}: gpu", remedy=remedy)
        called = matrix_word(self.names[model])
        words = {axis: called if axis == MODEL else matrix_word(item) for axis, item in varied.items()}
        name = str(config.gpu)
        inputs = inputs_of(Path(model), config, self.hashes)
        return Job(words, called, config, inputs, name, name if needs else "", settings.measure)

    def _config(
        self, values: dict[str, Any], model: str, varied: Mapping[str, Any]
    ) -> tuple[BuildConfig, GpuSpec | None]:
        """The options of a job, with its GPU and backend by name; ``{model}`` in a source becomes the model's name."""
        kinds, known, path = field_kinds(BuildConfig), options(BuildConfig), self.path
        for name, value in values.items():
            if kinds.get(name) == "shapes":
                with _at(path, name, varied):
                    values[name] = tuple(parse_shapes(text) for text in value)
            elif name in known and known[name].path == "source":
                values[name] = value.replace("{model}", model)
        config = BuildConfig(**values)
        if statistics_file(config) is not None:
            remedy = "leave it out: statistics are kept in the cache folder"
            raise UsageError("Jobs cannot share a file of statistics", where=f"{path}: calib_cache", remedy=remedy)
        with _at(path, "gpu", varied):
            gpu = choose_gpu(config.gpu or DEFAULT_GPU, self.gpus, None)
        backend = backend_of_rules(config.backend, gpu)
        # What a compiler cannot do fails its own jobs, with what it said.
        with _at(path, "builder", varied), contextlib.suppress(TargetError):
            parse_builder_options(config.builder, backend, gpu_present=True)
        name = PORTABLE if gpu is None else gpu.name
        return dataclasses.replace(config, gpu=name, backend=backend.name), gpu


@contextlib.contextmanager
def _at(path: Path, option: str, varied: Container[str]) -> Iterator[None]:
    """Errors of an option, with its place in the file."""
    try:
        yield
    except UsageError as error:
        value = error.where.removeprefix(flag(option)).strip()
        where = f"{path}: [{MATRIX if option in varied else BUILD}] {option}{f': {value}' if value else ''}"
        raise UsageError(error.what, where=where, remedy=error.remedy) from error


def check_recipes(path: Path, jobs: Sequence[Job], packs: Mapping[str, str]) -> None:
    """Raise where a job names a recipe that there is not; ``packs`` are others' packs of recipes where jobs run.

    Where others' packs are installed the job finds out: which recipes they have is known by running their code.

    Raises:
        UsageError: See above.
    """
    if not packs and not pack_hashes():
        for recipes, job in {job.config.recipes: job for job in jobs}.items():
            with _at(path, "recipes", job.varied):
                select(recipes)


def job_key(job: Job, code: str, backend_version: str, packs: Mapping[str, str]) -> str:
    """The SHA-256, hex, of what the results depend on: contents of files, options, code; no names of files.

    ``code``, ``backend_version`` and ``packs`` (of recipes, trtopt's own apart) are those of the machine it runs on.
    """
    parts = {
        "format": _FORMAT,
        "code": code,
        "backend": [job.config.backend, backend_version],
        "options": chosen_options(job.config),
        "inputs": [(item.option, item.function, [file.sha256 for file in item.files]) for item in job.inputs],
        "measure": job.measure,
        "on_gpu": job.place,
        **({"packs": dict(packs)} if packs and job.config.recipes != "none" else {}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def check_distinct(jobs: Sequence[Job], keys: Sequence[str]) -> None:
    """Raise :class:`UsageError` where two jobs would write the same entry of the store."""
    first: dict[str, Job] = {}
    for job, key in zip(jobs, keys, strict=True):
        if key in first:
            raise UsageError(
                f"Two jobs of the matrix have one output: {first[key].words}; and {job.words}",
                where=f"[{MATRIX}]",
                remedy="take one of the equal values out: names of files do not count, their contents do",
            )
        first[key] = job
