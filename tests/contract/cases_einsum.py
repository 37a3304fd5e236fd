"""Cases for Einsum as a matrix product."""

from __future__ import annotations

from collections.abc import Mapping

from contract_case import Case


def case(
    label: str,
    equation: str,
    shapes: tuple[str, str, str],
    weights: Mapping[str, tuple[int, ...]] | None = None,
    **expected: int,
) -> Case:
    """An Einsum of ``x`` and ``z``, which are inputs or weights."""
    weights = weights or {}
    given = zip(("x", "z"), shapes, strict=False)
    inputs = ", ".join(f"float[{shape}] {name}" for name, shape in given if name not in weights)
    graph = f'g ({inputs}) => (float[{shapes[2]}] y) {{ e = Einsum <equation = "{equation}"> (x, z) y = Neg(e) }}'
    return Case("einsum", label, graph, weights, tolerance=1e-5, **expected)  # type: ignore[arg-type]


PROJECTION = ("5, N, 6", "6, 2, 4", "5, N, 2, 4")

CASES: tuple[Case, ...] = (
    case("projection", "ibh,hnd->ibnd", PROJECTION, {"z": (6, 2, 4)}),
    case("projection-of-computed-weights", "ibh, hnd -> ibnd", PROJECTION),
    case("projection-back", "ibnd,hnd->ibh", ("5, N, 2, 4", "6, 2, 4", "5, N, 6"), {"z": (6, 2, 4)}),
    case("weight-first", "hnd,ibh->ibnd", ("6, 2, 4", "M, N, 6", "M, N, 2, 4"), {"x": (6, 2, 4)}),
    case("scores", "ibnd,jbnd->bnij", ("5, N, 2, 4", "7, N, 2, 4", "N, 2, 5, 7")),
    case("values", "bnij,jbnd->ibnd", ("N, 2, 5, 7", "7, N, 2, 4", "5, N, 2, 4")),
    case("masks", "bqc,bchw->bqhw", ("N, 5, 4", "N, 4, H, 6", "N, 5, H, 6")),
    case("vector", "bnij,bnj->bni", ("N, 2, 5, 7", "N, 2, 7", "N, 2, 5")),
    case("numbers", "bi,bi->b", ("N, 4", "N, 4", "N")),
    case("second-first", "bij,bkj->bki", ("N, 3, 4", "N, 5, 4", "N, 5, 3")),
    case("scores-of-shared-keys", "bhid,bjd->bhij", ("N, 3, S, 4", "N, T, 4", "N, 3, S, T")),
    case("values-shared-by-heads", "bhij,bjd->bhid", ("N, 3, S, T", "N, T, 4", "N, 3, S, 4")),
    case("shared-queries", "bid,bhjd->bhij", ("N, 5, 4", "N, 3, 6, 4", "N, 3, 5, 6")),
    case("shared-by-two-axes", "bghid,bjd->bghij", ("N, 2, 3, S, 4", "N, 7, 4", "N, 2, 3, S, 7")),
    case("two-open-sizes", "bqc,bchw->bqhw", ("N, 5, 4", "N, 4, H, W", "N, 5, H, W"), changes=0, refusals=1),
    case("angles", "i,j->ij", ("S", "5", "S, 5")),
    case("angles-of-entries", "j,bi->bij", ("5", "N, S", "N, S, 5")),
    case("element-wise", "bij,ji->bij", ("N, 4, 5", "5, 4", "N, 4, 5")),
    case("summed-alone", "bij,jk->bk", ("N, 3, 4", "4, 5", "N, 5"), changes=0, refusals=1),
    case("diagonal", "bii,ij->bj", ("N, 4, 4", "4, 5", "N, 5"), changes=0, refusals=1),
    case("ellipsis", "...i,ij->...j", ("N, 3, 4", "4, 5", "N, 3, 5"), changes=0, refusals=1),
    case("empty-axis", "bai,aic->bc", ("N, 2, 0", "2, 0, 3", "N, 3"), changes=0, refusals=1),
    case("without-an-arrow", "ij,jk", ("N, 4", "4, 5", "N, 5"), changes=0, refusals=1),
    case("broadcast", "bij,bjk->bik", ("2, 3, 4", "1, 4, 5", "2, 3, 5"), changes=0, refusals=1),
    Case(
        "einsum",
        "one-operand",
        'g (float[N, 4] x) => (float[4, N] y) { y = Einsum <equation = "ij->ji"> (x) }',
        changes=0,
    ),
    Case(
        "einsum",
        "integers",
        'g (int32[N, 4] x, int32[4, 5] z) => (int32[N, 5] y) { y = Einsum <equation = "ij,jk->ik"> (x, z) }',
        changes=0,
        refusals=1,
    ),
)
