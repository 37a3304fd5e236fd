"""Rules about the first stages of a convolutional network, where large maps with few channels are bound by memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import onnx_ir as ir

from trtopt.graph.edit import input_of, ints_attribute, is_op, maker_of
from trtopt.report.text.format import count, time_text
from trtopt.roofline.rules.subject import POINTWISE, Proposal, Subject, source
from trtopt.roofline.work import Gemm, Layer, Window, Work, alignment_of

_EARLY = 64
"""Early layers work on maps of at least this part of the input's pixels: down-sampled by eight at the most."""
_GATES = POINTWISE | {"Conv", "Gemm", "MatMul", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "HardSwish"}
_POOLS = ("MaxPool", "AveragePool")
_GLOBAL_POOLS = ("GlobalAveragePool", "ReduceMean", "AveragePool")
_LONGEST_GATE = 16


def depthwise(subject: Subject) -> Iterator[Proposal]:
    """A depthwise convolution that a dense one would beat.

    What:
        A depthwise convolution that takes longer than its launch, next to a 1x1 convolution, where
        one dense convolution in place of both is predicted to be faster. That happens in early
        stages: large maps, few channels.
    Why:
        A depthwise convolution does little arithmetic per byte and runs on the CUDA cores, so it
        costs what it moves. The wide map between it and the 1x1 convolution is written and read
        again. A dense convolution has many times the arithmetic, on Tensor Cores that have nothing
        else to do, and one map less.
    Example:
        The first blocks of MobileNetV2: 1x1 from 16 to 96 channels at 112x112, then depthwise 3x3.
        EfficientNetV2 has dense 3x3 convolutions (fused MBConv) in its first three stages.
    Remedy:
        Use dense 3x3 convolutions in the stages named, and keep depthwise ones in the late stages,
        where this rule finds nothing. It is another architecture: retrain it. The gain is the two
        layers' predicted time less that of the dense one.

    Both compilers want depthwise layers in FP16 when the rest is INT8: TensorRT for RTX pads each
    channel to four.
    """
    gains: dict[str, float] = {}
    layers: list[Layer] = []
    texts: list[str] = []
    for layer, work in subject.costed():
        node = subject.main(layer)
        if work.kind != "depthwise" or work.window is None or node is None or layer.name in gains:
            continue
        if subject.row[layer.name].limiter == "latency":
            continue
        for first, second in _neighbours(subject, layer, node):
            dense = _dense(subject, first, second)
            won = sum(subject.us((first, second)).values()) - (subject.predict(dense) if dense else math.inf)
            if dense is not None and dense.gemm is not None and won > 0 and not {first.name, second.name} & set(gains):
                gains[first.name] = won
                gains[second.name] = 0.0
                layers += [first, second]
                kernel = "x".join(str(size) for size in work.window.kernel)
                texts.append(f"{kernel} {dense.gemm.k // math.prod(work.window.kernel)} -> {dense.gemm.n}")
                break
    if layers:
        before = sum(subject.us(layers).values())
        yield Proposal(
            severity="warning",
            message=f"{count(len(texts), 'depthwise convolution')}, each with the 1x1 beside it, take"
            f" {time_text(before)}; {count(len(texts), 'dense one')} {time_text(before - sum(gains.values()))}",
            remedy=f"dense, retrained: {', '.join(dict.fromkeys(texts))} channels",
            nodes=subject.names(layers),
            gains=gains,
        )


def _neighbours(subject: Subject, layer: Layer, node: ir.Node) -> Iterator[tuple[Layer, Layer]]:
    """The 1x1 convolution before a depthwise one with the depthwise, and the depthwise with the 1x1 after it."""
    before = source(input_of(node, 0))
    maker = maker_of(before)
    producer = None if maker is None else subject.layer_of.get(str(maker.name))
    if producer is not None and before is not None and _only_reader(before) and _is_pointwise_conv(producer.work):
        yield producer, layer
    value = node.outputs[0]
    for _ in range(_LONGEST_GATE):
        users = list(dict.fromkeys(user for user, _ in value.uses()))
        if len(users) != 1 or value.is_graph_output():
            return
        if users[0].op_type not in POINTWISE:
            break
        value = users[0].outputs[0]
    user = subject.layer_of.get(str(users[0].name))
    if user is not None and user is not layer and is_op(users[0], "Conv") and _is_pointwise_conv(user.work):
        yield layer, user


