"""Cases for constants that hide behind shapes with dynamic dimensions."""

from __future__ import annotations

from contract_case import Case

X = "float[N, 6, 8] x"

CASES: tuple[Case, ...] = (
    Case(
        "constant-expression",
        "static-dimension-of-a-dynamic-shape",
        f"g ({X}) => (int64[1] y, float[N, 6, 8] z) <int64[1] i = {{-2}}> "
        "{ z = Relu(x) s = Shape(x) y = Gather(s, i) }",
    ),
    Case(
        "constant-expression",
        "scalar-dimension",
        f"g ({X}) => (int64 y, float[N, 6, 8] z) <int64 i = {{2}}> {{ z = Relu(x) s = Shape(x) y = Gather(s, i) }}",
    ),
    Case(
        "constant-expression",
        "dynamic-dimension",
        f"g ({X}) => (int64[2] y) <int64[2] i = {{0, 1}}> {{ s = Shape(x) y = Gather(s, i) }}",
        changes=0,
    ),
    Case(
        "constant-expression",
        "slice-of-a-dynamic-shape",
        f"g ({X}) => (int64[2] y, float[N, 6, 8] z) <int64[1] a = {{1}}, int64[1] e = {{9223372036854775807}}> "
        "{ z = Relu(x) s = Shape(x) y = Slice(s, a, e) }",
    ),
    Case(
        "constant-expression",
        "slice-with-steps",
        f"g ({X}) => (int64[1] y, float[N, 6, 8] z) "
        "<int64[1] a = {-1}, int64[1] e = {0}, int64[1] i = {0}, int64[1] t = {-2}> "
        "{ z = Relu(x) s = Shape(x) y = Slice(s, a, e, i, t) }",
    ),
    Case(
        "constant-expression",
        "dynamic-slice",
        f"g ({X}) => (int64[2] y) <int64[1] a = {{0}}, int64[1] e = {{2}}> {{ s = Shape(x) y = Slice(s, a, e) }}",
        changes=0,
    ),
    Case(
        "constant-expression",
        "shape-with-start",
        f"g ({X}) => (int64[2] y, float[N, 6, 8] z) {{ z = Relu(x) y = Shape <start = 1> (x) }}",
    ),
    Case(
        "constant-expression",
        "gather-of-data",
        "g (int64[3] x) => (int64[1] y) <int64[1] i = {1}> { y = Gather(x, i) }",
        changes=0,
    ),
)
