"""What a failed build says, for failures that no build here can be made to have."""

from __future__ import annotations

from trtopt.engine.process import crash, refusal
from trtopt.errors import EngineBuildError


def test_a_crash_names_the_signal_and_the_last_line() -> None:
    error = crash(-11, "first\nlast words\n\n")
    assert "SIGSEGV" in error.what and error.where == "last words"
    assert "memory" in crash(-9, "").remedy


def test_memory_that_runs_out_in_the_worker_is_called_so() -> None:
    said = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
    assert "ran out of memory" in crash(-6, said).what
    assert "ran out of memory" in crash(1, "Traceback (most recent call last):\nMemoryError\n").what


def test_a_missed_timing_cache_says_how_to_fill_it() -> None:
    """TensorRT's words for it, which no build here can be made to say."""
    error = refusal("build", [], [("INTERNAL_ERROR", "Assertion !errorOnMiss failed.")], "model.onnx")
    assert isinstance(error, EngineBuildError) and "--error-on-timing-cache-miss" in error.remedy
