"""Decoders with caches in the real compiler."""

from __future__ import annotations

from pathlib import Path

import decoder_nets
import numpy as np
import onnx
import pytest
from decoder_nets import KEY_HEADS, PLACES, SIZE, concat_decoder, concat_shapes, scatter_decoder, scatter_shapes

import trtopt
from trtopt import build, optimize
from trtopt.errors import InvalidModelError

pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")

CACHES = ["past_k", "past_v", "present_k", "present_v"]


def step(batch: int = 2, tokens: int = 1) -> dict[str, np.ndarray]:
    """A sample: places 5 and 9 of the caches are written next."""
    rng = np.random.default_rng(0)
    shapes = scatter_shapes(batch, tokens)
    start = np.array([5, 9])[:batch]
    caches = {name: rng.standard_normal(shapes[name], dtype=np.float32) for name in ("past_k", "past_v")}
    ids = rng.integers(0, 50, shapes["input_ids"])
    return {
        "input_ids": ids,
        "position_ids": start[:, None] + np.arange(tokens),
        **caches,
        "start": start,
        "used": start + tokens,
    }


def types(model: Path) -> dict[str, str]:
    graph = onnx.load(model).graph
    return {
        value.name: onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)
        for value in (*graph.input, *graph.output)
    }


@pytest.mark.parametrize("precision", ["fp32", "fp16", pytest.param("int8", marks=pytest.mark.long)])
def test_a_cache_in_place_builds_and_has_the_type_it_is_computed_in(tmp_path: Path, precision: str) -> None:
    model, saved = scatter_decoder(tmp_path / "decoder.onnx"), tmp_path / "saved.onnx"
    report = build(
        model,
        precision=precision,
        output=tmp_path / "decoder.engine",
        save_onnx=saved,
        calib=[step()],
        min_shapes=[scatter_shapes(1, 1), scatter_shapes(1, 2)],
        opt_shapes=[scatter_shapes(2, 1), scatter_shapes(2, 16)],
        max_shapes=[scatter_shapes(4, 1), scatter_shapes(4, PLACES)],
        allow_accuracy_loss=True,
    )
    wanted = "FLOAT" if precision == "fp32" else "FLOAT16"
    assert {name: kind for name, kind in types(saved).items() if name in CACHES} == dict.fromkeys(CACHES, wanted)
    assert types(saved)["logits"] == "FLOAT"
    states = [item.name for item in report.network_io if item.state]
    assert sorted(states) == ([] if precision == "fp32" else sorted(CACHES))
    assert report.engine is not None and len(report.engine.profiles) == 2
    assert report.accuracy is not None and report.accuracy.outputs["logits"].sqnr_db > 30


def test_what_is_optimized_builds_as_it_is(tmp_path: Path) -> None:
    model, saved = scatter_decoder(tmp_path / "decoder.onnx"), tmp_path / "saved.onnx"
    optimize(model, output=saved, precision="fp16", calib=[step()], opt_shapes=scatter_shapes(2, 1))
    report = build(saved, output=tmp_path / "saved.engine", calib=None, opt_shapes=scatter_shapes(2, 1))
    assert report.engine is not None


def test_a_cache_that_is_asked_to_be_fp32_outside_and_fp16_inside_is_refused(tmp_path: Path) -> None:
    model = scatter_decoder(tmp_path / "decoder.onnx")
    with pytest.raises(InvalidModelError, match="a cache has to be an input of the network"):
        optimize(
            model,
            output=tmp_path / "saved.onnx",
            precision="fp16",
            calib=[step()],
            io=("past_k:fp32:chw",),
            opt_shapes=scatter_shapes(2, 1),
        )
    assert not (tmp_path / "saved.onnx").exists()


