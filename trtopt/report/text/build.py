"""The report of a build as it is shown. Everything that is cut here is whole in the JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from trtopt.report.schema.build import BuildReport, EngineRecord, MatrixBuild
from trtopt.report.text.accuracy import accuracy_section, loss_text, tensors_section
from trtopt.report.text.blocks import Block, Section, Style, Table, View, line, pairs, table
from trtopt.report.text.calibration import calibration_lines
from trtopt.report.text.decisions import (
    builder_section,
    guard_section,
    pareto_section,
    recipes_section,
    same_reason,
    search_section,
    sparsity_section,
)
from trtopt.report.text.format import (
    bytes_text,
    count,
    near,
    percent,
    predicted_text,
    seconds_text,
    some,
    some_names,
    time_text,
    visible,
)
from trtopt.report.text.layers import as_layers, graph_blocks, layers_blocks
from trtopt.report.text.limit import limit_blocks
from trtopt.report.text.names import Labels
from trtopt.report.text.verdict import AS_IS, advice, against_plain, failed, verdict
from trtopt.support.precision import Precision

_MOST_ROWS, _MOST_LAYERS = 12, 8
_AUTO = "auto"
_MOSTLY = 0.8
"""Below this share of the flop in the type that was asked for, the report says so in a warning's colour."""


def view(report: BuildReport, *, verbose: bool = False, page: str | None = None) -> View:
    """The report: a verdict, what changed against plain, what to do next, and where the time goes.

    ``verbose`` adds all that was done, tried and refused, which a page has anyway: ``page``, where one is written, else
    that of the build.
    """
    loss, labels = loss_text(report), Labels(report.names)
    head, below = verdict(report)
    told: list[tuple[str, Sequence[Block]]] = [
        ("Against plain", against_plain(report)),
        ("Worth doing next", advice(report)),
        ("Where the time goes", _slowest(report, labels)),
        ("Pareto front", pareto_section(report.search)),
        ("Sparsity", sparsity_section(report.sparsity, labels)),
        ("Host", _host(report)),
        ("Inputs and outputs changed", _network_io(report)),
        ("Written", [line(visible(path)) for path in files_written(report)]),
    ]
    more = [(title, section(report, labels)) for title, section in _MORE]
    return View(
        head,
        (*([line(loss, "warn")] if loss else []), *below),
        (
            *(Section(title, tuple(body)) for title, body in told),
            Section("Layers as a graph", _graph(report, labels), "page"),
            *(Section(title, tuple(body), "" if verbose else "page") for title, body in more),
            *([] if verbose else [Section("", (line(_more_note(page or report.config.get("html"))),), "text")]),
        ),
        name=f"{head.text}: build",
        warnings=report.warnings,
    )


def _graph(report: BuildReport, labels: Labels) -> tuple[Block, ...]:
    listed = None if report.engine is None else report.engine.layers
    return (
        ()
        if report.analysis is None
        else graph_blocks(as_layers(report.analysis.layers, labels, listed or ()), measured=False, names=labels.names)
    )


def _slowest(report: BuildReport, labels: Labels) -> list[Block]:
    found = report.analysis
    return [] if found is None else [*layers_blocks(found.layers, found.totals.predicted_us, labels, _MOST_LAYERS)]


def matrix_table(builds: Sequence[MatrixBuild]) -> Table:
    """A row for each build."""
    axes = list(builds[0].varied)
    rows = []
    for build in builds:
        engine = None if build.report is None else build.report.engine
        found = None if build.report is None else build.report.analysis
        rows.append(
            (
                *(visible(build.varied[axis]) for axis in axes),
                "" if engine is None or engine.kernels is None else str(engine.kernels),
                "" if found is None else time_text(found.totals.predicted_us),
                "" if engine is None else bytes_text(engine.bytes),
                "done" if not build.exit_code else f"exit code {build.exit_code}: {visible(build.error)}",
            )
        )
    figures = tuple(range(len(axes), len(axes) + 3))
    return table((*axes, "kernels", "predicted", "size", ""), rows, right=figures)


def _result(report: BuildReport) -> list[Block]:
    gpu = "portable (Ampere and later)" if report.gpu is None else str(report.gpu.get("name", ""))
    rows = [("model", near(str(report.model.get("path") or report.model.get("target") or "in memory")))]
    engine = report.engine
    if engine is not None:
        rows.append(("target", f"{gpu}, compute capability {', '.join(engine.compute_capabilities)}"))
        rows.append(("compiler", f"{engine.backend} {engine.backend_version}"))
        rows.append(("runs in", engine.runtime))
    else:
        rows.append(("target", gpu))
    rows.append(("judge", judge_text(report.judge)))
    rows += [("calibrated", text) for text in calibration_lines(report.gpu)]
    rows += [("plain", visible(report.judged_apart))] if report.judged_apart else []
    return [pairs(rows)]


