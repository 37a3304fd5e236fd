"""A decoder loop with ``trtopt.Engine``, whose states are handed on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx_ir as ir
import pytest
from decoder_nets import concat_decoder, scatter_decoder

import trtopt
from trtopt.errors import UsageError
from trtopt.precision.observe.decode import decoder_samples
from trtopt.source.onnx_file import load

ROOT = Path(__file__).parents[2]
PROMPT = [3, 14, 15, 9]


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("decoder_example", ROOT / "examples" / "decoder.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_decodes_what_the_model_finds_likeliest(tmp_path: Path, example: ModuleType) -> None:
    model = concat_decoder(tmp_path / "decoder.onnx")
    np.savez(tmp_path / "prompts.npz", input_ids=np.array([PROMPT]))
    loaded = load(model)
    feeds = list(decoder_samples(tmp_path / "prompts.npz", loaded.model, loaded.inputs, 16))
    with trtopt.Engine.load(model) as engine:
        tokens = list(example.decode(engine, PROMPT, 16))
    assert tokens == [int(item["input_ids"][0, 0]) for item in feeds[1:]]


def test_the_example_feeds_a_decoder_of_one_token_its_prompt_token_by_token(
    tmp_path: Path, example: ModuleType
) -> None:
    model = load(concat_decoder(tmp_path / "decoder.onnx")).model
    with trtopt.Engine.load(tmp_path / "decoder.onnx") as engine:
        whole = list(example.decode(engine, PROMPT, 8))
    for value in model.graph.inputs[:2]:
        value.shape = ir.Shape([value.shape[0], 1])
    ir.save(model, tmp_path / "step.onnx")
    with trtopt.Engine.load(tmp_path / "step.onnx") as engine:
        assert list(example.decode(engine, PROMPT, 8)) == whole


def test_states_begin_empty_or_with_zeros_and_are_handed_on_as_they_are(tmp_path: Path) -> None:
    with trtopt.Engine.load(concat_decoder(tmp_path / "grown.onnx", "float16")) as engine:
        states = engine.first_states(batch=2)
        assert {name: (array.shape, str(array.dtype)) for name, array in states.items()} == {
            "past_k": ((2, 2, 0, 8), "float16"),
            "past_v": ((2, 2, 0, 8), "float16"),
        }
        tokens = np.array([PROMPT] * 2)
        reply = engine.run({"input_ids": tokens, "position_ids": np.arange(4)[None].repeat(2, 0), **states})
        after = engine.next_states(reply)
        assert after["past_k"] is reply["present_k"] and after["past_v"] is reply["present_v"]
    with trtopt.Engine.load(scatter_decoder(tmp_path / "placed.onnx")) as engine:
        assert engine.first_states()["past_k"].shape == (1, 2, 32, 8)


def test_wrong_states_are_refused_by_name(tmp_path: Path) -> None:
    tokens = {"input_ids": np.array([PROMPT]), "position_ids": np.arange(4)[None]}
    with trtopt.Engine.load(concat_decoder(tmp_path / "decoder.onnx")) as engine:
        states = engine.first_states()
        with pytest.raises(UsageError, match="past_k"):
            engine.run({**tokens, **states, "past_k": states["past_k"].astype(np.float16)})
        with pytest.raises(UsageError, match="past_k"):
            engine.run({**tokens, **states, "past_k": states["past_k"][0]})
        for batch in (0, -1, "2", 1.0):
            with pytest.raises(UsageError, match=f"A batch of {batch!r}"):
                engine.first_states(batch=batch)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="The reply has no present_k, present_v"):
            engine.next_states({})
