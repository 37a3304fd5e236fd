"""Greedy decoding with trtopt.Engine: the caches stay where the engine leaves them, and are handed on without a copy.

trtopt build decoder.onnx --calib decode:prompts.npz --save-onnx decoder.fp16.onnx
python examples/decoder.py decoder.rtx.engine decoder.fp16.onnx 3 14 15 9
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

import trtopt


def decode(engine: trtopt.Engine, prompt: list[int], steps: int) -> Iterator[int]:
    """The likeliest token after a prompt, then after that, ``steps`` times."""
    shapes = {spec.name: spec.shape for spec in engine.inputs}
    takes_one = (shapes["input_ids"] or (1, "any"))[1] == 1
    waiting = [[token] for token in prompt] if takes_one else [prompt]
    states, past = engine.first_states(), 0
    while steps:
        tokens = np.array([waiting.pop(0)])
        total = past + tokens.shape[1]
        feeds = {
            "input_ids": tokens,
            "position_ids": np.arange(past, total)[None],
            "attention_mask": np.ones((1, total)),
        }
        feeds = {name: array.astype(np.int64) for name, array in feeds.items() if name in shapes}
        reply = engine.run({**feeds, **states})
        states, past = engine.next_states(reply), total
        if not waiting:
            waiting, steps = [[int(reply["logits"][0, -1].argmax())]], steps - 1
            yield waiting[0][0]


if __name__ == "__main__":
    if len(sys.argv) < 4 or not all(word.isdecimal() for word in sys.argv[3:]):
        sys.exit(__doc__)
    try:
        with trtopt.Engine.load(sys.argv[1], fallback=sys.argv[2]) as engine:
            print(engine.runtime, *decode(engine, [int(token) for token in sys.argv[3:]], 64))
    except trtopt.TrtoptError as error:
        sys.exit(str(error))