def _only_reader(value: ir.Value) -> bool:
    """Whether a convolution's result goes one way only (an activation may read it twice: x * sigmoid(x))."""
    ends = {user for user, _ in value.uses()}
    return not value.is_graph_output() and len({id(user) for user in ends if user.op_type not in POINTWISE}) <= 1


def _is_pointwise_conv(work: Work | None) -> bool:
    if work is None or work.kind != "conv" or work.window is None or work.window.group > 1:
        return False
    return set(work.window.kernel) | set(work.window.stride) == {1}


def _dense(subject: Subject, first: Layer, second: Layer) -> Work | None:
    """One dense convolution with the window of the depthwise one, from the input of ``first`` to the output of
    ``second``."""
    if first.work is None or second.work is None:
        return None
    deep = first.work if first.work.kind == "depthwise" else second.work
    point = second.work if deep is first.work else first.work
    if deep.window is None or point.gemm is None or point.dtype != deep.dtype:
        return None
    pixels = _pixels(subject, second)
    if pixels is None:
        return None
    window = Window(deep.window.kernel, deep.window.stride, deep.window.dilation)
    gemm = Gemm(pixels, point.gemm.n, point.gemm.k * math.prod(window.kernel))
    return dataclasses.replace(
        point,
        gemm=gemm,
        window=window,
        flop=gemm.flop,
        read_bytes=first.work.read_bytes,
        weight_bytes=point.weight_bytes * math.prod(window.kernel),
        write_bytes=second.work.write_bytes,
        alignment_bytes=alignment_of(point.gemm.k, gemm.n, dtype=point.dtype),
    )


def _pixels(subject: Subject, layer: Layer) -> int | None:
    """Batch times pixels of the result of a convolution [N, K, ...]."""
    node = subject.main(layer)
    shape = subject.shape(node.outputs[0]) if node is not None else None
    return math.prod(shape) // shape[1] if shape and len(shape) > 2 else None


def early_pooling(subject: Subject) -> Iterator[Proposal]:
    """Pooling of a large map right after a convolution.

    What:
        A MaxPool or AveragePool of stride 2, bound by memory, that alone reads a convolution's
        result, down-sampled by eight at the most, where the convolution with the pool's stride is
        predicted to be faster.
    Why:
        Pooling visits every element for a few operations: it costs what it moves, and the
        convolution before it computed and wrote four values for each one that is kept.
    Example:
        The stem of ResNet: a 7x7 convolution writes 112x112x64, a 3x3 max pool of stride 2 reads
        it.
    Remedy:
        Give the convolution the pool's stride and leave the pool out (retraining), or let late
        stages do the pooling. The gain is the predicted time of both less that of the strided
        convolution.
    """
    area = _input_area(subject)
    for layer, _ in subject.costed():
        pool = subject.main(layer)
        if not is_op(pool, *_POOLS) or not _is_early(subject, input_of(pool, 0), area):
            continue
        strides = ints_attribute(pool, "strides") or (1,)
        if set(strides) != {2} or subject.row[layer.name].limiter != "memory":
            continue
        value = source(input_of(pool, 0))
        producer = maker_of(value)
        conv = subject.layer_of.get(str(producer.name)) if is_op(producer, "Conv") else None
        if conv is None or conv is layer or value is None or not _only_reader(value):
            continue
        strided = _strided(conv.work, strides)
        if strided is None:
            continue
        both = sum(subject.us((conv, layer)).values())
        won = both - subject.predict(strided)
        if won > 0:
            yield Proposal(
                severity="warning",
                message=f"a convolution and the {pool.op_type} after it take {time_text(both)} on a large map",
                remedy="instead of both a convolution of stride"
                f" {'x'.join(map(str, _strides(strided)))} (retraining): {time_text(both - won)}",
                nodes=subject.names((conv, layer)),
                gains={layer.name: won, conv.name: 0.0},
            )


