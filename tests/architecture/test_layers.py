"""Imports go downward, heavy packages are loaded on demand, and modules, functions and signatures stay small.

Read from the source of every module, imports inside functions included.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from house import (
    MODULES,
    PACKAGES,
    ROOT,
    Module,
    circles,
    heights,
    imports_of,
    longest_chain,
    module_graph,
    part_of,
    room_graph,
)

RECIPES_MAY_IMPORT = ("rewrite", "graph", "support", "report", "errors")

HEAVY = frozenset(
    "torch torchvision tensorrt tensorrt_rtx onnxruntime polygraphy sklearn scipy".split()
    + "jinja2 ray cryptography PIL pycocotools".split()
)
LIGHT_ROOMS = ("__init__", "__main__", "config", "errors", "events", "cli")
LIGHT_MODULES = {f"trtopt.support.{name}" for name in ("files", "_lazy", "_script", "limits", "version", "words")}
"""Loaded by ``import trtopt`` or ``trtopt --help``: the standard library only."""
ARRAYS = frozenset("numpy onnx onnx_ir ml_dtypes rich".split())

MODULE_LINES, FUNCTION_LINES, PARAMETERS = 600, 60, 7


ORDER = (
    *("errors", "events", "support", "cache", "config", "hardware", "report", "graph", "images"),
    *("roofline", "source", "precision", "accuracy", "engine", "judge", "profiling", "serve"),
    *("gates", "rewrite", "sparsity", "pipeline", "analysis", "api", "fleet", "__init__", "cli", "__main__"),
)
"""The rooms from the bottom, as docs/architecture.md lists them: a room imports rooms before it only."""
FLOORS, DEPTH, FILES_IN_A_FOLDER = 14, 15, 30
LOOSE = {"__init__", "__main__", "api", "errors", "events"}


def project_imports() -> list[tuple[str, str, str]]:
    """(room, room it imports, place) of every import of the project's own modules that leaves the room."""
    found = []
    for module in MODULES:
        room = part_of(module.name)
        for line, name in imports_of(module, in_functions=True, for_types=True):
            if name.split(".")[0] in PACKAGES and part_of(name) != room:
                found.append((room, part_of(name), f"{module.path.relative_to(ROOT)}:{line} imports {name}"))
    return found


def test_the_figures_of_the_house() -> None:
    """Printed first, also where all is well (``pytest -s``)."""
    modules = module_graph()
    rooms = room_graph(modules)
    chain = longest_chain(modules)
    largest, files = max(files_by_folder().items(), key=lambda item: item[1])
    print(f"\n{len(rooms)} rooms, {max(heights(rooms).values())} floors (limit {FLOORS})")
    print(f"import depth {len(chain)} (limit {DEPTH}): {' > '.join(chain)}")
    print(f"most files: {files} in {largest} (limit {FILES_IN_A_FOLDER})")
    assert max(heights(rooms).values()) <= FLOORS
    assert len(chain) <= DEPTH, " > ".join(chain)
    assert files <= FILES_IN_A_FOLDER, largest


def test_there_is_no_import_circle() -> None:
    modules = module_graph()
    assert not circles(modules)
    assert not circles(room_graph(modules))


def test_the_top_of_the_package_holds_the_named_modules_only() -> None:
    assert {path.stem for path in PACKAGES["trtopt"].glob("*.py")} == LOOSE


def test_every_room_has_its_place() -> None:
    assert {part_of(module.name) for module in MODULES} == {*ORDER, "trtopt_recipes"}


def test_imports_go_downward() -> None:
    wrong = [
        place
        for room, target, place in project_imports()
        if room != "trtopt_recipes" and (target not in ORDER or ORDER.index(target) >= ORDER.index(room))
    ]
    assert not wrong, "\n".join(wrong)


def files_by_folder() -> Counter[str]:
    return Counter(str(module.path.parent.relative_to(ROOT)) for module in MODULES if module.name.startswith("trtopt."))


def test_recipes_know_graphs_and_rewriting_only() -> None:
    wrong = [
        place
        for part, target, place in project_imports()
        if part == "trtopt_recipes" and target not in RECIPES_MAY_IMPORT
    ]
    assert not wrong, "\n".join(wrong)


def test_the_core_names_no_recipe() -> None:
    wrong = [place for _, target, place in project_imports() if target == "trtopt_recipes"]
    assert not wrong, "\n".join(wrong)


def test_nothing_that_is_judged_knows_the_judge_of_the_benchmarks() -> None:
    """What ships is held against plain by its own judge; that of the benchmarks says whether it was right."""
    scripts = {path.stem for path in (ROOT / "benchmarks").rglob("*.py")} - sys.stdlib_module_names
    wrong = [
        f"{module.path.relative_to(ROOT)}:{line} imports {name}"
        for module in MODULES
        for line, name in imports_of(module, in_functions=True, for_types=True)
        if name.split(".")[0] in scripts | {"benchmarks"}
    ]
    assert not wrong, "\n".join(wrong)


def test_heavy_packages_are_never_imported_at_module_level() -> None:
    wrong = [
        f"{module.path.relative_to(ROOT)}:{line} imports {name}"
        for module in MODULES
        for line, name in imports_of(module, in_functions=False)
        if name.split(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


def test_what_the_command_loads_first_imports_the_standard_library_only() -> None:
    wrong = [
        f"{module.path.relative_to(ROOT)}:{line} imports {name}"
        for module in MODULES
        if part_of(module.name) in LIGHT_ROOMS or module.name in LIGHT_MODULES
        for line, name in imports_of(module, in_functions=False)
        if name.split(".")[0] in ARRAYS
    ]
    assert not wrong, "\n".join(wrong)


def functions_of(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(module.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring, which has to say as much as the caller needs."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    text = function.body[0]
    return lines - ((text.end_lineno or text.lineno) - text.lineno + 1)


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters without ``self`` and ``cls``; ``*args`` and ``**kwargs`` count as one each."""
    given = function.args
    names = [item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    named = [name for position, name in enumerate(names) if position or name not in ("self", "cls")]
    return len(named) + sum(item is not None for item in (given.vararg, given.kwarg))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_modules_functions_and_signatures_stay_small(module: Module) -> None:
    wrong = []
    lines = len(module.path.read_text(encoding="utf-8").splitlines())
    if lines > MODULE_LINES:
        wrong.append(f"{lines} lines (limit {MODULE_LINES})")
    for function in functions_of(module):
        length = code_lines(function)
        if length > FUNCTION_LINES:
            wrong.append(f"{function.name} has {length} lines (limit {FUNCTION_LINES})")
        if parameter_count(function) > PARAMETERS:
            wrong.append(f"{function.name} has {parameter_count(function)} parameters (limit {PARAMETERS})")
    assert not wrong, f"{module.path.relative_to(ROOT)}: {'; '.join(wrong)}"


def test_no_assert_and_no_behaviour_by_environment_variable() -> None:
    """``python -O`` removes an assert. The command line alone may ask for the terminal's width."""
    wrong = [
        f"{module.path.relative_to(ROOT)}:{node.lineno}"
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and part_of(module.name) != "cli")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_library_prints_nothing() -> None:
    wrong = [
        f"{module.path.relative_to(ROOT)}:{node.lineno}"
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and part_of(module.name) != "cli"
        and not any(keyword.arg == "file" for keyword in node.keywords)
    ]
    assert not wrong, "\n".join(wrong)
