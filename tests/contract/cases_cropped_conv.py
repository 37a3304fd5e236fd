"""Cases for what is cut off behind convolutions: x [N, 4, 12]."""

from __future__ import annotations

from contract_case import Case

X = "float[N, 4, 12] x"
WEIGHTS = {"w": (4, 4, 3), "t": (4, 4, 4), "b": (4,), "d": (4, 1, 4), "k": (4, 4, 3, 5)}
CAUSAL = "Conv <pads = [2, 2]> (x, w, b)"
TAIL = "int64[1] s = {0}, int64[1] e = {-2}, int64[1] a = {2}, int64[1] o = {1}"
OPEN = TAIL.replace("{-2}", "{9223372036854775807}")


def case(label: str, body: str, io: str = f"{X}) => (float[N, 4, 12] y", constants: str = TAIL, **more: object) -> Case:
    weights = {name: shape for name, shape in WEIGHTS.items() if f" {name}," in body or f" {name})" in body}
    text = f"g ({io}) <{constants}> {{ {body} }}"
    return Case("cropped-conv", label, text, weights=weights, tolerance=1e-6, **more)  # type: ignore[arg-type]


CASES: tuple[Case, ...] = (
    case("causal", f"c = {CAUSAL} y = Slice(c, s, e, a)"),
    case("causal-steps", f"c = {CAUSAL} y = Slice(c, s, e, a, o)"),
    case("end-known", f"c = {CAUSAL} y = Slice(c, s, e, a)", constants=TAIL.replace("{-2}", "{12}")),
    case("beginning", f"c = {CAUSAL} y = Slice(c, s, e, a)", constants=OPEN.replace("s = {0}", "s = {2}")),
    case("last-two", f"c = {CAUSAL} y = Slice(c, s, e, a)", constants=OPEN.replace("s = {0}", "s = {-12}")),
    case("activations", f"c = {CAUSAL} r = Relu(c) t = Tanh(r) y = Slice(t, s, e, a)"),
    case("residual", f"c = {CAUSAL} q = Slice(c, s, e, a) r = Relu(q) y = Add(r, x)"),
    case(
        "dynamic",
        f"c = {CAUSAL} y = Slice(c, s, e, a)",
        "float[N, 4, L] x) => (float[N, 4, L] y",
    ),
    case(
        "length-that-went-in",
        "c = Conv <pads = [3, 3], group = 4> (x, d, b) h = Shape <start = 2> (x) y = Slice(c, s, h, a)",
        "float[N, 4, L] x) => (float[N, 4, L] y",
    ),
    case(
        "strided",
        "c = Conv <pads = [4, 4], strides = [2]> (x, w, b) y = Slice(c, s, e, a)",
        f"{X}) => (float[N, 4, 7] y",
        constants=TAIL.replace("s = {0}", "s = {1}").replace("{-2}", "{-1}"),
    ),
    case(
        "two-axes",
        "c = Conv <pads = [2, 4, 0, 4]> (x, k, b) y = Slice(c, s, e, a)",
        "float[N, 4, 6, 7] x) => (float[N, 4, 5, 8] y",
        constants="int64[2] s = {1, 2}, int64[2] e = {9223372036854775807, -1}, int64[2] a = {2, -1}",
    ),
    case(
        "transposed",
        "c = ConvTranspose <strides = [2]> (x, t, b) y = Slice(c, s, e, a)",
        f"{X}) => (float[N, 4, 24] y",
    ),
    case(
        "transposed-both-sides",
        "c = ConvTranspose <strides = [2], output_padding = [1]> (x, t, b) r = Relu(c) y = Slice(r, s, e, a)",
        "float[N, 4, L] x) => (float[N, 4, M] y",
        constants=TAIL.replace("s = {0}", "s = {1}").replace("{-2}", "{-1}"),
    ),
    case(
        "transposed-too-much",
        "c = ConvTranspose <strides = [2]> (x, t, b) y = Slice(c, s, e, a)",
        f"{X}) => (float[N, 4, 22] y",
        constants=TAIL.replace("{-2}", "{-4}"),
        changes=0,
        refusals=1,
    ),
    case(
        "transposed-short",
        "c = ConvTranspose <strides = [2]> (x, t, b) y = Slice(c, s, e, a)",
        "float[N, 4, L] x) => (float[N, 4, M] y",
        constants=TAIL.replace("s = {0}", "s = {2}"),
        changes=0,
        refusals=1,
    ),
    case(
        "more-than-padded",
        f"c = {CAUSAL} y = Slice(c, s, e, a)",
        f"{X}) => (float[N, 4, 11] y",
        constants=TAIL.replace("{-2}", "{-3}"),
        changes=0,
        refusals=1,
    ),
    case(
        "short-input",
        f"c = {CAUSAL} y = Slice(c, s, e, a)",
        "float[N, 4, L] x) => (float[N, 4, M] y",
        constants=TAIL.replace("s = {0}", "s = {1}"),
        changes=0,
        refusals=1,
    ),
    case(
        "shared",
        f"c = {CAUSAL} q = Slice(c, s, e, a) m = ReduceMax <axes = [2]> (c) y = Add(q, m)",
        changes=0,
        refusals=1,
    ),
    case(
        "output",
        f"c = {CAUSAL} y = Slice(c, s, e, a)",
        f"{X}) => (float[N, 4, 12] y, float[N, 4, 14] c",
        changes=0,
        refusals=1,
    ),
    case(
        "every-second",
        f"c = {CAUSAL} y = Slice(c, s, e, a, o)",
        f"{X}) => (float[N, 4, 6] y",
        constants=TAIL.replace("o = {1}", "o = {2}"),
        changes=0,
    ),
    case(
        "channels",
        f"c = {CAUSAL} y = Slice(c, s, e, a)",
        f"{X}) => (float[N, 2, 14] y",
        constants=TAIL.replace("a = {2}", "a = {1}"),
        changes=0,
    ),
    case(
        "automatic",
        'c = Conv <auto_pad = "SAME_UPPER"> (x, w, b) y = Slice(c, s, e, a)',
        f"{X}) => (float[N, 4, 10] y",
        changes=0,
    ),
)
