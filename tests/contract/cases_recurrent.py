"""Cases for the recipes of recurrent layers."""

from __future__ import annotations

import numpy as np
from contract_case import Case

from trtopt.rewrite.protocol import Target

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
TOLERANCE = 2e-6


def weights(op: str, *names: str, directions: int = 1, size: int = 4, hidden: int = 6) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of one layer; its names end with what ``names`` says."""
    rows = GATES[op] * hidden
    found: dict[str, tuple[int, ...]] = {}
    for name in names or ("",):
        found |= {
            f"w{name}": (directions, rows, size),
            f"r{name}": (directions, rows, hidden),
            f"b{name}": (directions, 2 * rows),
        }
    return found


def layer(
    op: str,
    *,
    steps: int | str = 5,
    directions: int = 1,
    hidden: int = 6,
    attributes: str = "",
    inputs: str = "x, w, r, b",
    **changes: object,
) -> Case:
    """One layer of six units on x [steps, 3, 4] whose first output is the graph's."""
    recipe, label = str(changes.pop("recipe", "static-recurrence")), str(changes.pop("label"))
    extra = f", {changes.pop('arguments')}" if "arguments" in changes else ""
    given = {"tolerance": TOLERANCE, "weights": weights(op, directions=directions), **changes}
    direction = "" if directions == 1 else ', direction = "bidirectional"'
    return Case(
        recipe,
        label,
        f"g (float[{steps}, 3, 4] x{extra}) => (float[{steps}, {directions}, 3, {hidden}] y) "
        f"{{ y = {op} <hidden_size = {hidden}{direction}{attributes}> ({inputs}) }}",
        **given,  # type: ignore[arg-type]
    )


STATES = "float[1, 3, 6] h, float[1, 3, 6] c"
ALL_OUTPUTS = (
    "g (float[5, N, 4] x) => (float[5, 1, N, 6] y, float[1, N, 6] p, float[1, N, 6] q, float[1, N, 6] z) "
    "{ y, p, q = LSTM <hidden_size = 6> (x, w, r, b) z = Neg(p) }"
)
STACK = "Squeeze(a, axes) y, p, q = LSTM <hidden_size = 6> (s, w2, r2, b2)"
FIRST = "LSTM <hidden_size = 6> (x, w1, r1, b1)"
Y = "float[9, 1, 3, 6] y"
AXES = {"axes": np.array([1])}


def stack(label: str, body: str, outputs: str = Y, **changes: object) -> Case:
    """Two layers of six units over nine steps."""
    given = {
        "tolerance": TOLERANCE,
        "weights": weights("LSTM", "1", "2", size=6),
        "values": AXES,
        **changes,
    }
    arguments = str(given.pop("arguments", "float[9, 3, 6] x"))
    return Case("stacked-recurrence", label, f"g ({arguments}) => ({outputs}) {{ {body} }}", **given)  # type: ignore[arg-type]


LENGTHS = np.array([5, 3, 4], np.int32)
HUGE = np.full((1, 48), 6e4, np.float32)

