"""The rules there are, and what they find in a network: what to change to make it faster."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping

from trtopt.report.schema.analysis import Finding, LayerRow, is_noise, range_of_rows, rank
from trtopt.roofline import gap
from trtopt.roofline.rules import batch, early, precision, quantization, sizes, structure
from trtopt.roofline.rules.subject import Proposal, Subject

Rule = Callable[[Subject], Iterator[Proposal]]
"""A rule. Its docstring is its page, with the headings below; its name, with dashes, is the rule's."""

HEADINGS = ("What", "Why", "Example", "Remedy")

_RULES: tuple[Rule, ...] = (
    sizes.alignment,
    sizes.first_layer,
    sizes.vocabulary,
    sizes.sequence_length,
    quantization.tile_quantization,
    quantization.wave_quantization,
    early.depthwise,
    early.early_pooling,
    early.squeeze_excite,
    early.early_normalization,
    early.pixel_shuffle,
    structure.normalization,
    structure.qkv,
    structure.weight_layout,
    structure.layout_transpose,
    structure.io_layout,
    batch.batch_too_small,
    batch.batch_size,
    batch.recurrent_size,
    batch.launch_bound,
    precision.precision_too_wide,
    precision.precision_cannot_help,
    precision.eight_bit,
    precision.precision_hole,
    precision.sparsity,
    precision.fp16_accumulate,
)

_RETRAIN, _EXPORT = ("needs retraining",), ("needs a new export",)
_SWEEP = ("analyze", "--batch-sweep", "1..256")
_INT8 = ("build", "--int8", "--calib", "samples.npz")

ACTS: dict[Rule, tuple[str, ...]] = {
    sizes.alignment: ("build",),
    sizes.vocabulary: _EXPORT,
    sizes.sequence_length: ("needs other lengths of the input",),
    quantization.tile_quantization: _RETRAIN,
    quantization.wave_quantization: _RETRAIN,
    early.depthwise: _RETRAIN,
    early.early_pooling: _RETRAIN,
    early.squeeze_excite: _RETRAIN,
    early.early_normalization: _RETRAIN,
    early.pixel_shuffle: _RETRAIN,
    structure.normalization: _EXPORT,
    structure.qkv: ("analyze", "--compile"),
    structure.weight_layout: ("build",),
    structure.layout_transpose: ("build",),
    batch.batch_too_small: _SWEEP,
    batch.batch_size: _SWEEP,
    batch.recurrent_size: _RETRAIN,
    batch.launch_bound: _SWEEP,
    precision.precision_cannot_help: ("build", "--fp16"),
    precision.eight_bit: _INT8,
    precision.precision_hole: ("build", "--fp16", "--calib", "samples.npz"),
    precision.sparsity: ("analyze", "--sparse"),
    precision.fp16_accumulate: ("analyze", "--compile"),
}
"""What to type after a finding of a rule: a command of trtopt without the model; else what it needs. Rules that are not
here say it in each proposal."""

RULES: dict[str, Rule] = {rule.__name__.replace("_", "-"): rule for rule in _RULES}
"""Every rule by name."""


_COMPILER_GAP = """The compiler needs more kernels or bytes than the graph asks for.

What:
    With `--compile`, nodes whose fused layers in a built engine are predicted to take at least 20 %
    longer than the same nodes in the ONNX graph, with the fusion TensorRT is known to do, and that
    are worth 1 % of the network's time. Blocks that repeat are one finding.
Why:
    The compiler did not fuse what it usually does: quantizers or Casts as kernels of their own,
    Transposes and copies, channels that it has to pad, an operator it has no fused form for.
Example:
    Scales per channel on an INT8 convolution in TensorRT for RTX: the convolution writes FP32 and a
    second kernel scales it, twice the bytes of activations.
Remedy:
    The one the finding names, by what the extra time goes to. The gain is the difference of the two
    predictions: what would be won if the compiler fused as expected. It is of the compiler that was
    asked, TensorRT for RTX; TensorRT may fuse differently.
"""

PAGES: dict[str, str] = {name: inspect.getdoc(rule) or "" for name, rule in RULES.items()}
"""The page of every rule by name: a line of summary, then its headings."""

PAGES[gap.RULE] = _COMPILER_GAP.rstrip()


NO_GAIN_US = 0.05
"""A predicted gain below this is none: it is within the printed digit."""


def advise(subject: Subject, engine: Subject | None = None) -> tuple[Finding, ...]:
    """Everything the rules find, by gain, the largest first; without gain: warnings, hints, information.

    A gain is the predicted time of the layers named less what they are predicted to take after the remedy. Within a
    finding each layer counts once; remedies of different rules for one layer are alternatives, so gains of different
    findings do not add up. Gains inside the noise of the model come after the others.

    Args:
        subject: The ONNX graph with the fusion TensorRT is known to do.
        engine: The kernels that the compiler made of it, where it was compiled: launches are counted there.
    """
    seen = {name: engine if engine and rule is batch.launch_bound else subject for name, rule in RULES.items()}
    findings = [_finding(name, item, seen[name].row) for name, rule in RULES.items() for item in rule(seen[name])]
    return tuple(sorted(findings, key=rank))


def _finding(rule: str, item: Proposal, rows: Mapping[str, LayerRow]) -> Finding:
    gain = sum(item.gains.values())
    won = gain >= NO_GAIN_US
    severity = item.severity if won or item.severity in ("hint", "info") else "hint"
    noise = won and is_noise(gain, range_of_rows(rows[name] for name in item.gains if name in rows))
    act = item.act or ACTS[RULES[rule]]
    command = act[0] if act[0].startswith("needs ") else shlex.join(act)
    return Finding(rule, severity, item.nodes, item.message, item.remedy, gain if won else 0.0, noise, command)
