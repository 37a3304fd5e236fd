"""Whether two graphs with the same inputs and outputs compute the same, tried on random numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from trtopt.errors import InvalidModelError
from trtopt.graph import edit
from trtopt.graph.edit import static_shape
from trtopt.graph.fold import RANDOM
from trtopt.graph.input_values import input_values
from trtopt.graph.shapes import infer_in_place
from trtopt.support.ort_session import OrtSession

_BOUNDS = {np.dtype(np.float64): 1e-5, np.dtype(np.float32): 1e-5}
_NARROW_BOUND = 2e-2
"""Largest difference over the largest output: FP32 sums in another order; what is typed FP16 is rounded to it."""

_NUDGE, _TIMES = 1e-6, 2.0
"""Where float inputs change by this share and weights by one rounding, outputs that move change by rounding alone, and
a rewrite may move them this many times as far: a network that selects (TopK, ArgMax) takes another of two equals, and
one that divides by a small variance multiplies what folding a weight rounds away."""

_ROWS, _LAYER_NORM = 3, 17
"""The rank of [samples, 1, numbers], and the opset from which on there is LayerNormalization."""

_SEED = 11

_MANY_NODES = 2000
"""From here on ONNX Runtime takes longer to fuse a graph than to run it once as it is."""

_LARGE = 1 << 16
"""Input elements from which on one row of a batch is tried first: a few numbers may all be positive."""


def difference(expected: ir.Model, found: ir.Model, shapes: Mapping[str, tuple[int, ...]] | None = None) -> str:
    """Where two models of the same inputs and outputs differ on random inputs, in words; empty when they agree.

    Args:
        expected: A model.
        shapes: A shape for each of its inputs that has a dynamic axis.

    Returns:
        A difference beyond rounding, or why the second model cannot be run. Empty as well when ONNX Runtime cannot run
        the first, or it draws random numbers: nothing is known then.
    """
    if any(node.op_type in RANDOM for node in edit.all_nodes(expected.graph)):
        return ""
    fixed = {str(value.name): static_shape(value) for value in expected.graph.inputs}
    is_static = None not in fixed.values()
    full = {name: (shapes or {}).get(name, ()) if shape is None else shape for name, shape in fixed.items()}
    if _is_large(full):
        # A recipe may write the static batch into the graph: only equality at batch one says anything.
        small, other = (_at_batch_one(model) if is_static else model for model in (expected, found))
        ones = {n: (1, *shape[1:]) if is_static or fixed[n] is None else shape for n, shape in full.items()}
        if small is not None and other is not None and _difference(small, other, ones) == "":
            return ""
    return _difference(expected, found, full) or ""


def _is_large(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a single row still shows a difference and all rows take their time."""
    return sum(math.prod(shape) for shape in shapes.values()) >= _LARGE


