"""The process of a worker of this machine: a job on each line of standard input, an answer on each line of standard
output, both as JSON. It ends with the process that started it."""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from trtopt.fleet.task import Task
from trtopt.runtime import share_cores


def main(function: str, threads: int) -> NoReturn:
    """Run jobs until standard input ends.

    Args:
        function: What runs one, ``module:function``.
        threads: Threads that ONNX Runtime takes.
    """
    share_cores(threads)
    module, _, name = function.partition(":")
    execute = getattr(importlib.import_module(module), name)
    # What native libraries and users' metrics print is no answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while True:
        order = json.loads(lines.get())
        outcome = execute(Task(**order["task"]), Path(order["folder"]))
        answers.write(json.dumps(asdict(outcome)) + "\n")
        answers.flush()


def _read(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # whoever asked is gone, also in the middle of a build
