"""What the service can do: a digit from 8x8 pixels, an embedding of a text, the classes of a picture."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import BaseModel, Field, StringConstraints

from trtopt.errors import UsageError
from trtopt.graph.artifact import InputSpec
from trtopt.images.decode import prepare
from trtopt.images.parse import parse_preprocess
from trtopt.serve.tensors import TensorSpec

Row = dict[str, np.ndarray]
"""Arrays by name, without the axis of the batch."""


class RequestError(UsageError):
    """A request is well formed, and the task can do nothing with it."""


class Task(Protocol):
    """A request becomes the rows of a batch, and its row of the outputs the reply.

    Attributes:
        request: The body of a request.
        reply: The body of a reply.
        example: A request to warm up with.
        largest_request_bytes: Longer bodies are refused unread.
    """

    request: type[BaseModel]
    reply: type[BaseModel]
    example: BaseModel
    largest_request_bytes: int

    def fit(self, inputs: Sequence[TensorSpec]) -> None:
        """Be told of the model's inputs, before the first request.

        Raises:
            UsageError: They are not those of the task.
        """

    def prepare(self, body: Any) -> Row:
        """The inputs of one request. Rows of the same shapes share a batch.

        Raises:
            RequestError: There is no reply to it.
        """

    def answer(self, row: Row, outputs: Row) -> BaseModel:
        """The reply, from the inputs and the outputs of one request."""


class Pixels(BaseModel):
    """An image of 8x8 pixels, row by row, from 0 (white) to 1 (black)."""

    pixels: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=64, max_length=64)]


class Digit(BaseModel):
    """The digit, and the score of each of the ten."""

    digit: int
    scores: list[float]


class Digits:
    """The network of ``examples/digits.py``."""

    request: type[BaseModel] = Pixels
    reply: type[BaseModel] = Digit
    example: BaseModel = Pixels(pixels=[0.0] * 64)
    largest_request_bytes = 4096

    def fit(self, inputs: Sequence[TensorSpec]) -> None:
        """The input is called as ``examples/digits.py`` calls it."""

    def prepare(self, body: Pixels) -> Row:
        """input [1, 8, 8]."""
        return {"input": np.array(body.pixels, np.float32).reshape(1, 8, 8)}

    def answer(self, row: Row, outputs: Row) -> BaseModel:
        """The largest of ten scores."""
        scores = next(iter(outputs.values()))
        return Digit(digit=int(scores.argmax()), scores=scores.tolist())


class Text(BaseModel):
    """A text; what is beyond the model's longest input is cut off."""

    text: Annotated[str, StringConstraints(min_length=1, max_length=10_000)]


class Embedding(BaseModel):
    """The embedding, of length 1."""

    embedding: list[float]


class Texts:
    """A sentence-transformers model: BERT's inputs, the last hidden state [batch, sequence, width], mean pooling.

    Args:
        tokenizer: The model's ``tokenizer.json``.
        longest: Tokens after which a text is cut off.

    Raises:
        UsageError: The file is not there, or is no tokenizer.
    """

    request: type[BaseModel] = Text
    reply: type[BaseModel] = Embedding
    example: BaseModel = Text(text="a")
    largest_request_bytes = 65536

    _STEP = 16
    """Lengths are padded to a multiple. A text meets texts of its own length only, so that its reply does not depend on
    what else is in the batch, to the last bit; and little is computed for padding."""

    def __init__(self, tokenizer: Path, longest: int = 128) -> None:
        from tokenizers import Tokenizer

        if not tokenizer.is_file():
            raise UsageError("There is no such file", where=str(tokenizer), remedy="check the path of --tokenizer")
        self._longest = longest
        try:
            self._tokens = Tokenizer.from_file(str(tokenizer))
        except Exception as error:  # it has no class of its own
            raise UsageError(
                f"The file is not a tokenizer: {error}", where=str(tokenizer), remedy="check the path of --tokenizer"
            ) from error
        self._tokens.enable_truncation(longest)
        self._tokens.no_padding()

    def fit(self, inputs: Sequence[TensorSpec]) -> None:
        """The inputs are called as BERT's are."""

    def prepare(self, body: Text) -> Row:
        """input_ids, attention_mask and token_type_ids [sequence], int64."""
        found = self._tokens.encode(body.text)
        if not found.ids:
            raise RequestError("The tokenizer finds no token in the text", where="body.text", remedy="send words")
        padded = min(-(-len(found.ids) // self._STEP) * self._STEP, self._longest)
        row = {"input_ids": found.ids, "attention_mask": found.attention_mask, "token_type_ids": found.type_ids}
        return {name: np.pad(np.array(ids, np.int64), (0, padded - len(ids))) for name, ids in row.items()}

    def answer(self, row: Row, outputs: Row) -> BaseModel:
        """The mean of the tokens' states, made to have length 1."""
        states, mask = next(iter(outputs.values())), row["attention_mask"].astype(bool)
        mean = states[mask].mean(axis=0)
        return Embedding(embedding=(mean / max(float(np.linalg.norm(mean)), 1e-12)).tolist())


class Picture(BaseModel):
    """A JPEG, PNG or WebP file in base64."""

    image: Annotated[str, StringConstraints(min_length=1)]


class Classes(BaseModel):
    """The five classes of the largest scores, the first one the largest."""

    classes: list[int]
    scores: list[float]


_ONE_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class Images:
    """A classifier of pictures: one input [batch, 3, height, width] or [batch, height, width, 3], scores as its output.

    Args:
        preprocess: What ``trtopt build --preprocess`` was given.
    """

    request: type[BaseModel] = Picture
    reply: type[BaseModel] = Classes
    example: BaseModel = Picture(image=_ONE_PIXEL)
    largest_request_bytes = 8 << 20

    _MOST = 5

    def __init__(self, preprocess: str) -> None:
        self._preprocess = preprocess

    def fit(self, inputs: Sequence[TensorSpec]) -> None:
        """Prepare pictures for the model's input."""
        spec = inputs[0]
        self._name = spec.name
        self._how = parse_preprocess(self._preprocess, InputSpec(spec.name, spec.dtype, spec.shape or ()))

    def prepare(self, body: Picture) -> Row:
        """The model's input, decoded as ``trtopt build`` decodes its samples."""
        try:
            content = base64.b64decode(body.image, validate=True)
        except ValueError as error:
            raise RequestError("The picture is no base64", where="body.image", remedy="encode the file") from error
        with tempfile.NamedTemporaryFile(suffix=".picture") as file:
            file.write(content)
            file.flush()
            try:
                return {self._name: prepare(Path(file.name), self._how)[0]}
            except UsageError as error:
                raise RequestError(error.what, where="body.image", remedy="send a JPEG, PNG or WebP file") from error

    def answer(self, row: Row, outputs: Row) -> BaseModel:
        """The largest scores of the first output."""
        scores = next(iter(outputs.values())).reshape(-1)
        order = np.argsort(scores)[::-1][: self._MOST]
        return Classes(classes=order.tolist(), scores=scores[order].astype(float).tolist())


def stacked(rows: Sequence[Row], names: Sequence[str]) -> dict[str, np.ndarray]:
    """The inputs of a batch; inputs that the model does not have are left out."""
    return {name: np.stack([row[name] for row in rows]) for name in names}
