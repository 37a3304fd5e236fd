"""MiniLM's encoder as a PyTorch module with the weights of its ONNX file, for tools that prune modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

LAYERS, WIDTH, HEADS, INNER = 6, 384, 12, 1536
WORDS, POSITIONS, SEGMENTS, EPSILON = 30522, 512, 2, 1e-12


class Attention(nn.Module):
    """``self``: the heads. Named as in the file, whose names are those of Hugging Face's BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            layer(hidden).view(batch, length, HEADS, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        heads = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return heads.transpose(1, 2).reshape(batch, length, WIDTH)


class Residual(nn.Module):
    """A product, added to what the block read, normalised."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(size, WIDTH), nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.LayerNorm(self.dense(hidden) + residual)
        return normed


class Layer(nn.Module):
    """An encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": Attention(), "output": Residual(WIDTH)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, INNER)})
        self.output = Residual(INNER)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.attention["output"](self.attention["self"](hidden, mask), hidden)
        inner = nn.functional.gelu(self.intermediate["dense"](hidden))
        normed: torch.Tensor = self.output(inner, hidden)
        return normed


class MiniLM(nn.Module):
    """Token ids, attention mask and segments, int64 ``[batch, tokens]``, to float32 ``[batch, tokens, 384]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(WORDS, WIDTH),
                "position_embeddings": nn.Embedding(POSITIONS, WIDTH),
                "token_type_embeddings": nn.Embedding(SEGMENTS, WIDTH),
                "LayerNorm": nn.LayerNorm(WIDTH, EPSILON),
            }
        )
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer() for _ in range(LAYERS))})

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        words, positions, types, norm = self.embeddings.values()
        hidden = norm(words(ids) + types(segments) + positions(torch.arange(ids.shape[1])))
        for layer in self.encoder["layer"]:
            hidden = layer(hidden, mask[:, None, None, :] > 0)
        return hidden  # type: ignore[no-any-return]


def products(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """The linear layers: their paths in the module, and their weights ``[K, N]`` in the file."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in tensors:
            path = node.name.removeprefix("/m/").removesuffix("/MatMul")
            yield path.replace("/", "."), tensors[node.input[1]]


def module_of(model: onnx.ModelProto) -> MiniLM:
    """The module with the file's weights."""
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    state = {name.removeprefix("m."): array for name, array in arrays.items() if name.startswith("m.")}
    state |= {f"{path}.weight": numpy_helper.to_array(tensor).T for path, tensor in products(model)}
    module = MiniLM()
    module.load_state_dict({name: torch.tensor(np.ascontiguousarray(array)) for name, array in state.items()})
    return module.eval()


def inputs_of(feed: dict[str, np.ndarray]) -> tuple[torch.Tensor, ...]:
    """A feed of the ONNX file as arguments of the module."""
    return tuple(torch.tensor(feed[name]) for name in ("input_ids", "attention_mask", "token_type_ids"))


def write_weights(model: onnx.ModelProto, module: Any) -> None:
    """Put the module's linear weights into the file's model, in place."""
    for path, tensor in products(model):
        weight = module.get_submodule(path).weight.detach().numpy()
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(weight.T), tensor.name))
