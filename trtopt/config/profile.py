"""The options of ``trtopt profile``."""

from __future__ import annotations

from dataclasses import dataclass

from trtopt.config.base import FILES, REPORT_HELP, TARGET, Config, ShapeMap, flag, option_field
from trtopt.errors import UsageError

ONNXRUNTIME = "onnxruntime"
PROFILE_BACKENDS = ("auto", "tensorrt", "tensorrt-rtx", ONNXRUNTIME)


@dataclass(frozen=True)
class ProfileConfig(Config):
    """The options of ``trtopt profile``.

    Raises:
        UsageError: As of :class:`BuildConfig`; or one of ``layer_info`` and ``layer_profile`` is there without the
            other.
    """

    layer_info: str | None = option_field(
        None, "the engine's layers, as trtexec --exportLayerInfo wrote them", FILES, metavar="FILE", path="file"
    )
    layer_profile: str | None = option_field(
        None, "their times, as trtexec --exportProfile wrote them", FILES, metavar="FILE", path="file"
    )
    times: str | None = option_field(
        None,
        "times of whole inferences, as trtexec --exportTimes wrote them (.json or .json.gz)",
        FILES,
        metavar="FILE",
        path="file",
    )
    key: str | None = option_field(
        None,
        "public key (Ed25519, PEM) that the engine's manifest has to be signed with",
        FILES,
        metavar="FILE",
        path="file",
    )
    backend: str = option_field(
        "auto",
        "what runs the network: an engine's own runtime on this machine's GPU, or ONNX Runtime on its CPU",
        TARGET,
        choices=PROFILE_BACKENDS,
    )
    shapes: tuple[ShapeMap, ...] = option_field(
        (),
        "input shapes to run at, name:1x3x224x224,other:1x77 (default: 8 on a dynamic first axis; an engine's optimum)",
        TARGET,
        aliases=("--opt-shapes", "--optShapes"),
        metavar="S",
        repeatable=True,
    )
    report: str | None = option_field(None, REPORT_HELP, FILES, metavar="FILE", path="output")
    html: str | None = option_field(None, "write the report as one HTML file", FILES, metavar="FILE", path="output")
    markdown: str | None = option_field(
        None, "write the report as Markdown, for a pull request", FILES, metavar="FILE", path="output"
    )
    trace: str | None = option_field(
        None, "write the layers as a trace for chrome://tracing or Perfetto", FILES, metavar="FILE", path="output"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        pair = {name: getattr(self, name) for name in ("layer_info", "layer_profile")}
        missing = [name for name, value in pair.items() if value is None]
        if len(missing) == 1:
            what = "Layers and their times come in two files"
            raise UsageError(what, where=flag(next(iter(pair.keys() - missing))), remedy=f"give {flag(missing[0])} too")
        if self.times is not None and missing:
            what = "Times of whole inferences need the layers too"
            raise UsageError(what, where="--times", remedy="give --layer-info and --layer-profile")