def judge_text(judge: str) -> str:
    """Who decided what is worth a change, in words: ``compiler:BACKEND VERSION``, ``model:BACKEND`` or ``none``."""
    kind, _, name = judge.partition(":")
    if kind == "compiler":
        return f"the compiler {name}; times are predicted"
    return f"the performance model with the fusions of {name}: neither compiled nor timed" if kind == "model" else judge


def files_written(report: BuildReport) -> list[str]:
    """The files the run has written, the main one first."""
    names = ["report", "html", "markdown"]
    if not failed(report):
        names = [
            *(["epcontext", "save_onnx", "export_layer_info"] if report.engine is not None else ["output"]),
            *names,
        ]
    files = [report.config.get(name) for name in names]
    if report.host is not None and report.host.path is not None:
        files.insert(1 if report.engine is None else 0, report.host.path)
    if report.engine is not None:
        signature = f"{report.engine.path}.manifest.sig" if report.engine.path and report.config.get("sign") else None
        files[:0] = [report.engine.path, report.engine.manifest, signature]
        if report.config.get("report"):
            files.append(Path(report.config["report"]).with_suffix(".build.log"))
    return [str(path) for path in files if path]


def _steps(report: BuildReport) -> list[Block]:
    busy = [step for step in report.steps if step.changes or step.refusals or step.details]
    idle = [step.name for step in report.steps if step not in busy]
    rows = [
        (step.name, step.stage, str(step.changes), str(len(step.refusals) or ""), seconds_text(step.seconds))
        for step in busy
    ]
    body: list[Block] = [table(("step", "stage", "changes", "refused", "time"), rows, right=(2, 3, 4))]
    body += [line(f"{step.name}: {detail}") for step in busy for detail in step.details[:_MOST_ROWS]]
    if idle:
        body.append(line(f"nothing to do: {', '.join(idle)}"))
    return body if report.steps else []


def _refused(report: BuildReport, labels: Labels) -> list[Block]:
    return _groups(
        ((f"{step.name}: {same_reason(item.reason)}", item.node) for step in report.steps for item in step.refusals),
        labels,
    )


def _kept(report: BuildReport, labels: Labels) -> list[Block]:
    return _groups(((f"{kept.dtype}: {kept.reason}", kept.node) for kept in report.precision.kept), labels)


def _limit(report: BuildReport, labels: Labels) -> list[Block]:
    found = report.analysis
    return [] if found is None else limit_blocks(found.limit, found.layers, labels)


def _precision(report: BuildReport) -> list[Block]:
    record = report.precision
    body: list[Block] = []
    if record.achieved:
        rows = [
            (
                dtype,
                str(share.layers),
                percent(share.flop_share),
                "" if share.time_share is None else percent(share.time_share),
            )
            for dtype, share in sorted(record.achieved.items(), key=lambda item: -item[1].flop_share)
        ]
        headers = ("type of the engine's kernels", "kernels", "of the flop", "of the predicted time")
        body.append(table(headers, rows, right=(1, 2, 3)))
    if record.achieved and record.requested == _AUTO:
        body.append(line("asked for auto: the types are those that the search chose"))
    elif record.achieved:
        wanted = Precision.FP32 if record.requested == Precision.TF32 else record.requested
        share = record.achieved[wanted].flop_share if wanted in record.achieved else 0.0
        style: Style = "" if share >= _MOSTLY else "warn"
        unsaid = (
            "; the compiler may multiply in TF32 and does not say where" if record.requested == Precision.TF32 else ""
        )
        body.append(line(f"asked for {record.requested}: {percent(share)} of the flop runs in {wanted}{unsaid}", style))
    elif record.requested == AS_IS:
        body.append(line("the types the model has"))
    else:
        body.append(line(f"asked for {record.requested}; without an engine, no type was achieved"))
    if record.int8_flop_share is not None:
        body.append(
            line(
                f"8-bit in the graph: {percent(record.int8_flop_share)} of the flop of Conv, Gemm and MatMul with"
                " constant weights, depthwise left out"
            )
        )
    return body


def _engine(report: BuildReport) -> list[Block]:
    engine = report.engine
    if engine is None:
        return []
    took = seconds_text(engine.build_seconds)
    origin = f"from the cache, {took} of building saved" if engine.cached else f"built in {took}"
    rows = [("kernels", "not known" if engine.kernels is None else str(engine.kernels))]
    if engine.activation_bytes is not None and engine.weight_bytes is not None:
        rows.append(("activations", f"{bytes_text(engine.activation_bytes)} read and written per run"))
        rows.append(("weights", f"{bytes_text(engine.weight_bytes)} read per run"))
    rows.append(("file", f"{bytes_text(engine.bytes)}, {origin}"))
    found = report.analysis
    if found is not None:
        rows.append(("predicted", f"{predicted_text(found.totals)} on {found.gpu}"))
        rows += [("no cost known", f"{item.op}: {some(item.nodes)}, in no sum") for item in found.uncosted]
    rows += [("profile" if index == 0 else "", text) for index, text in enumerate(_profiles(engine))]
    if engine.ignored_options:
        rows.append(("ignored", f"{', '.join(engine.ignored_options)}: {engine.backend} has no such option"))
    if any(item.startswith("search=") for item in engine.ignored_options):
        rows.append(("", "search: its engine is the same with every value of the options that are searched"))
    if engine.unclaimed_nodes:
        nodes = count(len(engine.unclaimed_nodes), "ONNX node")
        rows.append(("not seen", f"{nodes} that no layer names: {some(engine.unclaimed_nodes)}"))
    return [pairs(rows)]


