"""What every test gets: a home of its own, so that no test reads or fills the user's cache."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    patch = pytest.MonkeyPatch()
    home = str(tmp_path_factory.mktemp("home"))
    patch.setenv("HOME", home)
    patch.setenv("USERPROFILE", home)
