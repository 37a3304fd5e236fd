"""Many random networks through all recipes; failing seeds are printed.

python tests/property/soak.py [--networks 2000] [--first SEED]
"""

from __future__ import annotations

import argparse
import time
from functools import partial

from check_network import check_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=2000)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    options = parser.parse_args()
    began = time.perf_counter()
    seeds = range(options.first, options.first + options.networks)
    print(f"seeds {seeds.start} to {seeds.stop - 1}", flush=True)
    total = check_all(seeds, partial(print, flush=True))
    print(f"{options.networks} networks in {time.perf_counter() - began:.0f} s, {len(total.problems)} problems")
    print(f"largest difference over an output's scale: {total.largest:.1e}")
    for name, count in sorted(total.fired.items(), key=lambda item: -item[1]):
        print(f"  {count:6d} {name}")
    if total.problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
