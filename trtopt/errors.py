"""The only exception tree. Every error says what went wrong, where, and what to do about it."""

from __future__ import annotations


class TrtoptError(Exception):
    """Base of every error trtopt raises on purpose.

    Args:
        what: One sentence: what is wrong.
        where: The file, node, option or input it concerns.
        remedy: What the user can do about it.

    Attributes:
        code: A stable name for programs.
        exit_code: The exit code of the command line for this error.
    """

    code = "internal"
    exit_code = 1

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        parts = [self.what]
        if self.where:
            parts.append(f"  where:  {self.where}")
        if self.remedy:
            parts.append(f"  remedy: {self.remedy}")
        return "\n".join(parts)


class UsageError(TrtoptError):
    """Options, missing or unreadable files, samples, shapes, GPU names, configuration files."""

    code = "usage"
    exit_code = 2


class ClosedError(UsageError):
    """An engine was called after it was closed."""

    code = "closed"


class InvalidModelError(TrtoptError):
    """The model's content is invalid or unsupported."""

    code = "invalid-model"
    exit_code = 3


class ResourceError(TrtoptError):
    """The model needs more memory or time than it is given."""

    code = "resources"
    exit_code = 3


class IntegrityError(TrtoptError):
    """An engine, its manifest or a file that belongs to it is not what was built."""

    code = "integrity"
    exit_code = 3


class MissingDependencyError(TrtoptError):
    """A package, a device or a target is not there."""

    code = "missing-dependency"
    exit_code = 4


class TargetError(TrtoptError):
    """The backend cannot build for the GPU that was asked for."""

    code = "target"
    exit_code = 4


class QueueFullError(TrtoptError):
    """An engine has as many calls waiting as it may: the caller should try again later."""

    code = "queue-full"
    exit_code = 4


class RecipeError(TrtoptError):
    """A recipe failed under strict recipes."""

    code = "recipe"
    exit_code = 5


class EngineBuildError(TrtoptError):
    """The backend refused the network or failed to build the engine."""

    code = "engine-build"
    exit_code = 6


class LayerListError(EngineBuildError):
    """The engine is built, and what it says of its layers is not understood."""


class GateError(TrtoptError):
    """An accuracy, precision or size gate failed."""

    code = "gate"
    exit_code = 7
