"""Builds the decoders of export.py and decodes 64 steps with them: ``python run.py FOLDER NAME:PRECISION...``.

PRECISION is that of ``trtopt build``, or ``int4``: its weights beside FP16. ``NAME:PRECISION:all`` keeps all of them,
whether they pay and the floor holds or not.

Prints a row of the table in docs/decoders.md for each, and keeps its figures and the report beside the models. A row
that is there is printed as it is, and an interrupted build goes on from the prices in ``FOLDER/cache``.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

import trtopt
from trtopt.accuracy.compare import is_tie
from trtopt.accuracy.emulation import fp32_emulation
from trtopt.graph.artifact import input_spec
from trtopt.precision.observe.decode import Decoder
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

STEPS, PAST, PROMPT = 64, 127, 8
WEIGHTS = ("int4",)
HEAD = """| | kernels | plain FP16 | predicted | plain FP16 | bytes of a step | weights read + caches | top-1 |
|---|---|---|---|---|---|---|---|"""


def shapes(model: object, tokens: int, past: int) -> dict[str, tuple[int, ...]]:
    """The shapes of one row."""
    found = {}
    for value in model.graph.inputs:  # type: ignore[attr-defined]
        spec, ranks = input_spec(value), {2: (1, tokens), 4: (1, None, past, None)}
        own = ranks[len(spec.shape)]
        found[spec.name] = tuple(d if isinstance(d, int) else s for d, s in zip(spec.shape, own, strict=True))
    return found


def agreement(model: Path, saved: Path, prompts: Path) -> tuple[int, int, int]:
    """Steps at which the optimized model prefers FP32's token; those that count; and how many there were."""
    before, after = load(model).model, load(saved).model
    arrays = {name: array[:1] for name, array in np.load(prompts).items()}
    decoder = Decoder(before, list(arrays))
    types = {str(value.name): value.dtype.numpy() for value in after.graph.inputs}
    same = counted = steps = 0
    with OrtSession(before) as exact, OrtSession(fp32_emulation(after)) as rounded:
        states, past, tokens = decoder.first(arrays), 0, arrays[decoder.tokens]
        own = dict(states)
        while steps < STEPS:
            outputs = []
            for session, caches in ((exact, states), (rounded, own)):
                feeds = decoder.feeds(tokens, past, caches, arrays)
                if session is rounded:
                    feeds = {name: array.astype(types[name]) for name, array in feeds.items()}
                outputs.append(dict(zip(session.output_names, session.run(feeds), strict=True)))
            found = [int(decoder.chosen(item)[0, 0]) for item in outputs]
            if not is_tie(outputs[0][decoder.scores][:, -1])[0]:
                counted, same = counted + 1, same + (found[0] == found[1])
            past, tokens, steps = past + tokens.shape[1], np.array([[found[0]]]), steps + 1
            states, own = decoder.after(outputs[0]), decoder.after(outputs[1])
    return same, counted, steps


def measured(folder: Path, name: str, precision: str, kept: str = "") -> dict[str, Any]:
    """One network in one precision."""
    narrow = precision if precision in WEIGHTS else None
    stem = ".".join(filter(None, (name, precision, kept)))
    model, prompts, saved = folder / f"{name}.onnx", folder / f"{name}.npz", folder / f"{stem}.onnx"
    graph = load(model).model
    report = trtopt.build(
        model,
        precision="fp16" if narrow else precision,
        weights=narrow,
        gpu="L4",
        calib=f"decode:{prompts}",
        steps=STEPS,
        keep_all_int8=bool(kept) and narrow is None,
        keep_all_weights=bool(kept) and narrow is not None,
        allow_accuracy_loss=bool(kept),
        recipes="none" if kept else "all",
        output=folder / f"{stem}.engine",
        save_onnx=saved,
        min_shapes=[shapes(graph, 1, 1), shapes(graph, 1, 0)],
        opt_shapes=[shapes(graph, 1, PAST // 2), shapes(graph, PROMPT, 0)],
        max_shapes=[shapes(graph, 1, PAST), shapes(graph, 64, 0)],
        report=folder / f"{stem}.json",
        cache_dir=folder / "cache",
    )
    same, counted, steps = agreement(model, saved, prompts)
    final = load(saved).model
    weights = sum(
        value.const_value.nbytes
        for value in final.graph.initializers.values()
        if value.const_value and any(node.op_type != "Gather" for node, _ in value.uses())  # a row of a table is read
    )
    widths = {str(value.name): value.dtype.bitwidth // 8 for value in final.graph.inputs if value.dtype}
    caches = sum(
        math.prod(shape) * widths[name] for name, shape in shapes(final, 1, PAST // 2).items() if len(shape) == 4
    )
    plain, shipped = next(iter(report.plain_forms), None), report.shipped
    return {
        "name": name,
        "precision": f"{precision} {kept}".strip(),
        "profiles": len(report.engine.profiles) if report.engine else 0,
        "same": same,
        "counted": counted,
        "steps": steps,
        "kernels": shipped.kernels if shipped else None,
        "plain_kernels": plain.kernels if plain else None,
        "us": shipped.predicted_us if shipped else None,
        "plain_us": plain.predicted_us if plain else None,
        "bytes": shipped.bytes if shipped else None,
        "weights": weights,
        "caches": caches,
        "sqnr": report.accuracy.outputs["logits"].sqnr_db if report.accuracy else None,
        "gates": report.gate_failures,
    }


def table_row(found: dict[str, Any]) -> str:
    """A row of :data:`HEAD`."""
    read = found["weights"] + found["caches"]
    figures = (
        f"{found['name']}, {found['precision'].upper()}",
        found["kernels"],
        found["plain_kernels"],
        f"{found['us']:.0f} us",
        f"{found['plain_us']:.0f} us",
        f"{found['bytes'] / 1e6:.1f} MB",
        f"{read / 1e6:.1f} MB",
        f"{found['same']} of {found['counted']}",
    )
    return f"| {' | '.join(map(str, figures))} |"


if __name__ == "__main__":
    print(HEAD, flush=True)
    for item in sys.argv[2:]:
        file = Path(sys.argv[1]) / f"{item.replace(':', '.')}.row.json"
        if not file.exists():
            file.write_text(json.dumps(measured(Path(sys.argv[1]), *item.split(":"))))
        print(table_row(json.loads(file.read_text())), flush=True)
