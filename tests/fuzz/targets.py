"""What is fuzzed: command lines and calls, the file of each that is mutated, and how often each is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ARGUMENTS = "args.txt"
"""A file whose lines are added to the command line, so that options are mutated as files are."""


@dataclass(frozen=True)
class Target:
    """An entry point.

    Attributes:
        line: The command line; ``python:verify ENGINE`` and ``python:load_engine ENGINE`` call the functions.
        slots: The files that may be mutated, with their format.
        needs: Other files and folders it reads.
        outputs: Files it writes: all of them where the exit code is 0, none elsewhere.
        share: How often it is chosen, beside the other targets of the format.
        code: The exit code on whole files: that of an input which gets as far as it can here.
    """

    line: str
    slots: Mapping[str, str]
    needs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    share: float = 1.0
    code: int = 0


_CACHE = ("cache",)
_MODEL = {"model.onnx": "onnx"}
_M = ("model.onnx",)
_ENGINE = {"m.engine": "engine", "m.engine.manifest.json": "manifest", "m.engine.manifest.sig": "key"}

TARGETS = (
    Target("analyze model.onnx --json", _MODEL, share=8),
    Target("analyze model.onnx --fp16 --batch-sweep 1,2 --html a.html", _MODEL, outputs=("a.html",), share=2),
    Target("analyze model.onnx --int8 --sparse --report a.json", _MODEL, outputs=("a.json",), share=2),
    Target("optimize model.onnx -o o.onnx --recipes none", _MODEL, outputs=("o.onnx",), share=1),
    Target("optimize model.onnx -o o.onnx --fp16 --report o.json", _MODEL, outputs=("o.onnx", "o.json"), share=0.2),
    Target("optimize model.onnx -o o.onnx --int8 --no-cache", _MODEL, outputs=("o.onnx",), share=0.03),
    Target("build model.onnx -o o.engine --no-cache --recipes none", _MODEL, outputs=("o.engine",), share=0.03),
    Target("sensitivity model.onnx --calib synthetic --cache-dir new", _MODEL, share=0.02),
    Target("profile model.onnx --backend onnxruntime", _MODEL, share=0.01),
    Target("python:verify m.engine", _ENGINE, share=4),
    Target("python:verify m.engine --key public.pem", _ENGINE | {"public.pem": "key"}, share=2),
    Target("python:load_engine bare.engine", {"bare.engine": "engine"}, share=3),
    Target("profile m.engine", _ENGINE, code=4),
    Target("triton trt.engine -o models", {"trt.engine": "engine", "trt.engine.manifest.json": "manifest"}, share=2),
    Target("triton model.onnx -o models", _MODEL),
    Target("profile bare.engine", {"bare.engine": "engine"}, code=4),
    Target("report build.json", {"build.json": "report"}, share=3),
    Target("report analysis.json --html r.html", {"analysis.json": "report"}, outputs=("r.html",), share=3),
    Target("report sweep.json", {"sweep.json": "report"}),
    Target(
        "report trtexec.json --html r.html --markdown r.md --trace r.trace",
        {"trtexec.json": "report"},
        outputs=("r.html", "r.md", "r.trace"),
        share=3,
    ),
    Target("report sens.json", {"sens.json": "report"}, share=0.3, code=2),
    Target(
        "report other.json --against trtexec.json --markdown r.md",
        {"other.json": "report", "trtexec.json": "report"},
        outputs=("r.md",),
        share=2,
    ),
    Target(
        "report fleet.json --html f.html --markdown f.md --csv f.csv",
        {"fleet.json": "report"},
        outputs=("f.html", "f.md", "f.csv"),
        share=3,
    ),
    Target("report fleet.json --max-latency-ms 5 --max-drop 0.01", {"fleet.json": "report"}, share=3),
    Target(
        "check build.json --markdown c.md --junit c.xml --max-kernels 4",
        {"build.json": "report"},
        outputs=("c.md", "c.xml"),
        share=2,
        code=7,
    ),
    Target(
        "check build.json --baseline fp16.json --junit c.xml",
        {"build.json": "report", "fp16.json": "report"},
        outputs=("c.xml",),
        share=2,
    ),
    Target("check trtexec.json --baseline other.json", {"trtexec.json": "report", "other.json": "report"}, share=2),
    Target("cache verify --cache-dir cache", {"cache/*": "cache"}, _CACHE, share=8),
    Target("cache list --cache-dir cache", {"cache/*": "cache"}, _CACHE, share=0.5),
    Target("cache prune --max-size 1K --cache-dir cache", {"cache/*": "cache"}, _CACHE, share=0.5),
    Target(
        "build model.onnx -o o.engine --fp16 --recipes none --cache-dir cache",
        {"cache/engines/*": "cache"},
        (*_M, *_CACHE),
        ("o.engine", "o.engine.manifest.json"),
        share=0.5,
    ),
    Target(
        "optimize model.onnx -o o.onnx --int8 --calib calib.npz --cache-dir cache",
        {"cache/calibration/*": "cache", "cache/prices/*": "cache"},
        (*_M, *_CACHE, "calib.npz"),
        ("o.onnx",),
        share=0.3,
    ),
    Target(
        "optimize model.onnx -o o.onnx --auto --calib calib.npz --cache-dir cache --max-accuracy-drop 0.1",
        {"cache/search/*": "cache"},
        (*_M, *_CACHE, "calib.npz"),
        ("o.onnx",),
        share=0.15,
    ),
    Target(
        "sensitivity model.onnx --calib calib.npz --cache-dir cache",
        {"cache/sensitivity/*": "cache"},
        (*_M, *_CACHE, "calib.npz"),
        share=0.5,
    ),
    Target(
        "optimize model.onnx -o o.onnx --recipes none --calib calib.npz --eval calib.npz",
        {"calib.npz": "arrays"},
        _M,
        ("o.onnx",),
        share=3,
    ),
    Target(
        "optimize model.onnx -o o.onnx --recipes none --eval inputs.json --reference outputs.json",
        {"inputs.json": "report", "outputs.json": "report"},
        _M,
        ("o.onnx",),
    ),
    Target("optimize model.onnx -o o.onnx --recipes none --calib x.npy", {"x.npy": "arrays"}, _M, ("o.onnx",), share=2),
    Target("sensitivity model.onnx --calib calib.npz --cache-dir new", {"calib.npz": "arrays"}, _M, share=0.3),
    Target(
        "optimize model.onnx -o o.onnx --int8 --recipes none --calib-cache trt.cache --no-cache",
        {"trt.cache": "text"},
        _M,
        ("o.onnx",),
        share=2,
    ),
    Target(
        "optimize model.onnx -o o.onnx --int8 --recipes none --calib calib.npz --calib-cache stats.calib --no-cache",
        {"stats.calib": "cache"},
        (*_M, "calib.npz"),
        ("o.onnx",),
        share=0.2,
    ),
    Target("analyze model.onnx --config config.toml", {"config.toml": "toml"}, _M, share=4),
    Target("optimize -o {model}-{precision}.onnx --config matrix.toml", {"matrix.toml": "toml"}, _M, share=0.2),
    Target("sweep fleet.toml --dry-run", {"fleet.toml": "toml", "store/*": "cache"}, _M, share=3),
    Target("sweep fleet.toml --report s.json", {"fleet.toml": "toml"}, (*_M, "store"), ("s.json",), share=0.1),
    Target("gpu show Mine --config gpus.toml", {"gpus.toml": "toml"}, share=4),
    Target("gpu list --config gpus.toml --json", {"gpus.toml": "toml"}, share=2),
    Target("analyze dynamic.onnx", {ARGUMENTS: "arguments"}, ("dynamic.onnx",), share=2),
    Target("optimize dynamic.onnx -o o.onnx --recipes none", {ARGUMENTS: "arguments"}, ("dynamic.onnx",), share=0.2),
    Target("explain", {ARGUMENTS: "arguments"}),
    Target("cache prune --cache-dir cache", {ARGUMENTS: "arguments"}, _CACHE, code=2),
    Target("check build.json", {ARGUMENTS: "arguments"}, ("build.json",)),
    Target(
        "profile --layer-info layers.json --layer-profile times.json --times runs.json --gpu A100 --report p.json",
        {"layers.json": "trtexec", "times.json": "trtexec", "runs.json": "trtexec"},
        outputs=("p.json",),
        share=4,
    ),
    Target(
        "profile --layer-info layers11.json --layer-profile times11.json --gpu H100 --markdown p.md",
        {"layers11.json": "trtexec", "times11.json": "trtexec"},
        outputs=("p.md",),
        share=3,
    ),
    Target(
        "profile named.onnx --layer-info layers.json --layer-profile times.json --gpu A100",
        {"layers.json": "trtexec", "named.onnx": "onnx"},
        ("times.json",),
    ),
)

QUICK = tuple(
    target
    for target in TARGETS
    if target.share >= 1
    and not target.needs
    and not target.line.startswith(("build", "optimize", "sensitivity", "check build", "report build", "report fleet"))
)
"""Those that take a tenth of a second, on seeds that take seconds."""

SHARES = {
    "onnx": 26,
    "report": 20,
    "trtexec": 16,
    "manifest": 12,
    "toml": 10,
    "arrays": 3,
    "cache": 6,
    "engine": 3,
    "arguments": 2,
    "text": 1,
    "key": 1,
}
"""How often each format is mutated, in percent: most where the code is largest, few where an input takes seconds."""

OTHER_SEEDS = {
    "onnx": ("model.onnx", "dynamic.onnx", "attention.onnx", "function.onnx", "qdq.onnx"),
    "arrays": ("calib.npz", "labels.npz", "plain.npz", "x.npy"),
    "toml": ("config.toml", "matrix.toml", "fleet.toml", "gpus.toml"),
    "arguments": (ARGUMENTS,),
}
"""Seeds that fit every slot of their format; other slots start from their own file."""
