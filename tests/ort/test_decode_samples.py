"""Samples of a decoder that runs on its own tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from decoder_nets import PLACES, concat_decoder, scatter_decoder

from trtopt.errors import InvalidModelError, UsageError
from trtopt.precision.observe.decode import decoder_samples
from trtopt.precision.observe.stream import Samples
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

PROMPTS = np.array([[3, 14, 15, 9], [2, 7, 18, 28]])


def samples(tmp_path: Path, model: Path, steps: int, **prompts: np.ndarray) -> Samples:
    np.savez(tmp_path / "prompts.npz", **prompts)
    loaded = load(model)
    return decoder_samples(tmp_path / "prompts.npz", loaded.model, loaded.inputs, steps)


def test_each_step_is_fed_the_likeliest_token_of_the_one_before(tmp_path: Path) -> None:
    """The tokens are those of the network that sees all of them at once, without a cache."""
    model = concat_decoder(tmp_path / "decoder.onnx")
    feeds = list(samples(tmp_path, model, 6, input_ids=PROMPTS))
    assert len(feeds) == len(PROMPTS) * 7
    decoded = np.concatenate([item["input_ids"] for item in feeds[:7]], axis=1)
    empty = np.zeros((1, 2, 0, 8), np.float32)
    with OrtSession(load(model).model) as session:
        places = np.arange(decoded.shape[1])[None]
        whole = session.run({"input_ids": decoded, "position_ids": places, "past_k": empty, "past_v": empty})
        tokens = whole[session.output_names.index("logits")].argmax(-1)
    np.testing.assert_array_equal(decoded[0, 4:], tokens[0, 3:-1])
    np.testing.assert_array_equal(decoded[0, :4], PROMPTS[0])
    assert [item["past_k"].shape[2] for item in feeds[:7]] == [0, 4, 5, 6, 7, 8, 9]


def test_a_cache_in_place_decodes_what_one_that_grows_decodes(tmp_path: Path) -> None:
    grown, placed = (
        list(samples(tmp_path, make(tmp_path / f"{make.__name__}.onnx"), 6, input_ids=PROMPTS))
        for make in (concat_decoder, scatter_decoder)
    )
    for one, other in zip(grown, placed, strict=True):
        past = one["past_k"].shape[2]
        np.testing.assert_array_equal(one["input_ids"], other["input_ids"])
        np.testing.assert_array_equal(one["position_ids"], other["position_ids"])
        np.testing.assert_allclose(one["past_k"], other["past_k"][:, :, :past], atol=1e-5)
        assert other["start"].tolist() == [past] and other["used"].tolist() == [past + one["input_ids"].shape[1]]
        assert not other["past_k"][:, :, past:].any()


def test_caches_of_a_prompt_are_the_tokens_before_it(tmp_path: Path) -> None:
    model = concat_decoder(tmp_path / "decoder.onnx")
    whole = list(samples(tmp_path, model, 3, input_ids=PROMPTS[:1]))
    caches = {name: whole[1][name] for name in ("past_k", "past_v")}
    found = list(samples(tmp_path, model, 2, input_ids=whole[1]["input_ids"], **caches))
    for one, other in zip(whole[1:], found, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_more_steps_than_the_cache_has_places_for(tmp_path: Path) -> None:
    model = scatter_decoder(tmp_path / "decoder.onnx")
    with pytest.raises(UsageError, match=f"need 68 places, and the caches have {PLACES}") as caught:
        list(samples(tmp_path, model, 64, input_ids=PROMPTS))
    assert "--steps 28" in str(caught.value.remedy)


def test_a_model_without_places_for_the_steps_says_how_far_it_came(tmp_path: Path) -> None:
    """Its table of positions has 64 rows, and nothing else bounds a cache that grows."""
    with pytest.raises(InvalidModelError) as caught:
        list(samples(tmp_path, concat_decoder(tmp_path / "decoder.onnx"), 64, input_ids=PROMPTS))
    assert "it decodes 64 tokens: fewer --steps" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("name", "prompt", "what"),
    [
        ("past_k", np.zeros((2, 2, 8), np.float32), "past_k' has the shape"),
        ("past_k", np.zeros((2, 2), np.float32), r"past_k' has the shape \[B, 2, P, 8\], the prompts \[2, 2\]"),
        ("past_k", np.zeros((2, 2, 0, 8), np.int64), "past_k' is float32, the samples are int64"),
        ("input_ids", PROMPTS.astype(np.float32), "input_ids' is int64"),
        ("input_ids", PROMPTS - 100, "run from 0 to 49, those of the prompts from -"),
        ("input_ids", PROMPTS + 50, "run from 0 to 49, those of the prompts from 5"),
    ],
)
def test_prompts_of_a_wrong_rank_or_type_are_refused_by_file_and_name(
    tmp_path: Path, name: str, prompt: np.ndarray, what: str
) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        samples(tmp_path, concat_decoder(tmp_path / "decoder.onnx"), 2, **{"input_ids": PROMPTS, name: prompt})
    assert str(caught.value.where).startswith(f"decode:{tmp_path / 'prompts.npz'}")


@pytest.mark.parametrize(
    ("prompts", "what"),
    [
        ({"tokens": PROMPTS}, r"These are no prompts: the file holds tokens \[2, 4\]"),
        ({"input_ids": PROMPTS[0]}, r"These are no prompts: the file holds input_ids \[4\]"),
        ({"input_ids": PROMPTS[:, :0]}, r"These are no prompts: the file holds input_ids \[2, 0\]"),
        ({"input_ids": PROMPTS, "position_ids": PROMPTS[:1]}, "These are no prompts"),
    ],
)
def test_files_that_hold_no_prompts(tmp_path: Path, prompts: dict[str, np.ndarray], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        samples(tmp_path, concat_decoder(tmp_path / "decoder.onnx"), 2, **prompts)


def test_a_model_without_scores_says_so(tmp_path: Path) -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (int64[B, S] ids) => (float[B, S, 8] y) { y = Gather(table, ids) }'
    )
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((50, 8), np.float32), "table"))
    onnx.save(model, tmp_path / "embedding.onnx")
    with pytest.raises(UsageError, match="no output holds a score for each token"):
        samples(tmp_path, tmp_path / "embedding.onnx", 2, input_ids=PROMPTS)


def test_a_mask_grows_with_the_tokens_and_begins_as_the_prompt_says(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
      g (int64[B, S] input_ids, int64[B, T] attention_mask, int64[B, S] token_type_ids, float[B, 1, P, 8] past)
      => (float[B, S, 50] logits, float[B, 1, T, 8] present)
      { e = Gather(table, input_ids) t = Gather(types, token_type_ids) x = Add(e, t) k = Unsqueeze(x, one)
        present = Concat<axis = 2>(past, k) m = Cast<to = 1>(attention_mask) w = Unsqueeze(m, ones)
        p = Mul(present, w) s = ReduceSum<keepdims = 0>(p, two) y = Add(x, s) logits = MatMul(y, head) }"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    arrays = {
        "table": rng.standard_normal((50, 8)),
        "types": rng.standard_normal((2, 8)),
        "head": rng.standard_normal((8, 50)),
    }
    constants = {"one": np.array([1]), "ones": np.array([1, 3]), "two": np.array([2])}
    for name, array in ({key: item.astype(np.float32) for key, item in arrays.items()} | constants).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "masked.onnx")
    mask = np.array([[0, 1, 1, 1]])
    feeds = list(samples(tmp_path, tmp_path / "masked.onnx", 2, input_ids=PROMPTS[:1], attention_mask=mask))
    assert [item["attention_mask"].tolist() for item in feeds] == [
        [[0, 1, 1, 1]],
        [[0, 1, 1, 1, 1]],
        [[0, 1, 1, 1, 1, 1]],
    ]
    assert [item["token_type_ids"].tolist() for item in feeds] == [[[0, 0, 0, 0]], [[0]], [[0]]]