def _profiles(engine: EngineRecord) -> Iterable[str]:
    for profile in engine.profiles:
        for name, shapes in profile.items():
            for ending, said in (("", ""), ("_values", " values")):
                keys = [f"{end}{ending}" for end in ("min", "opt", "max")]
                texts = ["x".join(map(str, shapes[key])) for key in keys if key in shapes]
                if texts:
                    ends = f"{texts[0]} (static)" if len(set(texts)) == 1 else " .. ".join(texts)
                    yield f"{name}{said}: {ends}"


def _host(report: BuildReport) -> list[Block]:
    host = report.host
    if host is None:
        return []
    passed = [f"{item.name}: {item.dtype} {'x'.join(map(str, item.shape))}" for item in host.between]
    rows = [("because" if index == 0 else "", reason) for index, reason in enumerate(host.reasons)]
    rows += [("from the engine" if index == 0 else "", text) for index, text in enumerate(passed)]
    own = [name for name in host.inputs if name not in {item.name for item in host.between}]
    if own:
        rows.append(("from the caller", ", ".join(own)))
    rows.append(("gives", f"{', '.join(host.outputs)}, by {count(host.nodes, 'node')}"))
    return [line("the end of the model is an ONNX file of its own, to be run on the host"), pairs(rows)]


def _network_io(report: BuildReport) -> list[Block]:
    rows = [
        (item.name, f"state, {item.kind}" if item.state else item.kind, f"{item.dtype} {item.layout}", item.caller)
        for item in report.network_io
    ]
    return [table(("tensor", "", "type", "the caller must"), rows, right=())] if rows else []


def _calibration(report: BuildReport) -> list[Block]:
    record = report.calibration
    if record is None:
        return []
    time = "from the cache" if record.cached else seconds_text(record.seconds)
    memory = f", peak memory {bytes_text(record.peak_rss_bytes)}" if record.peak_rss_bytes and not record.cached else ""
    body: list[Block] = [line(f"{count(record.samples, 'sample')}, method {record.method}, {time}{memory}")]
    if record.source == "synthetic":
        body.insert(0, line("SYNTHETIC SAMPLES: the ranges say nothing about real data; give --calib", "warn"))
    return body


def _time(report: BuildReport) -> list[Block]:
    stages = [(name, seconds) for name, seconds in report.seconds.items() if name != "total"]
    total = report.seconds.get("total", sum(seconds for _, seconds in stages))
    return [line(", ".join(f"{name} {seconds_text(s)}" for name, s in stages) + f"; total {seconds_text(total)}")]


def _groups(items: Iterable[tuple[str, str]], labels: Labels) -> list[Block]:
    """Nodes by reason, a line each: how many, why, which; the most frequent reason first."""
    groups: dict[str, list[str]] = {}
    for reason, node in items:
        groups.setdefault(reason, []).append(node)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    rows = [
        (count(len(nodes), "node"), f"{reason} ({some_names(labels.each(nodes).names, 2)})")
        for reason, nodes in ordered[:_MOST_ROWS]
    ]
    if not rows:
        return []
    left = f"and {len(ordered) - _MOST_ROWS} more reasons, in the JSON report"
    return [pairs(rows), *([line(left)] if len(ordered) > _MOST_ROWS else [])]


def _more_note(page: object) -> str:
    """Where the rest is shown."""
    where = f"{visible(str(page))} has" if page else "--html FILE, in Python to_html(), makes a page with"
    return f"--verbose adds every step, region and refusal; {where} all of it"


_MORE: tuple[tuple[str, Callable[[BuildReport, Labels], Sequence[Block]]], ...] = (
    ("Result", lambda report, labels: _result(report)),
    ("Done", lambda report, labels: _steps(report)),
    ("Recipes", recipes_section),
    ("Guard", guard_section),
    ("Accuracy budget", lambda report, labels: search_section(report.search)),
    ("Refused", _refused),
    ("Precision achieved", lambda report, labels: _precision(report)),
    ("Kept in a wider type", _kept),
    ("Engine", lambda report, labels: _engine(report)),
    ("Limit", _limit),
    ("Builder options", lambda report, labels: builder_section(report.engine.builder_search if report.engine else ())),
    ("Saved model", lambda report, labels: [line(visible(report.saved))] if report.saved else []),
    ("Calibration", lambda report, labels: _calibration(report)),
    ("Accuracy", lambda report, labels: accuracy_section(report)),
    ("Least accurate tensors", lambda report, labels: tensors_section(report)),
    ("Time", lambda report, labels: _time(report)),
)
"""What a terminal shows when it is asked to say more."""
