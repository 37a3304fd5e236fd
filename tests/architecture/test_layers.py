"""Imports go downward, heavy packages are loaded on demand, and modules, functions and signatures stay small.

Read from the source of every module, imports inside functions included.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"trtopt": ROOT / "trtopt", "trtopt_recipes": ROOT / "recipes" / "trtopt_recipes"}

TIERS = (
    (
        *("config", "config_file", "batch_sizes", "report", "errors", "events", "clock", "files", "outputs"),
        *("_lazy", "_script", "cache_folder", "sealed", "limits", "json_text"),
    ),
    ("graph", "hardware", "runtime"),
    ("roofline",),
    ("rewrite",),
    ("source", "precision", "accuracy", "engine"),
    ("sparsity", "profiling", "serve"),
    ("gates",),
    ("pipeline", "pipeline_error", "pipeline_host", "pipeline_imports", "pipeline_judge", "pipeline_repair"),
    ("pipeline_analyze", "pipeline_calibrate", "pipeline_options"),
    ("pipeline_guard", "pipeline_improve", "pipeline_sensitivity", "pipeline_sparse_record"),
    ("pipeline_qdq", "pipeline_search"),
    ("pipeline_precision", "pipeline_sparse_search"),
    ("pipeline_io", "pipeline_sparse", "pipeline_manifest"),
    ("pipeline_write",),
    ("api_build", "api_analyze", "api_check", "api_sensitivity", "api_triton"),
    ("api_profile",),
    ("api",),
    ("fleet",),
    ("api_sweep",),
    ("cli", "__main__"),
)
"""From the bottom: a part may import what lies below it."""

SIBLINGS = {
    ("config_file", "config"): "the file sets the configuration's fields",
    ("config", "batch_sizes"): "an option of its own form",
    ("batch_sizes", "errors"): "a wrong batch size is a usage error",
    ("clock", "events"): "a warning is an event",
    ("config", "errors"): "a wrong option is a usage error",
    ("config_file", "errors"): "so is a wrong key in the file",
    ("config_file", "files"): "the file may be no file",
    ("outputs", "config"): "the options say which files are read and written",
    ("outputs", "files"): "one check of an output's path",
    ("outputs", "errors"): "an output over an input is a usage error",
    ("cache_folder", "errors"): "no home folder is a usage error",
    ("cache_folder", "events"): "what cannot be kept is a warning",
    ("files", "errors"): "a file that cannot be written is a usage error",
    ("_lazy", "errors"): "a missing package is a dependency error",
    ("_script", "errors"): "a wrong FILE.py:FUNCTION is a usage error",
    ("sealed", "files"): "a sealed file is written whole or not at all",
    ("cache_folder", "files"): "others write to the folder as well",
    ("cache_folder", "sealed"): "what is in the folder is checked",
    ("report", "_lazy"): "the plotting package is loaded when a page is drawn",
    ("report", "files"): "reports are written whole or not at all",
    ("report", "json_text"): "a report is JSON that anybody may have written",
    ("report", "errors"): "a report file that is wrong is a usage error",
    ("__main__", "cli"): "python -m trtopt is the command",
}
"""Imports between parts of one tier, with the reason."""

RECIPES_MAY_IMPORT = ("rewrite", "graph", "report", "errors")

HEAVY = frozenset(
    "torch torchvision tensorrt tensorrt_rtx onnxruntime polygraphy sklearn scipy plotly ray cryptography".split()
)
LIGHT_MODULES = ("__init__", "__main__", "batch_sizes", "config", "config_file", "errors", "events", "files", "outputs")
LIGHT_MODULES += ("_lazy", "_script", "limits")
"""Loaded by ``import trtopt`` or ``trtopt --help``, as are the modules of cli: the standard library only."""
ARRAYS = frozenset("numpy onnx onnx_ir ml_dtypes rich".split())

MODULE_LINES, FUNCTION_LINES, PARAMETERS = 400, 60, 7


@dataclass(frozen=True)
class Module:
    """A source file: ``name`` with dots, and whether it is a package's ``__init__``."""

    name: str
    path: Path
    is_package: bool

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))


def modules() -> list[Module]:
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            found.append(Module(".".join(parts[:-1] if is_package else parts), path, is_package))
    return found


MODULES = modules()
NAMES = frozenset(module.name for module in MODULES)


def part_of(name: str) -> str:
    """``engine`` for ``trtopt.engine.build``; ``__init__`` for ``trtopt``; ``trtopt_recipes`` for its modules."""
    package, *rest = name.split(".")
    if package != "trtopt":
        return package
    return rest[0] if rest else "__init__"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_of(module: Module, *, in_functions: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of what ``module`` imports at run time; a name imported from a package names its module.

    ``from trtopt import pipeline`` gives ``trtopt.pipeline``; ``from trtopt import build`` gives ``trtopt``.
    """
    waiting: list[ast.AST] = [module.tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in NAMES else base
        elif is_type_checking(node):
            continue
        elif in_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    base = parts[: len(parts) - node.level + (1 if module.is_package else 0)]
    return ".".join([*base, node.module] if node.module else base)


def project_imports() -> list[tuple[str, str, str]]:
    """(part, part it imports, place) of every import of the project's own modules that leaves the part."""
    found = []
    for module in MODULES:
        part = part_of(module.name)
        for line, name in imports_of(module, in_functions=True):
            if name.split(".")[0] in PACKAGES and part_of(name) != part:
                found.append((part, part_of(name), f"{module.path.relative_to(ROOT)}:{line} imports {name}"))
    return found


def tier(part: str) -> int:
    return next(index for index, parts in enumerate(TIERS) if part in parts)


def test_every_module_has_a_tier() -> None:
    known = {part for parts in TIERS for part in parts} | {"__init__", "trtopt_recipes"}
    assert {part_of(module.name) for module in MODULES} <= known


def test_imports_go_downward() -> None:
    wrong = [
        place
        for part, target, place in project_imports()
        if part not in ("__init__", "trtopt_recipes")
        and target != "__init__"
        and (part, target) not in SIBLINGS
        and (target == "trtopt_recipes" or tier(target) >= tier(part))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_sibling_exception_is_in_use_and_within_one_tier() -> None:
    seen = {(part, target) for part, target, _ in project_imports()}
    assert set(SIBLINGS) <= seen, set(SIBLINGS) - seen
    assert all(tier(part) == tier(target) for part, target in SIBLINGS)


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
        if part_of(module.name) in (*LIGHT_MODULES, "cli")
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
