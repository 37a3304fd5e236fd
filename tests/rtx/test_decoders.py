"""Decoders with caches in the real compiler."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from decoder_nets import PLACES, concat_decoder, concat_shapes, scatter_decoder, scatter_shapes

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
    ids = rng.integers(0, 50, shapes["ids"])
    return {
        "ids": ids,
        "positions": start[:, None] + np.arange(tokens),
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


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
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
