"""10,000 malformed inputs, and as many as of the first seed again without guidance.

python benchmarks/fuzz/run.py [--inputs 2500] [--seeds 1 2 3 4] [--folder FOLDER]

Runs ``tests/fuzz/fuzz.py`` once for each seed, guided, and once for the first seed without guidance, at the same time,
and writes ``results.json`` here. Figures of runs that are in FOLDER already are taken from there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests" / "fuzz"
_SEEDS = f"import sys; sys.path[:0] = ['{TESTS}', '{TESTS.parent / 'cli'}', '{TESTS.parent / 'unit'}']; import seeds"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=2500, help="of each seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, help="for the figures of each run and its findings")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trtopt-fuzz-") as name:
        folder = options.folder or Path(name)
        runs = {f"guided{seed}": ["--seed", str(seed)] for seed in options.seeds}
        runs["plain"] = ["--seed", str(options.seeds[0]), "--plain"]
        _run({name: words for name, words in runs.items() if not (folder / f"{name}.json").exists()}, folder, options)
        found = {name: json.loads((folder / f"{name}.json").read_text()) for name in runs}
    result = combined([found[name] for name in runs if name != "plain"], found["plain"])
    (HERE / "results.json").write_text(json.dumps(result, indent=1) + "\n")


def _run(runs: dict[str, list[str]], folder: Path, options: argparse.Namespace) -> None:
    if not runs:
        return
    fixtures = folder / "fixtures"
    if not fixtures.is_dir():
        fixtures.mkdir(parents=True)
        make = f"{_SEEDS}; from pathlib import Path; seeds.make(Path({str(fixtures.absolute())!r}))"
        subprocess.run([sys.executable, "-c", make], check=True)
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, TESTS / "fuzz.py", "--inputs", str(options.inputs), *words),
                *("--fixtures", fixtures, "--json", folder / f"{name}.json", "--findings", folder / name),
            ]
        )
        for name, words in runs.items()
    ]
    for process in processes:
        process.wait()


def combined(guided: list[dict[str, Any]], plain: dict[str, Any]) -> dict[str, Any]:
    """The figures of all runs in one."""
    first = guided[0]
    sums = {
        name: dict(sorted(sum((Counter(run[name]) for run in guided), Counter()).items()))
        for name in ("inputs_per_format", "inputs_per_target", "exit_codes")
    }
    return {
        **{name: first[name] for name in ("date", "versions", "machine")},
        "seeds": [run["seed"] for run in guided],
        "inputs": sum(run["inputs"] for run in guided),
        **sums,
        "lines_by_the_seeds": first["lines_by_the_seeds"],
        "lines": [run["lines"] for run in guided],
        "arcs": [run["arcs"] for run in guided],
        "lines_after_inputs": {"guided": first["lines_after_inputs"], "plain": plain["lines_after_inputs"]},
        "arcs_plain": plain["arcs"],
        "slowest_s": max((run["slowest_s"] for run in guided), key=lambda item: item["seconds"]),
        "largest_growth_mib": max((run["largest_growth_mib"] for run in guided), key=lambda item: item["mib"]),
        "findings": {name: item for run in guided for name, item in run["findings"].items()},
    }


if __name__ == "__main__":
    main()
