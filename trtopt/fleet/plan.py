"""The jobs of a sweep, each with the key that its results are kept under."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtopt.config import BuildConfig, field_kinds, flag, options
from trtopt.config.toml_file import GPUS, MATRIX, MODEL, load, load_matrix, load_plain, matrix_word
from trtopt.engine.backend import TENSORRT, backend_of_rules
from trtopt.engine.options import parse_builder_options
from trtopt.engine.request import parse_shapes
from trtopt.errors import TargetError, UsageError
from trtopt.fleet.inputs import Hashes, Input, inputs_of
from trtopt.fleet.settings import Settings, load_settings
from trtopt.fleet.task import Task
from trtopt.hardware.spec import DEFAULT_GPU, PORTABLE, GpuSpec, choose_gpu
from trtopt.hardware.user import gpu_table
from trtopt.pipeline.manifest import chosen_options
from trtopt.precision.observe.trt_cache import statistics_file
from trtopt.rewrite.registry import pack_hashes, select
from trtopt.support.precision import Precision

BUILD = "build"
"""The table of the options of every job."""

MOST_JOBS = 100_000
_FORMAT = 1
"""Of the key: another one makes every job new."""

_OF_THE_STORE = ("output", "report", "save_onnx", "export_layer_info", "timing_cache", "sign")
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
        """The inputs of an option."""
        return [item for item in self.inputs if item.option == option]

    def task(self, folders: Mapping[str, Path] | None = None) -> Task:
        """What its worker is asked, with the inputs' paths where they lie.

        Args:
            folders: The folder of each input by its hash; None where the paths are those here.
        """
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
    """What jobs are made of."""

    path: Path
    given: Mapping[str, Any]
    settings: Settings
    gpus: Sequence[GpuSpec]
    names: Mapping[str, str]
    hashes: Hashes

    def job(self, varied: Mapping[str, Any]) -> Job:
        """The job of a combination."""
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
    """Raise where a job names a recipe that there is not.

    Where others' packs are installed the job finds out: which recipes they have is known by running their code.

    Args:
        path: The sweep's file.
        jobs: The jobs.
        packs: Others' packs of recipes where jobs run.

    Raises:
        UsageError: See above.
    """
    if not packs and not pack_hashes():
        for recipes, job in {job.config.recipes: job for job in jobs}.items():
            with _at(path, "recipes", job.varied):
                select(recipes)


def job_key(job: Job, code: str, backend_version: str, packs: Mapping[str, str]) -> str:
    """The SHA-256, hex, of what the results depend on: contents of files, options, code; no names of files.

    Args:
        job: The job.
        code: A hash of the code of trtopt on the machine it runs on.
        backend_version: Of the compiler there.
        packs: Hashes of the packs of recipes there, trtopt's own apart.
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
    """Raise where two jobs would write the same entry of the store.

    Raises:
        UsageError: See above.
    """
    first: dict[str, Job] = {}
    for job, key in zip(jobs, keys, strict=True):
        if key in first:
            raise UsageError(
                f"Two jobs of the matrix have one output: {first[key].words}; and {job.words}",
                where=f"[{MATRIX}]",
                remedy="take one of the equal values out: names of files do not count, their contents do",
            )
        first[key] = job
