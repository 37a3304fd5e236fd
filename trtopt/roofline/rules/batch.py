"""Rules about how much work there is at once: batch size, recurrent layers, launches."""

from __future__ import annotations

from collections.abc import Iterator

from trtopt.report.schema.analysis import WITHOUT_KERNEL
from trtopt.report.text.format import count as counted
from trtopt.report.text.format import time_text
from trtopt.roofline.rules.change import at_batch, resized
from trtopt.roofline.rules.sizes import round_up
from trtopt.roofline.rules.subject import Proposal, Subject

_LARGEST_BATCH = 256
_SATURATED = 1.1
"""Doubling the batch is no longer worth it when it makes a sample less than this much cheaper."""
_TOO_SMALL = 1.5
"""A batch is too small when a sample costs this much more than at the batch that fills the GPU."""
_BETTER = 1.1
"""A smaller batch must make a sample this much cheaper."""
_EQUAL = 1.005
"""A larger batch may take this much longer and still come for nothing."""
_NEAR = 0.25
_CANDIDATES = 8
_FEW_LAUNCHES = 0.3
"""Share of the time that launches may take."""
_RECURRENT_MULTIPLE = 32


def batch_too_small(subject: Subject) -> Iterator[Proposal]:
    """A batch that does not fill the GPU.

    What:
        A sample costs at least 1.5 times what it would at the batch that fills the GPU: the first
        one, doubling from the present one up to 256, after which doubling makes a sample less than
        10 % cheaper.
    Why:
        With few rows a product has fewer tiles than the GPU has SMs, reads its weights for little
        arithmetic, and takes hardly longer than its launch. Products leave the memory-bound region
        when batch and widths are above 128 or so.
    Example:
        A linear layer of 1024 inputs and 4096 outputs in FP16: 315 flop per byte at batch 512, 1 at
        batch 1.
    Remedy:
        Collect requests into batches (Triton's dynamic batching), or choose a smaller GPU. Every
        layer is predicted anew with its rows multiplied. The latency of a batch grows, so there is
        no gain in microseconds: the message has latency and cost per sample. The whole curve:
        `trtopt analyze --batch-sweep 1..256`.
    """
    now = subject.batch
    if not now or not subject.total_us or subject.is_partial:
        return
    batch, us = now, subject.total_us
    while batch * 2 <= _LARGEST_BATCH:
        twice = _total_at(subject, batch * 2)
        if us / batch < _SATURATED * twice / (batch * 2):
            break
        batch, us = batch * 2, twice
    each, before = us / batch, subject.total_us / now
    if before >= _TOO_SMALL * each:
        yield Proposal(
            severity="hint",
            message=f"a batch of {now} does not fill the GPU: a sample costs {time_text(before)}; at batch {batch}"
            f" {time_text(each)} ({time_text(us)} the batch)",
            remedy=f"run batches of up to {batch} where the latency allows",
            nodes=(),
        )


