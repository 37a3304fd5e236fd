"""Transposes behind reshapes that merge axes."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from trtopt.graph.dims import Dimensions
from trtopt.graph.edit import (
    Splice,
    all_nodes,
    constant_of,
    constant_tensor_of,
    ints_attribute,
    is_op,
    maker_of,
    only_maker,
    only_user,
    remove_node,
)
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target


@dataclass(frozen=True)
class MergedTranspose:
    """Transposes a tensor as it is, where exports merge its leading axes first and split them afterwards.

    Rewrite:
        Reshape(Transpose(Reshape(x, [-1, s, d]), [0, 2, 1]), [b, h, d, s]) = Transpose(x, [0, 1, 3, 2]) for
        x of [b, h, s, d], and likewise for other trailing axes. The shapes may be computed. A convolution's map that
        becomes the tokens of products or normalizations is transposed before it is flattened, and tokens that become a
        convolution's map after they are one: Transpose(Reshape(x, [n, c, h w]), [0, 2, 1]) = Reshape(Transpose(x,
        [0, 2, 3, 1]), [n, h w, c]), Reshape(Transpose(x, [0, 2, 1]), [n, c, h, w]) = Transpose(Reshape(x,
        [n, h, w, c]), [0, 3, 1, 2]).
    Requires:
        Dimensions that are provably equal: the trailing ones before and after the first Reshape, the leading ones of x
        and of the result; the first two of a map. What is between is used once and is no graph output. Tokens are read
        by products with a constant matrix and layer normalizations alone, such a map by convolutions; its height and
        width are constants.
    Why faster:
        PyTorch's exporters write the keys of scaled_dot_product_attention so: the recipes for attention, and the
        compiler's fused kernel, know the one Transpose, which then merges with the one that splits the heads. Maps are
        channels-last in memory: where sizes are fixed, TensorRT for RTX flattens and transposes them in a kernel each,
        and in the other order in none (a depthwise convolution and a product on 196 tokens: 6 -> 4 kernels). A layer
        normalization whose tokens become a map is two kernels with FP32 between them, and in the other order one.
    Numerics:
        Exact.
    Refuses when:
        Never: what cannot be proven does not match.
    """

    name: str = "merged-transpose"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Such chains, each named after its last Reshape, and tokens of maps, named after their Transpose."""
        chains = [chain for node in all_nodes(model.graph) if (chain := _chain(node)) is not None]
        pairs = [pair for node in all_nodes(model.graph) if (pair := _tokens(node) or _map(node)) is not None]
        known = Dimensions(model) if chains or pairs else None
        matches: list[Match] = []
        for chain in chains:
            # A Reshape that one chain ends with cannot begin the next, too.
            taken = {match.nodes[0] for match in matches}
            if known is not None and chain[2] not in taken and _perm(chain, known) is not None:
                matches.append(Match(chain))
        matches.extend(Match(pair) for pair in pairs if known is not None and _keeps_channels(pair, known))
        return Findings(tuple(matches))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Replace one chain by a Transpose, or a pair by one in the other order; the shapes are left to dead-node."""
        if len(match.nodes) == 2:
            exchange = self._flatten_last if is_op(match.nodes[0], "Transpose") else self._turn_last
            return exchange(model, *match.nodes)
        last, transpose, first = match.nodes
        perm = ints_attribute(transpose, "perm")
        if perm is None or last.outputs[0].shape is None:
            return Refusal(match.label, "it is no transpose between reshapes any more")
        lead = len(last.outputs[0].shape) - len(perm) + 1
        whole = [*range(lead), *(axis + lead - 1 for axis in perm[1:])]
        Splice(model, last, self.name).replace(last, "Transpose", [first.inputs[0]], {"perm": whole})
        for node in (transpose, first):
            if node.graph is not None:
                node.graph.remove(node, safe=True)
        return None

    def _flatten_last(self, model: ir.Model, transpose: ir.Node, reshape: ir.Node) -> Refusal | None:
        """Transpose the map, and then flatten it."""
        splice, tokens = Splice(model, transpose, self.name), transpose.outputs[0]
        turned = splice.fresh("Transpose", reshape.inputs[0], attributes={"perm": (0, 2, 3, 1)})
        reader = next(user for user, _ in tokens.uses())
        constant = constant_tensor_of(reader.inputs[1])
        if constant is None:
            return Refusal(str(transpose.name), "its tokens meet no constant any more")
        shape = splice.ints([0, -1, constant.shape[0]], tokens, "shape")
        splice.finish(splice.op("Reshape", turned, shape))
        remove_node(reshape)
        return None

    def _turn_last(self, model: ir.Model, reshape: ir.Node, transpose: ir.Node) -> Refusal | None:
        """Make a map of tokens, and then transpose it."""
        splice, sizes = Splice(model, reshape, self.name), _map_sizes(reshape)
        if sizes is None:
            return Refusal(str(reshape.name), "its height and width are no constants any more")
        shape = splice.ints([0, *sizes], reshape.outputs[0], "shape")
        picture = splice.fresh("Reshape", transpose.inputs[0], shape)
        splice.finish(splice.op("Transpose", picture, attributes={"perm": (0, 3, 1, 2)}))
        remove_node(transpose)
        return None


def _chain(last: ir.Node) -> tuple[ir.Node, ir.Node, ir.Node] | None:
    """Reshape, Transpose that leaves the first axis, Reshape; last first."""
    nodes = [last]
    for kind in ("Reshape", "Transpose", "Reshape"):
        if not is_op(nodes[-1], kind) or nodes[-1].graph is not last.graph:
            return None
        value = nodes[-1].inputs[0]
        maker = maker_of(value)
        if len(nodes) == 3:
            break
        if value is None or maker is None or only_user(value) is None:
            return None
        nodes.append(maker)
    perm = ints_attribute(nodes[1], "perm")
    return (nodes[0], nodes[1], nodes[2]) if perm is not None and perm[0] == 0 and len(perm) > 1 else None


def _perm(chain: tuple[ir.Node, ir.Node, ir.Node], known: Dimensions) -> tuple[int, ...] | None:
    """The permutation of the Transpose; None where the reshapes may do more than merge leading axes and split them."""
    last, transpose, first = chain
    perm = ints_attribute(transpose, "perm")
    source, merged, result = (known.of(value) for value in (first.inputs[0], first.outputs[0], last.outputs[0]))
    if perm is None or source is None or merged is None or result is None or len(merged) != len(perm):
        return None
    trailing = len(perm) - 1
    lead = len(source) - trailing
    if lead < 1 or len(result) != len(source) or source[lead:] != merged[1:] or source[:lead] != result[:lead]:
        return None
    moved = tuple(source[lead + axis - 1] for axis in perm[1:])
    return perm if result[lead:] == moved else None


def _tokens(transpose: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """A Transpose that makes tokens of a convolution's map for layers with a constant, and its Reshape."""
    if not is_op(transpose, "Transpose") or ints_attribute(transpose, "perm") != (0, 2, 1):
        return None
    flat, tokens = transpose.inputs[0], transpose.outputs[0]
    reshape = only_maker(flat)
    if not is_op(reshape, "Reshape") or reshape.graph is not transpose.graph:
        return None
    picture = reshape.inputs[0]
    if picture is None or not is_op(picture.producer(), "Conv") or tokens.is_graph_output() or not tokens.uses():
        return None
    return (transpose, reshape) if all(_is_layer(user, tokens) for user, _ in tokens.uses()) else None


