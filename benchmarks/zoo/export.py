"""Export the zoo: one ONNX file a network, with dynamic axes, by torch.onnx.export(dynamo=True).

    python benchmarks/zoo/export.py --folder FOLDER [--only NAME,...] [--again]

Runs in the environment of requirements.txt. Each network is exported in a process of its own; what is there is kept.
``FOLDER/NAME.npz`` has the example inputs; ``FOLDER/exports.json`` has inputs, axes, seconds, peak memory and, where it
failed, the reason.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import resource
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

OPSET = 20
SECONDS, GIGABYTES = 300, 12
MOST_INSIDE = 1_900_000_000
"""Bytes of weights from which on they are in a file of their own: protobuf ends at 2 GiB."""
DIALECTS = {
    "torchscript": "resnet18 mobilenetv2 vit bert swin_tiny whisper_encoder vae_decoder yolov8 lstm segformer".split(),
    "raw": "mobilenetv2 bert vae_decoder".split(),
    "trtopt": "resnet18 mobilenetv2 deit_small bert swin_tiny whisper_encoder yolov8 lstm dlrm_bags gpt2".split(),
}
"""Networks that are exported by the TorchScript exporter too (opset 17), by dynamo without its optimizations, and by
``trtopt export``."""


def written(exported: Any, subject: Any, path: Path, dialect: str) -> None:
    """Write the ONNX file in a dialect."""
    import torch

    inputs, names = tuple(subject.inputs.values()), list(subject.inputs)
    if dialect == "torchscript":
        axes = {name: dict(axes) for name, axes in subject.axes.items()}
        torch.onnx.export(exported, inputs, path, dynamo=False, opset_version=17, input_names=names, dynamic_axes=axes)
        return
    if dialect == "trtopt":
        from trtopt.source.pytorch import export as trtopt_export

        dynamic = [f"{name}:{axis}={label}" for name, axes in subject.axes.items() for axis, label in axes.items()]
        trtopt_export(named(exported, names), path, subject.inputs, dynamic=dynamic, opset=OPSET)
        return
    program = torch.onnx.export(
        exported,
        inputs,
        dynamo=True,
        opset_version=OPSET,
        input_names=names,
        dynamic_shapes={"inputs": tuple(subject.axes.get(each) or None for each in names)},
        optimize=dialect != "raw",
        verbose=False,
    )
    size = sum(each.numel() * each.element_size() for each in exported.parameters())
    program.save(path, external_data=size > MOST_INSIDE)


def named(exported: Any, names: list[str]) -> Any:
    """The module with a parameter for each input, by which ``trtopt export`` names them."""
    signature = inspect.Signature([inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in names])
    forward = exported.forward

    def call(*inputs: Any, **more: Any) -> Any:
        return forward(*signature.bind(*inputs, **more).args)

    call.__signature__ = signature  # type: ignore[attr-defined]
    exported.forward = call
    return exported


def export(name: str, path: Path) -> dict[str, Any]:
    """Export a network in this process; ``bert.torchscript`` is that of another dialect."""
    import numpy as np
    import onnx
    import torch
    from subject import made

    base, _, dialect = name.partition(".")
    exported, subject = made(base)
    inputs = tuple(subject.inputs.values())
    with torch.no_grad():
        found = exported(*inputs)
    outputs = list(found) if isinstance(found, (tuple, list)) else [found]
    spread = [float(each.float().std()) for each in outputs if each.numel() > 1]
    if not all(torch.isfinite(each.float()).all() for each in outputs):
        raise ValueError("an output is not finite")
    written(exported, subject, path, dialect)
    graph = onnx.load(path, load_external_data=False).graph
    nodes = len(graph.node)
    np.savez(path.with_suffix(".npz"), **{each: value.numpy() for each, value in subject.inputs.items()})
    return {
        "inputs": {
            each: [str(value.dtype).removeprefix("torch."), *value.shape] for each, value in subject.inputs.items()
        },
        "axes": {each: {str(axis): label for axis, label in axes.items()} for each, axes in subject.axes.items()},
        "outputs": [list(each.shape) for each in outputs],
        "outputs_std": [float(f"{each:.3g}") for each in spread],
        "parameters": sum(each.numel() for each in exported.parameters()),
        "nodes": nodes,
    }


def _work(send: Connection, name: str, part: Path) -> None:
    """Export in a child process, and say what came of it."""
    resource.setrlimit(resource.RLIMIT_DATA, (GIGABYTES << 30, GIGABYTES << 30))
    try:
        found = export(name, part)
    except Exception as error:  # noqa: BLE001 - whatever the exporter raises is the finding
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        said = (str(cause).strip().splitlines() or [""])[0]
        found = {"reason": f"{type(cause).__name__}: {said}"[:300], "log": traceback.format_exc()[-3000:]}
    found["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    send.send(found)


def child(name: str, folder: Path) -> dict[str, Any]:
    """Export a network in a child process, within its time and memory."""
    part = folder / f"{name}.part"
    forks = multiprocessing.get_context("fork")  # the libraries are imported once
    receive, send = forks.Pipe(duplex=False)
    began = time.perf_counter()
    process = forks.Process(target=_work, args=(send, name, part))
    process.start()
    send.close()
    found = {"reason": f"no end after {SECONDS} s"}
    try:
        if receive.poll(SECONDS):
            found = receive.recv()
    except EOFError:
        found = {"reason": "the process ended without a word"}
    process.kill()
    process.join()
    found["seconds"] = round(time.perf_counter() - began, 1)
    if "reason" in found:
        part.unlink(missing_ok=True)
    else:
        part.replace(folder / f"{name}.onnx")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the ONNX files go: outside the repository")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--again", action="store_true", help="also those that are there or failed before")
    options = parser.parse_args()
    import torch
    from subject import names

    torch.set_num_threads(1)
    known_names = names()
    options.folder.mkdir(parents=True, exist_ok=True)
    others = [f"{name}.{dialect}" for dialect, chosen in DIALECTS.items() for name in chosen]
    record = options.folder / "exports.json"
    for name in options.only.split(",") if options.only else [*known_names, *others]:
        known = json.loads(record.read_text()) if record.exists() else {}
        if name in known and not options.again:
            continue
        found = child(name, options.folder)
        known = json.loads(record.read_text()) if record.exists() else {}
        known[name] = found
        record.write_text(json.dumps(known, indent=1) + "\n")
        said = known[name].get("reason") or f"{known[name]['nodes']} nodes, {known[name]['parameters'] / 1e6:.1f} M"
        print(f"{name}: {said}, {known[name].get('seconds')} s", flush=True)


if __name__ == "__main__":
    main()
