"""A table of a TOML file replaced, the rest byte for byte."""

from __future__ import annotations

import sys

import pytest

from trtopt.config.toml_edit import with_table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = {"base": "L4", "calibration": {"clock": 0.9, "layers": 7, "date": "2026-11-22"}}
PATH = ("gpu", "my card")
BLOCK = """\
[gpu."my card"]
base = "L4"

[gpu."my card".calibration]
clock = 0.9
layers = 7
date = "2026-11-22"
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", BLOCK),
        ("# only a comment\n", f"# only a comment\n\n{BLOCK}"),
        ("[build]\nfp16 = true", f"[build]\nfp16 = true\n\n{BLOCK}"),
        ('[gpu."my card"]\nsm = 3\n', BLOCK),
        (
            "#a\n[ gpu . 'my card' ] # mine\nsm = 3\n# within\ntdp_w = 4\n\n# of build\n[build]  # b\nfp16 = true\n",
            f"#a\n{BLOCK}\n# of build\n[build]  # b\nfp16 = true\n",
        ),
        (
            f'{BLOCK}\n[build]\ntext = """\n[gpu."other"]\n"""\n[gpu."my card".tflops]\nfp32 = 3\n',
            f'{BLOCK}\n[build]\ntext = """\n[gpu."other"]\n"""\n',
        ),
    ],
)
def test_the_table_is_replaced_and_nothing_else(before: str, after: str) -> None:
    assert with_table(before, PATH, TABLE) == after
    assert tomllib.loads(after)["gpu"]["my card"] == TABLE
    assert with_table(after, PATH, TABLE) == after


def test_line_ends_stay() -> None:
    found = with_table("[build]\r\nfp16 = true\r\n", PATH, TABLE)
    assert found is not None and found.startswith("[build]\r\nfp16 = true\r\n\r\n[gpu.")
    assert tomllib.loads(found)["gpu"]["my card"] == TABLE


@pytest.mark.parametrize(
    "text",
    [
        'gpu."my card" = { sm = 3 }\n',
        '[gpu]\n"my card".sm = 3\n',
        '[gpu]\n"my card" = { sm = 3 }\n',
        'gpu = { "my card" = { sm = 3 } }\n',
    ],
)
def test_what_is_not_in_lines_of_its_own_is_left_alone(text: str) -> None:
    assert with_table(text, PATH, TABLE) is None


def test_names_and_texts_are_quoted() -> None:
    name = 'a "b" \\ é'
    found = with_table("", ("gpu", name), {"source": 'x "y"\n\\'})
    assert found is not None
    assert tomllib.loads(found)["gpu"] == {name: {"source": 'x "y"\n\\'}}
