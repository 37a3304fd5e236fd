"""Try an installed trtopt from outside of its source: every recipe is listed, and an engine is built.

Run by the interpreter of an environment that has the wheel with the extras ``rtx`` and ``cpu``, and nothing else.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import onnx

import trtopt_recipes

MODEL = """<ir_version: 8, opset_import: ["": 17]>
net (float[N, 8, 16, 16] x) => (float[N, 8] y) <float[8, 8, 3, 3] w = {%s}> {
    c = Conv<pads = [1, 1, 1, 1]>(x, w)
    r = Relu(c)
    p = GlobalAveragePool(r)
    y = Flatten(p)
}"""


def trtopt(*arguments: str) -> str:
    """Run the command; what it printed."""
    command = [str(Path(sys.executable).with_name("trtopt")), *arguments]
    print("$ trtopt", *arguments, flush=True)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    listed = trtopt("recipe", "list").split()
    missing = [recipe.name for recipe in trtopt_recipes.PACK if recipe.name not in listed]
    if missing:
        sys.exit(f"try_wheel: trtopt recipe list lacks {', '.join(missing)}")
    print(f"{len(trtopt_recipes.PACK)} recipes")
    with tempfile.TemporaryDirectory() as folder:
        model, engine = Path(folder, "net.onnx"), Path(folder, "net.rtx.engine")
        weights = ", ".join(str(index % 7 / 7) for index in range(8 * 8 * 9))
        onnx.save(onnx.parser.parse_model(MODEL % weights), model)
        print(trtopt("build", str(model), "--int8", "--gpu", "L4", "-o", str(engine)))
        if not engine.stat().st_size:
            sys.exit("try_wheel: the engine is empty")


if __name__ == "__main__":
    main()
