"""What an option is, and how the value of one is checked."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trtopt.errors import UsageError
from trtopt.support.precision import Precision
from trtopt.support.words import did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Self

LARGEST_BATCH = 1 << 16
"""Beyond it curves are flat, and most models exceed every GPU's memory."""

MOST_BATCHES = 128
"""Sizes of one sweep; each takes a shape inference and a prediction of every layer."""

_MOST_DIGITS = 12
"""Digits of a number that are read: enough to tell that it is out of range."""


def parse_batches(text: str, where: str) -> tuple[int, ...]:
    """Read ``1,2,4``, ``1..256`` or both mixed.

    A range stands for its ends and four sizes per doubling between them (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20,
    ...): performance is not monotonic in the batch, and powers of two alone would hide its dips.

    Raises:
        UsageError: It has another form; ``where`` is the option.
    """
    sizes: list[int] = []
    for part in text.split(","):
        first, dots, last = (word.strip() for word in part.partition(".."))
        low, high = _number(first), _number(last) if dots else _number(first)
        if low is None or high is None or low > high:
            raise UsageError(
                f"Not a batch size or a range of them: {part.strip()!r}",
                where=where,
                remedy="write 1,2,4 or 1..256, the smallest first",
            )
        sizes += [low, high, *(size for size in _grid() if low < size < high)]
    return tuple(sorted(set(sizes)))


def checked_batches(sizes: Sequence[int], where: str) -> tuple[int, ...]:
    """The sizes in increasing order, each once.

    Raises:
        UsageError: One is below 1 or above :data:`LARGEST_BATCH`, or there are more than :data:`MOST_BATCHES`.
    """
    wrong = next((size for size in sizes if not 1 <= size <= LARGEST_BATCH), None)
    if wrong is not None or len(set(sizes)) > MOST_BATCHES:
        raise UsageError(
            f"The batch size {wrong} is out of range" if wrong is not None else "There are too many batch sizes",
            where=where,
            remedy=f"give at most {MOST_BATCHES} sizes from 1 to {LARGEST_BATCH}",
        )
    return tuple(sorted(set(sizes)))


def _number(text: str) -> int | None:
    return int(text[:_MOST_DIGITS]) if text.isascii() and text.isdecimal() else None


def _grid() -> list[int]:
    """1 to 8, then four evenly spaced sizes per doubling."""
    octaves = range(1, LARGEST_BATCH.bit_length() - 3)
    return [*range(1, 9), *((4 + step) << octave for octave in octaves for step in (1, 2, 3, 4))]


CALIB_METHODS = ("auto", "max", "percentile", "entropy", "mse")
BACKENDS = ("auto", "tensorrt", "tensorrt-rtx")

ShapeMap = dict[str, tuple[int, ...]]
"""Shapes by input name, for example ``{"input": (1, 3, 224, 224)}``."""

PathKind = Literal["", "output", "file", "folder", "source", "script"]


@dataclass(frozen=True)
class Option:
    """What the command line, the configuration file and the cache need to know of a field.

    Attributes:
        help: One line for ``--help``.
        group: The heading of ``--help`` it stands under.
        choices: The allowed values, if few.
        aliases: Other spellings on the command line (trtexec's).
        metavar: The placeholder in ``--help``.
        repeatable: The option may be given several times.
        path: What the value is as a path: a file that is written (``output``), a file or folder that is read or kept,
            a ``source`` (a path, or ``file.py:function``), a ``script`` (``file.py:function``, or words), or empty when
            it is no path.
        words: The values of a path option that are words, not paths.
        share: The number is a share: ``1%`` is 0.01.
    """

    help: str
    group: str
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    metavar: str = ""
    repeatable: bool = False
    path: PathKind = ""
    words: tuple[str, ...] = ()
    share: bool = False

    def is_path(self, value: Any) -> bool:
        """Whether a value of this option is a path, and not one of its words."""
        return self.path != "" and value not in self.words and (self.path != "script" or ".py:" in str(value))

    def is_read(self, value: Any) -> bool:
        """Whether a value of this option is a file or a folder that a run reads."""
        return self.path in ("source", "file", "script") and self.is_path(value)


MODULE = "a PyTorch module as MODEL, nets.py:resnet"
PRECISION = "precision"
SAMPLES = "calibration and accuracy"
TARGET = "target and shapes"
REWRITES = "graph rewrites"
BUILDER = "builder"
TIMING = "timing an engine"
FILES = "files"
GROUPS = (MODULE, PRECISION, SAMPLES, TARGET, REWRITES, BUILDER, TIMING, FILES)