def _strided(work: Work | None, strides: tuple[int, ...]) -> Work | None:
    """The convolution with its stride multiplied."""
    if work is None or work.gemm is None or work.window is None or len(strides) != len(work.window.stride):
        return None
    fewer = math.prod(strides)
    window = dataclasses.replace(
        work.window, stride=tuple(a * b for a, b in zip(work.window.stride, strides, strict=True))
    )
    gemm = dataclasses.replace(work.gemm, m=-(-work.gemm.m // fewer))
    return dataclasses.replace(
        work, gemm=gemm, window=window, flop=work.flop // fewer, write_bytes=work.write_bytes // fewer
    )


def _strides(work: Work) -> tuple[int, ...]:
    return work.window.stride if work.window else ()


def squeeze_excite(subject: Subject) -> Iterator[Proposal]:
    """Squeeze-and-excitation on large maps.

    What:
        A map that is pooled to one value per channel, sent through two small layers and a gate, and
        multiplied by it, in stages down-sampled by eight at the most.
    Why:
        The pooling reads the whole map, two products of a single row leave the GPU idle, and the
        multiplication reads and writes the map again: three to five kernels that are bound by
        memory or by their launch.
    Example:
        EfficientNet-B0 has one in each block, the first on 112x112x32.
    Remedy:
        Leave it out of the early stages, as EfficientNetV2 does, and keep it late, where the maps
        are small (retraining). The gain is the predicted time of its kernels.
    """
    area = _input_area(subject)
    layers: dict[str, Layer] = {}
    sizes: list[str] = []
    for node in subject.node.values():
        block = _excitation(subject, node) if is_op(node, "Mul") else None
        if block is None or not _is_early(subject, node.outputs[0], area):
            continue
        inside = {str(item.name) for item in block}
        own = {subject.layer_of[name].name: subject.layer_of[name] for name in inside if name in subject.layer_of}
        whole = {name: layer for name, layer in own.items() if set(layer.onnx_nodes) <= inside}
        layers.update(whole)
        if whole:
            sizes.append("x".join(str(size) for size in (subject.shape(node.outputs[0]) or ())[1:]))
    if layers:
        yield Proposal(
            severity="warning",
            message=f"squeeze-and-excitation on large maps: {', '.join(dict.fromkeys(sizes))}",
            remedy="leave it out of these stages (retraining)",
            nodes=subject.names(layers.values()),
            gains=subject.us(layers.values()),
        )


def _excitation(subject: Subject, product: ir.Node) -> list[ir.Node] | None:
    """The nodes from pooling to the multiplication by the gate, or None when it is no squeeze-and-excitation."""
    for gate, data in ((0, 1), (1, 0)):
        shape = subject.shape(input_of(product, gate))
        if (
            not shape
            or len(shape) < 4
            or math.prod(shape[2:]) != 1
            or math.prod(subject.shape(product.outputs[0]) or ()) == math.prod(shape)
        ):
            continue
        path, value = [product], input_of(product, gate)
        for _ in range(_LONGEST_GATE):
            node = maker_of(value)
            if not is_op(node, *_GATES, *_GLOBAL_POOLS):
                break
            path.append(node)
            value = input_of(node, 0)
            if is_op(node, *_GLOBAL_POOLS):
                pooled = math.prod((subject.shape(node.outputs[0]) or (0,))[2:]) == 1
                small = sum(is_op(item, "Conv", "Gemm", "MatMul") for item in path)
                return path if pooled and small and value is input_of(product, data) else None
    return None


def early_normalization(subject: Subject) -> Iterator[Proposal]:
    """Layer normalization of large maps.

    What:
        A layer normalization over the channels of a map of an image that is down-sampled by eight
        at the most, in a kernel of its own that is bound by memory.
    Why:
        It reads the map for the mean and the variance of each pixel and writes it again for a few
        operations: it costs what it moves, and a large map moves the most. It depends on the data,
        so that no compiler folds it into the convolution before it.
    Example:
        ConvNeXt normalizes 56x56x96 behind its stem and in each block of its first stage.
    Remedy:
        Batch normalization in these stages, which folds into the convolution before it
        (retraining); layer normalization in the late ones. The gain is the predicted time of the
        kernels, which vanish.
    """
    yield from _on_large_maps(
        subject,
        lambda node: node.op_type == "LayerNormalization" and last_axes(subject, node) == 1,
        "layer normalization",
        "batch normalization there, which folds into a convolution (retraining)",
    )


def last_axes(subject: Subject, node: ir.Node) -> int:
    """How many of the last axes a normalization goes over."""
    axis = node.attributes.get_int("axis", -1)
    return -axis if axis < 0 else len(subject.shape(node.outputs[0]) or ()) - axis


def pixel_shuffle(subject: Subject) -> Iterator[Proposal]:
    """Pixels and channels that change places on large maps.

    What:
        A DepthToSpace or SpaceToDepth (pixel shuffle and unshuffle) on a map of an image that is
        down-sampled by eight at the most, in a kernel of its own that is bound by memory.
    Why:
        It computes nothing: it reads the map and writes it in another order, and neighbours in
        memory come apart, so that it reaches less than the bandwidth.
    Example:
        The Focus layer of YOLOv5 turns 640x640x3 into 320x320x12; a super-resolution network ends
        in a pixel shuffle of its largest map.
    Remedy:
        SpaceToDepth before a convolution: a convolution with that stride, whose window covers the
        same pixels, computes the same. DepthToSpace after one: shuffle behind fewer channels, or
        on the host. The gain is the predicted time of the kernels.
    """
    yield from _on_large_maps(
        subject,
        lambda node: node.op_type in ("DepthToSpace", "SpaceToDepth"),
        "pixels and channels change places",
        "a convolution with that stride in place of SpaceToDepth; DepthToSpace on fewer channels, or on the host",
    )


def _on_large_maps(subject: Subject, is_meant: Callable[[ir.Node], bool], what: str, remedy: str) -> Iterator[Proposal]:
    """What there is of layers around such nodes on large maps that do nothing else and are bound by memory."""
    area = _input_area(subject)
    layers, sizes = [], []
    for layer, work in subject.costed():
        node = next((item for name in layer.onnx_nodes if (item := subject.node.get(name)) and is_meant(item)), None)
        shape = None if node is None else subject.shape(node.inputs[0])
        if shape is None or work.kind != "memory" or subject.row[layer.name].limiter != "memory":
            continue
        pixels = math.prod(shape[1:-1] if is_op(node, "LayerNormalization") else shape[2:])
        if len(shape) > 2 and pixels * _EARLY >= area > 0:
            layers.append(layer)
            sizes.append("x".join(str(size) for size in shape[1:]))
    if layers:
        yield Proposal(
            severity="warning",
            message=f"{what} on large maps: {', '.join(dict.fromkeys(sizes))}",
            remedy=remedy,
            nodes=subject.names(layers),
            gains=subject.us(layers),
        )


def _input_area(subject: Subject) -> int:
    """Pixels of the largest image that enters the network; 0 without one."""
    shapes = [subject.shape(value) for value in subject.model.graph.inputs]
    return max((math.prod(shape[2:]) for shape in shapes if shape and len(shape) == 4), default=0)


def _is_early(subject: Subject, value: ir.Value | None, area: int) -> bool:
    shape = subject.shape(value)
    return bool(shape) and area > 0 and len(shape or ()) == 4 and math.prod((shape or ())[2:]) * _EARLY >= area
