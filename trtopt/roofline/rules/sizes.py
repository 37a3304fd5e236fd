"""Rules about the sizes of products and convolutions: alignment, the first layer, vocabulary, sequence length."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.edit import constant_tensor_of, input_of, int_attribute, is_op, maker_of
from trtopt.report.schema.analysis import Severity
from trtopt.roofline.rules.change import channels, resized
from trtopt.roofline.rules.subject import POINTWISE, Proposal, Subject, interleaved, reads_network_input, sinks, source
from trtopt.roofline.work import Layer, Work, alignment_of
from trtopt.support.precision import ELEMENT_BYTES, Precision

TENSOR_CORE_TYPES: tuple[Precision, ...] = (
    Precision.TF32,
    Precision.FP16,
    Precision.BF16,
    Precision.FP8,
    Precision.INT8,
)
_TIERS: tuple[tuple[int, Severity], ...] = ((16, "warning"), (32, "hint"), (128, "info"))
_VOCABULARY = 2048
"""A product this wide that leaves the network is a vocabulary, not a choice of the architecture."""
_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"})
HEAD = POINTWISE.union(
    _VIEWS, "Softmax LogSoftmax Slice ArgMax TopK Concat Split GlobalAveragePool AveragePool ReduceMean".split()
)
"""From a classifier or a detection head to the network's outputs."""
_BEFORE_STEM = POINTWISE | _VIEWS | {"Pad"}
_MOST = {16: 2.0, 32: 4 / 3, 128: 4 / 3}
"""Sizes grow by this factor at the most: 24 channels to 32, not 16 to 64."""
_MOST_OUTPUTS = 1.125
"""Outputs of the network: 1001 classes to 1008, not 10 to 16."""
_SHORTEST_SEQUENCE = 33
_SEQUENCE_MULTIPLES: dict[Precision, int] = {
    Precision.FP16: 16,
    Precision.BF16: 16,
    Precision.INT8: 32,
    Precision.FP8: 32,
}


def multiple_for(tier_bytes: int, dtype: Precision) -> int:
    """Elements of ``dtype`` in ``tier_bytes``: 16 bytes are 4 in TF32, 8 in FP16 and BF16, 16 in INT8 and FP8."""
    return int(tier_bytes / ELEMENT_BYTES[dtype])