def test_a_cache_that_grows_is_fp16_with_prefill_and_step_profiles(tmp_path: Path) -> None:
    model, saved = concat_decoder(tmp_path / "decoder.onnx"), tmp_path / "saved.onnx"
    rng = np.random.default_rng(1)
    feeds = {
        name: rng.standard_normal(shape, dtype=np.float32) if name.startswith("past") else rng.integers(0, 32, shape)
        for name, shape in concat_shapes(2, 1, 7).items()
    }
    report = build(
        model,
        output=tmp_path / "decoder.engine",
        save_onnx=saved,
        calib=[feeds],
        min_shapes=[concat_shapes(1, 1, 1), concat_shapes(1, 1, 0)],
        opt_shapes=[concat_shapes(2, 1, 16), concat_shapes(2, 16, 0)],
        max_shapes=[concat_shapes(4, 1, 31), concat_shapes(4, 32, 0)],
    )
    assert {name: kind for name, kind in types(saved).items() if name in CACHES} == dict.fromkeys(CACHES, "FLOAT16")
    assert report.engine is not None and len(report.engine.profiles) == 2


def test_an_engine_knows_its_states_and_decodes_as_fp32_does(tmp_path: Path) -> None:
    model, saved, output = concat_decoder(tmp_path / "decoder.onnx"), tmp_path / "saved.onnx", tmp_path / "d.engine"
    np.savez(tmp_path / "prompts.npz", input_ids=np.array([[3, 14, 15, 9]]))
    build(model, output=output, save_onnx=saved, calib=f"decode:{tmp_path / 'prompts.npz'}", steps=12)
    places = np.arange(4)[None]
    with trtopt.Engine.load(output, fallback=saved) as engine, trtopt.Engine.load(model) as before:
        assert {spec.name: spec.state for spec in engine.inputs if spec.state} == {
            "past_k": "present_k",
            "past_v": "present_v",
        }
        states, tokens, found = [one.first_states() for one in (engine, before)], np.array([[3, 14, 15, 9]]), []
        assert str(states[0]["past_k"].dtype) == "float16"
        for past in range(4, 14):
            feeds = {"input_ids": tokens, "position_ids": places}
            replies = [one.run({**feeds, **own}) for one, own in zip((engine, before), states, strict=True)]
            states = [one.next_states(reply) for one, reply in zip((engine, before), replies, strict=True)]
            found.append([int(reply["logits"][0, -1].argmax()) for reply in replies])
            tokens, places = np.array([[found[-1][1]]]), np.array([[past]])
    assert all(one == other for one, other in found)


def test_analyze_compiles_a_cache_in_place(tmp_path: Path) -> None:
    model = scatter_decoder(tmp_path / "decoder.onnx")
    found = trtopt.analyze(model, compile=True, precision="fp16", gpu="L4", shapes=scatter_shapes(1, 1))
    (layer,) = (layer for layer in found.layers if "TensorScatter" in layer.op)
    entries, caches = (2 * 2 * KEY_HEADS * places * SIZE for places in (1, PLACES))  # keys and values in FP16
    assert 2 * entries <= layer.bytes < caches, "it writes new entries into the cache, and does not move the cache"


@pytest.mark.long
def test_the_last_token_is_taken_early_where_prefill_has_more_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step, which judges, has one token, of which the last one is all."""
    monkeypatch.setattr(decoder_nets, "VOCABULARY", 4000)
    path, saved = concat_decoder(tmp_path / "decoder.onnx"), tmp_path / "saved.onnx"
    np.savez(tmp_path / "prompts.npz", input_ids=np.array([[3, 14, 15, 9]]))
    report = build(
        path,
        output=tmp_path / "decoder.engine",
        save_onnx=saved,
        last_token=True,
        recipes="late-selection",
        calib=f"decode:{tmp_path / 'prompts.npz'}",
        steps=4,
        min_shapes=[concat_shapes(1, 1, 1), concat_shapes(1, 1, 0)],
        opt_shapes=[concat_shapes(1, 1, 16), concat_shapes(1, 64, 0)],
        max_shapes=[concat_shapes(1, 1, 31), concat_shapes(1, 64, 0)],
    )
    assert [step.changes for step in report.steps if step.name == "late-selection"] in ([1], [2])
    assert report.shipped is not None and report.plain is not None
    assert report.shipped.predicted_us <= report.plain.predicted_us
    scores = onnx.load(saved).graph.output[0]
    assert (scores.name, [dim.dim_value for dim in scores.type.tensor_type.shape.dim]) == ("logits", [1, 1, 4000])
