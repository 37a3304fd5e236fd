"""What a run keeps for Polygraphy: models, inputs and outputs in a folder, and the command that reduces the model."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from trtopt.accuracy.compare import Runner
from trtopt.config import FILES, BuildConfig, flag, options
from trtopt.config.words import command_words, given
from trtopt.errors import UsageError
from trtopt.pipeline.verify import Verification, emulation_of, reference_of
from trtopt.precision.observe.batches import BatchedSamples
from trtopt.precision.observe.polygraphy import write_inputs, write_outputs
from trtopt.source.save import save_model
from trtopt.support.ort_session import Feeds

MOST = 32
"""Inferences that are kept: enough to show an error, few enough for base64."""

MODEL, OPTIMIZED = "model.onnx", "optimized.onnx"
INPUTS, REFERENCE, OUTPUTS = "inputs.json", "reference.json", "outputs.json"

_REDUCED = "polygraphy_debug.onnx"
"""What ``polygraphy debug reduce`` calls the model that its check looks at."""

_OF_THIS_RUN = ("min_shapes", "opt_shapes", "max_shapes", "gpus", "metric", "cache_gb")
"""Options that say nothing of a part of the model, whose shapes are fixed and whose metric is another."""

_TOLERANCES = ("atol", "rtol")


def make_folder(name: str) -> Path:
    """The folder of ``--polygraphy``, which is made. Raises UsageError where it cannot be."""
    folder = Path(name).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"The folder cannot be made: {error.strerror}", where=f"--polygraphy {name}", remedy="choose another folder"
        ) from error
    return folder


def keep(folder: Path, job: Verification, product: AbstractContextManager[Runner] | None = None) -> None:
    """Write the model as loaded, the optimized model, inputs, and the outputs of both.

    Args:
        folder: It exists.
        job: What was compared with what, and on which samples: the first :data:`MOST` of them.
        product: The engine, where it can run; else the optimized model's emulation stands in.

    Raises:
        UsageError: A file cannot be written.
        InvalidModelError: A model fails on the samples.
    """
    save_model(job.reference, folder / MODEL)
    save_model(job.optimized, folder / OPTIMIZED)
    write_inputs(folder / INPUTS, _chosen(job))
    name = "trtopt-fp32" if job.recorded is None else job.recorded.runner
    own = [str(value.name) for value in (job.optimized if job.host else job.reference).graph.outputs]
    with reference_of(job) as runner:
        write_outputs(folder / REFERENCE, name, _outputs(runner, _chosen(job), own))
    with product or emulation_of(job) as runner:
        write_outputs(
            folder / OUTPUTS, f"trtopt-{'engine' if product else 'onnx'}", _outputs(runner, _chosen(job), own)
        )


def keep_inference(folder: Path, feeds: Feeds, outputs: Mapping[str, np.ndarray], runner: str) -> None:
    """Write the inputs and the outputs of one inference, by what Polygraphy knows as ``runner``."""
    write_inputs(folder / INPUTS, [feeds])
    write_outputs(folder / OUTPUTS, runner, [outputs])


def _chosen(job: Verification) -> Iterator[Feeds]:
    """The samples, as the optimized model takes them."""
    samples = job.samples
    if job.axes is not None and job.recorded is None:
        samples = BatchedSamples(samples, job.axes, filled=True)
    return itertools.islice(samples, MOST)


def _outputs(runner: Runner, samples: Iterable[Feeds], names: Iterable[str]) -> Iterator[dict[str, np.ndarray]]:
    for feeds in samples:
        found = dict(zip(runner.output_names, runner.run(feeds), strict=True))
        yield {name: found[name] for name in names}


def reduce_command(folder: Path, job: Verification, config: BuildConfig, *, make_engine: bool, code: int) -> str:
    """The command that cuts the model down to the nodes with which the run still ends in ``code``.

    Its check is the run itself on part of the model, with its options but for those that :func:`left_out` names; the
    samples are those that were kept, in the shapes of the first. Outputs of a part are others, so that the tightest
    tolerance is that of all. Polygraphy needs ``onnx-graphsurgeon`` for it.

    Example:
        ``polygraphy debug reduce D/model.onnx -o D/reduced.onnx --no-reduce-inputs --model-input-shapes 'x:[1,3]'
        --fail-code 7 --check trtopt optimize polygraphy_debug.onnx -o D/checked.onnx --fp16 --calib D/inputs.json``
    """
    first = next(iter(job.samples), {})
    shapes = [f"{name}:[{','.join(map(str, np.shape(array)))}]" for name, array in first.items()]
    command, file = ("build", "checked.engine") if make_engine else ("optimize", "checked.onnx")
    words = ["polygraphy", "debug", "reduce", folder / MODEL, "-o", folder / "reduced.onnx", "--no-reduce-inputs"]
    words += ["--model-input-shapes", *shapes, "--fail-code", code, "--check", "trtopt", command, _REDUCED]
    words += ["-o", folder / file, *command_words(vars(config), _of_parts(config))]
    if config.tolerances is not None:
        own = [config.tolerances.of(str(value.name)) for value in job.reference.graph.outputs]
        words += ["--atol", min(atol for atol, _ in own), "--rtol", min(rtol for _, rtol in own)]
    return shlex.join(map(str, [*words, "--calib", folder / INPUTS]))


def left_out(config: BuildConfig) -> list[str]:
    """The options that decide something in this run and are not in the check of :func:`reduce_command`."""
    known = options(BuildConfig)
    decides = (name for name in given(config) if known[name].group != FILES and name not in ("calib", "eval"))
    return [flag(name) for name in decides if not _is_of_parts(name)]


def _is_of_parts(name: str) -> bool:
    """Whether an option means the same on part of the model."""
    return name not in _OF_THIS_RUN and (not options(BuildConfig)[name].path or name == "plugins")


def _of_parts(config: BuildConfig) -> list[str]:
    """The options of a run that its check has too but for tolerances."""
    return [name for name in given(config) if name not in _TOLERANCES and _is_of_parts(name)]
