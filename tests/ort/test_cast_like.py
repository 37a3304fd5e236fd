"""CastLike, which dynamo writes without its optimizations, is a Cast or nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_attention_written import check, floats


@pytest.mark.parametrize(
    ("like", "casts"), [("float[2] like", []), ("float16[2] like", ["Cast"]), ("int64[2] like", ["Cast"])]
)
def test_cast_like_becomes_what_its_second_operand_says(tmp_path: Path, like: str, casts: list[str]) -> None:
    kind = like.split("[")[0]
    text = f"""g (float[B, 2] x, {like}) => ({kind}[B, 2] y)
        {{ z = Sin(x)  c = CastLike(z, like)  y = Add(c, like) }}"""
    value = np.ones(2, {"float": np.float32, "float16": np.float16, "int64": np.int64}[kind])
    kinds = check(tmp_path, text, 17, x=floats(3, 2), like=value)
    assert "CastLike" not in kinds
    assert [name for name in kinds if name == "Cast"] == casts