def _is_layer(node: ir.Node, tokens: ir.Value) -> bool:
    """Whether a node multiplies tokens by a constant matrix, or normalizes the channels of each and scales them."""
    rank = 2 if is_op(node, "MatMul") else 1
    if not is_op(node, "MatMul", "LayerNormalization") or node.inputs[0] is not tokens:
        return False
    constant = constant_tensor_of(node.inputs[1])
    return constant is not None and len(constant.shape) == rank and (rank == 2 or constant.shape[0] != 1)


def _map(reshape: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """A Reshape that makes a map of tokens for convolutions alone, and its Transpose."""
    turned = reshape.inputs[0] if is_op(reshape, "Reshape") else None
    transpose = only_maker(turned)
    if not is_op(transpose, "Transpose") or transpose.graph is not reshape.graph:
        return None
    picture = reshape.outputs[0]
    if ints_attribute(transpose, "perm") != (0, 2, 1) or picture.is_graph_output() or not picture.uses():
        return None
    if any(index or not is_op(user, "Conv") for user, index in picture.uses()) or _map_sizes(reshape) is None:
        return None
    return (reshape, transpose)


def _map_sizes(reshape: ir.Node) -> tuple[int, int, int] | None:
    """Height, width and channels of the map that a Reshape makes, where its shape is a constant."""
    shape = constant_of(reshape.inputs[1])
    if shape is None or shape.size != 4 or (shape[1:] < 1).any():
        return None
    channels, height, width = (int(size) for size in shape[1:])
    return height, width, channels


def _keeps_channels(pair: tuple[ir.Node, ir.Node], known: Dimensions) -> bool:
    """Whether the Reshape of a pair flattens the map of each channel, or makes one of the tokens of each channel."""
    reshape = pair[1] if is_op(pair[1], "Reshape") else pair[0]
    sides = (known.of(reshape.inputs[0]), known.of(reshape.outputs[0]))
    flat, picture = sides if reshape is pair[0] else reversed(sides)
    return picture is not None and flat is not None and (len(picture), len(flat)) == (4, 3) and picture[:2] == flat[:2]
