"""What ``--sparse`` did, for the report."""

from __future__ import annotations

import math

from trtopt.pipeline.output_error import decibels
from trtopt.report.schema.analysis import Sparsity
from trtopt.report.schema.decisions import PrunedLayer, SparsityRecord
from trtopt.sparsity.layers import Candidate, Candidates, PrunedWeight
from trtopt.sparsity.prune import Pruned


def gains_of(verdict: Sparsity | None) -> dict[str, float]:
    """Predicted microseconds that 2:4 saves, by the first node that reads the weight, where it pays."""
    rows = verdict.layers if verdict is not None else ()
    return {row.nodes[0]: row.dense_us - row.sparse_us for row in rows if row.eligible}


def record_of(
    backend: str,
    found: Candidates,
    verdict: Sparsity | None,
    final: Pruned,
    everything: Pruned,
) -> SparsityRecord:
    """What became of every layer.

    Args:
        backend: Whose kernels the gain is predicted for.
        found: The layers that can be pruned, and the others.
        verdict: The predicted gains; None where nobody predicts.
        final: What is pruned.
        everything: What was pruned before layers were given back.
    """
    kept, tried = {item.nodes: item for item in final.layers}, {item.nodes for item in everything.layers}
    gains, rows = gains_of(verdict), {} if verdict is None else {row.nodes: row for row in verdict.layers}
    layers = []
    for item in found.layers:
        row, done = rows.get(item.nodes), kept.get(item.nodes)
        reason = "asked for by --sparse-all" if row is None else row.reason
        if done is not None and done.method != "was sparse" and row is not None and not row.eligible:
            reason = f"asked for by --sparse-all; {row.reason}"
        times = (0.0, 0.0) if row is None else (row.dense_us, row.sparse_us if done is not None else row.dense_us)
        if done is None and item.nodes in tried:
            reason = "left dense for the accuracy budget"
        layers.append(_layer(item, done, reason, times))
    for name, reason in found.refused.items():
        row = rows.get((name,))
        dense = 0.0 if row is None else row.dense_us
        layers.append(PrunedLayer((name,), "", False, reason, dense_us=dense, sparse_us=dense))
    return SparsityRecord(
        backend,
        tuple(layers),
        (),
        None if verdict is None else verdict.dense_us,
        None if verdict is None else verdict.dense_us - math.fsum(gains.get(nodes[0], 0.0) for nodes in kept),
        "no gain was predicted: the target is not one GPU" if verdict is None else verdict.note,
        (
            *(f"{trial.name}: output SQNR {decibels(trial.error):.2f} dB" for trial in final.trials),
            *((final.reason,) if final.reason else ()),
        ),
    )


def _layer(item: Candidate, done: PrunedWeight | None, reason: str, times: tuple[float, float]) -> PrunedLayer:
    if done is None:
        return PrunedLayer(item.nodes, item.weight, False, reason, dense_us=times[0], sparse_us=times[1])
    before, after = (None, None) if done.errors is None else map(decibels, done.errors)
    return PrunedLayer(
        item.nodes,
        item.weight,
        True,
        reason,
        done.method,
        done.kept,
        before,
        after,
        dense_us=times[0],
        sparse_us=times[1],
    )