PREPROCESS_HELP = (
    "what is done to pictures: imagenet, clip, yolo, keys such as resize=256,crop=224,scale=255, or FILE.py:FUNCTION "
    "(default: guessed from the input)"
)
CALIB_HELP = (
    "calibration samples: .npz, .npy, .json (Polygraphy), a folder of these or of pictures, script.py:name of a "
    "loader, decode:prompts.npz (a decoder run on its own tokens), 'synthetic'"
)
METRICS = ("top1", "top5", "recall", "map50", "map", "miou", "psnr", "spearman", "agreement", "sqnr")
INPUT_HELP = "an example input, such as image:float32:1x3x224x224; repeat for each"
INPUT_METAVAR = "NAME:DTYPE:SHAPE"
DYNAMIC_HELP = "an axis of any size, such as image:0=batch:1..16; repeat for several"
DYNAMIC_METAVAR = "NAME:AXIS=SYMBOL[:MIN..MAX]"
REPORT_HELP = "write the report as JSON"
HTML_HELP = "write the report as one HTML file"
MARKDOWN_HELP = "write the report as Markdown, for a pull request"


def share(text: str) -> float:
    """The number that ``0.01`` or ``1%`` stands for. Raises ValueError: it is none."""
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def option_field(default: Any, help: str, group: str, **kwargs: Any) -> Any:
    return field(default=default, metadata={"option": Option(help, group, **kwargs)})


def switch_field(help: str, group: str, *aliases: str) -> Any:
    return option_field(False, help, group, aliases=aliases)


def file_field(help: str, *aliases: str, group: str = FILES, path: PathKind = "output", metavar: str = "FILE") -> Any:
    return option_field(None, help, group, aliases=aliases, metavar=metavar, path=path)


def samples_field(help: str) -> Any:
    return option_field(None, help, SAMPLES, metavar="SRC", path="source", words=("synthetic",))


def shapes_field(help: str, *aliases: str) -> Any:
    return option_field((), help, TARGET, aliases=aliases, metavar="S", repeatable=True)


