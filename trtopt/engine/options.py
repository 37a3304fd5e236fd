"""``--builder KEY=VALUE``: what each backend takes, ignores and cannot do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trtopt.engine.backend import TENSORRT_RTX, Backend
from trtopt.errors import TargetError, UsageError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TRUE = frozenset({"1", "true", "on", "yes", "enable"})
_FALSE = frozenset({"0", "false", "off", "no", "disable"})


@dataclass(frozen=True)
class _Option:
    """How a key reaches the builder.

    Attributes:
        kind: A builder flag, an integer attribute, an enum attribute, a memory pool, a set of members of an enum, or
            how many engines the search over the others may build.
        members: The enum's members by the value a user writes; of a set, several with spaces between.
        rtx: What TensorRT for RTX does with it: takes it, ignores it (the engine is the same to the byte), needs a GPU
            for it, or has no such engines.
    """

    kind: Literal["flag", "int", "enum", "pool", "mask", "search"]
    target: str
    help: str
    enum: str = ""
    members: dict[str, str] = field(default_factory=dict)
    limits: tuple[int, int] = (0, 0)
    rtx: Literal["takes", "ignores", "needs-gpu", "never"] = "takes"


_TILING = {"none": "NONE", "fast": "FAST", "moderate": "MODERATE", "full": "FULL"}
_HARDWARE = {"none": "NONE", "ampere+": "AMPERE_PLUS", "same_compute_capability": "SAME_COMPUTE_CAPABILITY"}
_TACTICS = {
    "all": "EDGE_MASK_CONVOLUTIONS JIT_CONVOLUTIONS",
    "edge_mask_convolutions": "EDGE_MASK_CONVOLUTIONS",
    "jit_convolutions": "JIT_CONVOLUTIONS",
    "none": "",
}
"""Those of TensorRT 10.3 and later that are not deprecated (cuBLAS, cuBLASLt and cuDNN are, and off by default)."""

SEARCH = "search"
_OPTIONS = {
    "builder_optimization_level": _Option("int", "builder_optimization_level", "0 to 5", limits=(0, 5), rtx="ignores"),
    "workspace": _Option("pool", "WORKSPACE", "bytes, with K, M or G for powers of 1024"),
    "max_aux_streams": _Option("int", "max_aux_streams", "0 to 64", limits=(0, 64)),
    "tiling": _Option(
        "enum", "tiling_optimization_level", ", ".join(_TILING), "TilingOptimizationLevel", _TILING, rtx="ignores"
    ),
    "tactic_sources": _Option("mask", "tactic_sources", ", ".join(_TACTICS), "TacticSource", _TACTICS, rtx="ignores"),
    SEARCH: _Option("search", SEARCH, "2 to 64 builds", limits=(2, 64), rtx="ignores"),
    "hardware_compatibility": _Option(
        "enum",
        "hardware_compatibility_level",
        ", ".join(_HARDWARE),
        "HardwareCompatibilityLevel",
        _HARDWARE,
        rtx="ignores",
    ),
    "weight_streaming": _Option("flag", "WEIGHT_STREAMING", "true or false"),
    "sparsity": _Option("flag", "SPARSE_WEIGHTS", "true or false", rtx="ignores"),
    "refit": _Option("flag", "REFIT", "true or false", rtx="needs-gpu"),
    "strip_plan": _Option("flag", "STRIP_PLAN", "true or false", rtx="needs-gpu"),
    "version_compatible": _Option("flag", "VERSION_COMPATIBLE", "true or false", rtx="never"),
}


@dataclass(frozen=True)
class BuilderSettings:
    """What to set on the builder's configuration, by the names of TensorRT's API.

    Attributes:
        enums: Attributes whose value is a member of an enum: (enum, member).
        pools: Bytes by ``MemoryPoolType``.
        masks: What is set as a set of members of an enum: (enum, members).
        search: Builds that the search over options may make; empty without one, else under one key.
        ignored: The options (``KEY=VALUE``) this backend ignores.
    """

    flags: dict[str, bool]
    attributes: dict[str, int]
    enums: dict[str, tuple[str, str]]
    pools: dict[str, int]
    masks: dict[str, tuple[str, list[str]]]
    search: dict[str, int]
    ignored: tuple[str, ...] = ()


def parse_builder_options(items: Sequence[str], backend: Backend, *, gpu_present: bool) -> BuilderSettings:
    """Read ``KEY=VALUE`` options.

    Raises:
        UsageError: A key is unknown or repeated, or a value is not one of its values.
        TargetError: The backend cannot do it here.
    """
    settings = _nothing()
    ignored: list[str] = []
    seen: set[str] = set()
    for item in items:
        key, value = key_of(item), item.partition("=")[2].strip()
        option = _lookup(key)
        if key in seen:
            raise UsageError(f"The builder option {key} is given twice", where=item, remedy="give it once")
        seen.add(key)
        is_ignored = backend == TENSORRT_RTX and option.rtx == "ignores"
        # What is ignored is checked, and not set: an engine does not depend on it, and the key of a cached one neither.
        target = _nothing() if is_ignored else settings
        _apply(target, option, item, value)
        if backend == TENSORRT_RTX and target.flags.get(option.target, True):
            _check_rtx(key, option, gpu_present)
            if is_ignored:
                ignored.append(f"{key}={value}")
    return replace(settings, ignored=tuple(ignored))


def key_of(item: str) -> str:
    """The key of ``KEY=VALUE``, as it is spelled here."""
    return item.partition("=")[0].strip().lower().replace("-", "_")


def _nothing() -> BuilderSettings:
    return BuilderSettings({}, {}, {}, {}, {}, {})


def _lookup(key: str) -> _Option:
    if key in _OPTIONS:
        return _OPTIONS[key]
    close = difflib.get_close_matches(key, _OPTIONS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UsageError(
        f"There is no builder option {key!r}",
        where="--builder",
        remedy=f"{hint}There are: {', '.join(_OPTIONS)}",
    )


def _apply(settings: BuilderSettings, option: _Option, item: str, value: str) -> None:
    lowered = value.lower()
    if option.kind == "flag" and lowered in _TRUE | _FALSE:
        settings.flags[option.target] = lowered in _TRUE
    elif option.kind in ("int", "search") and _is_within(value, option.limits):
        (settings.attributes if option.kind == "int" else settings.search)[option.target] = int(value)
    elif option.kind == "mask" and lowered in option.members:
        settings.masks[option.target] = (option.enum, option.members[lowered].split())
    elif option.kind == "enum" and lowered in option.members:
        settings.enums[option.target] = (option.enum, option.members[lowered])
    elif option.kind == "pool" and (size := _bytes(value)) is not None:
        settings.pools[option.target] = size
    else:
        raise UsageError("Not a value of this builder option", where=f"--builder {item}", remedy=f"give {option.help}")


def _bytes(value: str) -> int | None:
    match = re.fullmatch(r"(\d{1,15})([KMG]?)(?:I?B)?", value.upper())
    return None if match is None else int(match[1]) * _UNITS[match[2]]


def weight_budget(value: str | None) -> int | Literal["auto"] | None:
    """``--weight-streaming-budget``: bytes, or ``auto``.

    Raises:
        UsageError: It is neither.
    """
    if value is None:
        return None
    found = "auto" if value == "auto" else _bytes(value)
    if found is None:
        raise UsageError(
            f"{value!r} is no weight streaming budget",
            where="--weight-streaming-budget",
            remedy="give bytes, with K, M or G for powers of 1024, or auto",
        )
    return found  # type: ignore[return-value]


def _is_within(value: str, limits: tuple[int, int]) -> bool:
    return value.isdecimal() and len(value) < 10 and limits[0] <= int(value) <= limits[1]


def _check_rtx(key: str, option: _Option, gpu_present: bool) -> None:
    if option.rtx == "never":
        raise TargetError(
            f"TensorRT for RTX cannot build with {key}: its package has no lean runtime",
            where=f"--builder {key}",
            remedy="leave the option out, or use --backend tensorrt",
        )
    if option.rtx == "needs-gpu" and not gpu_present:
        raise TargetError(
            f"TensorRT for RTX needs a GPU to build with {key}",
            where=f"--builder {key}",
            remedy="leave the option out, or build on a machine with a GPU",
        )