def round_up(size: int, multiple: int) -> int:
    """The next multiple of ``multiple``."""
    return -(-size // multiple) * multiple


def alignment(subject: Subject) -> Iterator[Proposal]:
    """Channels, or k and n of a product, that do not fill the GPU's loads.

    What:
        A size of a convolution (input or output channels) or of a matrix product (k or n) is no
        multiple of 16, of 32 or, on compute capability 8.0 and later, of 128 bytes.

        | bytes | TF32 | FP16, BF16 | INT8, FP8 | reported as                       |
        |-------|------|------------|-----------|-----------------------------------|
        | 16    | 4    | 8          | 16        | warning, a hint when nothing wins |
        | 32    | 8    | 16         | 32        | hint                              |
        | 128   | 32   | 64         | 128       | info, where arithmetic limits     |

    Why:
        Tensor Core kernels load 16 bytes per thread. Rows that are no multiple of it need a slower
        kernel or a padded copy. Longer multiples fill sectors of 32 and cache lines of 128 bytes.
        Being divisible by 64 to 256 matters most for small sizes: 512 over 520 is worth more than
        5120 over 5128. Sizes are worth tuning where arithmetic is the limit; where memory is,
        padding adds bytes.
    Example:
        A convolution from 61 to 61 channels in FP16: 122 bytes per pixel. With 64 channels it has
        10 % more arithmetic and aligned loads.
    Remedy:
        Choose the multiple when the network is designed, or pad weights with zeros (exact, no
        retraining). The gain is the layer predicted with its sizes rounded up, against what it is
        now.

    The rule is NVIDIA's guidance for Tensor Cores and TensorRT. TensorRT for RTX pads by itself:
    odd channels to even ones in FP16 (with a kernel of its own), to multiples of 4 in INT8 (in the
    quantizer, free). There, 61 to 64 removes kernels, 60 to 64 does not. Left out are sizes that
    would grow too much (16 to 64 channels), inputs of the first layer and vocabularies, which have
    rules of their own, and numbers of classes that are far from a multiple.
    """
    found: dict[tuple[int, Precision], list[tuple[Layer, Work, _Free]]] = defaultdict(list)
    recent = tuple(int(part) for part in subject.gpu.compute_capability.split(".")) >= (8, 0)
    for layer, work in subject.products():
        tiers = _TIERS if recent else _TIERS[:2]
        if work.dtype not in TENSOR_CORE_TYPES or not any(
            size % multiple_for(tier, work.dtype) for tier, _ in tiers for size in channels(work)
        ):
            continue
        free = _free_sizes(subject, layer, work)
        for tier, _ in tiers:
            if free.missed(tier, multiple_for(tier, work.dtype)):
                if tier < 128 or subject.row[layer.name].limiter == "math":
                    found[tier, work.dtype].append((layer, work, free))
                break
    severity = dict(_TIERS)
    for (tier, dtype), cases in sorted(found.items()):
        multiple = multiple_for(tier, dtype)
        rounded = [_rounded(work, set(free.missed(tier, multiple)), multiple) for _, work, free in cases]
        subject.predict_all(rounded)
        sizes = sorted({size for *_, free in cases for size in free.missed(tier, multiple)})
        yield Proposal(
            severity=severity[tier],
            message=f"{_listed(sizes)} {'is no multiple' if len(sizes) == 1 else 'are no multiples'} of {multiple}"
            f" ({tier} bytes in {dtype.upper()})",
            remedy=("use " if tier == 16 else "where sizes are free: ")
            + _listed(f"{size} -> {round_up(size, multiple)}" for size in sizes),
            nodes=subject.names(layer for layer, *_ in cases),
            gains={layer.name: subject.gain(layer, after) for (layer, *_), after in zip(cases, rounded, strict=True)},
        )


@dataclass(frozen=True)
class _Free:
    """The channels of a layer that its designer chose; None for those given from outside.

    Attributes:
        inputs: Those it reads; None where it reads the network's input.
        outputs: Those it writes; None for a vocabulary.
        leaves: Whether what it writes leaves the network.
    """

    inputs: int | None
    outputs: int | None
    leaves: bool

    def missed(self, tier: int, multiple: int) -> tuple[int, ...]:
        """The sizes that are no multiple and could well be."""
        most = (_MOST_OUTPUTS if tier == 16 else 0.0) if self.leaves else _MOST[tier]
        limits = ((self.inputs, _MOST[tier]), (self.outputs, most))
        return tuple(
            size
            for size, limit in limits
            if size is not None and size % multiple and round_up(size, multiple) <= limit * size
        )


def _free_sizes(subject: Subject, layer: Layer, work: Work) -> _Free:
    inputs, outputs = channels(work)
    node = subject.main(layer)
    if node is None:
        return _Free(inputs, outputs, leaves=False)
    leaves = sinks(node.outputs[0], HEAD)[1]
    return _Free(
        None if reads_network_input(node, _BEFORE_STEM) else inputs,
        None if leaves and outputs >= _VOCABULARY else outputs,
        leaves,
    )


def _rounded(work: Work, missed: set[int], multiple: int) -> Work:
    """Both channels rounded up, where they are among the sizes that are no multiple."""
    if work.gemm is None:
        return work
    inputs, outputs = channels(work)
    k, n = (round_up(size, multiple) if size in missed else size for size in (inputs, outputs))
    return resized(work, n=work.gemm.n * n // outputs, k=work.gemm.k * k // inputs)


def _listed(items: Iterable[object], most: int = 6) -> str:
    texts = [str(item) for item in items]
    if len(texts) > most:
        return f"{', '.join(texts[:most])} and {len(texts) - most} more sizes"
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def first_layer(subject: Subject) -> Iterator[Proposal]:
    """A first convolution whose input has neither 4 channels nor a multiple of 8.

    What:
        In FP16, BF16, INT8 or FP8, the convolution that reads the network's input has input
        channels that are neither 4 nor a multiple of 8 (hint or gain), or has 4 and a stride other
        than 2 (info).
    Why:
        The kernels for first layers are made for four channels (an RGB image with one channel of
        zeros) and stride 2; others want multiples of 8. Three channels are read with unaligned
        loads or copied into a padded tensor first.
    Example:
        A 7x7 convolution on [8, 3, 224, 224]: TensorRT for RTX needs three kernels and 47 MB of
        activations for it with three planes, one kernel and 16 MB with four channels, interleaved.
    Remedy:
        Feed four channels, the last one zero, with weights padded by zeros: exact. The gain is the
        layer predicted with the padded channels.
    """
    for layer, work in subject.products():
        node = subject.main(layer)
        if work.window is None or work.window.group > 1 or work.dtype not in TENSOR_CORE_TYPES[1:] or work.gemm is None:
            continue
        if not is_op(node, "Conv") or not reads_network_input(node, _BEFORE_STEM):
            continue
        taps = math.prod(work.window.kernel)
        size = channels(work)[0]
        nodes = (str(node.name),)
        if size == 4 and set(work.window.stride) != {2}:
            strides = "x".join(str(step) for step in work.window.stride)
            message = f"the first convolution has stride {strides}; kernels for 4 channels are made for stride 2"
            yield Proposal(
                "info", message, "use stride 2 where the architecture is free", nodes, act=("needs retraining",)
            )
        elif size != 4 and size % 8:
            padded = 4 if size < 4 else round_up(size, 8)
            yield Proposal(
                severity="warning",
                message=f"the first convolution reads {size} channel{'s' * (size > 1)}: neither 4 nor a multiple of 8",
                remedy=f"feed {padded} channels, zeros in the new ones, with zeros in the weights",
                nodes=nodes,
                gains={layer.name: subject.gain(layer, resized(work, k=padded * taps))},
                act=interleaved(subject, nodes[0]),
            )


def vocabulary(subject: Subject) -> Iterator[Proposal]:
    """A product over a vocabulary whose size is not aligned.

    What:
        A matrix product with 2048 columns or more whose result leaves the network, n no multiple of
        8 (of 16 in INT8 and FP8).
    Why:
        The rows of its weight and of the logits are not aligned to 16 bytes, and it is one of the
        largest products of the network. Padding costs next to nothing.
    Example:
        A vocabulary of 33708: 33712 is 0.012 % more arithmetic.
    Remedy:
        Pad the weight and the bias, and let the padded logits leave the network (a bias of -1e4
        keeps them from being chosen). Cutting them off inside the network is a copy of all logits,
        which TensorRT for RTX makes for an odd size anyway: there `trtopt build` does it, where that
        is faster (recipe padded-vocabulary), and an even size needs none: 30522 is one kernel. The
        gain is the product predicted with the padded size.
    """
    for layer, work in subject.products():
        node = subject.main(layer)
        if work.kind != "gemm" or work.gemm is None or work.dtype not in TENSOR_CORE_TYPES or node is None:
            continue
        multiple = max(8, multiple_for(16, work.dtype))
        size = work.gemm.n
        if size < _VOCABULARY or size % multiple == 0 or not sinks(node.outputs[0], HEAD)[1]:
            continue
        padded = round_up(size, multiple)
        yield Proposal(
            severity="warning",
            message=f"a vocabulary of {size} is no multiple of {multiple}",
            remedy=f"pad it to {padded} ({100 * (padded / size - 1):.2g} % more arithmetic); let the padded logits out",
            nodes=subject.names([layer]),
            gains={layer.name: subject.gain(layer, resized(work, n=padded))},
        )


def sequence_length(subject: Subject) -> Iterator[Proposal]:
    """Attention over a sequence whose length is not aligned.

    What:
        A softmax between two products of activations, over a length above 32 that is no multiple of
        16 (FP16, BF16) or 32 (INT8, FP8).
    Why:
        Fused attention works on tiles of 16 or 32 keys and queries; the last tile is computed in
        full. Rows of the scores are not aligned where attention is not fused.
    Example:
        Text cut at 130 tokens: 128 or 144 instead.
    Remedy:
        Where the length can be chosen (where text is cut, the size of an image), choose a multiple.
        Padding an existing length adds work to every layer: the message has the prediction of both,
        the gain is that of padding. TensorRT for RTX fuses attention in FP16 at any length, and
        padding 197 to 208 only added bytes there; in FP32 it does not fuse, and an odd length costs
        four kernels.
    """
    softmaxes: dict[tuple[int, int], list[ir.Node]] = defaultdict(list)
    for node in subject.node.values():
        if not is_op(node, "Softmax"):
            continue
        shape, layer = subject.shape(input_of(node, 0)), subject.layer_of.get(str(node.name))
        if not shape or layer is None or layer.work is None or not _is_attention(node):
            continue
        multiple = _SEQUENCE_MULTIPLES.get(layer.work.dtype)
        is_last = int_attribute(node, "axis", -1) in (-1, len(shape) - 1)
        if is_last and multiple is not None and shape[-1] >= _SHORTEST_SEQUENCE and shape[-1] % multiple:
            softmaxes[shape[-1], multiple].append(node)
    for (length, multiple), nodes in softmaxes.items():
        lower, upper = length // multiple * multiple, round_up(length, multiple)
        padded = _at_length(subject, length, upper)
        total = sum(padded.values())
        shorter = sum(_at_length(subject, length, lower).values())
        yield Proposal(
            severity="warning",
            message=f"a sequence of {length} is no multiple of {multiple}: {upper} would take {_longer(-total)},"
            f" {lower} {_longer(-shorter)}",
            remedy=f"where the length can be chosen, choose {lower} or {upper}" + ("" if total > 0 else "; do not pad"),
            nodes=tuple(str(node.name) for node in nodes),
            gains=padded if total > 0 else {},
        )


def _longer(us: float) -> str:
    return "as long" if abs(us) < 0.05 else f"{abs(us):.1f} us {'more' if us > 0 else 'less'}"


def _is_attention(softmax: ir.Node) -> bool:
    """Whether what a softmax reads is a product of two activations."""
    origin = source(input_of(softmax, 0))
    producer = maker_of(origin)
    if not is_op(producer, "MatMul", "Einsum"):
        return False
    return all(constant_tensor_of(value) is None for value in producer.inputs)


def _at_length(subject: Subject, now: int, length: int) -> dict[str, float]:
    """Microseconds won per layer at another sequence length; negative where it costs."""
    won: dict[str, float] = {}
    for layer, work in subject.costed():
        gemm = work.gemm
        if gemm is None:
            shapes = [
                subject.shape(value)
                for name in layer.onnx_nodes
                if name in subject.node
                for value in subject.node[name].outputs
            ]
            share = length / now if any(now in (shape or ()) for shape in shapes) else 1.0
            changed = _scaled_bytes(work, share)
        elif work.weight_bytes:
            changed = resized(work, m=gemm.m // now * length) if gemm.m % now == 0 else work
        else:
            sizes = [length if size == now else size for size in (gemm.m, gemm.n, gemm.k)]
            changed = resized(work, m=sizes[0], n=sizes[1], k=sizes[2])
            if changed != work:
                changed = _aligned_as(changed, work, now, length)
        if changed != work:
            won[layer.name] = subject.predict(work) - subject.predict(changed)
    return won


def _scaled_bytes(work: Work, share: float) -> Work:
    return dataclasses.replace(
        work,
        flop=round(work.flop * share),
        read_bytes=round(work.read_bytes * share),
        write_bytes=round(work.write_bytes * share),
    )


def _aligned_as(changed: Work, work: Work, now: int, length: int) -> Work:
    """Fused attention has the length in none of its rows; unfused products do, where it was what limited them."""
    if work.kind == "attention" or work.alignment_bytes != alignment_of(now, dtype=work.dtype):
        return dataclasses.replace(changed, alignment_bytes=work.alignment_bytes)
    return dataclasses.replace(changed, alignment_bytes=alignment_of(length, dtype=work.dtype))
