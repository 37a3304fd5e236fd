"""What a graph costs, and who says it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from trtopt.report.schema.steps import Cost


@dataclass(frozen=True)
class Priced:
    """What a graph costs, and which part of it is whose.

    Attributes:
        total: The whole graph.
        kernels: The bytes and microseconds of each kernel, with the names of the nodes it computes.
    """

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
        """The cost of a model whose shapes are static.

        Args:
            model: The model.
            inner: Whether it is a piece of a larger one, whose inputs and outputs are tensors inside an engine and have
                the types an engine gives them.

        Raises:
            TrtoptError: The graph cannot be judged: the compiler refuses it, or it lacks a cost.
        """


OpenJudge = Callable[..., AbstractContextManager[Judge]]
"""Opens the judge of one target: ``open_judge(precision, io=(), prices=...)``; see ``trtopt.judge.judges``."""
