"""Cases for tensors that are assigned slice by slice: y [8, ...] or y [..., 8] is made of a and b."""

from __future__ import annotations

import numpy as np
from contract_case import Case

EVEN, ODD = (np.arange(at, 8, 2).reshape(4, 1) for at in (0, 1))
FIRST, REST = np.arange(3).reshape(3, 1), np.arange(3, 8).reshape(5, 1)
HALVES = "g (float[4, N, 3] a, float[4, N, 3] b) => (float[8, N, 3] y)"
LAST = "g (float[N, 5, 3, 4] a, float[N, 5, 3, 4] b) => (float[N, 5, 3, 8] y)"
OPEN = LAST.replace("5, 3", "S, H")
MIDDLE = "g (float[N, 4, S] a, float[N, 4, S] b) => (float[N, 8, S] y)"
PARTS = "g (float[3, N] a, float[5, N] b) => (float[8, N] y)"
TURNED = "p = Transpose <perm = [3, 1, 2, 0]> (a) q = Transpose <perm = [3, 1, 2, 0]> (b)"
SCATTERED = "s = ScatterND(z, i, p) t = ScatterND(s, j, q)"
ROTATED = f"c = Concat <axis = 3> (a, a) z = Transpose <perm = [3, 1, 2, 0]> (c) {TURNED} {SCATTERED} "
BACK = "y = Transpose <perm = [3, 1, 2, 0]> (t)"


def case(label: str, body: str, io: str, i: np.ndarray = EVEN, j: np.ndarray = ODD, **expected: int) -> Case:
    opset = expected.pop("opset", 18)
    return Case("assigned-slices", label, f"{io} {{ {body} }}", values={"i": i, "j": j}, opset=opset, **expected)  # type: ignore[arg-type]


WHOLE = "z = Concat <axis = 0> (a, b) s = ScatterND(z, i, a) y = ScatterND(s, j, b)"

CASES: tuple[Case, ...] = (
    case("every-second", WHOLE, HALVES),
    case("the-second-first", WHOLE, HALVES, ODD, EVEN),
    case("counted-from-the-end", WHOLE, HALVES, EVEN, ODD - 8),
    case("of-the-last-axis", f"{ROTATED} {BACK}", LAST),
    case("of-the-last-axis-of-open-sizes", f"{ROTATED} {BACK}", OPEN),
    case(
        "of-an-axis-between",
        "c = Concat <axis = 1> (a, b) z = Transpose <perm = [1, 0, 2]> (c) p = Transpose <perm = [1, 0, 2]> (a) "
        f"q = Transpose <perm = [1, 0, 2]> (b) {SCATTERED} y = Transpose <perm = [1, 0, 2]> (t)",
        MIDDLE,
    ),
    case(
        "transposed-in-two-ways",
        "z = Concat <axis = 0> (a, a) p = Transpose <perm = [0, 2, 1]> (b) s = ScatterND(z, i, a) "
        "y = ScatterND(s, j, p)",
        "g (float[4, 3, 3] a, float[4, 3, 3] b) => (float[8, 3, 3] y)",
    ),
    case("one-behind-the-other", WHOLE, PARTS, FIRST, REST),
    case(
        "the-last-first",
        "z = Concat <axis = 0> (a, b) s = ScatterND(z, j, b) y = ScatterND(s, i, a)",
        PARTS,
        FIRST,
        REST,
    ),
    case(
        "all-at-once",
        "y = ScatterND(a, i, b)",
        "g (float[8, N] a, float[8, N] b) => (float[8, N] y)",
        np.arange(8).reshape(8, 1),
    ),
    case("some-only", "z = Concat <axis = 0> (a, b) y = ScatterND(z, i, a)", HALVES, changes=0, refusals=1),
    case("overlapping", WHOLE, HALVES, EVEN, EVEN, changes=0, refusals=1),
    case("in-another-order", WHOLE, HALVES, EVEN[::-1].copy(), ODD, changes=0, refusals=1),
    case("used-between", f"{WHOLE.replace('y =', 't =')} n = Neg(s) y = Sub(t, n)", HALVES, changes=0, refusals=2),
    case("two-open-sizes", WHOLE, HALVES.replace("N, 3", "N, M"), changes=0, refusals=1),
    case("added", WHOLE.replace("ScatterND(", 'ScatterND <reduction = "add"> ('), HALVES, changes=0),
    case(
        "entries",
        "z = Concat <axis = 0> (a, b) y = ScatterND(z, i, b)",
        "g (float[4] a, float[4] b) => (float[8] y)",
        np.arange(4).reshape(4, 1),
        changes=0,
        refusals=1,
    ),
)
