"""The cache of engines under many builders, kills and damage; seeds are printed.

python tests/rtx/cache_soak.py [--rounds 5] [--processes 16] [--corruptions 1000] [--seed 8]
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from cache_damage import corruptions
from cache_race import build, make_models, race, reference

from trtopt.cache.folder import damage, files
from trtopt.engine.cache import Compiled, EngineCache
from trtopt.events import Event


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--corruptions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=8)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="trtopt-soak-") as name:
        folder = Path(name)
        models = make_models(folder, 4)
        engines = reference(models)
        total: Counter[str] = Counter()
        for turn in range(options.rounds):
            began = time.perf_counter()
            shutil.rmtree(folder / "cache", ignore_errors=True)
            dice = random.Random(options.seed + turn)
            counts = race(models, engines, options.processes, options.processes // 3, dice)
            total += counts
            print(f"round {turn}: {dict(counts)} in {time.perf_counter() - began:.0f} s", flush=True)
        print(f"{options.rounds * options.processes} builds: {dict(total)}, no wrong or partial entry", flush=True)
        unseen = _damage_entry(folder, models[0], options.corruptions, random.Random(options.seed))
    print(f"{options.corruptions} corruptions of an entry, {unseen} not detected")
    if unseen:
        raise SystemExit(1)


def _damage_entry(folder: Path, model: Path, count: int, dice: random.Random) -> int:
    """How many corruptions of a real engine's entry a reader or ``verify`` took for whole."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    if build(model, "entry", "--cache-dir", "cache").wait(300) != 0:
        raise SystemExit("the build failed")
    (file,) = (entry for entry in files(folder / "cache") if entry.kind == "engines")
    whole, unseen = file.path.read_bytes(), 0
    original = _read(folder / "cache", file.path.stem)
    if original is None:
        raise SystemExit("the entry is not read")
    for what, damaged in corruptions(whole, count, dice):
        file.path.unlink(missing_ok=True)
        if damaged is not None:
            file.path.write_bytes(damaged)
        found = [entry for entry in files(folder / "cache") if entry.path == file.path]
        seen = _read(folder / "cache", file.path.stem) is None and all(damage(entry) for entry in found)
        if not seen:
            unseen += 1
            print(f"not detected: {what}", flush=True)
    return unseen


class _MissedError(Exception):
    """The entry is not used: the engine would be built."""


def _read(folder: Path, key: str) -> Compiled | None:
    events: list[Event] = []

    def miss() -> Compiled:
        raise _MissedError

    try:
        return EngineCache(folder, events.append).obtain(key, miss, lambda found: found)[0]
    except _MissedError:
        return None


if __name__ == "__main__":
    main()
