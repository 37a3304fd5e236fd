"""Breaks one place of the code at a time and says whether the tests notice.

    python scripts/mutate.py --checkout OLD --coverage FILE --count 50 --seed 1 --out mutations.jsonl
    python scripts/mutate.py --checkout NEW --replay mutations.jsonl [--coverage FILE] --out replayed.jsonl

The first command takes random lines of ``trtopt/`` and ``recipes/`` that tests execute, makes one change to each (a
comparison, a sign, a constant, a condition, ``and``, a returned value, a keyword argument left out), runs the tests
whose coverage contexts have that line, the smallest first, and writes a JSON line for each mutation, until enough of
them are killed. A test counts only when it passes on the code as it is.

The second command makes the same mutations in another checkout. Modules may have moved and names may have changed: a
mutation is found by its function, its statement and what was changed, and failing that by the most similar statement.
It runs the tests of the same names, then those that FILE has for the line, then the test files of the same names, and
says of each mutation ``caught``, ``not caught`` or ``gone``.

FILE is one coverage data file with contexts (``pytest --cov --cov-context=test``, then ``coverage combine``).
All happens in a copy of the checkout; what is in the file of ``--out`` is not made again.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import coverage

PACKAGES = ("trtopt", "recipes")
MOST_TESTS = 15
LIMIT_SECONDS = 60.0
LONG_STATEMENT = 40
COMPARISONS: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One change of one expression.

    Attributes:
        file: Its file, relative to the checkout.
        line: The first line of its statement.
        function: The function's name, with those of the classes and functions around it.
        statement: The statement, or its first line when others stand in it, as ``ast.unparse`` writes it.
        kind: What was changed.
        ordinal: Which of the equal changes of equal statements in the function it is.
        before: The expression.
        after: What takes its place.
        span: Where the expression begins and ends: line, column in bytes, line, column.
    """

    file: str
    line: int
    function: str
    statement: str
    kind: str
    ordinal: int
    before: str
    after: str
    span: tuple[int, int, int, int]

    @property
    def identity(self) -> tuple[str, str, str, int]:
        return self.function, self.statement, self.kind, self.ordinal


def changes(node: ast.AST) -> Iterator[tuple[str, ast.expr, str]]:
    """The kinds of change of a node: the expression that is replaced, and by what."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right) if type(op) in COMPARISONS:
            yield "comparison", node, ast.unparse(ast.Compare(left, [COMPARISONS[type(op)]()], right))
        case ast.BinOp(left=left, op=op, right=other) if type(op) in OPERATORS:
            yield "operator", node, ast.unparse(ast.BinOp(left, OPERATORS[type(op)](), other))
        case ast.BoolOp(op=op, values=values):
            yield "and or", node, ast.unparse(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", node, ast.unparse(operand)
        case ast.Constant(value=bool(value)):
            yield "constant", node, repr(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", node, repr(value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", test, f"not ({ast.unparse(test)})"
        case ast.comprehension(ifs=[test]):
            yield "condition", test, f"not ({ast.unparse(test)})"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return", value, "None"
        case ast.Call(keywords=[*_, ast.keyword(arg=str())] as keywords):
            yield "argument", node, ast.unparse(ast.Call(node.func, node.args, keywords[:-1]))


class Mutations(ast.NodeVisitor):
    """Collects the mutations of the functions of a file; what runs at import is left out."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Mutation] = []
        self._names: list[str] = []
        self._statement: ast.stmt | None = None
        self._text = ""
        self._seen: dict[tuple[str, str, str], int] = defaultdict(int)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            outer = self._statement, self._text
            self._names.append(node.name)
            self._statement = None if isinstance(node, ast.ClassDef) else self._statement or node
            for child in node.body:
                self.visit(child)
            self._names.pop()
            self._statement, self._text = outer
            return
        if isinstance(node, ast.JoinedStr | ast.pattern | ast.Assert | ast.Raise):
            return
        if isinstance(node, ast.stmt) and self._statement is not None:
            self._visit_statement(node)
            return
        self._collect(node)
        self.generic_visit(node)

    def _visit_statement(self, node: ast.stmt) -> None:
        outer = self._statement, self._text
        lines = ast.unparse(node).splitlines()
        self._statement, self._text = node, lines[0] if hasattr(node, "body") else " ".join(lines)
        self._collect(node)
        for child in ast.iter_child_nodes(node):
            if child is not getattr(node, "annotation", None):
                self.visit(child)
        self._statement, self._text = outer

    def _collect(self, node: ast.AST) -> None:
        if self._statement is None:
            return
        for kind, replaced, after in changes(node):
            function = ".".join(self._names)
            key = (function, self._text, kind)
            mutation = Mutation(
                file=self.file,
                line=self._statement.lineno,
                function=function,
                statement=self._text,
                kind=kind,
                ordinal=self._seen[key],
                before=ast.unparse(replaced),
                after=after,
                span=(replaced.lineno, replaced.col_offset, replaced.end_lineno or 0, replaced.end_col_offset or 0),
            )
            self.found.append(mutation)
            self._seen[key] += 1


