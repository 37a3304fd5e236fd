"""EmbeddingBag as exporters write it, a loop over bags: reduced at once where all bags are as long."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.graph.bags import write_out_bags
from trtopt.graph.shapes import infer_in_place
from trtopt.support.ort_session import OrtSession

BAGS, LENGTH, WIDTH = 5, 3, 4
TABLE = np.random.default_rng(0).standard_normal((7, WIDTH)).astype(np.float32)

SUM = "r = ReduceSum (rows, first)"
MEAN = """left = Sub (bags, one)  last = Equal (i, left)
    r = If (last) <
      then_branch = a () => (float[u, w] of_last) {
        total = ReduceSum (rows, first)  whole = Shape <start = 0, end = 1> (flat)  length = Sub (whole, start)
        some = Greater (length, zero)
        of_last = If (some) <
          then_branch = c () => (float[u, w] d) { count = Cast <to = 1> (length)  d = Div (total, count) },
          else_branch = e () => (float[u, w] f) { f = Identity (total) }> },
      else_branch = b () => (float[u, w] other) { other = ReduceMean (rows, first) }>"""
MAX = "r = ReduceMax (rows, first)"
BEGINS = """shape = Shape (ids)  batch = Gather (shape, zero)  limit = Mul (batch, k)
    begins = Range (zero, limit, k)  size = Shape (flat)  offsets = Concat <axis = 0> (begins, size)
    bags = Size (begins)"""
NARROW = """size = Shape (flat)  limit = Cast <to = 6> (size)  stop = Squeeze (limit)
    numbers = Range (nil, stop, three)  begins = Cast <to = 7> (numbers)  offsets = Concat <axis = 0> (begins, size)"""
INTS = ", ".join(
    f"int64 {name} = {{{value}}}" for name, value in {"zero": 0, "one": 1, "k": LENGTH, "big": 2**63 - 1}.items()
)
LISTS = ", ".join(f"int64[1] {name} = {{{value}}}" for name, value in {"first": 0, "second": 1, "all": -1}.items())
ROWS = f"float[7, {WIDTH}] table = {{{', '.join(map(str, TABLE.ravel()))}}}"


def sequences(
    reduced: str = SUM,
    *,
    begins: str = BEGINS,
    batch: str = "N",
    more: str = "",
    inputs: str = "",
    until: str = "bags",
    follow: str = "one",
) -> ir.Model:
    """As the exporter of torch.export writes it."""
    return parsed(
        f"""flat = Reshape (ids, all)  rows_all = Gather (table, flat)  {begins}
    empty = SequenceEmpty ()  any = Less (zero, {until})
    found, steps = Loop (, any, empty, zero) <body = body (int64 n, bool go, seq(float[u, w]) so_far, int64 i)
      => (bool goes_on, seq(float[u, w]) longer, int64 next) {{
        at = Reshape (i, all)  then = Add (at, one)  after = Add (then, one)
        start = Slice (offsets, at, then)  end = Slice (offsets, then, after)  nothing = Equal (start, end)
        row = If (nothing) <
          then_branch = t () => (float[u, w] z) {{ z = Expand (nought, begin) }},
          else_branch = s () => (float[u, w] r) {{ rows = Slice (rows_all, start, end)  {reduced} }}>
        longer = SequenceInsert (so_far, row)  next = Add (i, {follow})  goes_on = Less (next, {until}) }}>
    y = ConcatFromSequence <axis = 0> (found)""",
        batch,
        f", int64[2] begin = {{1, {WIDTH}}}, float nought = {{0}}{more}",
        inputs,
    )


def scans(
    reduced: str = "ReduceSum <keepdims = 0>",
    *,
    begins: str = BEGINS,
    batch: str = "N",
    count: str = "0",
    more: str = "",
    begin: str = "a = Gather (offsets, n)",
    ends: str = "ends = Slice (offsets, second, most, first, second)",
    last: str = "row = Identity (total)",
    beside: bool = False,
) -> ir.Model:
    """As the exporter of TorchScript writes it; ``beside``: behind another output, which nothing uses."""
    other, number, counts = ("other, ", "int64 m, ", "m = Add (n, one)") if beside else ("", "", "")
    return parsed(
        f"""flat = Reshape (ids, all)  {begins}  {ends}
    how = Shape (ends)  trips = Gather <axis = {count}> (how, zero)
    {other}y = Loop (trips, yes) <body = body (int64 n, bool go) => (bool goes_on, {number}float[w] row) {{
        {counts}  {begin}  b = Gather (ends, n)  start = Unsqueeze (a, first)  end = Unsqueeze (b, first)
        those = Slice (flat, start, end, first)  rows = Gather (table, those)  total = {reduced} (rows, first)
        {last}  goes_on = Cast <to = 9> (one) }}>""",
        batch,
        f", int64[1] most = {{{2**63 - 1}}}, bool yes = {{1}}{more}",
    )


def parsed(text: str, batch: str, more: str, inputs: str = "", outputs: str = "") -> ir.Model:
    graph = f"""<ir_version: 10, opset_import: ["": 21]>
      g (int64[{batch}, {LENGTH}] ids{inputs}) => (float[M, {WIDTH}] y{outputs})
      <{INTS}, {LISTS}, {ROWS}{more}> {{ {text} }}"""
    model = ir.from_proto(onnx.parser.parse_model(graph))
    infer_in_place(model)
    return model


def expected(reduce: np.ufunc | object, ids: np.ndarray) -> np.ndarray:
    return np.asarray(reduce(TABLE[ids], axis=1))  # type: ignore[operator]


def offsets_of(*numbers: int) -> str:
    return f", int64[{len(numbers)}] offsets = {{{', '.join(map(str, numbers))}}}, int64 bags = {{{len(numbers) - 1}}}"


EVEN = range(0, BAGS * LENGTH + 1, LENGTH)


@pytest.mark.parametrize(
    ("model", "reduce"),
    [
        (lambda: sequences(SUM), np.sum),
        (lambda: sequences(MEAN), np.mean),
        (lambda: sequences(MAX), np.max),
        (lambda: sequences(SUM, begins="", batch="5", more=offsets_of(*EVEN)), np.sum),
        (lambda: scans(), np.sum),
        (lambda: scans("ReduceMean <keepdims = 0>"), np.mean),
        (lambda: scans(beside=True), np.sum),
        (lambda: scans("ReduceMax <keepdims = 0>", begins="", batch="5", more=offsets_of(*EVEN)), np.max),
        (
            lambda: scans(
                begins="size = Shape (flat)  offsets = Concat <axis = 0> (begins, size)",
                batch="5",
                more=", int64[5] begins = {0, 3, 6, 9, 12}",
            ),
            np.sum,
        ),
        (lambda: scans(begins="", batch="1", ends="", more=offsets_of(0, 3) + ", int64[1] ends = {3}"), np.sum),
        (lambda: scans(begins=NARROW, more=", int32 nil = {0}, int32 three = {3}"), np.sum),
    ],
)
def test_bags_of_one_length_are_reduced_at_once(model: object, reduce: object) -> None:
    """In both dialects, of any number of bags and of a known one; the loop is gone and outputs are those of before."""
    made = model()  # type: ignore[operator]
    batch = made.graph.inputs[0].shape[0]
    ids = np.random.default_rng(1).integers(0, 7, (batch if isinstance(batch, int) else BAGS, LENGTH))
    with OrtSession(made) as session:
        before = session.run({"ids": ids})[0]
    np.testing.assert_allclose(before, expected(reduce, ids), rtol=1e-5, atol=1e-6)
    assert write_out_bags(made) == 1
    infer_in_place(made)
    assert "Loop" not in {node.op_type for node in made.graph}
    with OrtSession(made) as session:
        np.testing.assert_allclose(session.run({"ids": ids})[0], before, rtol=1e-5, atol=1e-6)


USER = "size = Shape (flat)  offsets = Concat <axis = 0> (given, size)  bags = Size (given)"
TURNED = """p = Cast <to = 9> (a)  q = Cast <to = 9> (b)  same = Equal (p, q)
    row = If (same) <then_branch = t () => (float[w] z) { z = Neg (total) },
      else_branch = s () => (float[w] r) { r = Identity (total) }>"""
DEEP = """length = Sub (end, start)  column = Unsqueeze (length, first)  many = Cast <to = 1> (column)
    mean = Div (total, many)  row = Identity (mean)"""
TWICE = BEGINS.replace("Mul (batch, k)", "Mul (batch, one)")


@pytest.mark.parametrize(
    "model",
    [
        lambda: sequences(begins=USER, inputs=", int64[B] given"),  # bags of any length
        lambda: sequences(begins="", batch="5", more=offsets_of(0, 3, 6, 9, 11, 15)),
        lambda: sequences(begins="", batch="5", more=offsets_of(*EVEN[:-1])),  # the last rows are in no bag
        lambda: sequences(begins="", batch="5", more=offsets_of(*EVEN[1:])),  # nor the first
        lambda: sequences(begins=TWICE),  # the last bag is longer
        lambda: sequences(follow="k"),  # each third bag
        lambda: sequences(until="k"),  # three bags
        lambda: sequences(MEAN.replace("Sub (bags, one)", "Sub (bags, k)")),  # another bag is divided
        lambda: sequences(MEAN.replace("Div (total, count)", "Mul (total, count)")),
        lambda: sequences("r = ReduceSum (rows, second)"),
        lambda: sequences("r = ReduceSum <keepdims = 0> (rows, first)"),  # the sequence joins the widths
        lambda: scans("ReduceSum <keepdims = 1>"),
        lambda: scans("ReduceProd <keepdims = 0>"),
        lambda: scans(begin="before = Sub (n, one)  a = Gather (ends, before)"),  # of bag 0, the last offset
        lambda: scans(last=TURNED),
        lambda: scans(last=DEEP),
    ],
)
def test_what_is_not_provably_such_a_loop_stays(model: object) -> None:
    """Of each of these one thing is another."""
    made = model()  # type: ignore[operator]
    assert write_out_bags(made) == 0
    assert [node.op_type for node in made.graph].count("Loop") == 1


def test_a_loop_over_what_another_makes() -> None:
    """Which is an output, too."""
    body = """body (int64 n, bool go) => (bool goes_on, float[w] row) {
        m = Add (n, one)  a = Gather (AT, n)  b = Gather (AT, m)  start = Unsqueeze (a, first)
        end = Unsqueeze (b, first)  rows = Slice (ROWS, start, end, first)
        row = ReduceSum <keepdims = 0> (rows, first)  goes_on = Cast <to = 9> (one) }"""
    bodies = (body.replace("AT", at).replace("ROWS", rows) for at, rows in (("by_3", "all_rows"), ("by_2", "x")))
    text = "flat = Reshape (ids, all)  all_rows = Gather (table, flat)  x = Loop (six, yes) <body = {}>"
    made = parsed(
        (text + "  y = Loop (k, yes) <body = {}>").format(*bodies),
        "6",
        ", bool yes = {1}, int64 six = {6}, int64[7] by_3 = {0, 3, 6, 9, 12, 15, 18}, int64[4] by_2 = {0, 2, 4, 6}",
        outputs=f", float[6, {WIDTH}] x",
    )
    ids = np.random.default_rng(1).integers(0, 7, (6, LENGTH))
    with OrtSession(made) as session:
        before = session.run({"ids": ids})
    assert write_out_bags(made) == 2
    infer_in_place(made)
    with OrtSession(made) as session:
        for one, other in zip(session.run({"ids": ids}), before, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