def batch_size(subject: Subject) -> Iterator[Proposal]:
    """A batch next to a better one.

    What:
        A batch of which a batch up to a quarter smaller makes a sample at least 10 % cheaper; or
        one that is no multiple of 8, where the next multiple takes no longer; else, above 8, a
        hint.
    Why:
        The rows of linear layers are the batch, so an odd batch leaves the last tile part empty and
        rows unaligned where the batch is the contiguous axis. The number of thread blocks grows
        with it, and one block more than the GPU has room for is a wave more: time is no smooth
        function of the batch, so look at the curve.
    Example:
        H100, a product of n = k = 4096: 257 rows instead of 256 cost 20 % more.
    Remedy:
        Use the batch the message names. The gain is of the present number of samples: their time
        now, less their share of the better batch's.
    """
    now, total = subject.batch, subject.total_us
    if not now or now < 4 or not total or subject.is_partial:
        return
    reach = max(1, int(now * _NEAR))
    step = 1 if now < 8 else 4 if now < 32 else round_up(reach // _CANDIDATES, 8) or 8
    smaller = set(range(round_up(now - reach, step), now, step))
    cost = {size: _total_at(subject, size) / size for size in sorted(smaller | {now // 8 * 8} - {0, now})}
    best = min(cost, key=lambda size: (cost[size], -size), default=now)
    upper = round_up(now, 8)
    if best != now and total / now >= _BETTER * cost[best]:
        message = f"a batch of {now} costs {total / now:.2f} us a sample, one of {best} {cost[best]:.2f} us"
        yield Proposal("warning", message, f"run batches of {best}", (), _gains_at(subject, best))
    elif upper != now and _total_at(subject, upper) <= _EQUAL * total:
        message = f"a batch of {upper} takes no longer than one of {now}"
        yield Proposal("warning", message, f"run batches of {upper}", (), _gains_at(subject, upper))
    elif now > 8 and upper != now:
        remedy = f"{upper - 8} or {upper}; the prediction sees little difference here"
        yield Proposal("hint", f"a batch of {now} is no multiple of 8", remedy, ())


def _gains_at(subject: Subject, batch: int) -> dict[str, float]:
    """The time of the present batch less its share of that of another batch, by layer."""
    now = subject.batch or 1
    return {
        layer.name: subject.predict(work) - subject.predict(at_batch(work, batch, now)) * now / batch
        for layer, work in subject.costed()
    }


def _total_at(subject: Subject, batch: int) -> float:
    """The predicted time of all layers at another batch."""
    now = subject.batch or 1
    times = subject.predict_all([at_batch(work, batch, now) for work in subject.distinct])
    return sum(count * us for count, us in zip(subject.distinct.values(), times, strict=True))


def recurrent_size(subject: Subject) -> Iterator[Proposal]:
    """A recurrent layer whose hidden size or minibatch is no multiple of 32.

    What:
        An LSTM, GRU or RNN whose hidden size is no multiple of 32 or whose minibatch is above 32
        and no multiple of it (a gain or a hint), or whose minibatch is below 32 (a hint with the
        cost per sequence).
    Why:
        Each time step multiplies the hidden state of the whole minibatch by the recurrent weights.
        The steps cannot run side by side, so a step of few rows leaves the GPU idle, and each reads
        the weights again: from 1 to 32 rows the time of a step hardly changes, and a sequence
        becomes an order of magnitude cheaper. The input products of all steps are one product,
        which the compiler takes out of the loop.
    Example:
        Speech: hidden size 500 takes the tiles of 512, and 32 sequences run in little more than the
        time of one.
    Remedy:
        Make the hidden size a multiple of 32 (retraining), and run sequences in minibatches of 32
        or a multiple. The gain is the layer predicted with both rounded up, if that is faster.
        Performance is not monotonic in the minibatch: look at the curve (`--batch-sweep`).
    """
    for layer, work in subject.costed():
        gemm = work.gemm
        if work.kind != "recurrent" or gemm is None:
            continue
        hidden, rows = gemm.k, gemm.m
        if hidden % _RECURRENT_MULTIPLE or (rows > _RECURRENT_MULTIPLE and rows % _RECURRENT_MULTIPLE):
            wider = round_up(hidden, _RECURRENT_MULTIPLE)
            more = round_up(rows, _RECURRENT_MULTIPLE) if rows > _RECURRENT_MULTIPLE else rows
            changed = resized(work, m=more, n=gemm.n // hidden * wider, k=wider)
            yield Proposal(
                severity="warning",
                message=f"{layer.op}: hidden size {hidden}, minibatch {rows}: no multiples of {_RECURRENT_MULTIPLE}",
                remedy=f"hidden size {wider}, minibatch {more}",
                nodes=subject.names([layer]),
                gains={layer.name: subject.gain(layer, changed)},
            )
        if rows < _RECURRENT_MULTIPLE:
            full = subject.predict(at_batch(work, _RECURRENT_MULTIPLE * rows, rows)) / _RECURRENT_MULTIPLE / rows
            now = subject.row[layer.name].predicted_us / rows
            yield Proposal(
                severity="hint",
                message=f"{layer.op} with {counted(rows, 'sequence')} at once: {time_text(now)} each; with"
                f" {_RECURRENT_MULTIPLE * rows} {time_text(full)} each",
                remedy=f"run minibatches of {_RECURRENT_MULTIPLE} sequences or more",
                nodes=subject.names([layer]),
            )


def launch_bound(subject: Subject) -> Iterator[Proposal]:
    """A network whose kernels are over before the next can start.

    What:
        Launches take 30 % or more of the predicted time; a recurrent layer launches a kernel in
        each step. With `--compile` they are those of the compiler's kernels.
    Why:
        Each kernel costs about two microseconds however little it does, in a captured CUDA graph;
        without one it is more. Small networks at batch 1 consist of such kernels. Neither precision
        nor sparsity nor padding makes a launch shorter.
    Example:
        A keyword spotter of 30 kernels of 1 us each runs 90 us, 60 of them launches.
    Remedy:
        Capture the inference in a CUDA graph (`trtexec --useCudaGraph`), which the prediction
        assumes, run larger batches, and see with `--compile` which small operators do not fuse.
        Prefer one wide layer to several narrow ones. A hint: what could be won depends on which
        kernels fuse.
    """
    layers = [(layer, work) for layer, work in subject.costed() if work.kind not in WITHOUT_KERNEL]
    launches = sum(subject.row[layer.name].latency_us for layer, _ in layers)
    if subject.total_us and not subject.is_partial and launches >= _FEW_LAUNCHES * subject.total_us:
        share = 100 * launches / subject.total_us
        steps = sum(work.steps for _, work in layers)
        of_layers = f", the steps of {counted(len(layers), 'layer')}" if steps > len(layers) else ""
        yield Proposal(
            severity="hint",
            message=f"{share:.0f} % of the time ({launches:.0f} of {time_text(subject.total_us)}) is the launch of"
            f" {counted(steps, 'kernel')}{of_layers}",
            remedy="run larger batches, have fewer and larger layers; a CUDA graph is assumed already",
            nodes=(),
        )
