"""What every test gets: a home of its own, so that no test reads or fills the user's cache; signals as from a shell."""

from __future__ import annotations

import gc
import signal

import pytest


def pytest_collection_finish() -> None:
    """A collection of garbage takes a second of CPU time where it looks at all that ten thousand tests are made of."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    patch = pytest.MonkeyPatch()
    home = str(tmp_path_factory.mktemp("home"))
    patch.setenv("HOME", home)
    patch.setenv("USERPROFILE", home)


@pytest.fixture(autouse=True, scope="session")
def _own_signals() -> None:
    """Started in the background, or by nohup, the tests ignore signals, and so would the commands that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
