"""The layers of an engine with their work and times, from the inspector's entries and what a profiler reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from trtopt.engine.inspector import read_layer
from trtopt.engine.layers import profiles_of
from trtopt.errors import UsageError
from trtopt.profiling.entry_work import layer_work
from trtopt.profiling.measured import MeasuredLayer
from trtopt.report.schema.layers import LayerInfo
from trtopt.report.text.format import count

_SHOWN_NAMES, _NAME_WIDTH = 3, 80
"""How many names a message shows, and how much of each."""


@dataclass(frozen=True)
class LayerTime:
    """What a profiler says of a layer, in microseconds of one inference; exact, so that sums are.

    Attributes:
        name: The layer's name, as the engine has it.
        average_us: Mean.
        median_us: Median; None where only the mean is known.
        spread_us: Median absolute deviation; None where the runs are not known.
    """

    name: str
    average_us: Decimal
    median_us: Decimal | None = None
    spread_us: Decimal | None = None


def join_times(entries: Sequence[Any], times: Sequence[LayerTime]) -> tuple[tuple[MeasuredLayer, ...], tuple[str, ...]]:
    """Put layers and times together: no layer that ran is left out, and no time is lost.

    The n-th time of a name is of the n-th layer of that name; times beyond the last one are of that one, which a loop
    runs several times. Layers without a time took none. Where the entries are those of several optimization profiles,
    the layers are those of the one that ran.

    Args:
        entries: The list ``Layers`` of the engine inspector's JSON.
        times: In the order the profiler reported them.

    Returns:
        The layers in the order of the entries, each with a name of its own, and what the reader should know of them.

    Raises:
        EngineBuildError: An entry is not understood.
        UsageError: The times are of another engine.
    """
    infos = [read_layer(entry) for entry in entries]
    kept, notes = _that_ran(infos, {time.name for time in times})
    joined, more = _join([infos[index].name for index in kept], times)
    named = _with_own_names([infos[index] for index in kept])
    layers = tuple(_measured(info, entries[index], time) for info, index, time in zip(named, kept, joined, strict=True))
    return layers, (*notes, *more, *_untold(layers))


def _that_ran(infos: Sequence[LayerInfo], names: set[str]) -> tuple[list[int], list[str]]:
    """The layers of the optimization profile that most of the names are of."""
    numbers = profiles_of(infos)
    found = Counter(number for info, number in zip(infos, numbers, strict=True) if info.name in names)
    profiles = sorted(set(numbers))
    if len(profiles) == 1 or not found:
        return list(range(len(infos))), []
    ran = max(profiles, key=lambda number: (found[number], -number))
    kept = [i for i, info in enumerate(infos) if numbers[i] == ran or info.name in names]
    return kept, [f"the engine has {len(profiles)} optimization profiles; the times are of profile {ran}"]


def _join(names: Sequence[str], times: Sequence[LayerTime]) -> tuple[list[LayerTime], list[str]]:
    """The time of each layer, and what the reader should know of the join."""
    places: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        places.setdefault(name, []).append(index)
    _check_names(places, times)
    found: dict[int, LayerTime] = {}
    seen: Counter[str] = Counter()
    repeated: set[str] = set()
    for time in times:
        own = places[time.name]
        index = own[min(seen[time.name], len(own) - 1)]
        seen[time.name] += 1
        if index in found:
            repeated.add(time.name)
            time = LayerTime(time.name, found[index].average_us + time.average_us)
        found[index] = time
    notes = []
    if repeated:
        notes.append(f"{count(len(repeated), 'layer')} ran several times in one inference (a loop): the times are sums")
    if len(found) < len(names):
        missing = len(names) - len(found)
        notes.append(f"the profile does not name {count(missing, 'layer')} of the engine: counted as 0 us")
    return [found.get(index, LayerTime(name, Decimal(0))) for index, name in enumerate(names)], notes


def _check_names(places: Mapping[str, Sequence[int]], times: Sequence[LayerTime]) -> None:
    measured = dict.fromkeys(time.name for time in times)
    unknown = [name for name in measured if name not in places]
    if not unknown:
        return
    absent = [name for name in places if name not in measured]
    raise UsageError(
        "The layer profile and the layer info are of different engines:"
        f" {len(unknown)} of {count(len(measured), 'name')} of the profile are not in the layer info",
        where=f"only in the profile: {_some(unknown)}; only in the layer info ({len(absent)}): {_some(absent)}",
        remedy="export both in one run: trtexec --profilingVerbosity=detailed --separateProfileRun"
        " --exportLayerInfo=layers.json --exportProfile=profile.json",
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(_short(repr(name)) for name in names[:_SHOWN_NAMES])
    return f"{shown} ..." if len(names) > _SHOWN_NAMES else shown or "none"


def _short(text: str) -> str:
    return text if len(text) <= _NAME_WIDTH else f"{text[: _NAME_WIDTH - 3]}..."


def _with_own_names(infos: Sequence[LayerInfo]) -> list[LayerInfo]:
    """The layers with names of their own: ``NAME #2`` for the second one of a name."""
    taken = {info.name for info in infos}
    seen: Counter[str] = Counter()
    found = []
    for info in infos:
        seen[info.name] += 1
        if seen[info.name] > 1:
            while (name := f"{info.name} #{seen[info.name]}") in taken:
                seen[info.name] += 1
            taken.add(name)
            info = replace(info, name=name)
        found.append(info)
    return found


def _measured(info: LayerInfo, entry: Any, time: LayerTime) -> MeasuredLayer:
    work = layer_work(info, entry)
    operator = "ConvTranspose" if work and work.window and work.window.transposed else "Conv"
    sparse = [entry[key] for key in ("HasSparseWeights", "ConvHasSparseWeights") if key in entry] if info.type else []
    return MeasuredLayer(
        info=info,
        op=operator if info.kind == "conv" else info.type or "unknown",
        work=work,
        measured_us=float(time.average_us),
        median_us=None if time.median_us is None else float(time.median_us),
        spread_us=None if time.spread_us is None else float(time.spread_us),
        sparse_weights=bool(sparse[0]) if sparse else None,
    )


def _untold(layers: Sequence[MeasuredLayer]) -> list[str]:
    """Which layers have no work, and why."""
    if not any(layer.info.type for layer in layers):
        return [
            "the layer info holds names only, so that nothing can be predicted:"
            " build the engine with --profilingVerbosity=detailed"
        ]
    kernels = [layer for layer in layers if layer.info.is_kernel and layer.measured_us > 0]
    hidden = [layer for layer in kernels if layer.work is None]
    if not hidden:
        return []
    types = ", ".join(f"{number} {kind}" for kind, number in Counter(item.info.type for item in hidden).items())
    found = [f"the layer info does not tell the work of {len(hidden)} of {count(len(kernels), 'kernel')}: {types}"]
    if any(-1 in item.shape for layer in hidden for item in (*layer.info.inputs, *layer.info.outputs)):
        found.append("shapes are dynamic: export with --shapes, so that they are those of the run")
    return found
