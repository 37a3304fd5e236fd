"""Speech, sound, recurrent networks and recommendation."""

from __future__ import annotations

import torch
import transformers as hf
from subject import BATCH, Subject, batched, network, tokens
from torch import nn
from written import DLRM, HifiGan, Recurrent

REQUESTS = 256


def _whisper() -> hf.WhisperModel:
    return hf.WhisperModel(hf.WhisperConfig(encoder_layers=2, decoder_layers=2))


@network
def whisper_encoder() -> Subject:
    inputs = {"features": torch.randn(BATCH, 80, 3000)}
    return Subject(_whisper().encoder, inputs, batched(inputs), lambda model, x: model(x, return_dict=False)[0])


@network
def whisper_decoder() -> Subject:
    inputs = {"decoder_input_ids": tokens(51865, 32), "encoder_hidden_states": torch.randn(BATCH, 1500, 384)}

    def call(model: nn.Module, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, encoder_hidden_states=states, use_cache=False, return_dict=False)[0]

    return Subject(_whisper().decoder, inputs, batched(inputs, decoder_input_ids={1: "sequence"}), call)


@network
def wav2vec2() -> Subject:
    """A second of sound."""
    inputs = {"sound": torch.randn(BATCH, 16000)}
    module = hf.Wav2Vec2Model(hf.Wav2Vec2Config(num_hidden_layers=3))
    return Subject(module, inputs, batched(inputs), lambda model, x: model(x, return_dict=False)[0])


@network
def hifigan() -> Subject:
    inputs = {"mel": torch.randn(BATCH, 80, 32)}
    return Subject(HifiGan(), inputs, batched(inputs, mel={2: "frames"}))


def _recurrent(kind: type[nn.RNNBase]) -> Subject:
    inputs = {"input_ids": tokens(4000, 64)}
    return Subject(Recurrent(kind), inputs, batched(inputs))


@network
def lstm() -> Subject:
    return _recurrent(nn.LSTM)


@network
def gru() -> Subject:
    return _recurrent(nn.GRU)


def _dlrm(bags: bool) -> Subject:
    inputs = {"dense": torch.randn(REQUESTS, 13), "ids": torch.randint(0, 4000, (REQUESTS, 26, 4))}
    return Subject(DLRM(bags), inputs, batched(inputs))


@network
def dlrm() -> Subject:
    return _dlrm(bags=False)


@network
def dlrm_bags() -> Subject:
    return _dlrm(bags=True)
