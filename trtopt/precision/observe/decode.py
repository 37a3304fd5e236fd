"""Samples of a decoder by running it on itself: prompts, then the tokens that it finds likeliest, with its caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from trtopt.errors import InvalidModelError, UsageError
from trtopt.graph import edit
from trtopt.graph.artifact import InputSpec, input_spec
from trtopt.graph.input_values import InputValues, input_values
from trtopt.graph.states import State, find_states, tokens_and_scores
from trtopt.precision.observe.feeds import open_arrays
from trtopt.precision.observe.loaders import take
from trtopt.precision.observe.pictures import UNSAID, PictureOptions
from trtopt.precision.observe.samples import of_taken, open_samples
from trtopt.precision.observe.stream import Samples
from trtopt.support._script import DECODE
from trtopt.support.ort_session import OrtSession

STEPS = 64
"""Tokens that are decoded of each prompt, unless something else is asked for."""

_FUNCTION = "write a function that yields the feeds of each step, and give it as FILE.py:FUNCTION"


class Decoder:
    """How a decoder is fed: its tokens, its states, and what counts along.

    Args:
        model: A model with an input of tokens, an output of scores [batch, tokens, vocabulary] and states
            (:func:`~trtopt.graph.states.find_states`).
        given: Names of the inputs that a prompt says.

    Raises:
        UsageError: The tokens or the scores are not found, or nothing says what an input holds at a later step.
    """

    def __init__(self, model: ir.Model, given: Sequence[str]) -> None:
        self.states = find_states(model)
        self._model, self._given = model, frozenset(given)
        self._specs = {str(value.name): input_spec(value) for value in model.graph.inputs}
        self._values = input_values(model)
        self.tokens, self.scores = self._ends()
        self._starts = {
            str(node.inputs[2].name)
            for node in edit.all_nodes(model.graph)
            if edit.is_op(node, "TensorScatter") and len(node.inputs) > 2 and node.inputs[2] is not None
        }
        self._fed = {str(state.input.name): str(state.output.name) for state in self.states}
        for name in self._specs:
            self._check(name)

    def _ends(self) -> tuple[str, str]:
        """The input of tokens and the output of their scores."""
        found = next(tokens_and_scores(self._model), None)
        if found is not None:
            return found
        raise UsageError(
            "The model is no decoder that can be run on its own tokens: no output holds a score for each token that "
            "an input takes",
            where=f"outputs {', '.join(str(value.name) for value in self._model.graph.outputs)}",
            remedy=f"export it with its scores (logits); or {_FUNCTION}",
        )

    def _check(self, name: str) -> None:
        spec = self._specs[name]
        known = name in self._fed or name in self._given or name == self.tokens or name in self._starts
        if known or (spec.dtype.kind in "iub" and len(spec.shape) <= 2):
            return
        raise UsageError(
            f"Nothing says what the input {name!r} holds while decoding",
            where=f"input {name}",
            remedy=f"add an array {name!r} to the prompts; or {_FUNCTION}",
        )

    def check_prompts(self, arrays: Mapping[str, np.ndarray], where: str) -> None:
        """Refuse arrays of another rank than their inputs, and tokens that the model does not know.

        Raises:
            UsageError: There is one.
        """
        for name, array in arrays.items():
            shape = ", ".join(map(str, self._specs[name].shape))
            if array.ndim != len(self._specs[name].shape):
                raise UsageError(
                    f"The input {name!r} has the shape [{shape}], the prompts {list(array.shape)}",
                    where=where,
                    remedy="give as many axes; the first counts prompts",
                )
        tokens, size = arrays[self.tokens], self._values[self.tokens].size or 0
        if tokens.dtype.kind in "iu" and not 0 <= tokens.min() <= tokens.max() < size:
            raise UsageError(
                f"Tokens of {self.tokens!r} run from 0 to {size - 1}, those of the prompts from {tokens.min()} to "
                f"{tokens.max()}",
                where=where,
                remedy="encode the prompts with the model's own tokenizer, and leave no padding in",
            )

    @property
    def batch(self) -> int:
        """How many prompts are decoded at a time."""
        first = self._specs[self.tokens].shape[0]
        return first if isinstance(first, int) else 1

    @property
    def places(self) -> int | None:
        """The tokens that the caches hold; None where they grow."""
        sizes = [self._specs[str(s.input.name)].shape[s.axis] for s in self.states if s.axis is not None and s.in_place]
        return min((size for size in sizes if isinstance(size, int)), default=None)

    def first(self, prompt: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The states before the first step: those of the prompt, else empty caches and zeros."""
        return {
            name: prompt[name] if name in prompt else np.zeros(self._empty(state), self._specs[name].dtype)
            for state in self.states
            for name in (str(state.input.name),)
        }

    def filled(self, states: Mapping[str, np.ndarray]) -> int:
        """How many tokens caches that grow hold: those of a prompt that says them."""
        grown = [state for state in self.states if state.axis is not None and not state.in_place]
        return max((states[str(state.input.name)].shape[state.axis or 0] for state in grown), default=0)

    def _empty(self, state: State) -> list[int]:
        shape = [dim if isinstance(dim, int) else None for dim in self._specs[str(state.input.name)].shape]
        shape[0] = self.batch
        if state.axis is not None and shape[state.axis] is None:
            shape[state.axis] = 0
        if None in shape:
            raise UsageError(
                f"The state {state.input.name!r} has an axis of no known size",
                where=f"input {state.input.name}: {list(self._specs[str(state.input.name)].shape)}",
                remedy=f"add an array {str(state.input.name)!r} to the prompts",
            )
        return [dim or 0 for dim in shape]

    def feeds(
        self, tokens: np.ndarray, past: int, states: Mapping[str, np.ndarray], prompt: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The inputs of one step.

        Args:
            tokens: [batch, tokens].
            past: How many tokens the caches hold.
            states: The states, by the names of the inputs.
            prompt: What the prompt says of the other inputs.
        """
        found = {self.tokens: tokens, **states}
        for name, spec in self._specs.items():
            if name not in found:
                found[name] = self._other(name, tokens.shape[1], past, prompt).astype(spec.dtype)
        return found

    def _other(self, name: str, new: int, past: int, prompt: Mapping[str, np.ndarray]) -> np.ndarray:
        spec, values = self._specs[name], self._values.get(name, InputValues("ids"))
        rank, total = len(spec.shape), past + new
        if name in self._starts:
            return np.full(self.batch, past)
        if name in prompt and (spec.dtype.kind not in "iub" or values.kind not in ("mask", "positions", "lengths")):
            return prompt[name]
        if values.kind == "positions":
            return np.broadcast_to(np.arange(past, total), (self.batch, new)[2 - rank :]) if rank else np.array(past)
        if rank == 2 and values.kind != "mask":  # the types of tokens, as a rule
            return np.zeros((self.batch, new))
        if rank == 2:
            length = spec.shape[1] if isinstance(spec.shape[1], int) else total
            length = new if spec.shape[1] == self._specs[self.tokens].shape[1] else length
            mask = np.zeros((self.batch, length))
            mask[:, :total] = 1
            if name in prompt and length >= total:
                start = prompt[name][:, :total]
                mask[:, : start.shape[1]] = start
            return mask
        return np.full([self.batch] * rank, total - ("seqlens" in name))  # GroupQueryAttention counts one less

    def after(self, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The states that a step hands on, by the names of the inputs."""
        return {name: outputs[output] for name, output in self._fed.items()}

    def chosen(self, outputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """The likeliest tokens after a step, [batch, 1]."""
        scores = outputs[self.scores]
        last = scores[:, -1] if scores.ndim == 3 else scores
        return np.asarray(last.argmax(-1)[:, None])

    def parts(self, tokens: np.ndarray) -> list[np.ndarray]:
        """A prompt [batch, tokens] as the model takes it: whole, or in parts of the size that it is made for."""
        size = self._specs[self.tokens].shape[1]
        if not isinstance(size, int):
            return [tokens]
        if tokens.shape[1] % size or size != 1:
            raise UsageError(
                f"The model takes {size} tokens at a time and cannot decode one by one",
                where=f"input {self.tokens}",
                remedy=f"export it with a dynamic number of tokens; or {_FUNCTION}",
            )
        return list(np.split(tokens, tokens.shape[1], axis=1))


def decoded(
    session: OrtSession, decoder: Decoder, prompt: Mapping[str, np.ndarray], steps: int
) -> Iterator[dict[str, np.ndarray]]:
    """The feeds of every step: those of the prompt, then of ``steps`` tokens that the model finds likeliest.

    Raises:
        UsageError: The caches do not hold so many tokens.
        InvalidModelError: The model does not run.
    """
    tokens = np.asarray(prompt[decoder.tokens])
    if decoder.places is not None and tokens.shape[1] + steps > decoder.places:
        raise UsageError(
            f"A prompt of {tokens.shape[1]} tokens and {steps} steps need {tokens.shape[1] + steps} places, and the "
            f"caches have {decoder.places}",
            where=f"--steps {steps}",
            remedy=f"give --steps {max(decoder.places - tokens.shape[1], 0)}, or shorter prompts",
        )
    states, waiting = decoder.first(prompt), decoder.parts(tokens)
    past = decoder.filled(states)
    while waiting:
        new = waiting.pop(0)
        feeds = decoder.feeds(new, past, states, prompt)
        yield feeds
        if not waiting and not steps:
            return
        try:
            outputs = dict(zip(session.output_names, session.run(feeds), strict=True))
        except InvalidModelError as error:
            if past:
                error.remedy += f"; it decodes {past} tokens: fewer --steps, where it has places for no more"
            raise
        states, past = decoder.after(outputs), past + new.shape[1]
        if not waiting:
            waiting, steps = [decoder.chosen(outputs)], steps - 1


def open_given(
    source: Any,
    model: ir.Model,
    inputs: Sequence[InputSpec],
    steps: float | None = None,
    *,
    pictures: PictureOptions = UNSAID,
) -> Samples:
    """The samples that a user names: as :func:`~trtopt.precision.observe.samples.open_samples` has them, or those of
    ``decode:FILE.npz`` (:func:`decoder_samples`)."""
    if isinstance(source, str) and source.startswith(DECODE):
        return decoder_samples(Path(source.removeprefix(DECODE)), model, inputs, int(steps or STEPS))
    return open_samples(source, inputs, pictures=pictures)


def decoder_samples(path: Path, model: ir.Model, inputs: Sequence[InputSpec], steps: int) -> Samples:
    """The feeds of a decoder that runs on its own tokens, as samples.

    Args:
        path: An ``.npz`` of prompts: tokens [prompts, length] by the name of their input, and what else each prompt
            has by the names of other inputs, such as an encoder's output [prompts, ...]. Caches begin empty; positions,
            masks of ones, and where a cache is written next, count along.
        model: The model, in FP32.
        inputs: Its inputs.
        steps: Tokens that are decoded of each prompt.

    Returns:
        A sample for each step. They are computed once, and kept on disk for the run.

    Raises:
        UsageError: The file is no such file, or the model no such decoder.
    """
    arrays = {name: reader.read() for name, reader in open_arrays(path.absolute()).items()}
    decoder = Decoder(model, list(arrays))
    counts = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    known = {spec.name for spec in inputs}
    unknown = [name for name in arrays if name not in known]
    shown = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
    prompts = arrays.get(decoder.tokens, np.empty(0))
    if unknown or len(set(counts.values())) != 1 or prompts.ndim != 2 or not prompts.size:
        raise UsageError(
            f"These are no prompts: the file holds {shown or 'nothing'}",
            where=str(path),
            remedy=f"give {decoder.tokens!r} [prompts, tokens], and arrays by the names of other inputs [prompts, ...]",
        )
    where = f"{DECODE}{path}"
    decoder.check_prompts(arrays, where)
    size = decoder.batch

    def make() -> Iterator[dict[str, np.ndarray]]:
        with OrtSession(model) as session:
            for at in range(0, counts[decoder.tokens] - size + 1, size):
                yield from decoded(session, decoder, {name: a[at : at + size] for name, a in arrays.items()}, steps)

    return of_taken(take(make(), inputs, where), where)
