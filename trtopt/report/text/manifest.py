"""A verified engine as ``trtopt check ENGINE`` shows it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from trtopt.report.schema.manifest import Manifest
from trtopt.report.text.analysis import visible
from trtopt.report.text.numbers import pairs


def render(manifest: Manifest, *, key: str | None) -> RenderableType:
    """What an engine was built by and for, and what of it was checked.

    Args:
        manifest: Its manifest, which it fits.
        key: The public key that the manifest is signed with; None where signatures were not looked at.
    """
    asked, achieved = manifest.precision.requested, manifest.precision.achieved
    layers = ", ".join(f"{share.layers} layers {dtype}" for dtype, share in achieved.items())
    rows = [
        ("built by", f"{manifest.backend} {manifest.backend_version}, trtopt {manifest.trtopt}"),
        ("built for", f"{manifest.gpu}, compute capability {', '.join(manifest.compute_capabilities)}"),
        ("model", f"SHA-256 {manifest.model_sha256}"),
        ("precision", f"{asked} asked for; {layers}" if layers else f"{asked} asked for"),
        ("engine", f"{manifest.engine_bytes} bytes, SHA-256 {manifest.engine_sha256}"),
    ]
    if manifest.host is not None:
        rows.append(("with", ", ".join(file.name for file in manifest.host.files)))
    rows.append(("signature", f"fits the key {key}" if key else "not looked at; give --key FILE"))
    return Group(
        Text("The engine is what was built", style="bold green"),
        Padding(pairs([(name, visible(text)) for name, text in rows]), (0, 0, 0, 2), expand=False),
    )
