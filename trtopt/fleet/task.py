"""What a job is asked, what comes of it, and what the machine has that it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtopt.cache.code import code_hash
from trtopt.engine.backend import BACKENDS, installed_version
from trtopt.hardware.probe import present_gpu
from trtopt.report.schema.sweep import Failure
from trtopt.rewrite.registry import pack_hashes
from trtopt.support.precision import Precision
from trtopt.support.version import VERSION

REPORT, PROFILE = "report.json", "profile.json"
"""Files of a result, beside the engine and its manifest."""

EXECUTE, PREPARE = "trtopt.fleet.run:execute", "trtopt.fleet.run:prepare"
"""What runs a job, and what does the part of it that needs no GPU: ``module:function``, loaded where it runs."""


@dataclass(frozen=True)
class Task:
    """What a job is asked, as JSON values.

    Attributes:
        model: The model's path.
        options: Fields of :class:`~trtopt.config.BuildConfig`.
        measure: Whether the engine is timed on this machine's GPU.
    """

    model: str
    options: dict[str, Any]
    measure: bool = False

    @property
    def is_worth_preparing(self) -> bool:
        """Whether a machine without a GPU can spare the one with it anything: samples to run, graphs to compare."""
        return self.options.get("precision") in [item for item in Precision if item.is_quantized]


@dataclass(frozen=True)
class Outcome:
    """What came of it; the files are in the folder.

    Attributes:
        seconds: From its start to its end.
        node: The machine.
        failure: None where it was built, or a gate failed.
    """

    seconds: float
    node: str
    failure: Failure | None = None


@dataclass(frozen=True)
class Survey:
    """What a machine has: the version of trtopt, a hash of the code that does a job, versions of the compilers, the
    name of its GPU (empty without one), and hashes of others' packs of recipes."""

    trtopt: str
    code: str
    backends: dict[str, str]
    gpu: str
    packs: dict[str, str]


def survey() -> Survey:
    """What this machine has."""
    gpu = present_gpu()
    versions = {name: installed_version(backend) for name, backend in BACKENDS.items()}
    code = code_hash("trtopt.fleet.run", "trtopt_recipes")
    return Survey(VERSION, code, versions, "" if gpu is None else gpu.name, pack_hashes())
