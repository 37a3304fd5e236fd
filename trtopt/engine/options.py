"""``--builder KEY=VALUE``: what each backend takes, ignores and cannot do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trtopt.engine.backend import TENSORRT_RTX, Backend
from trtopt.errors import TargetError, UsageError
from trtopt.support.words import nearest

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TRUE = frozenset({"1", "true", "on", "yes", "enable"})
_FALSE = frozenset({"0", "false", "off", "no", "disable"})


@dataclass(frozen=True)
class _Option:
    """How a key reaches the builder.

    Attributes:
        kind: A builder flag, an attribute (an integer, bytes, an enum, a build route), a memory pool, a set of members
            of an enum, or how many engines the search over the others may build.
        members: The enum's members by the value a user writes; of a set, several with spaces between.
        rtx: What TensorRT for RTX does with it: takes it, ignores it (the engine is the same to the byte), needs a GPU
            for it, or has no such engines.
    """

    kind: Literal["flag", "int", "bytes", "enum", "route", "pool", "mask", "search"]
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

SEARCH, ROUTE = "search", "build_route"
_KNOB = re.compile(r"(?P<knob>-\w[\w:.]*)=(?:\[(?P<choices>[\w.+-]+(?:\|[\w.+-]+)*)\]|(?P<value>[\w.+-]+))")
"""``-knob=value`` or ``-knob=[one|other]``, as in trtexec's ``--tuneBuildRoutes``."""

_OPTIONS = {
    "builder_optimization_level": _Option("int", "builder_optimization_level", "0 to 5", limits=(0, 5), rtx="ignores"),
    "workspace": _Option("pool", "WORKSPACE", "bytes, with K, M or G for powers of 1024"),
    "max_aux_streams": _Option("int", "max_aux_streams", "0 to 64", limits=(0, 64)),
    "tiling": _Option(
        "enum", "tiling_optimization_level", ", ".join(_TILING), "TilingOptimizationLevel", _TILING, rtx="ignores"
    ),
    "tactic_sources": _Option("mask", "tactic_sources", ", ".join(_TACTICS), "TacticSource", _TACTICS, rtx="ignores"),
    "l2_limit_for_tiling": _Option(
        "bytes", "l2_limit_for_tiling", "bytes, with K, M or G for powers of 1024", rtx="ignores"
    ),
    "avg_timing_iterations": _Option("int", "avg_timing_iterations", "1 to 1000", limits=(1, 1000), rtx="ignores"),
    "max_num_tactics": _Option("int", "max_num_tactics", "1 to 1000000", limits=(1, 1_000_000), rtx="ignores"),
    ROUTE: _Option("route", ROUTE, "-knob=value -other=[one|two], knobs of trtexec --helpBuildRoute", rtx="ignores"),
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
    "exclude_lean_runtime": _Option("flag", "EXCLUDE_LEAN_RUNTIME", "true or false", rtx="never"),
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
    attributes: dict[str, int | str]
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
    if route_axes(items) and SEARCH not in seen:
        raise UsageError(
            "A build route has several values for a knob, and no search tries them",
            where="--builder",
            remedy=f"add --builder {SEARCH}=8, or give one value for each knob",
        )
    return replace(settings, ignored=tuple(ignored))


def key_of(item: str) -> str:
    """The key of ``KEY=VALUE``, as it is spelled here."""
    return item.partition("=")[0].strip().lower().replace("-", "_")


def route_axes(items: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The knobs of a build route that have several values, and these.

    Example:
        >>> route_axes(["build_route=-conv_lowering=on -kgen:tiling=[0|1]"])
        (('-kgen:tiling', ('0', '1')),)
    """
    return tuple((knob["knob"], tuple(knob["choices"].split("|"))) for knob in _knobs(items) if knob["choices"])


def with_found(items: Sequence[str], found: Sequence[str] = ()) -> tuple[str, ...]:
    """The builder options of one engine of a search: without the search, and with what it chose, knobs as one route.

    Example:
        >>> with_found(["search=8", "build_route=-a=[1|2] -b=on"], ["tiling=fast", "-a=2"])
        ('tiling=fast', 'build_route=-b=on -a=2')
    """
    own = [item for item in items if key_of(item) not in (SEARCH, ROUTE)]
    route = [knob[0] for knob in _knobs(items) if knob["value"]] + [item for item in found if item.startswith("-")]
    chosen = [item for item in found if not item.startswith("-")]
    return (*own, *chosen, *([f"{ROUTE}={' '.join(route)}"] if route else []))


def _knobs(items: Sequence[str]) -> list[re.Match[str]]:
    return [knob for item in items if key_of(item) == ROUTE for knob in _KNOB.finditer(item.partition("=")[2])]


def _nothing() -> BuilderSettings:
    return BuilderSettings({}, {}, {}, {}, {}, {})


def _lookup(key: str) -> _Option:
    if key in _OPTIONS:
        return _OPTIONS[key]
    near = nearest(key, _OPTIONS)
    hint = f"did you mean {near}? " if near else ""
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
    elif option.kind == "bytes" and (size := _bytes(value)) is not None:
        settings.attributes[option.target] = size
    elif option.kind == "route" and value and all(_KNOB.fullmatch(word) for word in value.split()):
        settings.attributes[option.target] = " ".join(value.split())
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
