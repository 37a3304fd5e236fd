"""What a recipe is."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import onnx_ir as ir

from trtopt.report.schema.steps import Refusal

__all__ = ["Findings", "Match", "Recipe", "Refusal", "Stage", "Target"]


class Stage(enum.IntEnum):
    """When a recipe runs: recipes of an earlier stage see the graph first."""

    CLEAN = 1
    FOLD = 2
    FUSE = 3
    ALIGN = 4
    LAYOUT = 5


@dataclass(frozen=True)
class Target:
    """What the graph is prepared for.

    Attributes:
        backend: ``tensorrt`` or ``tensorrt-rtx``; None when the graph is for either.
        precision: ``fp32``, ``tf32``, ``fp16``, ``bf16`` or ``int8``; None when the graph keeps its types.
        compute_capability: ``8.9``, ...; None when it is for several.
    """

    backend: str | None = None
    precision: str | None = None
    compute_capability: str | None = None


@dataclass(frozen=True)
class Match:
    """One place a recipe applies to.

    Attributes:
        nodes: Every node the rewrite changes or removes, the one it is named after first; of the model
            :meth:`Recipe.find` got.
        values: Values concerned that no node makes (initializers).
        choice: Which of several ways to rewrite the place; matches that agree in their first node are alternatives, of
            which the best is taken (the first, where nobody judges). Empty when there is one way.
    """

    nodes: tuple[ir.Node, ...]
    values: tuple[ir.Value, ...] = ()
    choice: str = ""

    @property
    def label(self) -> str:
        """The name it goes by in reports."""
        return str(self.nodes[0].name if self.nodes else self.values[0].name)


@dataclass(frozen=True)
class Findings:
    """Where a recipe applies, and where it nearly does and why not."""

    matches: tuple[Match, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    @classmethod
    def of(cls, places: Sequence[tuple[Match, str]]) -> Findings:
        """Matches, and of those for which a reason is given why they are none, refusals."""
        matches = tuple(match for match, reason in places if not reason)
        return cls(matches, tuple(Refusal(match.label, reason) for match, reason in places if reason))


@runtime_checkable
class Recipe(Protocol):
    """One graph rewrite: a frozen dataclass whose fields are its options.

    The class docstring has the headings Rewrite, Requires, Why faster, Numerics and Refuses when.
    """

    @property
    def name(self) -> str:
        """Kebab-case; names the pattern that is found."""

    @property
    def stage(self) -> Stage:
        """When it runs."""

    @property
    def lossless(self) -> bool:
        """Whether results are equal within rounding of the arithmetic that is done anyway."""

    def find(self, model: ir.Model, target: Target) -> Findings:
        """The places it applies to, in graph order. Pure.

        A match stays valid when the matches before it were rewritten.
        """

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Edit ``model``, a clone, at one match found in it.

        Returns:
            None when done; a refusal when the match turned out not to be possible and nothing was changed.
        """