def _difference(expected: ir.Model, found: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """As above; None where nothing is known."""
    feeds = _random_feeds(expected, shapes)
    fuse = len(expected.graph) < _MANY_NODES
    expected, found = _exact_rows(expected), _exact_rows(found)
    try:
        with OrtSession(expected, fuse=fuse, brief=True) as session:
            before = session.run(feeds)
    except InvalidModelError:
        return None
    try:
        with OrtSession(found, fuse=fuse, brief=True) as session:
            after = session.run(feeds)
    except InvalidModelError as error:
        return error.what
    texts = [_differs(first, second) for first, second in zip(before, after, strict=True)]
    if any(texts):
        nudged = _nudged(expected, feeds, fuse, before)
        for index, (first, second, third) in enumerate(zip(before, after, nudged, strict=True)):
            if texts[index] and _distance(first, second) <= _TIMES * _distance(first, third):
                texts[index] = ""
    for value, text in zip(expected.graph.outputs, texts, strict=True):
        if text:
            return f"{value.name}: {text}"
    return ""


def _exact_rows(model: ir.Model) -> ir.Model:
    """The model with LayerNormalization in place of InstanceNormalization of one row a sample: ONNX Runtime's sums of
    a million numbers are off by 5e-5 there, and not here."""
    if not any(map(_is_row_norm, model.graph)) or model.graph.opset_imports.get("", 1) < _LAYER_NORM:
        return model
    clone = model.clone()
    for node in filter(_is_row_norm, clone.graph):
        node.op_type = "LayerNormalization"
    return clone


def _is_row_norm(node: ir.Node) -> bool:
    is_single = edit.is_op(node, "InstanceNormalization") and static_shape(node.inputs[1]) == (1,)
    return is_single and len(edit.dims_of_value(node.inputs[0]) or ()) == _ROWS


def _nudged(
    model: ir.Model, feeds: Mapping[str, np.ndarray], fuse: bool, before: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The outputs for inputs next to these, and weights one rounding off; integers, single numbers and scales of
    images, which sizes are computed from, stay exact; all do where outputs get other shapes than ``before`` or are no
    numbers: what a root is taken of."""
    rng, near = np.random.default_rng(_SEED), {}
    for name, array in feeds.items():
        factors = 1 + _NUDGE * rng.standard_normal(array.shape, dtype=np.float32)
        near[name] = (array * factors).astype(array.dtype) if array.dtype.kind == "f" else array
    rounded = model.clone()
    for value in rounded.graph.initializers.values():
        if value.const_value is not None and value.dtype is ir.DataType.FLOAT and value.const_value.size > 1:
            if any(edit.is_op(user, "Resize", "Upsample") for user, _ in value.uses()):
                continue
            weight = value.const_value.numpy()
            factors = 1 + np.finfo(np.float32).eps * rng.standard_normal(weight.shape, dtype=np.float32)
            off = np.where(weight == np.rint(weight), weight, weight * factors)
            value.const_value = ir.tensor(off.astype(np.float32), name=value.name)
    try:
        with OrtSession(rounded, fuse=fuse, brief=True) as session:
            found = session.run(near)
    except InvalidModelError:
        found = []
    if found and all(map(_is_alike, before, found)):
        return found
    with OrtSession(model, fuse=fuse, brief=True) as session:
        return session.run(near)


def _is_alike(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two arrays are of one shape and finite at the same places."""
    if first.shape != second.shape or first.dtype.kind not in "fV":
        return first.shape == second.shape
    return np.array_equal(np.isfinite(first), np.isfinite(second))


def _distance(first: np.ndarray, second: np.ndarray) -> float:
    """How far two arrays are apart, over the L2 norm of the first; of integers the root of the share that differs."""
    if first.shape != second.shape:
        return math.inf
    if first.dtype.kind not in "fV":
        return math.sqrt(float(np.mean(first != second))) if first.size else 0.0
    exact, other = (np.nan_to_num(array.astype(np.float64), posinf=0.0, neginf=0.0) for array in (first, second))
    return float(np.linalg.norm(exact - other)) / (float(np.linalg.norm(exact)) or 1.0)


def _at_batch_one(model: ir.Model) -> ir.Model | None:
    """The model for a batch of one, where all inputs begin with the same larger number and shapes still fit: equal
    there is equal for the batch, and soon seen."""
    first = {(static_shape(value) or (0,))[0] for value in model.graph.inputs}
    if len(first) != 1 or first.pop() <= 1:
        return None
    clone = model.clone()
    for value in clone.graph.inputs:
        value.shape = ir.Shape((1, *(static_shape(value) or ())[1:]))
    for value in clone.graph.outputs:
        value.shape = None
    try:
        infer_in_place(clone)
    except InvalidModelError:
        return None
    return clone


def _differs(first: np.ndarray, second: np.ndarray) -> str:
    if first.shape != second.shape:
        return f"shape {first.shape} became {second.shape}"
    if first.dtype.kind not in "fV":
        changed = int(np.count_nonzero(first != second))
        return f"{changed} of {first.size} elements" if changed else ""
    exact, other = (array if array.dtype.kind == "f" else array.astype(np.float32) for array in (first, second))
    if not exact.size:
        return ""
    low, high, lowest, highest = (float(f(array)) for array in (exact, other) for f in (np.min, np.max))
    if not all(map(math.isfinite, (low, high, lowest, highest))):
        finite = np.isfinite(exact)
        if not np.array_equal(finite, np.isfinite(other)):
            return "other elements are finite"
        exact, other = exact[finite], other[finite]
        low, high = float(exact.min(initial=0.0)), float(exact.max(initial=0.0))
    scale = max(abs(low), abs(high))
    off = np.subtract(exact, other, dtype=np.result_type(exact.dtype, np.float32))
    error = max(float(off.max(initial=0.0)), -float(off.min(initial=0.0)))
    bound = _BOUNDS.get(first.dtype, _NARROW_BOUND) * scale
    return f"by {error:.3g}, the largest output is {scale:.3g}" if error > bound else ""


def _random_feeds(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(_SEED)
    feeds, values = dict[str, np.ndarray](), input_values(model)
    for value in model.graph.inputs:
        dtype = np.dtype(value.dtype.numpy()) if value.dtype is not None else np.dtype(np.float32)
        shape = shapes[str(value.name)]
        if dtype.kind in "iub":
            feeds[str(value.name)] = _ones_and_zeros(rng, shape).astype(dtype)
        else:
            made, known = rng.standard_normal(shape, dtype=np.float32), values.get(str(value.name))
            # A weight of unit variance would drown in its sums what a rewrite gets wrong.
            made = made / np.float32(math.sqrt(known.size or 1)) if known and known.kind == "weight" else made
            feeds[str(value.name)] = made.astype(dtype)
    return feeds


def _ones_and_zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random ones and zeros; the last axis begins with a one and, where it is longer, ends with a zero.

    So a mask, whichever of the two it masks with, leaves every row a key: the result for a row without any is
    arbitrary, and a recipe may change it.
    """
    array = rng.integers(0, 2, shape)
    if shape and shape[-1]:
        array[..., -1] = 0
        array[..., 0] = 1
    return array
