"""One random network through every recipe: alone, all together, and in mixtures."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from random_networks import random_network

from trtopt.engine.request import ShapeProfile
from trtopt.errors import TrtoptError
from trtopt.events import Event
from trtopt.graph import invariants
from trtopt.graph.artifact import ModelArtifact
from trtopt.graph.edit import all_nodes
from trtopt.judge.protocol import Priced
from trtopt.report.schema.steps import Cost
from trtopt.rewrite.driver import apply
from trtopt.rewrite.protocol import Findings, Match, Recipe, Stage, Target
from trtopt.rewrite.registry import all_recipes
from trtopt.rewrite.sweeps import Judging
from trtopt.source.onnx_file import load
from trtopt.support.ort_session import OrtSession

BOUND = 1e-5
"""Largest difference of an output over its largest element."""

TARGETS = (Target("tensorrt-rtx", "fp16", "8.9"), Target("tensorrt", "fp16", "8.9"), Target())
BAD_REASONS = ("rolled back", "taken back", "the results differ")
"""How refusals begin, or what they hold, that no recipe should cause."""

_JUDGED_EVERY = 5

_OWN_NOISE = 4.0
"""A difference may be so many times what rounding alone moves the output by."""


@dataclass
class Findout:
    """What came of one or more networks.

    Attributes:
        fired: Rewrites by recipe, each recipe alone.
        problems: What went wrong, in words that name seed and recipes.
        largest: Largest difference over the output's scale.
    """

    fired: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    largest: float = 0.0

    def add(self, other: Findout) -> None:
        self.fired += other.fired
        self.problems += other.problems
        self.largest = max(self.largest, other.largest)


@dataclass(frozen=True)
class Picky:
    """A recipe as a judge would have it: some of its matches only, in a random order of their alternatives.

    Recipes that no judge is asked about have all their matches, or none.
    """

    recipe: Recipe
    seed: int

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def stage(self) -> Stage:
        return self.recipe.stage

    @property
    def lossless(self) -> bool:
        return self.recipe.lossless

    def find(self, model: ir.Model, target: Target) -> Findings:
        found = self.recipe.find(model, target)
        if self.stage < Stage.FUSE:
            return found if self._draw("") < 0.7 else Findings()
        kept = [match for match in found.matches if self._draw(match.label) < 0.5]
        order = {match: (kept.index(_first(kept, match)), self._draw(match.label + match.choice)) for match in kept}
        return Findings(tuple(sorted(kept, key=order.__getitem__)), found.refusals)

    def rewrite(self, model: ir.Model, match: Match) -> object:
        return self.recipe.rewrite(model, match)

    def _draw(self, text: str) -> float:
        return float(np.random.default_rng([self.seed, *f"{self.name} {text}".encode()]).random())


def _first(matches: list[Match], wanted: Match) -> Match:
    return next(match for match in matches if match.label == wanted.label)


@dataclass
class RandomJudge:
    """Says of most graphs that they cost less than those before."""

    rng: np.random.Generator
    calls: int = 0
    name: str = "random"

    def price(self, model: ir.Model, *, inner: bool) -> Priced:
        self.calls += 1
        each = 0.97**self.calls * float(self.rng.choice((1.0, 1.2)))
        kernels = tuple((frozenset({str(node.name)}), 1, each) for node in all_nodes(model.graph))
        return Priced(Cost(1, 0, 1, 1e3 * each), kernels)


@dataclass
class _Subject:
    seed: int
    artifact: ModelArtifact
    feeds: list[dict[str, np.ndarray]]
    expected: list[list[np.ndarray]]
    target: Target
    found: Findout = field(default_factory=Findout)

    def run(self, label: str, recipes: tuple[Recipe, ...], judging: Judging | None = None) -> ModelArtifact:
        """Apply recipes and compare; problems are kept."""
        warnings: list[str] = []

        def listen(event: Event) -> None:
            # A random judge may find the whole slower with every recipe: no fault of a recipe.
            if event.kind == "warning" and not event.text.startswith("the network is slower"):
                warnings.append(event.text)

        try:
            rewritten = apply(self.artifact, recipes, strict=True, target=self.target, judging=judging, on_event=listen)
            after = rewritten.artifact
            invariants.check(after.model, invariants.signature(self.artifact.model))
            reasons = [item.reason for step in after.steps for item in step.refusals]
            wrong = warnings + [reason for reason in reasons if any(bad in reason for bad in BAD_REASONS)]
            if after.model is not self.artifact.model:
                wrong += self._differences(after)
        except (TrtoptError, ValueError) as error:
            after, wrong = self.artifact, [f"{type(error).__name__}: {error}"]
        self.found.problems += [f"{label}: seed {self.seed}: {' '.join(text.split())[:300]}" for text in wrong]
        return after

    def _differences(self, after: ModelArtifact) -> list[str]:
        wrong = []
        with OrtSession(after.model, threads=1) as session:
            for feed, expected in zip(self.feeds, self.expected, strict=True):
                found = zip(after.model.graph.outputs, expected, session.run(feed), strict=True)
                for index, (spec, one, other) in enumerate(found):
                    if one.shape != other.shape or one.dtype != other.dtype:
                        wrong.append(f"{spec.name} is {other.dtype}{other.shape}, was {one.dtype}{one.shape}")
                        continue
                    if not np.isfinite(one).all():  # a network that overflows may do so at another place
                        continue
                    scale = float(np.abs(one).max(initial=0)) or 1.0
                    off = float(np.abs(one - other).max(initial=0)) / scale
                    if not off <= BOUND and not off <= _OWN_NOISE * self._own_noise(feed, expected)[index]:
                        wrong.append(f"{spec.name} differs by {off:.1e} of its scale, batch {len(one)}")
                    elif off <= BOUND:
                        self.found.largest = max(self.found.largest, off)
        return wrong

    def _own_noise(self, feed: dict[str, np.ndarray], expected: list[np.ndarray]) -> list[float]:
        """By how much of its scale each output of the original moves when ONNX Runtime leaves its own fusions, or when
        every input moves by one unit in the last place: a badly conditioned network shows no more than that."""
        rng = np.random.default_rng(self.seed)
        moved = {name: np.nextafter(x, x + rng.choice((-1, 1), x.shape).astype(x.dtype)) for name, x in feed.items()}
        model = self.artifact.model
        with OrtSession(model, threads=1) as fused, OrtSession(model, threads=1, fuse=False) as bare:
            others = [fused.run(moved), bare.run(feed)]
        return [
            max(float(np.abs(one - other[index]).max(initial=0)) for other in others)
            / (float(np.abs(one).max(initial=0)) or 1.0)
            for index, one in enumerate(expected)
        ]


def check_all(seeds: Iterable[int], show: Callable[[str], None] | None = None, *, processes: int = 2) -> Findout:
    """:func:`check` of many seeds; ``show`` is told each problem as it comes. One process is this one."""
    total = Findout()
    with contextlib.ExitStack() as stack:
        checked = map(check, seeds)
        if processes > 1:
            pool = stack.enter_context(ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")))
            checked = pool.map(check, seeds, chunksize=4)
        for found in checked:
            total.add(found)
            if show is not None:
                for problem in found.problems:
                    show(problem)
    return total


def check(seed: int) -> Findout:
    """Put the network of a seed through every recipe alone, all, and random mixtures."""
    subject = _subject(seed)
    recipes = all_recipes()
    firing: list[Recipe] = []
    for recipe in recipes:
        after = subject.run(recipe.name, (recipe,))
        changes = sum(step.changes for step in after.steps if step.name == recipe.name)
        if changes:
            subject.found.fired[recipe.name] += changes
            firing.append(recipe)
    subject.run("all recipes", recipes)
    mixture: tuple[Recipe, ...] = tuple(Picky(recipe, seed) for recipe in recipes)  # type: ignore[misc]
    subject.run("a mixture of recipes", mixture)
    if seed % _JUDGED_EVERY == 0:
        profile = ShapeProfile({"x": (subject.feeds[-1]["x"].shape,) * 3})
        subject.run("judged recipes", recipes, Judging(RandomJudge(np.random.default_rng(seed)), (profile,)))
    return subject.found


def _subject(seed: int) -> _Subject:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "random.onnx")
        onnx.save(random_network(seed), path)
        artifact = load(path)
    rng = np.random.default_rng(seed)
    feeds = []
    for batch in (1, 3):
        shape = [size if isinstance(size, int) else batch for size in artifact.inputs[0].shape]
        feeds.append({"x": rng.standard_normal(shape, dtype=np.float32)})
    with OrtSession(artifact.model, threads=1) as session:
        expected = [session.run(feed) for feed in feeds]
    return _Subject(seed, artifact, feeds, expected, TARGETS[seed % len(TARGETS)])
