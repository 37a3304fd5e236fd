"""Text, and text's decoders with their caches."""

from __future__ import annotations

from dataclasses import replace

import torch
import transformers as hf
from subject import BATCH, Subject, batched, network, tokens
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.models.t5.modeling_t5 import T5Attention

LENGTH = 128
PAST = 127


def _text(module: nn.Module, vocabulary: int, length: int = LENGTH, take: int = 0) -> Subject:
    inputs = {"input_ids": tokens(vocabulary, length)}

    def call(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, return_dict=False)[take]

    return Subject(module, inputs, batched(inputs, input_ids={1: "sequence"}), call)


@network
def bert() -> Subject:
    return _text(hf.BertModel(hf.BertConfig(num_hidden_layers=4)), 30522)


@network
def bert_masked() -> Subject:
    """With attention mask and position ids as inputs."""
    inputs = {
        "input_ids": tokens(30522, LENGTH),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64),
        "position_ids": torch.arange(LENGTH).repeat(BATCH, 1),
    }

    def call(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, attention_mask=mask, position_ids=places, return_dict=False)[0]

    axes = batched(inputs, **{name: {1: "sequence"} for name in inputs})
    return Subject(hf.BertModel(hf.BertConfig(num_hidden_layers=4)), inputs, axes, call)


@network
def bert_eager() -> Subject:
    return _text(hf.BertModel(hf.BertConfig(num_hidden_layers=4, attn_implementation="eager")), 30522)


@network
def distilbert() -> Subject:
    return _text(hf.DistilBertModel(hf.DistilBertConfig(n_layers=4)), 30522)


@network
def roberta() -> Subject:
    return _text(hf.RobertaModel(hf.RobertaConfig(num_hidden_layers=4)), 50265)


@network
def clip_text() -> Subject:
    """Its texts have 77 tokens; the end of each is found by argmax."""
    made = _text(hf.CLIPTextModel(hf.CLIPTextConfig(num_hidden_layers=4)), 49408, 77, take=1)
    return replace(made, axes=batched(made.inputs))


def _t5() -> hf.T5Config:
    return hf.T5Config(num_layers=3, num_decoder_layers=3, use_cache=False)


def _scaled_queries(module: nn.Module) -> nn.Module:
    """T5 keeps the scale of attention in its queries' weights: at standard deviation 1 its scores would have 8."""
    for item in module.modules():
        if isinstance(item, T5Attention):
            item.q.weight.data /= item.key_value_proj_dim**0.5
    return module


@network
def t5_encoder() -> Subject:
    return replace(_text(hf.T5EncoderModel(_t5()), 32128), deploy=_scaled_queries)


def _decoder(module: nn.Module, vocabulary: int, width: int) -> Subject:
    inputs = {
        "decoder_input_ids": tokens(vocabulary, 64),
        "encoder_hidden_states": torch.randn(BATCH, LENGTH, width),
    }

    def call(model: nn.Module, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, encoder_hidden_states=states, use_cache=False, return_dict=False)[0]

    axes = batched(inputs, decoder_input_ids={1: "sequence"}, encoder_hidden_states={1: "encoded"})
    return Subject(module, inputs, axes, call)


@network
def t5_decoder() -> Subject:
    return replace(_decoder(hf.T5Model(_t5()).decoder, 32128, 512), deploy=_scaled_queries)


@network
def bart_decoder() -> Subject:
    return _decoder(hf.BartModel(hf.BartConfig(encoder_layers=1, decoder_layers=2)).decoder, 50265, 1024)


def _cached(module: nn.Module, vocabulary: int, layers: int, heads: int, size: int) -> Subject:
    """One step of decoding: a token, the keys and values of those before it."""
    inputs: dict[str, torch.Tensor] = {"input_ids": tokens(vocabulary, 1)}
    for index in range(layers):
        for kind in ("key", "value"):
            inputs[f"past_{kind}_{index}"] = torch.randn(BATCH, heads, PAST, size)

    def call(model: nn.Module, ids: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = DynamicCache(config=model.config)
        for index in range(layers):
            cache.update(past[2 * index], past[2 * index + 1], index)
        found = model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True)
        kept = found.past_key_values.layers
        return (found.last_hidden_state, *(each for layer in kept for each in (layer.keys, layer.values)))

    past = {name: {2: "past"} for name in inputs if name != "input_ids"}
    return Subject(module, inputs, batched(inputs, **past), call)


@network
def gpt2() -> Subject:
    return _cached(hf.GPT2Model(hf.GPT2Config(n_layer=2)), 50257, 2, 12, 64)


@network
def llama() -> Subject:
    """One block at the width of Llama 3.2 1B, with grouped heads and a small vocabulary."""
    config = hf.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=2048,
    )
    return _cached(hf.LlamaModel(config), 2048, 1, 8, 64)


@network
def llama_8b() -> Subject:
    """Three blocks at the width of Llama 3.1 8B, with a small vocabulary: 2.6 GB in FP32."""
    config = hf.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=3,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=2048,
    )
    return _cached(hf.LlamaModel(config), 2048, 3, 8, 128)
