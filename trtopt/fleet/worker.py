"""The process of a worker of this machine: a job on each line of standard input, an answer on each line of standard
output, both as JSON. It ends with the process that started it."""

from __future__ import annotations

import json
import os
import queue
import shutil
import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import NoReturn

from trtopt.fleet.task import Task
from trtopt.support.ort_session import share_cores


def main(function: str, threads: int, temporary: str) -> NoReturn:
    """Run jobs until standard input ends.

    Args:
        function: What runs one, ``module:function``.
        threads: Threads that ONNX Runtime takes.
        temporary: The folder of its temporary files, which goes with it.
    """
    share_cores(threads)
    execute = resolve_name(function)
    # What native libraries and users' metrics print is no answer, and what they read no order.
    answers, orders = os.fdopen(os.dup(1), "w", encoding="utf-8"), os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(orders, lines, temporary), daemon=True).start()
    while True:
        order = json.loads(lines.get())
        outcome = execute(Task(**order["task"]), Path(order["folder"]))
        answers.write(json.dumps(asdict(outcome)) + "\n")
        answers.flush()


def _read(orders: Iterable[str], lines: queue.SimpleQueue[str], temporary: str) -> None:
    for line in orders:
        lines.put(line)
    shutil.rmtree(temporary, ignore_errors=True)
    os._exit(0)  # whoever asked is gone, also in the middle of a build