def mutations(checkout: Path) -> list[Mutation]:
    """Every mutation of the checkout, in the order of files and lines."""
    found = []
    for path in sorted(path for package in PACKAGES for path in (checkout / package).rglob("*.py")):
        collector = Mutations(path.relative_to(checkout).as_posix())
        collector.visit(ast.parse(path.read_text()))
        found += collector.found
    return found


class Copy:
    """A copy of a checkout, in which code is broken and tests run."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.root = folder / checkout.name
        self._clock = 1_000_000_000
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache")
        shutil.copytree(checkout, self.root, ignore=ignored, symlinks=True)
        shared = checkout.parent / "shared"
        if shared.exists():
            (folder / "shared").symlink_to(shared.resolve())

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        path = self.root / mutation.file
        original = path.read_bytes()
        lines = original.splitlines(keepends=True)
        first, column, last, end = mutation.span
        lines[first - 1 : last] = [lines[first - 1][:column] + f"({mutation.after})".encode() + lines[last - 1][end:]]
        self._write(path, b"".join(lines))
        try:
            yield
        finally:
            self._write(path, original)

    def _write(self, path: Path, content: bytes) -> None:
        """Write it with a time of its own: Python takes a compiled file for stale by time and size."""
        self._clock += 1
        path.write_bytes(content)
        os.utime(path, (self._clock, self._clock))

    def run(self, tests: Sequence[str], seconds: float = LIMIT_SECONDS) -> tuple[str, list[str]]:
        """``passed``, ``failed``, ``timeout``, ``missing`` (no such test) or ``broken``; and the tests that failed."""
        command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-rfE", "-p", "no:cacheprovider", *tests]
        paths = os.pathsep.join((str(self.root), str(self.root / "recipes")))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        output = self.root.parent / "pytest.txt"
        with output.open("w") as stream:
            process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=stream, stderr=stream, start_new_session=True
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return "timeout", []
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output.read_text(errors="replace"), re.M)
        return {0: "passed", 1: "failed", 4: "missing", 5: "missing"}.get(code, "broken"), failed


class Contexts:
    """Which tests execute a line in their own process, those first that execute the least code."""

    def __init__(self, data_file: Path) -> None:
        self._data = coverage.CoverageData(str(data_file))
        self._data.read()
        self._files = sorted(self._data.measured_files())
        self._lines: dict[str, dict[int, list[str]]] = {}
        self._sizes: dict[str, int] = defaultdict(int)
        with closing(sqlite3.connect(data_file)) as database:
            found = "SELECT context, count(*) FROM arc JOIN context ON context_id = context.id GROUP BY context_id"
            for context, arcs in database.execute(found):
                self._sizes[context.rpartition("|")[0]] += arcs

    def tests(self, mutation: Mutation) -> list[str]:
        if mutation.file not in self._lines:
            measured = next((name for name in self._files if name.endswith("/" + mutation.file)), None)
            self._lines[mutation.file] = self._data.contexts_by_lineno(measured) if measured else {}
        contexts = self._lines[mutation.file].get(mutation.line, [])
        tests = {context.rpartition("|")[0] for context in contexts} - {""}
        return sorted(tests, key=lambda test: (self._sizes[test], test))


def find(
    copy: Copy, contexts: Contexts, seed: int, count: int, known: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Mutations in random order, one for each function, until enough are killed."""
    by_line: dict[tuple[str, int], list[Mutation]] = defaultdict(list)
    for mutation in mutations(copy.root):
        by_line[mutation.file, mutation.line].append(mutation)
    places = sorted(by_line)
    chance = random.Random(seed)
    chance.shuffle(places)
    done = {(row["file"], *identity(row)): row for row in known}
    functions: set[tuple[str, str]] = set()
    killed = 0
    for place in places:
        mutation = chance.choice(by_line[place])
        tests = contexts.tests(mutation)[:MOST_TESTS]
        if not tests or (mutation.file, mutation.function) in functions:
            continue
        functions.add((mutation.file, mutation.function))
        row = done.get((mutation.file, *mutation.identity))
        if row is None:
            row = asdict(mutation) | killed_by(copy, mutation, tests)
            yield row
        killed += row["outcome"] == "killed"
        if killed >= count:
            return


