"""Many random networks through all recipes, or through whole builds; failing seeds are printed.

python tests/property/soak.py [--networks 2000] [--first SEED] [--builds [--backend tensorrt]]
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import check_shipped
from check_network import check_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=2000)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--builds", action="store_true", help="build each, and hold what ships against what was judged")
    parser.add_argument("--backend", default="tensorrt-rtx", help="of the builds; for tensorrt, models are optimized")
    options = parser.parse_args()
    began = time.perf_counter()
    seeds = range(options.first, options.first + options.networks)
    print(f"seeds {seeds.start} to {seeds.stop - 1}", flush=True)
    if options.builds:
        soak_builds(seeds, began, options.backend)
        return
    total = check_all(seeds, partial(print, flush=True))
    print(f"{options.networks} networks in {time.perf_counter() - began:.0f} s, {len(total.problems)} problems")
    print(f"largest difference over an output's scale: {total.largest:.1e}")
    for name, count in sorted(total.fired.items(), key=lambda item: -item[1]):
        print(f"  {count:6d} {name}")
    if total.problems:
        raise SystemExit(1)


def soak_builds(seeds: range, began: float, backend: str) -> None:
    """:mod:`check_shipped` of many seeds."""
    found = check_shipped.check_all(seeds, partial(print, flush=True), backend)
    print(f"{len(seeds)} builds in {time.perf_counter() - began:.0f} s, {len(found.problems)} problems")
    for name, count in found.seen.most_common():
        print(f"  {count:6d} {name}")
    if found.problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
