"""Calls of PyTorch that its exporter writes in operators no compiler has, in forms that all of them have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from trtopt.support._lazy import require


@contextlib.contextmanager
def exportable() -> Iterator[None]:
    """Bags of one length as Gather and a reduction, and recurrent layers over a dynamic axis, while a module is traced.

    The exporter writes ``EmbeddingBag`` as a Loop over a sequence of tensors, since bags may have any length. Those of
    an input of two axes all have that of its second axis.
    """
    torch = require("torch", "torch", "export PyTorch models")
    functional = torch.nn.functional
    original = functional.embedding_bag

    def bags(input: Any, weight: Any, offsets: Any = None, *args: Any, **kwargs: Any) -> Any:
        names = ("max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights")
        options = {**dict(zip((*names, "include_last_offset", "padding_idx"), args, strict=False)), **kwargs}
        mode, padding = options.get("mode", "mean"), options.get("padding_idx")
        if input.dim() != 2 or options.get("max_norm") is not None or (padding is not None and mode == "max"):
            return original(input, weight, offsets, *args, **kwargs)
        rows, length = functional.embedding(input, weight), input.shape[1]
        if padding is not None:
            kept = input != padding % weight.shape[0]
            rows, length = rows * kept.unsqueeze(-1).to(rows.dtype), kept.sum(1, keepdim=True).clamp(min=1)
        if options.get("per_sample_weights") is not None:
            rows = rows * options["per_sample_weights"].unsqueeze(-1)
        return rows.amax(1) if mode == "max" else rows.sum(1) if mode == "sum" else rows.sum(1) / length

    for operator in (torch.ops.aten.lstm.input, torch.ops.aten.gru.input):
        # The exporter of torch 2.13 replaces the kernels of these, and calls those it remembers from an earlier export.
        getattr(operator, "_dispatch_cache", {}).clear()
    functional.embedding_bag = bags
    try:
        yield
    finally:
        functional.embedding_bag = original
