"""Cases for shared-indices: elements that a whole batch takes from the same places."""

from __future__ import annotations

import numpy as np
from contract_case import Case

IO = "g (float[N, 2, 3, 5] x) => (float[N, 2, 3, 4] y)"
EXPANDED = "n = Shape <start = 0, end = 1> (x) s = Concat <axis = 0> (n, rest) e = Expand(i, s)"
ROWS = np.array([[0, 2, 4, 1], [3, -1, 0, 0], [1, 1, -5, 2]], np.int64)
HEADS = np.stack([ROWS, ROWS[::-1]])


def case(
    label: str, body: str, index: np.ndarray = ROWS[None, None], io: str = IO, *, changes: int = 1, **more: np.ndarray
) -> Case:
    values = {"i": index, "rest": np.array([2, 3, 4], np.int64), **more}
    return Case("shared-indices", label, f"{io} {{ {body} }}", values=values, changes=changes)


def along(axis: int, index: str = "e") -> str:
    return f"y = GatherElements <axis = {axis}> (x, {index})"


CASES: tuple[Case, ...] = (
    case("for-batch-and-heads", f"{EXPANDED} {along(-1)}"),
    case("for-the-batch", f"{EXPANDED} {along(3)}", HEADS[None]),
    case("of-lower-rank", f"{EXPANDED} {along(3)}", ROWS),
    case("int32", f"{EXPANDED} {along(3)}", ROWS.astype(np.int32)),
    case("for-all-rows", f"{EXPANDED} {along(3)}", ROWS[:1]),
    case(
        "along-rows",
        f"{EXPANDED} {along(2)}",
        ROWS[:2, :1].reshape(1, 1, 2, 1) % 2,
        "g (float[N, 2, 3, 5] x) => (float[N, 2, 2, 5] y)",
        rest=np.array([2, 2, 5], np.int64),
    ),
    case(
        "along-heads",
        f"{EXPANDED} {along(1)}",
        np.array([1, 0, 1], np.int64).reshape(1, 1, 3, 1),
        "g (float[N, 2, 3, M] x) => (float[N, 2, 3, 1] y)",
        rest=np.array([2, 3, 1], np.int64),
        changes=0,
    ),
    case(
        "between-open-axes",
        f"n = Shape(x) e = Expand(i, n) {along(1)}",
        np.array([[1, 0, 1], [0, 0, -1]], np.int64).reshape(1, 2, 3, 1),
        "g (float[N, 2, 3, M] x) => (float[N, 2, 3, M] y)",
    ),
    case(
        "before-two-open-axes",
        f"n = Shape(x) e = Expand(i, n) {along(0)}",
        np.array([[1, 0, 1], [0, 0, -1]], np.int64).reshape(2, 3, 1, 1),
        "g (float[2, 3, N, M] x) => (float[2, 3, N, M] y)",
        changes=0,
    ),
    case(
        "one-axis-before-two-open-ones",
        f"n = Shape(x) e = Expand(i, n) {along(0)}",
        np.array([1, 0], np.int64).reshape(2, 1, 1),
        "g (float[2, N, M] x) => (float[2, N, M] y)",
    ),
    case(
        "a-constant-for-each",
        along(2, "i"),
        np.stack([ROWS, ROWS]),
        "g (float[2, 3, 5] x) => (float[2, 3, 4] y)",
    ),
    case("another-for-each", along(2, "i"), HEADS, "g (float[2, 3, 5] x) => (float[2, 3, 4] y)", changes=0),
    case("fewer-rows", along(2, "i"), np.stack([ROWS[:2]] * 2), "g (float[2, 3, 5] x) => (float[2, 2, 4] y)"),
    case("fewer-entries", along(2, "i"), ROWS[None], "g (float[2, 3, 5] x) => (float[1, 3, 4] y)", changes=0),
    case("one-matrix", along(1, "i"), ROWS, "g (float[3, 5] x) => (float[3, 4] y)", changes=0),
    case(
        "computed",
        f"j = ArgMax <axis = 2, keepdims = 1> (x) {along(2, 'j')}",
        io="g (float[2, 3, 5] x) => (float[2, 3, 1] y)",
        changes=0,
    ),
)
