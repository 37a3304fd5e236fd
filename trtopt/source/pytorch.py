"""PyTorch modules exported to ONNX by ``torch.export``, checked against PyTorch first; models in memory as files."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import onnx
import onnx_ir as ir

from trtopt.config import Config, flag
from trtopt.config.paths import product_path
from trtopt.errors import UsageError
from trtopt.events import Event, OnEvent, ignore
from trtopt.graph.artifact import InputSpec, input_spec
from trtopt.source.save import save_model
from trtopt.source.torch_call import Call, bind, enlarged, parse_dynamic, parse_inputs
from trtopt.source.torch_check import ExportCheck, check
from trtopt.source.torch_errors import export_error
from trtopt.source.torch_forms import exportable
from trtopt.source.torch_names import name_axes, name_outputs
from trtopt.source.torch_target import no_inputs, resolve_target
from trtopt.support._lazy import require
from trtopt.support._script import is_target
from trtopt.support.files import check_writable

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

DEFAULT_OPSET = 21
OPSETS = range(18, 25)

_STACK_TRACE = "pkg.torch.onnx.stack_trace"


@dataclass(frozen=True)
class ExportRecord:
    """What was exported, and how it compared with PyTorch."""

    path: Path
    opset: int
    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    nodes: int
    checks: tuple[ExportCheck, ...]


class ExportOptions(TypedDict, total=False):
    """How the graph is written.

    Attributes:
        opset: The ONNX opset, 18 to 24.
        output_names: Names of all outputs, in their order; without, their fields.
        accept: Gets the graph before it is compared; what it raises ends the export.
    """

    opset: int
    output_names: Sequence[str]
    accept: Callable[[ir.Model], None]


def export(
    target: torch.nn.Module | str,
    path: str | Path,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    *,
    inputs: Sequence[str] = (),
    dynamic: Sequence[str] = (),
    on_event: OnEvent = ignore,
    **options: Unpack[ExportOptions],
) -> ExportRecord:
    """Export a PyTorch module to ONNX, and check the graph against PyTorch with ONNX Runtime.

    The module runs in evaluation mode and gets its training flags back. Graph inputs are named after the parameters of
    ``forward``, outputs after the fields and keys of what it gives (``logits``); nodes keep the path of the module they
    come from in their metadata (``pkg.torch.onnx.name_scopes``). The check runs the example inputs, random inputs of
    the same shapes, and other sizes of the dynamic axes; nothing is written unless it passes.

    Args:
        target: A module, or a string: ``package.module:attribute``, ``file.py:function``, ``program.pt2`` (see
            :func:`~trtopt.source.torch_target.resolve_target`; all of them run as code).
        path: The ONNX file to write.
        example_inputs: Positional arguments of ``forward`` as a tuple, or arguments by name.
        inputs: Instead of ``example_inputs``: ``NAME:DTYPE:SHAPE`` each.
        dynamic: ``NAME:AXIS=SYMBOL[:MIN..MAX]`` each.
        options: See :class:`ExportOptions`.

    Raises:
        UsageError: An argument is wrong, or the module fails on the example inputs.
        MissingDependencyError: torch, onnxscript or onnxruntime is missing.
        InvalidModelError: torch cannot export the module.
        GateError: The graph computes something else than the module.
    """
    path, opset = Path(path), options.get("opset", DEFAULT_OPSET)
    check_writable(path)
    if opset not in OPSETS:
        raise UsageError(f"--opset: {opset} cannot be exported", remedy=f"give {OPSETS[0]} to {OPSETS[-1]}")
    torch = require("torch", "torch", "export PyTorch models")
    require("onnxscript", "torch", "export PyTorch models")
    on_event(Event("start", "export", total=3))
    module = resolve_target(target) if isinstance(target, str) else target
    if isinstance(module, torch.export.ExportedProgram):
        if inputs or dynamic or example_inputs is not None:
            raise UsageError(
                "An exported program has its inputs and dynamic axes in it",
                where="--input, --dynamic",
                remedy="leave them out, or export the module again",
            )
        call, program = _program_call(module), module
        mode: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    elif isinstance(module, torch.nn.Module):
        if isinstance(target, str) and not inputs and example_inputs is None:
            raise no_inputs(target, module)
        axes = tuple(parse_dynamic(text) for text in dynamic)
        call = enlarged(bind(module, parse_inputs(inputs) if inputs else example_inputs, axes))
        program, mode = module, _evaluation_mode(module)
    else:
        raise UsageError(f"Not a torch.nn.Module: {type(module).__name__}", remedy="pass the module itself")
    with mode, torch.no_grad():
        example = call.run()
        model = _to_onnx(call, program, opset)
        name_axes(model, call)
        name_outputs(model, example, options.get("output_names", ()))
        if "accept" in options:
            options["accept"](model)
        on_event(Event("advance", "export"))
        checks = check(call, model, example)
    on_event(Event("advance", "export"))
    save_model(model, path)
    on_event(Event("advance", "export"))
    on_event(Event("end", "export"))
    return ExportRecord(
        path=path,
        opset=opset,
        inputs=tuple(input_spec(value) for value in model.graph.inputs),
        outputs=tuple(str(value.name) for value in model.graph.outputs),
        nodes=len(model.graph),
        checks=checks,
    )


def _program_call(program: Any) -> Call:
    if program.example_inputs is None:
        raise UsageError("The exported program has no example inputs", remedy="export the module again")
    args, kwargs = program.example_inputs
    return Call(program.module(), tuple(args), dict(kwargs))


def _to_onnx(call: Call, program: Any, opset: int) -> ir.Model:
    """The module or exported program as a graph, without the paths of this machine's source files.

    Raises:
        InvalidModelError: torch cannot export it.
    """
    torch = require("torch", "torch", "export PyTorch models")
    names = None if program is not call.module else list(call.inputs())
    try:
        with _quiet(), exportable():
            result = torch.onnx.export(
                program,
                call.args,
                kwargs=call.kwargs,
                input_names=names,
                dynamic_shapes=call.dynamic_shapes(),
                opset_version=opset,
                verbose=False,
                dynamo=True,
            )
    except Exception as error:
        raise export_error(call.module, error) from error
    model: ir.Model = result.model
    for node in model.graph.all_nodes():
        node.metadata_props.pop(_STACK_TRACE, None)
    return model


@contextlib.contextmanager
def _evaluation_mode(module: Any) -> Iterator[None]:
    """Evaluation mode, and each submodule's own flag back afterwards."""
    flags = {part: part.training for part in module.modules()}
    if any(flags.values()):
        module.eval()
    try:
        yield
    finally:
        for part, flag in flags.items():
            part.training = flag


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what torch's exporter prints and logs; its exceptions carry the message that counts."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def as_file(model: Any, folder: Path, config: Config, example_inputs: Any = None, on_event: OnEvent = ignore) -> Path:
    """The model as a file: a path as it is; a model in memory, or one that code makes, is written to ``folder``.

    Args:
        model: A path, an ONNX model, a PyTorch module, or ``file.py:attribute`` or ``package.module:attribute``.
        folder: The temporary folder of the run.
        config: Its ``inputs`` and ``dynamic`` say how a PyTorch module is exported.
        example_inputs: Instead of ``inputs``: arguments of ``forward``.
        on_event: Called with the progress of the export.

    Raises:
        UsageError: It is something else, or a module without example inputs; or what is for modules is given for
            another model.
        InvalidModelError: torch cannot export the module.
    """
    is_code = isinstance(model, str) and is_target(model)
    if is_code or (hasattr(model, "forward") and not isinstance(model, (str, Path))):
        path = folder / (f"{product_path(model)}.onnx" if is_code else "model.onnx")
        export(model, path, example_inputs, inputs=config.inputs, dynamic=config.dynamic, on_event=on_event)
        return path
    given = [flag(name) for name in ("inputs", "dynamic") if getattr(config, name)]
    if given:
        raise UsageError(
            f"{given[0]} is for a PyTorch module, and this is an ONNX model or an engine",
            where=str(model)[:200] if isinstance(model, (str, Path)) else "model",
            remedy="leave it out; --min-shapes, --opt-shapes and --max-shapes, or --shapes, give the sizes of its axes",
        )
    if isinstance(model, (str, Path)):
        return Path(model)
    path = folder / "model.onnx"
    if isinstance(model, onnx.ModelProto):
        onnx.save(model, path)
    elif isinstance(model, ir.Model):
        save_model(model, path)
    else:
        raise UsageError(
            f"A {type(model).__name__} is no model",
            where="model",
            remedy="give a path, an ONNX model or a module",
        )
    return path