def identity(row: Mapping[str, Any]) -> tuple[str, str, str, int]:
    return row["function"], row["statement"], row["kind"], row["ordinal"]


def killed_by(copy: Copy, mutation: Mutation, tests: Sequence[str]) -> dict[str, Any]:
    """The outcome of the tests on the mutated code; of a test that fails without it too, nothing is said."""
    with copy.mutated(mutation):
        state, failed = copy.run(tests)
    if state == "failed" and copy.run(failed)[0] != "passed":
        state = "fails as it is"
    outcome = {"failed": "killed", "passed": "survived"}.get(state, state)
    return {"outcome": outcome, "caught_by": failed if outcome == "killed" else [], "tests": list(tests)}


def same_place(row: Mapping[str, Any], candidates: Sequence[Mutation]) -> tuple[str, Mutation] | None:
    """Where a mutation is in another checkout, and how it was found."""
    name = row["function"].rpartition(".")[2]
    statement, before = row["statement"], row["before"]
    alike = [m for m in candidates if m.kind == row["kind"]]
    in_function = [m for m in alike if m.function.rpartition(".")[2] == name]
    # A short statement, such as ``if graph is None:``, stands in many functions.
    near = [
        m
        for m in alike
        if Path(m.file).name == Path(row["file"]).name
        or quick_ratio(m.function.rpartition(".")[2], name) >= 0.6
        or (m.statement == statement and len(statement) >= LONG_STATEMENT)
    ]

    def closeness(mutation: Mutation) -> float:
        """How much of the names and texts is equal; the same ordinal and file decide between equals."""
        functions = mutation.function, row["function"]
        if not all("." in function for function in functions):  # a method may have become a function
            functions = mutation.function.rpartition(".")[2], name
        pairs = ((mutation.statement, statement), (mutation.before, before), functions)
        score = sum(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs) / len(pairs)
        same = bool(mutation.ordinal == row["ordinal"]), Path(mutation.file).name == Path(row["file"]).name
        return score + 0.01 * same[0] + 0.005 * same[1]

    steps: tuple[tuple[str, Sequence[Mutation], float], ...] = (
        ("same", [m for m in in_function if m.identity == identity(row) and m.before == before], 0.0),
        ("same statement", [m for m in in_function if m.statement == statement and m.before == before], 0.0),
        ("function renamed", [m for m in near if m.statement == statement and m.before == before], 0.0),
        ("statement changed", in_function, 0.75),
        ("similar", [m for m in near if quick_ratio(m.statement, statement) >= 0.75], 0.75),
    )
    for how, found, least in steps:
        best = max(found, key=closeness, default=None)
        if best is not None and closeness(best) >= least:
            return how, best
    return None


def quick_ratio(one: str, other: str) -> float:
    return float(difflib.SequenceMatcher(None, one, other).quick_ratio())


