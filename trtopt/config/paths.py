"""Which files a run reads and writes, checked before any work."""

from __future__ import annotations

import os
from pathlib import Path

from trtopt.config import BuildConfig, Config, flag, options
from trtopt.errors import UsageError
from trtopt.support._script import DECODE, is_target
from trtopt.support.files import check_outputs


def check_files(model: str | None, config: Config, config_file: str | None, *, engine: bool = False) -> None:
    """Raise before any work when an output cannot be written, or would overwrite an input or another output.

    Args:
        model: The model file; None without one.
        config: The options; the paths among them are known by :class:`Option.path`.
        config_file: The value of ``--config``.
        engine: Whether an engine is built: it has a name when ``--output`` gives none, and a log beside the report.

    Raises:
        UsageError: See above; or the model is a folder.
    """
    if model is not None and os.path.isdir(model or "."):
        raise UsageError("The model path is a folder, not a file", where=model or ".", remedy="name the ONNX file")
    inputs = files_read(model, config)
    if config_file is not None:
        inputs["--config"] = Path(config_file)
    if engine and isinstance(config, BuildConfig) and config.output is None:
        engines = (product_path(str(model)).with_suffix(suffix) for suffix in (".rtx.engine", ".engine"))
        inputs.update((f"the engine {path.name}", path) for path in engines)
    if engine and isinstance(config, BuildConfig) and config.report is not None:
        inputs["the builder's log"] = Path(config.report).with_suffix(".build.log")
    check_outputs(files_written(config), inputs)


def files_written(config: Config) -> dict[str, Path]:
    """The files that options ask for, by the options."""
    values = {name: getattr(config, name) for name, option in options(type(config)).items() if option.path == "output"}
    return {flag(name): Path(value) for name, value in values.items() if value is not None}


def files_read(model: str | None, config: Config) -> dict[str, Path]:
    """The files a run reads, by what messages call them: the model, and those that options name."""
    inputs = {} if model is None else {"the model": source_file(model)}
    for name, option in options(type(config)).items():
        value = getattr(config, name)
        items = (value,) if isinstance(value, str) else value or ()
        if option.path:
            inputs.update((f"{flag(name)} {item}", source_file(item)) for item in items if option.is_read(item))
    return inputs


def product_path(model: str) -> Path:
    """What the files that are made of a model are named after: its file; of ``nets.py:resnet``, ``resnet`` in the
    current folder."""
    return Path(model.rpartition(":")[2].rpartition(".")[2]) if is_target(model) else Path(model)


def source_file(value: str) -> Path:
    """The file that ``FILE.py:FUNCTION``, ``FILE.safetensors:SCALE``, ``decode:FILE`` or a path names."""
    value = value.removeprefix(DECODE)
    file, _, rest = value.rpartition(":")
    return Path(file if file.endswith((".py", ".safetensors")) and rest else value)