CASES: tuple[Case, ...] = (
    *(layer(op, label=op.lower()) for op in GATES),
    *(layer(op, label=f"{op.lower()}-bidirectional", directions=2) for op in GATES),
    layer("GRU", label="gru-reset-after", attributes=", linear_before_reset = 1"),
    layer("GRU", label="gru-both-reset-after", directions=2, attributes=", linear_before_reset = 1"),
    layer("LSTM", label="reverse", attributes=', direction = "reverse"'),
    layer("LSTM", label="one-step", steps=1),
    layer("LSTM", label="opset-11", opset=11),
    layer("LSTM", label="no-bias", inputs="x, w, r", weights={"w": (1, 24, 4), "r": (1, 24, 6)}),
    layer("LSTM", label="states", inputs='x, w, r, b, "", h, c', arguments=STATES),
    layer("LSTM", label="one-state", inputs='x, w, r, b, "", h', arguments="float[1, 3, 6] h", changes=0, refusals=1),
    layer("GRU", label="gru-state", inputs='x, w, r, b, "", h', arguments="float[1, 3, 6] h"),
    layer(
        "LSTM",
        label="states-of-zeros",
        inputs='x, w, r, b, "", h, c',
        values={"h": np.zeros((1, 3, 6), np.float32), "c": np.zeros((1, 3, 6), np.float32)},
    ),
    layer(
        "LSTM",
        label="full-lengths",
        inputs="x, w, r, b, n",
        values={"n": np.full(3, 5, np.int32)},
    ),
    layer("LSTM", label="lengths", inputs="x, w, r, b, n", values={"n": LENGTHS}, changes=0, refusals=1),
    layer("LSTM", label="dynamic-steps", steps="S", changes=0, refusals=1),
    layer("LSTM", label="many-steps", steps=65, changes=0, refusals=1),
    layer("LSTM", label="clip", attributes=", clip = 3.0", changes=0, refusals=1),
    layer("LSTM", label="coupled", attributes=", input_forget = 1", changes=0, refusals=1),
    layer(
        "LSTM",
        label="other-activations",
        attributes=', activations = ["Sigmoid", "Relu", "Tanh"]',
        changes=0,
        refusals=1,
    ),
    layer("LSTM", label="named-activations", attributes=', activations = ["Sigmoid", "Tanh", "Tanh"]'),
    layer(
        "LSTM",
        label="peepholes",
        inputs='x, w, r, b, "", "", "", p',
        weights={**weights("LSTM"), "p": (1, 18)},
        changes=0,
        refusals=1,
    ),
    layer(
        "LSTM",
        label="computed-weights",
        arguments="float[1, 24, 6] r",
        weights={"w": (1, 24, 4), "b": (1, 48)},
        changes=0,
        refusals=1,
    ),
    layer("LSTM", label="int8", target=Target(precision="int8"), changes=0, refusals=1),
    layer(
        "LSTM",
        label="large-biases",
        weights={"w": (1, 24, 4), "r": (1, 24, 6)},
        values={"b": HUGE},
        changes=0,
        refusals=1,
    ),
    Case(
        "static-recurrence",
        "all-outputs-dynamic-batch",
        ALL_OUTPUTS,
        weights("LSTM"),
        tolerance=TOLERANCE,
    ),
    Case(
        "static-recurrence",
        "last-states-only",
        "g (float[5, 3, 4] x) => (float[2, 3, 6] p, float[2, 3, 6] q) "
        '{ y, p, q = LSTM <hidden_size = 6, direction = "bidirectional"> (x, w, r, b) }',
        weights("LSTM", directions=2),
        tolerance=TOLERANCE,
    ),
    Case(
        "static-recurrence",
        "shared-weights",
        "g (float[5, 3, 4] x) => (float[5, 1, 3, 6] y, float[5, 1, 3, 6] z) { n = Neg(x) "
        "y = GRU <hidden_size = 6> (x, w, r, b) z = GRU <hidden_size = 6> (n, w, r, b) }",
        weights("GRU"),
        changes=2,
        tolerance=TOLERANCE,
    ),
    Case(
        "static-recurrence",
        "nested",
        "g (bool c, float[3, 2, 4] x) => (float[3, 1, 2, 6] y) { t = Relu(x) y = If (c) <"
        "then_branch = a () => (float[3, 1, 2, 6] p) { p = LSTM <hidden_size = 6> (t, w, r, b) },"
        "else_branch = e () => (float[3, 1, 2, 6] s) { l = GRU <hidden_size = 6> (t, w2, r2, b2) s = Neg(l) }> }",
        {**weights("LSTM"), **weights("GRU", "2")},
        changes=2,
        tolerance=TOLERANCE,
    ),
    stack("two", f"a = {FIRST} s = {STACK}"),
    stack(
        "states-out",
        f"a, m, n = {FIRST} s = {STACK}",
        f"{Y}, float[1, 3, 6] m, float[1, 3, 6] n, float[1, 3, 6] p, float[1, 3, 6] q",
    ),
    stack(
        "lower-layer-used",
        f"a, m = {FIRST} s = Squeeze(a, axes) z = Neg(s) k = Neg(a) y, p = LSTM <hidden_size = 6> (s, w2, r2, b2)",
        f"{Y}, float[9, 3, 6] z, float[9, 1, 3, 6] k",
    ),
    stack("dynamic-batch", f"a = {FIRST} s = {STACK}", "float[9, 1, N, 6] y", arguments="float[9, N, 6] x"),
    stack(
        "reverse-and-shared-weights",
        'a = GRU <hidden_size = 6, direction = "reverse"> (x, w1, r1, b1) s = Squeeze(a, axes) '
        'y = GRU <hidden_size = 6, direction = "reverse"> (s, w1, r1, b1)',
        weights=weights("GRU", "1", size=6),
    ),
    stack(
        "three-rnn-through-reshape",
        "a = RNN <hidden_size = 6> (x, w1, r1, b1) s = Reshape(a, shape) d = RNN <hidden_size = 6> (s, w2, r2, b2) "
        "t = Squeeze(d, axes) y = RNN <hidden_size = 6> (t, w3, r3, b3)",
        weights=weights("RNN", "1", "2", "3", size=6),
        values={**AXES, "shape": np.array([9, 3, 6])},
        tolerance=1e-5,
    ),
    stack(
        "states-in",
        'a = LSTM <hidden_size = 6> (x, w1, r1, b1, "", h, c) s = Squeeze(a, axes) '
        'y = LSTM <hidden_size = 6> (s, w2, r2, b2, "", h, c)',
        arguments=f"float[9, 3, 6] x, {STATES}",
    ),
    stack(
        "state-of-one-layer",
        f'a = {FIRST} s = Squeeze(a, axes) y = LSTM <hidden_size = 6> (s, w2, r2, b2, "", h, c)',
        arguments=f"float[9, 3, 6] x, {STATES}",
        changes=0,
        refusals=1,
    ),
    stack(
        "other-directions",
        f'a = {FIRST} s = Squeeze(a, axes) y = LSTM <hidden_size = 6, direction = "reverse"> (s, w2, r2, b2)',
        changes=0,
    ),
    stack(
        "changed-between",
        f"a = {FIRST} u = Relu(a) s = Squeeze(u, axes) y = LSTM <hidden_size = 6> (s, w2, r2, b2)",
        changes=0,
    ),
    stack("int8", f"a = {FIRST} s = {STACK}", target=Target(precision="int8"), changes=0, refusals=1),
    stack(
        "dynamic-steps",
        f"a = {FIRST} s = {STACK}",
        "float[S, 1, 3, 6] y",
        arguments="float[S, 3, 6] x",
        changes=0,
        refusals=1,
    ),
    *(layer(op, label=op.lower(), directions=2, recipe="backward-recurrence", steps="S") for op in GATES),
    layer("LSTM", label="reverse", attributes=', direction = "reverse"', recipe="backward-recurrence", steps="S"),
    layer("LSTM", label="forward", recipe="backward-recurrence", changes=0),
    layer(
        "LSTM",
        label="activations-and-states",
        directions=2,
        attributes=', activations = ["Sigmoid", "Tanh", "Tanh", "HardSigmoid", "Relu", "Tanh"]',
        recipe="backward-recurrence",
        inputs='x, w, r, b, "", h, c',
        arguments="float[2, 3, 6] h, float[2, 3, 6] c",
    ),
    layer(
        "LSTM",
        label="lengths",
        directions=2,
        recipe="backward-recurrence",
        inputs="x, w, r, b, n",
        values={"n": LENGTHS},
        changes=0,
        refusals=1,
    ),
    layer(
        "LSTM",
        label="full-lengths-and-peepholes",
        directions=2,
        recipe="backward-recurrence",
        inputs='x, w, r, b, n, "", "", p',
        weights={**weights("LSTM", directions=2), "p": (2, 18)},
        values={"n": np.full(3, 5, np.int32)},
    ),
    Case(
        "backward-recurrence",
        "all-outputs-dynamic-batch",
        "g (float[S, N, 4] x) => (float[S, 2, N, 6] y, float[2, N, 6] p, float[2, N, 6] q) "
        '{ y, p, q = LSTM <hidden_size = 6, direction = "bidirectional"> (x, w, r, b) }',
        weights("LSTM", directions=2),
        tolerance=TOLERANCE,
    ),
    Case(
        "backward-recurrence",
        "computed-weights",
        "g (float[5, 3, 4] x, float[1, 6, 4] w) => (float[5, 1, 3, 6] y) "
        '{ y = RNN <hidden_size = 6, direction = "reverse"> (x, w, r) }',
        {"r": (1, 6, 6)},
        changes=0,
        refusals=1,
    ),
)
