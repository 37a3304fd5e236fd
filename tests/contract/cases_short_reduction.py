"""Cases for reductions over a few entries."""

from __future__ import annotations

from contract_case import Case

AXES = "int64[1] one = {1}, int64[1] two = {2}, int64[1] last = {-1}, int64[2] both = {1, 2}, int64[1] front = {0}"


def case(
    label: str,
    body: str,
    *,
    x: str = "float[N, 3, 4, 6] x",
    y: str = "float[N, 3, 6] y",
    changes: int = 1,
    refusals: int = 0,
    tolerance: float = 0.0,
    opset: int = 18,
) -> Case:
    graph = f"g ({x}) => ({y}) <{AXES}> {{ {body} }}"
    return Case("short-reduction", label, graph, changes=changes, refusals=refusals, tolerance=tolerance, opset=opset)


STACK = "a = Cos(x) b = Sin(x) p = Unsqueeze(a, one) q = Unsqueeze(b, one) r = Unsqueeze(x, one)"
MAP, STACKED = "float[N, 3, 6] x", "j = Concat <axis = 1> (p, q, r)"
CASES: tuple[Case, ...] = (
    case("maximum", "c = Cos(x) y = ReduceMax <keepdims = 0> (c, two)"),
    case("minimum", "c = Cos(x) y = ReduceMin <keepdims = 0> (c, two)"),
    case("sum", "c = Cos(x) y = ReduceSum <keepdims = 0> (c, two)", tolerance=1e-6),
    case("mean", "c = Cos(x) y = ReduceMean <keepdims = 0> (c, two)", tolerance=1e-6),
    case("kept-axis", "c = Cos(x) y = ReduceMax (c, two)", y="float[N, 3, 1, 6] y"),
    case("an-odd-number", "c = Cos(x) y = ReduceMean <keepdims = 0> (c, one)", y="float[N, 4, 6] y", tolerance=1e-6),
    case("last-axis", "c = Cos(x) y = ReduceMax <keepdims = 0> (c, last)", y="float[N, 3, 4] y"),
    case("first-axis", "y = ReduceMax <keepdims = 0> (x, front)", x="float[2, N, 6] x", y="float[N, 6] y"),
    case("an-output-that-an-input-reduces-to", "y = ReduceSum (x, two)", y="float[N, 3, 1, 6] y", tolerance=1e-6),
    case("axes-as-an-attribute", "c = Cos(x) y = ReduceMax <keepdims = 0, axes = [2]> (c)", opset=17),
    case("stacked", f"{STACK} {STACKED} y = ReduceMean <keepdims = 0> (j, one)", x=MAP, tolerance=1e-6),
    case("stacked-kept", f"{STACK} {STACKED} y = ReduceMax (j, one)", x=MAP, y="float[N, 1, 3, 6] y"),
    case(
        "stacked-of-single-entries",
        "a = Cos(x) b = Sin(x) j = Concat <axis = 1> (a, b) y = ReduceMax <keepdims = 0> (j, one)",
        x="float[N, 1, 3, 6] x",
    ),
    case(
        "joined-in-longer-parts",
        "a = Cos(x) b = Sin(x) j = Concat <axis = 1> (a, b) y = ReduceMax <keepdims = 0> (j, one)",
        x="float[N, 2, 3, 6] x",
    ),
    case(
        "stacked-elsewhere",
        f"{STACK} {STACKED} y = ReduceMax <keepdims = 0> (j, two)",
        x=MAP,
    ),
    case(
        "a-map-and-its-weighted-form",
        f"{STACK} {STACKED} s = ReduceSum <keepdims = 0> (j, one) m = Mul(j, w) y = ReduceSum <keepdims = 0> (m, one)",
        x="float[N, 3, 6] x, float[N, 3, 1, 1] w",
        y="float[N, 3, 6] y, float[N, 3, 6] s",
        tolerance=1e-6,
    ),
    case(
        "two-of-one-value",
        "c = Cos(x) y = ReduceMax <keepdims = 0> (c, two) s = ReduceMin <keepdims = 0> (c, two)",
        y="float[N, 3, 6] y, float[N, 3, 6] s",
    ),
    case(
        "two-axes-of-one-value",
        "c = Cos(x) y = ReduceMax <keepdims = 0> (c, two) s = ReduceMax <keepdims = 0> (c, one)",
        y="float[N, 3, 6] y, float[N, 4, 6] s",
        changes=2,
    ),
    case(
        "maximum-of-16-bits",
        "c = Neg(x) y = ReduceMax <keepdims = 0> (c, two)",
        x="float16[N, 3, 4, 6] x",
        y="float16[N, 3, 6] y",
    ),
    case(
        "sum-of-16-bits",
        "c = Neg(x) y = ReduceSum <keepdims = 0> (c, two)",
        x="float16[N, 3, 4, 6] x",
        y="float16[N, 3, 6] y",
        changes=0,
        refusals=1,
    ),
    case("integers", "y = ReduceMax <keepdims = 0> (x, two)", x="int32[N, 3, 4, 6] x", y="int32[N, 3, 6] y", changes=0),
    case("two-axes", "c = Cos(x) y = ReduceMax <keepdims = 0> (c, both)", y="float[N, 6] y", changes=0),
    case("all-axes", "c = Cos(x) y = ReduceMax <keepdims = 0> (c)", y="float y", changes=0),
    case(
        "an-unknown-number", "y = ReduceMax <keepdims = 0> (x, one)", x="float[2, N, 6] x", y="float[2, 6] y", changes=0
    ),
    case("one-entry", "y = ReduceMax <keepdims = 0> (x, one)", x="float[N, 1, 6] x", y="float[N, 6] y", changes=0),
    case("many-entries", "y = ReduceMax <keepdims = 0> (x, one)", x="float[N, 17, 6] x", y="float[N, 6] y", changes=0),
)
