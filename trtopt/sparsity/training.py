"""PyTorch modules whose weights stay 2:4 while they are trained.

The mask of a weight is a parametrization (``torch.nn.utils.parametrize``): the optimizer trains the parameter it always
had, under the name ``parametrizations.weight.original``, and all that reads ``layer.weight`` gets its masked value. So
whatever the optimizer writes, momentum and weight decay included, the layer computes with a 2:4 weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from trtopt.errors import InvalidModelError, UsageError
from trtopt.sparsity.layers import best_mask, is_sparse, kept_share, why_not
from trtopt.support._lazy import require

if TYPE_CHECKING:
    import torch

Layers: TypeAlias = "Collection[str] | Callable[[str, torch.nn.Module], bool]"
"""Names of layers, or what says of a name and a layer whether it is meant."""

_AXIS = 1
"""The reduction axis of every weight masked here: [out, in / groups, kernel...]."""

_RECORD = "_trtopt_masked"
"""Attribute of a prepared module: the names of its masked weights. Not in its ``state_dict``."""


@dataclass(frozen=True)
class Prepared:
    """What :func:`prepare` did with the weights of two and more axes, by their names before.

    Attributes:
        masked: The share of the weight's magnitude, sum of abs(w), that its mask keeps: 0..1.
        refused: Why a weight has no mask.
    """

    masked: dict[str, float]
    refused: dict[str, str]


@dataclass(frozen=True)
class _Place:
    """A parameter of a layer: the layer's name in the prepared module, the layer, the parameter's name in it."""

    path: str
    layer: Any
    tensor: str

    @property
    def name(self) -> str:
        return f"{self.path}.{self.tensor}" if self.path else self.tensor


def prepare(module: torch.nn.Module, *, layers: Layers | None = None) -> Prepared:
    """Give the weights of a module 2:4 masks that stay while it is trained. The module is changed in place.

    Of every four weights along the input channels the two of largest magnitude stay; the others are zero from now on.
    The masks are those of the weights as they are now, and never change: a weight that is 2:4 already keeps its
    zeros. Masked are the weights of Linear, Conv1d, Conv2d, Conv3d and MultiheadAttention.

    An optimizer made before keeps working: the parameters are the same objects. Their order changes, however, and
    optimizers save their state by position: make the optimizer after this call if its state is to be saved and loaded.

    Args:
        module: The trained module, on any device, its weights of any floating type.
        layers: The layers to mask: names as ``module.named_modules()`` gives them, all of which must be maskable; or a
            function of name and layer. By default all that can be.

    Returns:
        What was masked, and what was refused.

    Raises:
        UsageError: It is no module, was prepared already, has no weight that can be masked, or a layer named cannot be.
        MissingDependencyError: torch is missing.

    Example:
        >>> import torch
        >>> trtopt.sparsity.prepare(torch.nn.Sequential(torch.nn.Linear(8, 4))).refused
        {}
    """
    torch = _torch()
    _check_module(module)
    if any(isinstance(part, _mask_class()) for part in module.modules()):
        raise UsageError(
            "The module is prepared already, in whole or in part",
            where=type(module).__name__,
            remedy="train it, then call trtopt.sparsity.finalize(module)",
        )
    names, chosen = _selection(module, layers)
    masks: list[tuple[_Place, Any]] = []
    masked: dict[str, float] = {}
    refused: dict[str, str] = {}
    for places in _weights(module):
        if not any(chosen(place.path, place.layer) for place in places):
            continue
        reasons = _refusals(places, chosen)
        if reasons:
            refused.update(reasons)
            continue
        weight = _array(getattr(places[0].layer, places[0].tensor).abs())
        keep = best_mask(weight, _AXIS)
        masked.update((place.name, kept_share(weight, keep)) for place in places)
        masks += [(place, keep) for place in places]
    _check_masked(module, names - {place.path for place, _ in masks}, masked, refused)
    for place, keep in masks:
        mask = _mask_class()(torch.from_numpy(keep).to(getattr(place.layer, place.tensor).device))
        torch.nn.utils.parametrize.register_parametrization(place.layer, place.tensor, mask)
    vars(module)[_RECORD] = tuple(masked)  # torch.compile's wrapper would hand setattr on to the module inside
    return Prepared(masked, refused)


def finalize(module: torch.nn.Module) -> None:
    """Write the masks into the weights and take them off: a plain module again, checked to be 2:4. Changed in place.

    Its ``state_dict`` has the names and shapes it had before :func:`prepare`. Nothing is changed unless all weights
    that were masked are 2:4.

    Args:
        module: The module given to :func:`prepare`, a copy of it, or a module that contains it.

    Raises:
        UsageError: It is no module, or was not prepared.
        InvalidModelError: A weight that was masked is not 2:4 or not there: its parametrization was removed, its layer
            replaced, or its mask overwritten.
        MissingDependencyError: torch is missing.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4))
        >>> prepared = trtopt.sparsity.prepare(net)
        >>> trtopt.sparsity.finalize(net)
        >>> int((net[0].weight == 0).sum())
        16
    """
    _check_module(module)
    roots = [part for part in module.modules() if _RECORD in vars(part)]
    if not roots:
        raise UsageError(
            "The module was not prepared",
            where=type(module).__name__,
            remedy="call trtopt.sparsity.prepare(module) before the training, and finalize the same module after it",
        )
    masked = [(root, name) for root in roots for name in vars(root)[_RECORD]]
    lost = [name for root, name in masked if not _is_masked(root, name)]
    if lost:
        raise InvalidModelError(
            f"{len(lost)} of {len(masked)} weights that were masked are not 2:4",
            where=", ".join(lost[:5]),
            remedy="keep the parametrizations of prepare() during the training, replace layers before it, "
            "and load only what a prepared module saved",
        )
    for root, name in masked:
        _bake(*_locate(root, name))
    for root in roots:
        del vars(root)[_RECORD]


def _torch() -> Any:
    return require("torch", "torch", "train with 2:4 masks")


@functools.cache
def _mask_class() -> Any:
    """The parametrization: made on first use, as torch is loaded on demand, and only once, for ``isinstance``."""
    torch = _torch()

    class SparseMask(torch.nn.Module):  # type: ignore[misc,name-defined]
        """Zeros where the mask is zero, whatever the parameter holds there, and no gradient to it."""

        def __init__(self, keep: Any) -> None:
            super().__init__()
            # Numbers, not bool: torch.optim.swa_utils.AveragedModel subtracts buffers.
            self.register_buffer("mask", keep.to(torch.uint8))

        def forward(self, weight: Any) -> Any:
            return torch.where(self.mask.bool(), weight, 0)

        def right_inverse(self, weight: Any) -> Any:
            """The parameter starts masked: norms over parameters count no weight that is not there."""
            return self.forward(weight)

    return SparseMask


def _check_module(module: Any) -> None:
    if not isinstance(module, _torch().nn.Module):
        raise UsageError(f"Not a torch.nn.Module: {type(module).__name__}", remedy="pass the module itself")


def _selection(module: Any, layers: Layers | None) -> tuple[set[str], Callable[[str, Any], bool]]:
    """The layers that are asked for by name, and whether a layer is meant."""
    if layers is None:
        return set(), lambda path, layer: True
    if callable(layers):
        return set(), layers
    if not isinstance(layers, Iterable):
        raise UsageError(
            f"Not a choice of layers: {layers!r}",
            where="layers",
            remedy="give names of module.named_modules(), or a function of name and layer",
        )
    names = {layers} if isinstance(layers, str) else set(layers)
    unknown = names.difference(path for path, _ in module.named_modules())
    if unknown:
        raise UsageError(
            f"The module has no layer {', '.join(sorted(unknown))}",
            where="layers",
            remedy="give names of module.named_modules()",
        )
    return names, lambda path, layer: path in names


def _weights(module: Any) -> list[list[_Place]]:
    """The parameters of two and more axes, each with all places that share it.

    Those of a parametrization count as the tensor that is computed from them.
    """
    torch = _torch()
    found: dict[int, list[_Place]] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.utils.parametrize.ParametrizationList):
            continue
        held = list(layer.named_parameters(recurse=False, remove_duplicate=False))
        if torch.nn.utils.parametrize.is_parametrized(layer):
            for tensor, sources in layer.parametrizations.items():
                held += [(tensor, parameter) for parameter in sources.parameters(recurse=False)]
        for tensor, parameter in held:
            if isinstance(parameter, torch.nn.parameter.UninitializedParameter) or parameter.ndim > 1:
                found.setdefault(id(parameter), []).append(_Place(path, layer, tensor))
    return list(found.values())


def _refusals(places: list[_Place], chosen: Callable[[str, Any], bool]) -> dict[str, str]:
    """Why a parameter cannot be masked in all of its places, by their names; empty where it can."""
    for place in places:
        reason = _why_not(place)
        if not reason and not chosen(place.path, place.layer):
            reason = "that layer was not chosen"
        if reason:
            shared = f"it is shared with {place.name}: {reason}"
            return {other.name: reason if other is place else shared for other in places}
    return {}


def _why_not(place: _Place) -> str:
    """Why a parameter cannot be masked, whoever shares it; empty where it can."""
    torch = _torch()
    nn, layer, weight = torch.nn, place.layer, getattr(place.layer, place.tensor)
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if isinstance(weight, nn.parameter.UninitializedParameter) or weight.is_meta:
        return "it has no values yet"
    if nn.utils.parametrize.is_parametrized(layer, place.tensor):
        return "it is parametrized already: torch.nn.utils.parametrize.remove_parametrizations takes that off"
    if not isinstance(layer, (nn.Linear, *convolutions, nn.MultiheadAttention)):
        return f"{type(layer).__name__} is none of Linear, Conv1d, Conv2d, Conv3d and MultiheadAttention"
    attention = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    if place.tensor not in (attention if isinstance(layer, nn.MultiheadAttention) else ("weight",)):
        return f"{type(layer).__name__} does not multiply by it"
    if not weight.is_floating_point():
        return f"it holds {weight.dtype}"
    if not bool(weight.isfinite().all()):
        return "it holds values that are not finite"
    return why_not(tuple(weight.shape), _AXIS, layer.groups if isinstance(layer, convolutions) else 1)


def _check_masked(module: Any, missing: set[str], masked: dict[str, float], refused: dict[str, str]) -> None:
    """Refuse to go on without any mask, or without one for a layer that was asked for by name."""
    if masked and not missing:
        return
    reasons = [f"{name}: {reason}" for name, reason in refused.items()]
    named = ", ".join(sorted(missing))
    raise UsageError(
        f"No weight that can be 2:4 in {named}" if missing else "The module has no weight that can be 2:4",
        where="; ".join(reasons[:5]) or type(module).__name__,
        remedy="choose Linear, Conv and MultiheadAttention with a multiple of 4 input channels (of each group)",
    )


def _array(weight: Any) -> Any:
    """The values in NumPy, where every floating type of torch has its place in FP64."""
    return weight.detach().cpu().double().numpy()


def _locate(root: Any, name: str) -> tuple[Any, str]:
    """The layer of a masked weight, and the weight's name in it."""
    path, _, tensor = name.rpartition(".")
    return root.get_submodule(path), tensor


def _is_masked(root: Any, name: str) -> bool:
    """Whether a weight that was masked is there and 2:4."""
    try:
        weight = getattr(*_locate(root, name))
    except AttributeError:
        return False
    return isinstance(weight, _torch().Tensor) and is_sparse(_array(weight), _AXIS)


def _bake(layer: Any, tensor: str) -> None:
    """Replace a parametrized weight by its value; the parameter stays the same object."""
    parametrize = _torch().nn.utils.parametrize
    if not parametrize.is_parametrized(layer, tensor):
        return
    # torch deletes the weight's property from the layer's class, which copies made by copy.deepcopy share (torch 2.13).
    own = type(layer)
    layer.__class__ = type(own.__name__, own.__bases__, dict(vars(own)))
    parametrize.remove_parametrizations(layer, tensor)
