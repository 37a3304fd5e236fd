"""Why torch cannot export a module: its message without the noise, the call in the user's code, and what works."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from trtopt import errors
from trtopt.errors import InvalidModelError
from trtopt.support._lazy import require

_REMEDIES = (
    (
        r"inferred a static shape of|specialized it to be a constant",
        "leave that axis out of --dynamic, one size a model; or export with torch.onnx.export(..., dynamo=False), "
        "which keeps recurrent layers of any length, and give its file to trtopt",
    ),
    (
        r"No ONNX function found|No decompositions registered",
        "write the call with PyTorch's own operators, or end the module before it and make the call outside",
    ),
    (
        r"no fake impl|UnsupportedOperator",
        "give the operator a fake implementation (torch.library.register_fake) and PyTorch's own operators inside, or "
        "end the module before it and make the call outside",
    ),
)
_OPERATOR = re.compile(r"CustomOpDef\(([\w:.]+)\)|OpOverload\(op='([\w:.]+)'")
_REMEDY = (
    "change the module so that torch.export can trace it (no branches on tensor values), or make fewer axes dynamic"
)


def export_error(module: Any, error: Exception) -> InvalidModelError:
    """The error to tell: torch's message without colours, advice on debugging torch, and repetition."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split("## Exception summary")[-1]
    text = re.sub(r"For more information, run with \S+|<class '[^']*'>:", "", text).strip()
    text = re.split(r"The error above|Suggested fixes|If you're using|\(Refer to|You may have run|\n\s*\n", text)[0]
    everything = " ".join(str(each) for each in _chain(error))
    operator = _OPERATOR.search(everything)
    call = f"the operator {(operator[1] or operator[2]).replace('.', '::')}" if operator else "the module"
    return InvalidModelError(
        f"torch cannot export {call}: {' '.join(text.split())[:500]}",
        where=_place(module, error) or type(module).__name__,
        remedy=next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, everything)), _REMEDY),
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those it comes from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _place(module: Any, error: Exception) -> str:
    """The layer and the line of the user's code that torch was at, if the stack of the error has them."""
    torch = require("torch", "torch", "export PyTorch models")
    layers = {id(part): f"{name} ({type(part).__name__})".lstrip() for name, part in module.named_modules()}
    own = tuple(f"{Path(str(file)).parent}{os.sep}" for file in (torch.__file__, errors.__file__))
    found = ""
    for each in _chain(error):
        layer = line = ""
        for frame in _frames(each):
            code, inside = frame.f_code, frame.f_locals
            first = inside.get(code.co_varnames[0]) if code.co_varnames else None
            layer = layers.get(id(first), layer)
            if layer and not code.co_filename.startswith(own):
                line = _line(code.co_filename, frame.f_lineno)
            if isinstance(node := inside.get("node"), torch.fx.Node):
                layer, line = _of_node(node) or (layer, line)
        found = ", ".join(part for part in (layer, line) if part) or found
    return found


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _line(file: str, number: int) -> str:
    return f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()}".rstrip(": ")


def _of_node(node: Any) -> tuple[str, str] | None:
    """The layer and line that a node of the exported program comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    lines = re.findall(r'File "(.*)", line (\d+)', node.meta.get("stack_trace") or "")
    if not stack:
        return None
    name, kind = stack[-1][0], stack[-1][1]
    kind = kind if isinstance(kind, str) else kind.__name__
    return f"{name} ({kind.rsplit('.', 1)[-1]})".lstrip(), _line(lines[-1][0], int(lines[-1][1])) if lines else ""
