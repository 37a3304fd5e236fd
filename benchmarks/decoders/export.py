"""Decoders with caches from transformers, with random weights: ``python export.py FOLDER [NAME...]``.

Each takes tokens and the keys and values of those before it, and gives scores and those of the next step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

PROMPTS, PROMPT = 2, 8
ENCODED = 48


@dataclass(frozen=True)
class Decoder:
    """A decoder, its caches' heads and size, and what an encoder hands it (width of a token, tokens; 0 for none)."""

    module: nn.Module
    vocabulary: int
    layers: int
    heads: int
    size: int
    encoded: tuple[int, int] = (0, 0)


def gpt2() -> Decoder:
    return Decoder(hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=4)), 50257, 4, 12, 64)


def llama() -> Decoder:
    config = hf.LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=8000,
    )
    return Decoder(hf.LlamaForCausalLM(config), 8000, 2, 4, 64)


def whisper() -> Decoder:
    config = hf.WhisperConfig(d_model=384, encoder_layers=1, decoder_layers=4, decoder_attention_heads=6)
    config.encoder_attention_heads, config.decoder_ffn_dim, config.encoder_ffn_dim = 6, 1536, 1536
    return Decoder(hf.WhisperForConditionalGeneration(config), 51865, 4, 6, 64, (384, 1500))


def t5() -> Decoder:
    config = hf.T5Config(num_layers=1, num_decoder_layers=6)
    return Decoder(hf.T5ForConditionalGeneration(config), 32128, 6, 8, 64, (512, ENCODED))


def bart() -> Decoder:
    config = hf.BartConfig(encoder_layers=1, decoder_layers=2)
    return Decoder(hf.BartForConditionalGeneration(config), 50265, 2, 16, 64, (1024, ENCODED))


NAMES: dict[str, Callable[[], Decoder]] = {made.__name__: made for made in (gpt2, llama, whisper, t5, bart)}


class Step(nn.Module):
    """One step: tokens, what the encoder says, keys and values by layer; the last token's scores are not cut out."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.model, self.decoder = decoder.module.eval(), decoder

    def forward(self, input_ids: torch.Tensor, *caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        decoder, parts = self.decoder, (DynamicCache(), DynamicCache())
        for place, tensors in enumerate(zip(caches[::2], caches[1::2], strict=True)):
            parts[place // decoder.layers].update(*tensors, place % decoder.layers)
        if decoder.encoded[0]:
            cache: Any = EncoderDecoderCache(*parts)
            cache.is_updated = dict.fromkeys(range(decoder.layers), True)
            width, length = decoder.encoded
            states = input_ids.new_zeros((1, 1, 1), dtype=torch.float32).expand(input_ids.shape[0], length, width)
            found = self.model(
                decoder_input_ids=input_ids, encoder_outputs=(states,), past_key_values=cache, use_cache=True
            )
            kept = found.past_key_values.self_attention_cache.layers
        else:
            found = self.model(input_ids=input_ids, past_key_values=parts[0], use_cache=True)
            kept = found.past_key_values.layers
        return (found.logits, *(each for layer in kept for each in (layer.keys, layer.values)))


def write(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    decoder = NAMES[name]()
    new, past = 3, 5
    tokens = torch.randint(decoder.vocabulary, (2, new))
    width, length = decoder.encoded
    inputs: dict[str, torch.Tensor] = {"input_ids": tokens}
    places: dict[str, tuple[int, ...]] = {"input_ids": (0, 1)}
    outputs = ["logits"]
    for index in range(decoder.layers):
        for kind in ("key", "value"):
            inputs[f"past_{kind}_{index}"] = torch.randn(2, decoder.heads, past, decoder.size)
            places[f"past_{kind}_{index}"] = (0, 2)
            outputs.append(f"present_{kind}_{index}")
    encoder = {
        f"encoder_{kind}_{index}": torch.randn(2, decoder.heads, length, decoder.size)
        for index in range(decoder.layers if width else 0)
        for kind in ("key", "value")
    }
    inputs |= encoder
    places |= dict.fromkeys(encoder, (0,))
    names = list(inputs)
    shapes = [dict.fromkeys(places[item], torch.export.Dim.DYNAMIC) for item in names]
    with torch.no_grad():
        torch.onnx.export(
            Step(decoder),
            tuple(inputs.values()),
            folder / f"{name}.onnx",
            input_names=names,
            output_names=outputs,
            dynamic_shapes=(shapes[0], tuple(shapes[1:])),
            dynamo=True,
            external_data=False,
        )
    prompts = {"input_ids": np.random.default_rng(1).integers(0, decoder.vocabulary, (PROMPTS, PROMPT))}
    for index, (item, tensor) in enumerate(encoder.items()):
        generator = torch.Generator().manual_seed(index)
        prompts[item] = torch.randn(PROMPTS, *tensor.shape[1:], generator=generator).numpy()
    np.savez(folder / f"{name}.npz", **prompts)


if __name__ == "__main__":
    for item in sys.argv[2:] or NAMES:
        write(item, Path(sys.argv[1]))
        print(item, flush=True)
