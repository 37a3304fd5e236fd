"""Temporary folders that are gone when their process is: those of a process that was killed, at the next start."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import stat
import tempfile
import time
import weakref

try:
    import fcntl
except ImportError:  # on Windows, where folders cannot be locked and stay until they are removed by hand
    fcntl = None  # type: ignore[assignment]

_OURS = "trtopt-run-"

TEMPORARY = f"{_OURS}{secrets.token_hex(4)}-"
"""How the names of this run's temporary folders begin: who watches over it removes what it leaves when it crashes."""

_UNLOCKED_S = 60.0
"""A folder is made and then locked: one that is younger may be about to be."""


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder, removed at the end of ``with``, or by the next run where this process is killed.

    It is locked (flock(2)) for as long as this process, or one that it forked, lives: a process number could belong to
    another process by then.

    Args:
        what: A word for its name.

    Example:
        >>> with TemporaryFolder("parse") as name:
        ...     os.path.basename(name).startswith(TEMPORARY)
        True
    """

    def __init__(self, what: str = "") -> None:
        remove_left()
        super().__init__(prefix=f"{TEMPORARY}{what}", ignore_cleanup_errors=True)
        self._unlock = contextlib.ExitStack()
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks, where no run removes what another left
                self._unlock.callback(weakref.finalize(self, os.close, _locked(self.name)))

    def cleanup(self) -> None:
        """Remove the folder."""
        super().cleanup()
        self._unlock.close()


@functools.cache
def remove_left() -> None:
    """Remove this user's temporary folders of runs that have ended; once in a process."""
    if fcntl is None:
        return
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if not entry.name.startswith(_OURS):
                continue
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                is_old = time.time() - found.st_mtime > _UNLOCKED_S
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and is_old:
                    lock = _locked(entry.path)
                    shutil.rmtree(entry.path, ignore_errors=True)
                    os.close(lock)


def _locked(folder: str) -> int:
    """A descriptor that holds the lock of a folder. Raises OSError: another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
