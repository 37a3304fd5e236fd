"""A judge that is asked once for models of equal structure, also by later runs."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from trtopt.cache.checksummed import MOST_LINE_BYTES, lines_of, open_line, seal_line
from trtopt.cache.folder import PRICES, cache_folder, mark_used, warn_not_kept
from trtopt.errors import TrtoptError
from trtopt.events import OnEvent
from trtopt.graph import edit
from trtopt.judge.protocol import Judge, Priced
from trtopt.judge.subgraph import structure_key
from trtopt.report.schema.steps import Cost
from trtopt.support.files import open_shared, read_shared
from trtopt.support.version import IMPORT_ROOT

_FORMAT = "trtopt.prices/2"
AT_ONCE = 2
"""Questions that a judge is asked at once."""


@dataclass(frozen=True)
class Question:
    """A model whose price is wanted.

    Attributes:
        key: Equal for models that cost the same.
        names: Node names in an order that models of one key share; other nodes are left out of the kernels.
        make: Gives the model; called where the key is not known.
        inner: See the judge.
    """

    key: str
    names: Sequence[str]
    make: Callable[[], ir.Model]
    inner: bool


class PriceFile:
    """Prices kept in a file that all runs with one judge share: JSON lines, each written with one call.

    A line that is torn, damaged, or no price is left out.

    Args:
        keys: What prices depend on beside the model: the judge, its version, the GPU, plugins. The code of trtopt is
            added.
        folder: Where the cache lies; None for ``~/.cache/trtopt``, which need not be writable.
        on_event: Told why the file is not written.
    """

    def __init__(self, keys: Sequence[str], folder: Path | None, on_event: OnEvent) -> None:
        text = json.dumps([_FORMAT, _code(), *keys])
        name = f"{hashlib.sha256(text.encode()).hexdigest()}.jsonl"
        self._folder = cache_folder(folder)
        self.path = self._folder / PRICES / name
        self._on_event = on_event
        self._writes = True
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = open_shared(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            too_large = os.fstat(handle).st_size > MOST_LINE_BYTES
            os.close(handle)
            if too_large:
                self.path.unlink()
        except OSError as error:
            self._stop(error)

    def load(self) -> dict[str, Priced]:
        """The prices by their keys."""
        try:
            lines = lines_of(read_shared(self.path, MOST_LINE_BYTES))
        except (OSError, ValueError):  # told when it was opened for writing
            return {}
        mark_used(self.path)
        return dict(item for line in lines if (item := _read(line)) is not None)

    def add(self, key: str, priced: Priced) -> None:
        """Append one price."""
        if not self._writes:
            return
        total, kernels = priced.total, [[sorted(nodes), moved, time] for nodes, moved, time in priced.kernels]
        record = {"key": key, "total": [total.kernels, total.syncs, total.bytes, total.predicted_us], "of": kernels}
        try:
            with open(open_shared(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0) as handle:
                line = seal_line(record)
                if handle.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        self._writes = False
        warn_not_kept(self._folder, error, self._on_event)


@dataclass
class Prices:
    """Remembers what a judge said, by structure; which node is which is told by their order.

    Attributes:
        judge: Says what a model costs.
        file: Prices of other runs; None for none. What a judge refuses is not kept there.
    """

    judge: Judge
    file: PriceFile | None = None
    _known: dict[str, Priced | TrtoptError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file is not None:
            self._known.update(self.file.load())

    def of(self, model: ir.Model, *, inner: bool) -> Priced:
        """As :meth:`~trtopt.judge.protocol.Judge.price`."""
        names = [str(node.name) for node in edit.all_nodes(model.graph)]
        return self.answer(Question(f"{structure_key(model)} {inner}", names, lambda: model, inner))

    def answer(self, question: Question) -> Priced:
        """The price of one model.

        Raises:
            TrtoptError: The judge raised it for the first model of this key.
        """
        self.ask((question,))
        found = self._known[question.key]
        if isinstance(found, TrtoptError):
            raise found
        return _renamed(found, {str(index): name for index, name in enumerate(question.names)})

    def ask(self, questions: Sequence[Question]) -> None:
        """Let the judge price several models at once, for :meth:`answer` to find."""
        unknown = list({item.key: item for item in questions if item.key not in self._known}.values())
        if len(unknown) < 2:
            found = [self._asked(item) for item in unknown]
        else:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                found = list(pool.map(self._asked, unknown))
        for question, priced in zip(unknown, found, strict=True):
            self._known[question.key] = priced
            if self.file is not None and isinstance(priced, Priced):
                self.file.add(question.key, priced)

    def _asked(self, question: Question) -> Priced | TrtoptError:
        try:
            priced = self.judge.price(question.make(), inner=question.inner)
        except TrtoptError as error:
            return error
        return _renamed(priced, {name: str(index) for index, name in enumerate(question.names)})


def _renamed(priced: Priced, names: Mapping[str, str]) -> Priced:
    """With other node names; nodes that have none are left out."""
    kernels = ((frozenset(names[n] for n in nodes if n in names), moved, time) for nodes, moved, time in priced.kernels)
    return Priced(priced.total, tuple(kernels))


def _read(line: bytes) -> tuple[str, Priced] | None:
    try:
        item = open_line(line)
        kernels, syncs, moved, time = item["total"]
        total = Cost(int(kernels), int(syncs), int(moved), float(time))
        of = tuple((frozenset(map(str, nodes)), int(moved), float(time)) for nodes, moved, time in item["of"])
        return str(item["key"]), Priced(total, of)
    except (ValueError, KeyError, TypeError):
        return None


@functools.cache
def _code() -> str:
    """A hash of the package: how precision is written and kernels are timed decides what a price is."""
    digest = hashlib.sha256()
    for path in sorted((IMPORT_ROOT / "trtopt").rglob("*")):
        if path.suffix in (".py", ".toml"):
            digest.update(path.read_bytes())
    return digest.hexdigest()
