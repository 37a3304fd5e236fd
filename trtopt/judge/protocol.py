"""What a graph costs, who says it, what a change of it gains, and a judge that is asked once, also by later runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir

from trtopt.cache.code import entry_key
from trtopt.cache.folder import PRICES, Lines
from trtopt.errors import TrtoptError
from trtopt.events import OnEvent
from trtopt.graph import edit
from trtopt.judge.subgraph import structure_key
from trtopt.report.schema.steps import Cost
from trtopt.support.files import hash_file


@dataclass(frozen=True)
class Priced:
    """What a graph costs; of each kernel the names of the nodes it computes, the bytes, and the microseconds."""

    total: Cost
    kernels: tuple[tuple[frozenset[str], int, float], ...]

    def share(self, nodes: Collection[str]) -> Cost:
        """The kernels that compute any of these nodes, all of each; the syncs are those of the whole."""
        mine = [(moved, time) for names, moved, time in self.kernels if not names.isdisjoint(nodes)]
        return Cost(len(mine), self.total.syncs, sum(moved for moved, _ in mine), sum(time for _, time in mine))


class Judge(Protocol):
    """Says what a graph costs on one backend; a plan for one backend is never justified by another's judge."""

    @property
    def name(self) -> str:
        """How reports name it."""

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        """The cost of a model: at its shapes, or where axes are open for its profile (:mod:`trtopt.judge.form`).

        Args:
            model: The model.
            inner: Whether it is a subgraph, whose inputs and outputs are tensors inside an engine and have the types
                that an engine gives them.

        Raises:
            TrtoptError: The graph cannot be judged: the compiler refuses it, or it lacks a cost.
        """


OpenJudge = Callable[..., AbstractContextManager[Judge]]
"""Opens the judge of one target: ``open_judge(precision, io=(), prices=...)``; see ``trtopt.judge.judges``."""


LEAST_GAIN = 0.02
"""Share of the predicted time of the kernels that compute a region that a rewrite must win; a tenth of it where neither
kernels, stream syncs nor bytes grow."""


def grows(before: Cost, after: Cost) -> bool:
    """Whether there is more of anything but time."""
    return after.kernels > before.kernels or after.syncs > before.syncs or after.bytes > before.bytes


def least_gain(before: Cost, after: Cost) -> float:
    """The share of the time to win: :data:`LEAST_GAIN` is for what the model of times may err in where one thing is
    traded for another."""
    return LEAST_GAIN if grows(before, after) else LEAST_GAIN / 10


def no_gain(before: Cost, after: Cost) -> str:
    return f"it does not pay: {changes(before, after)}"


def changes(before: Cost, after: Cost) -> str:
    """Kernels, bytes and time of two forms, in words."""
    return (
        f"{before.kernels} -> {after.kernels} kernels, {before.bytes / 1e6:.2f} -> {after.bytes / 1e6:.2f} MB, "
        f"{before.predicted_us:.1f} -> {after.predicted_us:.1f} us"
    )


AT_ONCE = 2
"""Questions that a judge is asked at once."""


@dataclass(frozen=True)
class Question:
    """A model whose price is wanted; ``make`` gives it, and is called where its key is not known.

    Attributes:
        key: Equal for models that cost the same.
        names: Node names in an order that models of one key share; other nodes are left out of the kernels.
    """

    key: str
    names: Sequence[str]
    make: Callable[[], ir.Model]
    inner: bool


