"""Rules about tiles and waves: work that is computed and thrown away, and rounds in which most of the GPU waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trtopt.report.schema.analysis import LayerRow
from trtopt.roofline.gemm import Tiling, tiling
from trtopt.roofline.layer import layer_time
from trtopt.roofline.rules.change import resized
from trtopt.roofline.rules.sizes import HEAD, multiple_for
from trtopt.roofline.rules.subject import Proposal, Subject, sinks
from trtopt.roofline.work import Gemm, Layer, Work

_WORTH = 0.1
"""The time per column must fall by this share: less is within the error of the prediction."""
_SHRINK, _GROW = 0.875, 1.125
"""How far a size may move and still be the same architecture."""
_STEPS = (256, 128, 64, 32)
_MOST_KINDS = 4
"""Findings per rule: the sizes that win most; the rest of a network's odd sizes has the same remedy."""
_VISIBLE = 0.001
"""Layers below this share of the network's time are not searched."""


def tile_quantization(subject: Subject) -> Iterator[Proposal]:
    """Output columns that do not fill the last tile.

    What:
        A product or dense convolution for which a width (n: output channels) within an eighth is
        predicted to cost at least 10 % less per column, and whose present width wastes more of the
        tiles of the better one than of their waves.
    Why:
        Each thread block computes a whole tile of the output, 64 to 256 columns wide, and throws
        away what sticks out. One column beyond a tile costs as much as a full tile.
    Example:
        An A100 with tiles of 256x128: m = 27648, k = 4096, n = 128 are 108 tiles, one for each SM;
        n = 136 are 216, of which 53 % is useful.
    Remedy:
        Choose the width the message names, found by predicting the multiples of 32, 64, 128 and 256
        around it. The gain is the layer's predicted time now less that of the better size; layers
        that read the narrower result win a little more, which is not counted. A wider layer that is
        faster is proposed too.

    The tile in the message is the one that suits the better width. For the present width the model
    may choose smaller tiles, with lower steps but more time per element: that is in its time. The
    compiler's choice may differ.
    """
    yield from _better_widths(subject, by_tiles=True)


def wave_quantization(subject: Subject) -> Iterator[Proposal]:
    """A last wave of thread blocks that leaves most of the GPU idle.

    What:
        A product or dense convolution for which a width (n: output channels) within an eighth is
        predicted to cost at least 10 % less per column, and whose present width, in the tiles of
        the better one, leaves more of its waves empty than of its tiles.
    Why:
        Thread blocks run in rounds, one or more per SM at a time. A round with a few blocks takes
        as long as a full one. It matters for the first few waves, and not at all after ten.
    Example:
        An A100, m = 2304, k = 4096: n = 1536 is one full wave of 108 tiles of 256x128; n = 1544 is
        117 tiles, two waves, 54 % used.
    Remedy:
        Choose the width the message names; the gain is the layer's predicted time now less that of
        the better size. The number of rows (m) grows with the batch: rule batch-size looks for a
        better one.
    """
    yield from _better_widths(subject, by_tiles=False)


@dataclass(frozen=True)
class _Better:
    """A width that suits the GPU better, and how the present one fills the tiles it is computed in."""

    width: int
    us: float
    filled: Tiling

    @property
    def is_by_tiles(self) -> bool:
        """Whether the present width wastes more of its tiles than of its waves."""
        return self.filled.tile_efficiency <= self.filled.wave_efficiency


def _better_widths(subject: Subject, *, by_tiles: bool) -> Iterator[Proposal]:
    layers: dict[Work, list[Layer]] = defaultdict(list)
    first: dict[Work, Work] = {}
    for layer, work in subject.products():
        row = subject.row[layer.name]
        visible = row.predicted_us >= _VISIBLE * subject.total_us
        if visible and row.limiter != "latency" and _may_choose_width(subject, layer, work):
            layers[first.setdefault(replace(work, network_share=0.0), work)].append(layer)
    subject.predict_all([resized(work, n=width) for work in layers for width in _candidates(work)])
    proposals = []
    for work, alike in layers.items():
        better = _better_width(subject, work, subject.row[alike[0].name])
        if better is not None and better.is_by_tiles is by_tiles:
            proposals.append(_proposal(subject, work, better, alike))
    yield from sorted(proposals, key=lambda item: -sum(item.gains.values()))[:_MOST_KINDS]


def _may_choose_width(subject: Subject, layer: Layer, work: Work) -> bool:
    """The columns of a grouped convolution and of the network's output are no free choice."""
    node = subject.main(layer)
    if work.window is not None and work.window.group > 1:
        return False
    return node is None or not sinks(node.outputs[0], HEAD)[1]


def _candidates(work: Work) -> list[int]:
    """Widths around n that fill tiles."""
    n, unit = (work.gemm.n if work.gemm else 0), multiple_for(16, work.dtype)
    edges = {edge for step in _STEPS for edge in (n // step * step, n // step * step + step)}
    return sorted(edge for edge in edges if edge != n and edge % unit == 0 and _SHRINK * n <= edge <= _GROW * n)


def _better_width(subject: Subject, work: Work, row: LayerRow) -> _Better | None:
    """The width near n with the least time per column, or None when none is better by enough."""
    if work.gemm is None:
        return None
    body = row.predicted_us - row.latency_us
    best, most = 0, _WORTH * body
    for width in _candidates(work):
        us = subject.predict(resized(work, n=width))
        saved = body * width / work.gemm.n - (us - row.latency_us)
        if us < row.predicted_us and saved > most:
            best, most = width, saved
    if not best:
        return None
    after = layer_time(resized(work, n=best), subject.gpu)
    if after.tiling is None:
        return None
    tile = (after.tiling.tile_m, after.tiling.tile_n)
    return _Better(best, after.predicted_us, tiling(work.gemm, tile, subject.gpu.sm))


def _proposal(subject: Subject, work: Work, better: _Better, layers: list[Layer]) -> Proposal:
    row, filled, gemm = subject.row[layers[0].name], better.filled, work.gemm or Gemm(0, 0, 0)
    share = (
        f"{100 * filled.tile_efficiency:.0f} % useful"
        if better.is_by_tiles
        else f"which fill {filled.waves} waves to {100 * filled.wave_efficiency:.0f} %"
    )
    return Proposal(
        severity="warning",
        message=f"a product of {gemm.m}x{gemm.n}x{gemm.k} (m, n, k) takes {row.predicted_us:.1f} us: in tiles of"
        f" {filled.tile_m}x{filled.tile_n} it is {filled.tiles} tiles, {share}",
        remedy=f"{better.width} output channels instead of {gemm.n}: {better.us:.1f} us each",
        nodes=subject.names(layers),
        gains={layer.name: row.predicted_us - better.us for layer in layers},
    )
