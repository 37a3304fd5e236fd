"""``python -m trtopt``: the same as the command ``trtopt``."""

from __future__ import annotations

import sys

from trtopt.cli.main import entry

if __name__ == "__main__":
    sys.exit(entry())