@dataclass(frozen=True)
class Config:
    """What the commands that take a model share.

    Attributes:
        inputs: What a PyTorch module is exported with: ``NAME:DTYPE:SHAPE`` each.
        dynamic: Its axes of any size: ``NAME:AXIS=SYMBOL[:MIN..MAX]`` each.
        gpus: GPUs of the user's own and other figures for known ones, by name: the tables ``[gpu.NAME]`` of the
            configuration file (:func:`trtopt.hardware.user.gpu_table`).
    """

    gpu: str | None = option_field(
        None,
        "target GPU (default: the one present, else L4); builds also take 'portable', for Ampere and later",
        TARGET,
        metavar="NAME",
    )
    inputs: tuple[str, ...] = option_field((), INPUT_HELP, MODULE, metavar=INPUT_METAVAR, repeatable=True)
    dynamic: tuple[str, ...] = option_field((), DYNAMIC_HELP, MODULE, metavar=DYNAMIC_METAVAR, repeatable=True)
    gpus: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = field_kinds(type(self))
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name in kinds and (value is not None or item.default is not None):
                value = checked(item.name, item.metadata["option"], kinds[item.name], value)
                object.__setattr__(self, item.name, value)
        tables = isinstance(self.gpus, Mapping) and all(isinstance(table, Mapping) for table in self.gpus.values())
        _expect("gpus", self.gpus, "a mapping of GPU fields by GPU name", tables)

    @classmethod
    def given(cls, config: object, changes: Mapping[str, Any], call: str) -> Self:
        """The configuration that a caller from Python gives: ``config``, or the defaults, with ``changes`` by name.

        Raises:
            UsageError: ``config`` is of another class (the remedy shows ``call``), or as of :meth:`with_options`.
        """
        if config is not None and not isinstance(config, cls):
            article = "an" if cls.__name__[0] in "AEIOU" else "a"
            remedy = f"pass options as keywords: {call}"
            raise UsageError(f"config is not {article} {cls.__name__}", where="config", remedy=remedy)
        return (config or cls()).with_options(changes)

    def with_options(self, changes: Mapping[str, Any]) -> Self:
        """A copy with other values of the named options.

        Raises:
            UsageError: There is no such option, or its value is wrong.
        """
        known = [item.name for item in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                remedy = did_you_mean(name, known) or "see docs/build.md and docs/analyze.md"
                raise UsageError(f"There is no option {name!r}", where=name, remedy=remedy)
        return dataclasses.replace(self, **changes)


FieldKind = Literal["flag", "number", "text", "texts", "shapes", "batches"]


def options(config: type) -> dict[str, Option]:
    """The options of a configuration class by field name."""
    return {item.name: item.metadata["option"] for item in dataclasses.fields(config) if "option" in item.metadata}


_known_kinds: dict[type, dict[str, FieldKind]] = {}
"""Of classes that were asked for: evaluating annotations takes a millisecond, and a sweep makes thousands."""


def field_kinds(config: type) -> dict[str, FieldKind]:
    """What kind of value each field of a configuration class holds, read from its annotation."""
    if config in _known_kinds:
        return _known_kinds[config]
    kinds: dict[Any, FieldKind] = {
        bool: "flag",
        float | None: "number",
        str: "text",
        str | None: "text",
        Precision: "text",
        Precision | None: "text",
        tuple[str, ...]: "texts",
        tuple[ShapeMap, ...]: "shapes",
        tuple[int, ...]: "batches",
    }
    hints = typing.get_type_hints(config)
    _known_kinds[config] = {name: kinds[hints[name]] for name in options(config)}
    return _known_kinds[config]


def flag(name: str) -> str:
    """The option's spelling on the command line: ``calib_method`` is ``--calib-method``, ``inputs`` one ``--input``."""
    return "--input" if name == "inputs" else "--" + name.replace("_", "-")


def checked(name: str, option: Option, kind: FieldKind, value: Any) -> Any:
    """``value`` in the field's own type.

    Raises:
        UsageError: It has another type, is out of range, or is not among the choices.
    """
    if kind == "flag":
        return _expect(name, value, "true or false", isinstance(value, bool))
    if kind == "number" and option.share and isinstance(value, str) and value.endswith("%"):
        with contextlib.suppress(ValueError):
            value = share(value)
    if kind == "number":
        _expect(name, value, "a number", isinstance(value, (int, float)) and not isinstance(value, bool))
        return float(_expect(name, value, "a finite number", math.isfinite(value)))
    if kind == "shapes":
        profiles = (value,) if isinstance(value, Mapping) else value
        _expect(name, value, "shapes by input name", isinstance(profiles, (list, tuple)))
        return tuple(_shape_map(name, profile) for profile in profiles)
    if kind == "batches":
        sizes = parse_batches(value, flag(name)) if isinstance(value, str) else value
        good = isinstance(sizes, (list, tuple)) and all(type(size) is int for size in sizes)
        _expect(name, value, "batch sizes, such as (1, 2, 4)", good)
        return checked_batches(sizes, flag(name))
    if kind == "texts":
        items = (value,) if isinstance(value, (str, os.PathLike)) else value
        _expect(name, value, "a list of texts", isinstance(items, (list, tuple)))
        return tuple(_text(name, option, item) for item in items)
    return _text(name, option, value)


def _text(name: str, option: Option, value: Any) -> str:
    text = str(os.fspath(value)) if isinstance(value, os.PathLike) and option.path else value
    _expect(name, value, "a text that is not empty", isinstance(text, str) and text != "")
    _expect(name, value, "a text without null characters", "\0" not in str(text))
    if option.choices and text not in option.choices:
        raise UsageError(
            f"{text!r} is not a value of {name}",
            where=name,
            remedy=did_you_mean(str(text).lower(), option.choices) or f"choose one of {', '.join(option.choices)}",
        )
    return option.choices[option.choices.index(text)] if option.choices else str(text)


def _shape_map(name: str, value: Any) -> ShapeMap:
    wanted = "shapes by input name, such as {'input': (1, 3, 224, 224)}"
    _expect(name, value, wanted, isinstance(value, Mapping))
    for key, dims in value.items():
        _expect(name, value, wanted, isinstance(key, str) and key != "" and isinstance(dims, (list, tuple)))
        _expect(name, value, wanted, all(type(dim) is int and dim >= 0 for dim in dims))
    return {key: tuple(dims) for key, dims in value.items()}


def _expect(name: str, value: Any, wanted: str, good: bool) -> Any:
    if not good:
        raise UsageError(
            f"{name} must be {wanted}, not {value!r}", where=name, remedy="see docs/build.md and docs/analyze.md"
        )
    return value