class TestNames:
    """Where the tests of a checkout are, by the names of their functions."""

    __test__ = False

    def __init__(self, root: Path) -> None:
        self._files: dict[str, list[str]] = defaultdict(list)
        self._names: dict[str, list[str]] = defaultdict(list)
        for path in sorted((root / "tests").rglob("test_*.py")):
            file = path.relative_to(root).as_posix()
            self._names[path.name].append(file)
            for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.M):
                self._files[name].append(file)

    def same(self, test: str, parameters: bool) -> list[str]:
        """The test, in whatever file it is now."""
        file, _, name = test.partition("::")
        bare = name.partition("[")[0]
        files = self._files[bare.rpartition("::")[2]]
        return [f"{found}::{name if parameters else bare}" for found in ([file] if file in files else files)]

    def files(self, test: str) -> list[str]:
        """The test files of the same name."""
        return self._names[Path(test.partition("::")[0]).name]


def test_sets(
    row: Mapping[str, Any], mutation: Mutation, names: TestNames, contexts: Contexts | None
) -> Iterator[list[str]]:
    """What to run, one after another, until a test fails."""
    for tests in (row["caught_by"], row["tests"]):
        for parameters in (True, False):
            yield [found for test in tests for found in names.same(test, parameters)]
    if contexts:
        yield contexts.tests(mutation)[: 2 * MOST_TESTS]
    yield sorted({file for test in row["tests"] for file in names.files(test)})


def replay(copy: Copy, contexts: Contexts | None, rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What the tests of another checkout say of the mutations that were killed."""
    candidates, names = mutations(copy.root), TestNames(copy.root)
    for row in rows:
        place = same_place(row, candidates)
        if place is None:
            yield {**row, "replayed": "gone"}
            continue
        how, mutation = place
        yield {
            **row,
            "place": how,
            "new": asdict(mutation),
            **caught_by(copy, mutation, test_sets(row, mutation, names, contexts)),
        }


def caught_by(copy: Copy, mutation: Mutation, sets: Iterator[list[str]]) -> dict[str, Any]:
    """Run sets of tests until one fails that passes without the mutation."""
    states = []
    ran: set[tuple[str, ...]] = set()
    for tests in sets:
        key = tuple(dict.fromkeys(tests))
        if not key or key in ran:
            continue
        ran.add(key)
        with copy.mutated(mutation):
            state, failed = copy.run(key, 5 * LIMIT_SECONDS)
        states.append(f"{len(key)} tests: {state}")
        if state == "failed" and copy.run(failed, 5 * LIMIT_SECONDS)[0] == "passed":
            return {"replayed": "caught", "new_caught_by": failed, "ran": states}
    return {"replayed": "not caught", "new_caught_by": [], "ran": states}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--coverage", type=Path, help="coverage data with contexts; needed without --replay")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=50, help="mutations that have to be killed")
    parser.add_argument("--replay", type=Path, help="mutations to make again in this checkout")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; what is in it is not made again")
    given = parser.parse_args(arguments)
    if not (given.replay or given.coverage):
        parser.error("--coverage is needed to choose lines and tests")
    return given


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    known = read(given.out)
    contexts = given.coverage and Contexts(given.coverage)
    with tempfile.TemporaryDirectory() as temporary, given.out.open("a") as out:
        copy = Copy(given.checkout.resolve(), Path(temporary))
        if given.replay:
            done = {(row["file"], *identity(row)) for row in known}
            killed = [row for row in read(given.replay) if row["outcome"] == "killed"]
            found = replay(copy, contexts, [row for row in killed if (row["file"], *identity(row)) not in done])
            key = "replayed"
        else:
            found, key = find(copy, contexts, given.seed, given.count, known), "outcome"
        for row in found:
            known.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
            place = row.get("new", row)
            print(f"{row[key]:10} {place['file']}:{place['line']} {place['before']} -> {place['after']}", flush=True)
    totals = {state: sum(row[key] == state for row in known) for state in sorted({row[key] for row in known})}
    print(", ".join(f"{count} {state}" for state, count in totals.items()))
    return 1 if totals.get("not caught") else 0


if __name__ == "__main__":
    raise SystemExit(main())
