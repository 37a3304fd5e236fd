"""What the layers of an engine have to do: the compiler's list and the graph it was made from, as ``Layer`` records.

The compiler says which kernels there are, which tensors they move and in which types; the ONNX graph says how much
arithmetic that is and of which shape.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from trtopt.engine.achieved import MATH_KINDS, math_dtype, preference
from trtopt.engine.layers import (
    BITS,
    buffer_sizes,
    constant_bytes,
    in_place,
    layers_of_profile,
    own_name,
    tensor_bytes,
    views_bytes,
)
from trtopt.graph import edit
from trtopt.graph.cost import graphs_with_counts
from trtopt.graph.edit import constant_tensor_of, is_op
from trtopt.graph.products import GATES, PRODUCTS, Shapes, products_of
from trtopt.report.schema.layers import LayerInfo, TensorInfo
from trtopt.roofline.node_work import POOLS, READ_AS_WRITTEN, GraphTypes, sums_in_fp16, work_of_node
from trtopt.roofline.row_work import rows_of
from trtopt.roofline.work import LARGEST_ALIGNMENT, AttentionSizes, Gemm, Kind, Layer, Work, in_network
from trtopt.support.precision import MATH_TYPES, Precision

_SEPARATORS = re.compile(r" \+ | \|\| |, |\.\.\.|PWN\(|\{ForeignNode\[|\]\}|[()]")
"""What stands between ONNX names in the layer names of TensorRT 8 to 10: ``a + b``, ``a || b``, ``PWN(a, b)``,
``{ForeignNode[first...last]}``."""

_SHAPES = ("Shape", "Size")


@dataclass(frozen=True)
class Claims:
    """Who computes what.

    Attributes:
        owned: Per layer, the nodes whose arithmetic it does; each node of the graph is in one layer at most.
        touched: Per layer, the names of all nodes it computes part of, in the order it lists them; a layer that lists
            none has those of the layer that reads its result, whose operands it prepares, and products that one takes
            over from no layer at all: a GRU leaves no trace in the names of its kernels.
        lost: Nodes that belong to no layer, because nothing near them does. Those that depend on constants and static
            shapes only are not among them: nothing is left of them to compute.
    """

    owned: tuple[tuple[ir.Node, ...], ...]
    touched: tuple[tuple[str, ...], ...]
    lost: tuple[str, ...]


def claims_of(layers: Sequence[LayerInfo], model: ir.Model, is_product: Callable[[ir.Node], bool]) -> Claims:
    """Match layers and nodes.

    A node that several layers list belongs to the one that most surely does its arithmetic: a kernel of products
    before a generated one, and the one that moves most. A product that only generated kernels list belongs to the
    kernel of products that prepares their operands, if there is one. Nodes that no layer lists (fused without a trace)
    belong to the layer of the nearest consumer, else of the nearest producer.

    Args:
        layers: Kernels only, in the order of the engine.
        model: The model that was compiled; node names are unique.
    """
    nodes = {str(node.name): node for node in edit.all_nodes(model.graph)}
    direct = _claims_by_output(layers, [_names(layer, nodes) for layer in layers], nodes)
    touched, helpers = _with_helpers(layers, direct)
    owner: dict[str, int] = {}
    for index, names in enumerate(direct):
        for name in names:
            if name not in owner or preference(layers[index]) < preference(layers[owner[name]]):
                owner[name] = index
    for index, names in enumerate(touched):
        for name in names if layers[index].kind in MATH_KINDS else ():
            if is_product(nodes[name]) and layers[owner[name]].kind not in MATH_KINDS:
                owner[name] = index
    folded = _folded(model)
    lost = []
    adopted: dict[str, int] = {}
    for name, node in nodes.items():
        if name in owner or name in folded:
            continue
        found = _nearest(node, owner, _consumers)
        found = _nearest(node, owner, _producers) if found is None else found
        if found is None:
            lost.append(name)
        else:
            adopted[name] = found
    owned: list[list[ir.Node]] = [[] for _ in layers]
    for name, node in nodes.items():
        at = owner.get(name, adopted.get(name))
        if at is None:
            continue
        owned[at].append(node)
        if name not in touched[at]:
            for index in helpers.get(at, ()) if is_product(node) else ():
                touched[index].append(name)
            touched[at].append(name)
    return Claims(tuple(map(tuple, owned)), tuple(map(tuple, touched)), tuple(lost))


def _names(layer: LayerInfo, nodes: Mapping[str, ir.Node]) -> list[str]:
    """The names of nodes a layer lists, whole or inside the names TensorRT makes of several."""
    found: dict[str, None] = {}
    for name in layer.onnx_nodes:
        parts = [name] if name in nodes else _SEPARATORS.split(name)
        found.update((part, None) for part in parts if part in nodes)
    return list(found)


def _claims_by_output(
    layers: Sequence[LayerInfo], direct: list[list[str]], nodes: Mapping[str, ir.Node]
) -> list[list[str]]:
    """A layer that lists no node computes the one whose output it writes, where the compiler kept the tensor's name
    (that of a network output) and no other layer lists the node."""
    makers = {str(value.name): name for name, node in nodes.items() for value in node.outputs if value.name}
    claimed = {name for names in direct for name in names}
    makers = {value: name for value, name in makers.items() if name not in claimed}
    return [
        names or [makers[item.name] for item in layer.outputs if item.name in makers]
        for layer, names in zip(layers, direct, strict=True)
    ]


def _with_helpers(
    layers: Sequence[LayerInfo], direct: Sequence[list[str]]
) -> tuple[list[list[str]], dict[int, list[int]]]:
    """A layer without nodes takes those of the first layer after it that reads what it writes; and which layers such
    ones help in the end."""
    readers: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        for name in dict.fromkeys(item.name for item in layer.inputs):
            readers.setdefault(name, []).append(index)
    touched = [list(names) for names in direct]
    helped: dict[int, int] = {}
    for index in reversed(range(len(layers))):
        if touched[index]:
            continue
        after = sorted(
            reader for item in layers[index].outputs for reader in readers.get(item.name, ()) if reader > index
        )
        reader = next((reader for reader in after if touched[reader]), None)
        if reader is not None:
            touched[index] = list(touched[reader])
            helped[index] = helped.get(reader, reader)
    helpers: dict[int, list[int]] = {}
    for index, at in helped.items():
        helpers.setdefault(at, []).append(index)
    return touched, helpers


def _folded(model: ir.Model) -> set[str]:
    """Names of nodes that depend on constants and static shapes only."""
    folded: set[str] = set()
    constant: set[ir.Value] = set()
    for node in edit.all_nodes(model.graph):
        known = node.op_type in _SHAPES or all(
            value is None or value in constant or edit.constant_tensor_of(value) is not None for value in node.inputs
        )
        if known and not edit.subgraphs_of(node) and not node.op_type.startswith(("Random", "Bernoulli")):
            folded.add(str(node.name))
            constant.update(node.outputs)
    return folded


def _nearest(node: ir.Node, owner: Mapping[str, int], step: Callable[[ir.Node], Iterable[ir.Node]]) -> int | None:
    """The owner of the nearest node that has one, in one direction."""
    waiting, seen = deque([node]), {node}
    while waiting:
        for other in step(waiting.popleft()):
            if other in seen:
                continue
            if str(other.name) in owner:
                return owner[str(other.name)]
            seen.add(other)
            waiting.append(other)
    return None


def _consumers(node: ir.Node) -> list[ir.Node]:
    return [user for value in node.outputs for user, _ in value.uses()]


def _producers(node: ir.Node) -> list[ir.Node]:
    found = [value.producer() for value in node.inputs if value is not None]
    return [producer for producer in found if producer is not None]


_LITERAL = re.compile(r"__d\^(M?)(\d+)i(?:32|64)(?:_myl\d+)?\Z")
"""A constant of the host: ``__d^64i32_myl0`` is 64, ``__d^M1i32_myl0`` is -1."""


def trip_counts(layers: Sequence[LayerInfo]) -> tuple[int | None, ...]:
    """How often each layer runs: 1 outside of loops, else the trip count of the loop, nested ones multiplied.

    As seen in the lists of TensorRT for RTX 1.7: a ``memset`` sets a counter (or a ``copy`` from the GPU), the body
    follows, an ``add`` advances the counter and a ``cjmp`` compares it with a constant. The compiler unrolls bodies, so
    a recurrent layer of 64 steps may be 8 trips of 8 kernels. Kernels before the body that write the initial values of
    what the body writes again run once.

    Returns:
        In the order of the layers; None where the trip count is not a constant. Where not even the body is known, it is
        the branch (``cjmp``) that has None.
    """
    counts: list[int | None] = [1] * len(layers)
    for end, layer in enumerate(layers):
        if layer.type != "cjmp":
            continue
        counter = next((item.name for item in layer.inputs if _literal(item.name) is None), None)
        setters = [i for i in range(end) if layers[i].type in ("memset", "copy")]
        start = max((i for i in setters if any(item.name == counter for item in layers[i].outputs)), default=None)
        step = None if start is None else _step(layers[start:end], counter)
        if start is None or step is None:
            counts[end] = None
            continue
        trips = _trips(layers, end, step)
        for index in _body(layers, start + 1, end):
            known = counts[index]
            counts[index] = None if known is None or trips is None else known * trips
    return tuple(counts)


def _literal(name: str) -> int | None:
    match = _LITERAL.match(name)
    return None if match is None else int(match[2]) * (-1 if match[1] else 1)


def _body(layers: Sequence[LayerInfo], start: int, end: int) -> range:
    """The layers that are repeated: those of the range, but for leading ones that write initial values."""
    while start < end and _writes_initial_values(layers, start, end):
        start += 1
    return range(start, end)


def _writes_initial_values(layers: Sequence[LayerInfo], index: int, end: int) -> bool:
    if not layers[index].is_kernel:
        return True
    later = {item.name for layer in layers[index + 1 : end] if layer.is_kernel for item in layer.outputs}
    return bool(layers[index].outputs) and all(item.name in later for item in layers[index].outputs)


def _trips(layers: Sequence[LayerInfo], end: int, step: int) -> int | None:
    """A counter that rises does so from 0 to the constant it is compared with; one that falls, to it from a constant
    that no other layer reads."""
    limit = next((value for value in (_literal(item.name) for item in layers[end].inputs) if value is not None), None)
    if limit is None:
        return None
    if step > 0:
        return max(-(-limit // step), 1)
    read = {item.name for layer in layers for item in layer.inputs}
    unread = [_literal(item.name) for layer in layers for item in layer.outputs if item.name not in read]
    starts = [value for value in unread if value is not None and value > limit]
    return -((limit - starts[0]) // -step) if len(starts) == 1 else None


def _step(layers: Sequence[LayerInfo], counter: str | None) -> int | None:
    for layer in layers:
        names = [item.name for item in layer.inputs]
        if layer.type == "add" and counter in names and any(item.name == counter for item in layer.outputs):
            return next((value for value in map(_literal, names) if value), None)
    return None


_FP16_SUMS = re.compile(r"f16f16_f16f16_f16|_h(?:884|1688|16816)")
"""Tactics that sum FP16 products in FP16: xmma kernels name operands and result, multiplication and sum, epilogue; the
older ones begin ``h`` for half sums where others begin ``s``."""

_TELLING = re.compile(r"f16|f32|i8|_[his](?:884|1688|16816)")
"""Tactics whose name tells the types; TensorRT for RTX hides them."""

_CHANNELS_LAST = re.compile("NHWC|channel|transposed", re.IGNORECASE)
"""Formats whose rows are channels. TensorRT for RTX calls what a fused 1x1 convolution writes for one that reads NHWC
"Transposed"."""

_WIDTHS = {"two": 2, "four": 4, "eight": 8, "sixteen": 16, "thirty-two": 32}
_PACKED = re.compile(rf"channel % ([1-9]\d{{0,2}}) == 0|({'|'.join(_WIDTHS)}) wide", re.IGNORECASE)


@dataclass(frozen=True)
class EngineWork:
    """The kernels of an engine with their work.

    Attributes:
        layers: One per kernel, in the engine's order. ``onnx_nodes`` also holds nodes that were fused without a trace;
            for a kernel that only prepares operands, they are those of the layer it does so for.
        notes: What could not be counted: loops of unknown trip count, nodes that no layer computes.
    """

    layers: tuple[Layer, ...]
    notes: tuple[str, ...]


def layers_of_engine(layers: Sequence[LayerInfo], model: ir.Model, shapes: Shapes, *, tf32: bool = False) -> EngineWork:
    """The work of every kernel of an engine's first optimization profile.

    The arithmetic of a node belongs to the layer that does its math (see :func:`~trtopt.engine.work.claims_of`), so
    that all layers add up to the graph; a recurrent node's is spread over its products and the element-wise kernels
    between them. Sizes of products come from the node, types and bytes from what the compiler lists. A kernel inside a
    loop is one layer whose bytes and ``steps`` are those of all its trips, the weights of a recurrent product once as
    in ``Work``; the flop are those of all iterations in the graph, whatever the compiler unrolled.

    Args:
        layers: What the compiler lists, from a build at static shapes.
        model: The model that was compiled: its precision is in its graph. Node names are unique.
        shapes: Static shapes of its values, by name.
        tf32: Whether FP32 products may use TF32 Tensor Cores.

    Returns:
        ``work`` is None for a layer that computes an operator without a known cost.
    """
    mine = layers_of_profile(layers)
    trips = trip_counts(mine)
    indices = [index for index, layer in enumerate(mine) if layer.is_kernel]
    kernels = [mine[index] for index in indices]
    claims = claims_of(kernels, model, lambda node: node.domain == "" and node.op_type in PRODUCTS)
    counter = _Counter(kernels, claims, [trips[index] or 1 for index in indices], model, shapes, tf32)
    notes = []
    if None in trips:
        notes.append("the trip count of a loop is not a constant: its kernels count once")
    lost = [name for name in claims.lost if counter.flop_of(name)]
    if lost:
        notes.append(f"no layer of the engine computes {', '.join(lost[:5])}{' ...' if lost[5:] else ''}")
    found = in_network(counter.layers(), constant_bytes(*kernels))
    return EngineWork((*found, *_without_kernel(mine, trips)), tuple(notes))


_WITHOUT_KERNEL: Mapping[str, tuple[str, Kind]] = {
    "wait": ("stream syncs", "sync"),
    "copy": ("host copies", "copy"),
    "ShapeHostToDevice": ("host copies", "copy"),
    "ShapeDeviceToHost": ("host copies", "copy"),
}
"""Layer types that run no kernel and yet take time, with the name and the kind that they are counted under. A
``signal`` is the other end of a ``wait``."""


def _without_kernel(layers: Sequence[LayerInfo], trips: Sequence[int | None]) -> list[Layer]:
    """All waits of streams, and all copies between host and GPU, as one layer each."""
    counts: dict[tuple[str, Kind], int] = {}
    for layer, times in zip(layers, trips, strict=True):
        if layer.type in _WITHOUT_KERNEL:
            key = _WITHOUT_KERNEL[layer.type]
            counts[key] = counts.get(key, 0) + (times or 1)
    return [
        Layer(name, kind, (), Work(kind, 0, 0, 0, 0, Precision.FP32, steps=steps))
        for (name, kind), steps in counts.items()
    ]


class _Counter:
    """Counts the work of the kernels of one engine."""

    def __init__(
        self,
        kernels: Sequence[LayerInfo],
        claims: Claims,
        trips: Sequence[int],
        model: ir.Model,
        shapes: Shapes,
        tf32: bool,
    ) -> None:
        self.kernels, self.claims, self.trips, self.shapes, self.tf32 = kernels, claims, trips, shapes, tf32
        self.nodes = {str(node.name): node for node in model.graph.all_nodes()}
        self.sizes = buffer_sizes(kernels)
        self.network = {str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)}
        self.work = _works(model, shapes)
        self.recurrent = self._recurrent_shares()

    def flop_of(self, name: str) -> int:
        work = self.work[name]
        return 0 if work is None else work.flop

    def layers(self) -> tuple[Layer, ...]:
        seen: dict[str, int] = {}
        found = []
        for index, kernel in enumerate(self.kernels):
            seen[kernel.name] = seen.get(kernel.name, 0) + 1
            name = kernel.name if seen[kernel.name] == 1 else f"{kernel.name} #{seen[kernel.name]}"
            found.append(Layer(name, self._operator(index), self.claims.touched[index], self._work(index)))
        return tuple(found)

    def _operator(self, index: int) -> str:
        """The operator with most arithmetic, among equals a quantizer or the last; the compiler's layer type for a
        kernel that computes no node."""
        owned = self.claims.owned[index]
        if index in self.recurrent:
            return self.recurrent[index].op
        flop = [(self.flop_of(str(node.name)), is_op(node, "QuantizeLinear"), at) for at, node in enumerate(owned)]
        best = owned[max(flop)[2]] if flop else None
        return self.kernels[index].type if best is None else best.op_type

    def _work(self, index: int) -> Work | None:
        kernel, trips = self.kernels[index], self.trips[index]
        owned = [node for node in self.claims.owned[index] if not is_op(node, *GATES)]
        works = {node: self.work[str(node.name)] for node in owned}
        if None in works.values():
            return None
        known = {node: work for node, work in works.items() if work is not None}
        share = self.recurrent.get(index)
        flop = sum(work.flop for work in known.values()) + (share.flop if share else 0)
        read, weights, written, crossing = self._bytes(index)
        # Integers and booleans are computed where FP32 is, on CUDA cores.
        math_type = Precision(dtype) if (dtype := math_dtype(kernel)) in MATH_TYPES else Precision.FP32
        base = Work("memory", flop, read * trips, weights * trips, written * trips, math_type, steps=trips)
        base = replace(base, network_share=crossing / max(read + written, 1))
        if share is not None and share.gemm is not None:
            kind: Kind = "recurrent" if trips > 1 else "gemm"
            return self._product(replace(base, weight_bytes=weights), kernel, kind, share.gemm)
        products = {node: work for node, work in known.items() if work.gemm is not None}
        if not products:
            pooled = any(is_op(node, *POOLS) for node in owned)
            return replace(base, rows=rows_of(owned, self.shapes), pooled=pooled)
        largest = max(products, key=lambda node: products[node].flop)
        shaped = products[largest]
        gemm = self._merged(list(products), largest)
        if kernel.kind == "mha":
            attention = _attention(list(products.values()))
            return replace(self._product(base, kernel, "attention", gemm), attention=attention)
        return replace(self._product(base, kernel, shaped.kind, gemm), window=shaped.window)

    def _product(self, base: Work, kernel: LayerInfo, kind: Kind, gemm: Gemm) -> Work:
        uses_tf32 = base.dtype == Precision.FP32 and (self.tf32 or Precision.TF32 in kernel.tactic)
        return replace(
            base,
            kind=kind,
            gemm=gemm,
            dtype=Precision.TF32 if uses_tf32 else base.dtype,
            accumulate_fp16=accumulates_fp16(kernel.tactic, kind, base.dtype),
            alignment_bytes=_alignment(kernel),
        )

    def _merged(self, products: Sequence[ir.Node], largest: ir.Node) -> Gemm:
        """The product a kernel computes for several nodes: of one operand by several weights (query, key and value),
        one with their columns side by side; else the largest."""
        gemm = self._gemm(largest)
        same = [node for node in products if node.inputs[0] is largest.inputs[0]]
        beside = [self._gemm(node) for node in same]
        if len(same) < len(products) or any((g.m, g.k, g.batch) != (gemm.m, gemm.k, gemm.batch) for g in beside):
            return gemm
        return replace(gemm, n=sum(each.n for each in beside))

    def _gemm(self, node: ir.Node) -> Gemm:
        work = self.work[str(node.name)]
        if work is None or work.gemm is None:
            raise ValueError(f"{node.name} is no product")
        return work.gemm

    def _bytes(self, index: int) -> tuple[int, int, int, int]:
        """Bytes of activations read, of constants read, of activations written, and of the activations those of the
        network's inputs and outputs, in one run of the kernel; of a cache that is filled up in place, new entries."""
        kernel = self.kernels[index]
        nodes = [self.nodes[name] for name in self.claims.touched[index]]
        entries = [node.inputs[1] for node in nodes if is_op(node, "TensorScatter")]
        placed = in_place(kernel) if entries else frozenset()
        new = sum(math.prod(self.shapes.get(str(v.name), ())) * v.dtype.bitwidth // 8 for v in entries if v and v.dtype)
        tables = self._gathered(index)
        constants = {item.name: item for item in kernel.constants}
        weights = _read_bytes(constants.values(), tables)
        inputs, outputs = ([i for i in items if i.name not in placed] for items in (kernel.inputs, kernel.outputs))
        crossing = [item for item in (*inputs, *outputs) if own_name(item) in self.network]
        read, written, crosses = (views_bytes(items, self.sizes) for items in (inputs, outputs, crossing))
        return read, weights, written + new, crosses + new

    def _gathered(self, index: int) -> dict[tuple[int, ...], int]:
        """Shapes of constants of which a kernel gathers rows, and the elements it reads of them."""
        found: dict[tuple[int, ...], int] = {}
        for name in self.claims.touched[index]:
            node = self.nodes[name]
            if not is_op(node, *READ_AS_WRITTEN) or constant_tensor_of(node.inputs[0]) is None:
                continue
            table = self.shapes.get(str(node.inputs[0].name))  # type: ignore[union-attr]
            out = [self.shapes.get(str(value.name)) for value in node.outputs if value.name]
            if table is not None and None not in out:
                found[table] = found.get(table, 0) + sum(math.prod(shape) for shape in out if shape is not None)
        return found

    def _recurrent_shares(self) -> dict[int, _Share]:
        """The shares of recurrent nodes in their kernels, by kernel."""
        shares: dict[int, _Share] = {}
        for name, node in self.nodes.items():
            products = products_of(node, self.shapes) if is_op(node, *GATES) else None
            members = [index for index, names in enumerate(self.claims.touched) if name in names]
            if not products or not members:
                continue
            gemms = {index: _gemm_of(self.kernels[index]) for index in members if self.kernels[index].kind == "gemm"}
            own = {index: gemm.flop * self.trips[index] for index, gemm in gemms.items() if gemm is not None}
            total = self.flop_of(name)
            in_products = sum(product.flop for product in products) if own else 0
            split = _split(in_products, own)
            others = {index: self.trips[index] for index in members if index not in own} or own
            for index, part in _split(total - in_products, others).items():
                split[index] = split.get(index, 0) + part
            shares.update((index, _Share(node.op_type, flop, gemms.get(index))) for index, flop in split.items())
        return shares


def _attention(products: Sequence[Work]) -> AttentionSizes | None:
    """The sizes of a fused attention from its products: one operator Attention, or that of the scores and that of V."""
    scores, *others = products
    if not others or scores.gemm is None:
        return scores.attention
    values = others[0].gemm
    if len(others) > 1 or values is None or values.k != scores.gemm.n:
        return None
    return AttentionSizes(scores.gemm.m, values.k, scores.gemm.k, values.n, scores.gemm.batch, scores.gemm.batch)


def _works(model: ir.Model, shapes: Shapes) -> dict[str, Work | None]:
    """The work of every node as a kernel of its own, the flop of all iterations of the loops around it."""
    found = {}
    for graph, times in graphs_with_counts(model.graph, shapes):
        for node in graph:
            work = work_of_node(node, shapes, GraphTypes())
            found[str(node.name)] = None if work is None else replace(work, flop=work.flop * times)
    return found


@dataclass(frozen=True)
class _Share:
    """What a kernel does of a recurrent node: its flop, and its product in one step."""

    op: str
    flop: int
    gemm: Gemm | None


def _split(total: int, weights: Mapping[int, int]) -> dict[int, int]:
    """``total`` in whole parts in proportion to ``weights``, adding up exactly."""
    parts, given, seen, whole = {}, 0, 0, sum(weights.values())
    for index, weight in weights.items():
        seen += weight
        upto = total * seen // whole
        parts[index], given = upto - given, upto
    return parts


def _gemm_of(kernel: LayerInfo) -> Gemm | None:
    """The sizes of a matrix product as the compiler lists it: [..., m, k] x [..., k, n] = [..., m, n]."""
    left = next((item.shape for item in kernel.inputs if len(item.shape) >= 2), None)
    out = next((item.shape for item in kernel.outputs if len(item.shape) >= 2), None)
    if left is None or out is None:
        return None
    return Gemm(m=out[-2], n=out[-1], k=left[-1], batch=math.prod(out[:-2]))


def _read_bytes(constants: Iterable[TensorInfo], tables: Mapping[tuple[int, ...], int]) -> int:
    """Bytes read of constants: all of each, but of tables of one shape together what is gathered of them."""
    found, left = 0, {shape: float(elements) for shape, elements in tables.items()}
    for item in constants:
        size, bits = tensor_bytes(item), BITS[item.dtype]
        read = min(size, left.get(item.shape, size * 8 / bits) * bits // 8)
        if item.shape in left:
            left[item.shape] -= read * 8 / bits
        found += math.ceil(read)
    return found


def _alignment(kernel: LayerInfo) -> int:
    """The largest power of two, at most 128, that divides the bytes of the rows of all activations a product moves."""
    tensors = [item for item in (*kernel.inputs, *kernel.outputs) if len(item.shape) >= 2]
    rows = [_row_elements(item) * BITS[item.dtype] // 8 for item in tensors]
    return math.gcd(LARGEST_ALIGNMENT, *(row for row in rows if row > 0))


def _row_elements(item: TensorInfo) -> int:
    """Elements of a contiguous row: channels where they are last, padded to what the format packs; else the last
    axis."""
    if not _CHANNELS_LAST.search(item.format):
        return item.shape[-1]
    multiple = packed_channels(item.format)
    return -(-item.shape[1] // multiple) * multiple


def packed_channels(form: str) -> int:
    """The number of channels a memory format stores together, which pads the channels to a multiple of it."""
    packed = _PACKED.search(form)
    return 1 if packed is None else int(packed[1] or _WIDTHS[packed[2].lower()])


def accumulates_fp16(tactic: str, kind: Kind, dtype: Precision) -> bool:
    """Whether FP16 products are summed in FP16: from the tactic's name; where that is hidden, as for the same node of
    a graph."""
    if _TELLING.search(tactic) is None:
        return sums_in_fp16(kind, dtype)
    return _FP16_SUMS.search(tactic) is not None
