"""The records of 2:4 sparsity in a build. Field names are part of the contract."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrunedLayer:
    """A Conv, Gemm or MatMul, and whether it is 2:4.

    Attributes:
        nodes: The node; all that read the weight where several share it.
        weight: The weight; empty where it cannot be 2:4.
        sparse: Whether the weight is 2:4 in the model that was made.
        reason: Why it is, or why not.
        method: Where a 2:4 weight comes from: ``was sparse``, ``magnitude`` or ``recovered``; else empty.
        kept_magnitude: The share of the dense weight's magnitude where the new one is not zero, 0..1; None if dense.
        magnitude_sqnr_db: SQNR of the layer's outputs in the pruned network with the smaller weights set to zero, on
            samples kept from the fit; None where nothing was fitted.
        sqnr_db: The same with the weights it got.
        mask_before: None; the channels keep their order.
        mask_after: None.
        dense_us: Predicted time of its kernels without the pattern; 0 where it is not known.
        sparse_us: The same with sparse kernels, where the backend has them and they pay.
    """

    nodes: tuple[str, ...]
    weight: str
    sparse: bool
    reason: str
    method: str = ""
    kept_magnitude: float | None = None
    magnitude_sqnr_db: float | None = None
    sqnr_db: float | None = None
    mask_before: float | None = None
    mask_after: float | None = None
    dense_us: float = 0.0
    sparse_us: float = 0.0


@dataclass(frozen=True)
class CurvePoint:
    """Some layers 2:4, and what that gains and costs.

    Attributes:
        layers: How many layers are 2:4, those included that were before.
        predicted_us: Predicted time of the whole network; None for a target that is not one GPU.
        drop: The drop of accuracy, by the metric of the budget; infinite where an output is not finite.
        chosen: Whether it is the result, before its weights were fitted anew.
    """

    layers: int
    predicted_us: float | None
    drop: float
    chosen: bool


@dataclass(frozen=True)
class SparsityBudget:
    """How layers were given back until an accuracy budget held.

    Attributes:
        largest_drop: The largest drop of accuracy allowed; half of the build's where 8-bit is to have the other half,
            and infinite where ``--min-sqnr-db`` alone bounds the accuracy.
        aim: The drop that was aimed at, less for samples that were not seen.
        drop: The drop of the layers that were chosen, before their weights were fitted anew.
        reached: Whether that is within the budget.
        given_back: Layers that would gain, and stay dense, by their first nodes.
        evaluations: Models that were measured.
        is_default: Whether nobody gave the budget.
    """

    largest_drop: float
    aim: float
    drop: float
    reached: bool
    given_back: tuple[str, ...]
    evaluations: int
    is_default: bool


@dataclass(frozen=True)
class SparsityRecord:
    """What ``--sparse`` did.

    Attributes:
        backend: Whose kernels the gain is predicted for.
        layers: Every Conv, Gemm and MatMul: those whose weights can be 2:4 first, each in the order of the graph.
        permuted: Empty: channels keep their order. Older reports list the groups of channels that got another one.
        dense_us: Predicted time of the network without sparse kernels, as the performance model has it; None for a
            target that is not one GPU.
        sparse_us: The same with them, for the layers that are 2:4.
        note: How far to trust it.
        recovery: What the fit to samples did to the error at the outputs, or why there was none.
        metric: What drops are measured by; empty where none was.
        curve: Gain against accuracy, the fewest layers first.
        budget: The accuracy budget; None without one.
        sparse_kernels: Layers of the engine that run a sparse kernel, by the names of their tactics; None where the
            engine does not tell.
    """

    backend: str
    layers: tuple[PrunedLayer, ...]
    permuted: tuple[dict[str, object], ...]
    dense_us: float | None
    sparse_us: float | None
    note: str
    recovery: tuple[str, ...] = ()
    metric: str = ""
    curve: tuple[CurvePoint, ...] = ()
    budget: SparsityBudget | None = None
    sparse_kernels: tuple[str, ...] | None = None

    @property
    def pruned(self) -> int:
        """How many weights were made 2:4."""
        return sum(item.sparse and item.method != "was sparse" for item in self.layers)
