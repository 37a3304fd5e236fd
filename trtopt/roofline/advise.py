"""What to change in a network to make it faster, with the gain predicted by the same model as its layers."""

from __future__ import annotations

from trtopt.report.schema.analysis import Finding
from trtopt.roofline.rules.registry import RULES
from trtopt.roofline.rules.subject import Proposal, Subject

__all__ = ["Subject", "advise"]

NO_GAIN_US = 0.05
"""A predicted gain below this is none: it is within the printed digit."""

_ORDER = ("error", "warning", "hint", "info")


def advise(subject: Subject) -> tuple[Finding, ...]:
    """Everything the rules find, by gain, the largest first; without gain: warnings, hints, information.

    A gain is the predicted time of the layers named less what they are predicted to take after the remedy. Within a
    finding each layer counts once; remedies of different rules for one layer are alternatives, so gains of different
    findings do not add up.

    Args:
        subject: The network, its layers with their predictions, and the GPU.
    """
    findings = [_finding(name, item) for name, rule in RULES.items() for item in rule(subject)]
    return tuple(sorted(findings, key=lambda item: (-item.gain_us, _ORDER.index(item.severity))))


def _finding(rule: str, item: Proposal) -> Finding:
    gain = sum(item.gains.values())
    won = gain >= NO_GAIN_US
    severity = item.severity if won or item.severity in ("hint", "info") else "hint"
    return Finding(rule, severity, item.nodes, item.message, item.remedy, gain if won else 0.0)
