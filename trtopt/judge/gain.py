"""What a change of a graph gains: the least that counts, and the words for less."""

from __future__ import annotations

from trtopt.report.schema.steps import Cost

LEAST_GAIN = 0.02
"""Share of a region's predicted time that a rewrite must win."""


def changed_cost(place: Cost, before: Cost, after: Cost) -> Cost:
    """The cost of a place after a rewrite that changed the cost of the piece around it."""
    return Cost(
        place.kernels + after.kernels - before.kernels,
        after.syncs,
        place.bytes + after.bytes - before.bytes,
        place.predicted_us + after.predicted_us - before.predicted_us,
    )


def no_gain(before: Cost, after: Cost) -> str:
    return (
        f"it does not pay: {before.kernels} -> {after.kernels} kernels, {before.bytes / 1e6:.2f} -> "
        f"{after.bytes / 1e6:.2f} MB, {before.predicted_us:.1f} -> {after.predicted_us:.1f} us"
    )