class PriceFile:
    """Prices kept in a file that all runs with one judge share. A line that is no price is left out.

    Args:
        keys: What prices depend on beside the model and the code: the judge, its version, the GPU.
        folder: Where the cache lies; None for ``~/.cache/trtopt``, which need not be writable.
        on_event: Told why the file is not written.
        plugins: Libraries that the compiler loads.

    Raises:
        UsageError: A plugin library cannot be read.
    """

    def __init__(
        self, keys: Sequence[str], folder: str | Path | None, on_event: OnEvent, plugins: Sequence[str] = ()
    ) -> None:
        hashes = [hash_file(Path(name), "The plugin library")[1] for name in plugins]
        self._lines = Lines(PRICES, folder, on_event, entry_key("trtopt.judge", *keys, *hashes))
        self.path = self._lines.path(self._lines.key)

    def load(self) -> dict[str, Priced]:
        """The prices by their keys."""
        return dict(item for record in self._lines.load() if (item := _price_of(record)) is not None)

    def add(self, key: str, priced: Priced) -> None:
        """Append one price."""
        total, kernels = priced.total, [[sorted(nodes), moved, time] for nodes, moved, time in priced.kernels]
        cost = [total.kernels, total.syncs, total.bytes, total.predicted_us]
        self._lines.add({"key": key, "total": cost, "of": kernels})


@dataclass
class Prices:
    """Remembers what a judge said, by structure; which node is which is told by their order.

    Attributes:
        judge: Says what a model costs.
        file: Prices of other runs; None for none. What a judge refuses is not kept there.
        by_name: Whether the judge knows inputs and outputs of whole models by their names, so that these count.
    """

    judge: Judge
    file: PriceFile | None = None
    by_name: bool = False
    _known: dict[str, Priced | TrtoptError] = field(default_factory=dict)
    _started: dict[str, Future[Priced | TrtoptError]] = field(default_factory=dict)
    _pool: ThreadPoolExecutor | None = None

    def __post_init__(self) -> None:
        if self.file is not None:
            self._known.update(self.file.load())

    @property
    def name(self) -> str:
        return self.judge.name

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        return self.answer(self._question(model, inner))

    def begin(self, model: ir.Model, *, inner: bool) -> None:
        """Begin to price a model beside other work, of which a clone is taken, for :meth:`price` to find."""
        question = self._question(model, inner)
        if question.key not in self._known:
            clone = model.clone()
            self.start((replace(question, make=lambda: clone),))

    def _question(self, model: ir.Model, inner: bool) -> Question:
        names = [str(node.name) for node in edit.all_nodes(model.graph)]
        ends = (*model.graph.inputs, *model.graph.outputs) if self.by_name and not inner else ()
        key = " ".join((structure_key(model), str(inner), *(str(value.name) for value in ends)))
        return Question(key, names, lambda: model, inner)

    def start(self, questions: Sequence[Question]) -> None:
        """Begin to price models beside other work, :data:`AT_ONCE` of them at a time, for :meth:`answer` to find."""
        for question in questions:
            if question.key in self._known or question.key in self._started:
                continue
            self._pool = self._pool or ThreadPoolExecutor(AT_ONCE)
            self._started[question.key] = self._pool.submit(self._asked, question)

    def answer(self, question: Question) -> Priced:
        """The price of one model.

        Raises:
            TrtoptError: The judge raised it for the first model of this key.
        """
        if question.key not in self._known:
            begun = self._started.pop(question.key, None)
            waits = begun is None or begun.cancel()  # behind others: it is asked here and now
            self._keep(question.key, self._asked(question) if begun is None or waits else begun.result())
        found = self._known[question.key]
        if isinstance(found, TrtoptError):
            raise found
        return _renamed(found, {str(index): name for index, name in enumerate(question.names)})

    def close(self) -> None:
        """Wait for what was begun; what is priced by then is kept, and what is not begun is left."""
        begun = {key: future for key, future in self._started.items() if not future.cancel()}
        self._started.clear()
        for key, future in begun.items():
            if future.exception() is None:
                self._keep(key, future.result())
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _keep(self, key: str, priced: Priced | TrtoptError) -> None:
        self._known[key] = priced
        if self.file is not None and isinstance(priced, Priced):
            self.file.add(key, priced)

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


def _price_of(item: Mapping[str, Any]) -> tuple[str, Priced] | None:
    try:
        kernels, syncs, moved, time = item["total"]
        total = Cost(int(kernels), int(syncs), int(moved), float(time))
        of = tuple((frozenset(map(str, nodes)), int(moved), float(time)) for nodes, moved, time in item["of"])
        return str(item["key"]), Priced(total, of)
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
