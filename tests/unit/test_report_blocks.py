"""Blocks of reports: what a terminal, Markdown and a page make of the same view."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from analysis_samples import HOSTILE
from report_samples import full_report
from rich.console import Console
from test_check_forms import FOUND, hostile

from trtopt.report.html.page import html_page
from trtopt.report.schema.analysis import Finding
from trtopt.report.text import blocks, build, check
from trtopt.report.text.blocks import Cell, Column, Name, Names, Section, Table, View, line
from trtopt.report.text.markdown import as_markdown

LONG = "/encoder/layers.11/attention/self/query/MatMul"


class _Attributes(HTMLParser):
    """The names of all attributes in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {name for name, _ in attrs}


def shown(view: View, width: int = 100) -> str:
    console = Console(width=width, no_color=True, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(view, crop=False)  # as the command prints
    return "\n".join(text.rstrip() for text in capture.get().splitlines())


def view_of(*items: blocks.Block, **changes: object) -> View:
    return dataclasses.replace(View(line("head"), (), (Section("part", items),)), **changes)  # type: ignore[arg-type]


def body(view: View) -> str:
    """The page without scripts and styles."""
    page = html_page(view)
    return re.sub(r"<(script|style)\b.*?</\1>", "", page[page.index("<main>") :], flags=re.DOTALL)


def everything(name: str) -> View:
    """A text in every place that shows one."""
    cells = (Cell(name, 1.0, "good"), Cell(name), Name(name, after=name, below=name), Names((name,) * 5), name)
    columns = tuple(Column(f"{name}{index}") for index in range(len(cells)))
    return view_of(
        *(blocks.Line(name, "warn"), blocks.Line(name), blocks.Bullets((name,)), blocks.pairs([(name, Name(name))])),
        blocks.Figures(((name, name, name),)),
        Table(columns, (cells, cells), most=1, noun="row", sorted_by=0),
        blocks.Split((blocks.Part(name, 1.0, name, "0"), blocks.Part("rest", 0.0, "0", "1"))),
        blocks.Findings((Finding("rule", "warning", (name,), name, name, 1.0),), 2.0, name),
        blocks.Note(name),
        warnings=(name,),
        name=name,
        kind=name,
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_of_a_file_is_markup_in_any_block(name: str) -> None:
    view = everything(name)
    assert "\x1b" not in as_markdown(view) and re.search(r"(?<!\\)[<@]", as_markdown(view)) is None
    page, plain = html_page(view), html_page(everything("plain"))
    for mark in ("<script", "<img", "<b>", "</title", "<iframe", "\x1b"):
        assert page.count(mark) == plain.count(mark), mark
    seen = _Attributes()
    seen.feed(body(view))
    assert seen.names <= {"class", "title", "style", "scope", "type", "aria-sort", "data-value", "id", "data-find"}


def test_the_forms_show_the_same_rows_and_say_how_many_are_left_out() -> None:
    rows = tuple((f"n{index}", Cell(str(index), index)) for index in range(9))
    columns = (Column("name"), Column("number", "number"), Column("", "text"), Column("only a page", on="page"))
    table = Table(columns, tuple((*row, "", "x") for row in rows), 3, "row", sorted_by=1)
    for text in (shown(view_of(table)), as_markdown(view_of(table))):
        assert "n2" in text and "n3" not in text and "only a page" not in text
        assert "and 6 more rows; all of them are in the JSON" in text
    page = body(view_of(table))
    assert page.count("<tr>") == 1 + len(rows) and "only a page" in page and 'data-value="8"' in page
    assert page.count("<th ") == 3, "a column without a heading in which nothing stands"


def test_what_only_a_page_can_show_leaves_no_trace_elsewhere() -> None:
    view = view_of(blocks.Note("how to read it"), blocks.Plot("p", dict))
    assert shown(view) == "head" and as_markdown(view) == "## head\n"


@pytest.mark.parametrize(("width", "name"), [(80, LONG), (40, "…self/query/MatMul")])
def test_a_name_has_the_room_that_the_other_columns_leave(width: int, name: str) -> None:
    text = shown(view_of(Table((Column("layer"), Column("time")), ((Name(LONG), "12.3 us"),))), width)
    assert name in text, "the end of a path says most, and its parts stay whole"
    assert max(map(len, text.splitlines())) <= width and len(text.splitlines()) == 5


def test_times_have_the_real_sign_of_micro_in_a_page() -> None:
    assert "3.25 µs" in body(view_of(line("3.25 us"))) and "bus" in body(view_of(line("bus")))


def test_an_arrow_is_one_character_in_a_page() -> None:
    view = view_of(blocks.pairs([("kernels", "35 -> 27")]))
    assert "35 → 27" in body(view) and "35 -> 27" in shown(view)


def test_builds_and_checks_are_pages_and_markdown_too() -> None:
    page, text = body(build.view(full_report())), as_markdown(build.view(full_report(), verbose=True))
    for words in ("Precision achieved", "Least accurate tensors", "nothing to do: dead-node"):
        assert words in page and words in text.replace("\\", "")
    page = body(check.view(FOUND))
    assert "2 of 5 gates failed" in page and '<span class="bad">failed</span>' in page
    assert "<img" not in html_page(check.view(hostile()))


def test_commands_name_files_below_the_folder_from_there_in_every_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = f"trtopt build '{tmp_path}/a net.onnx' --int8"
    finding = Finding("rule", "hint", (), "what", "remedy", 1.0, command=command)
    view = view_of(blocks.Command(command), blocks.Findings((finding,), 1.0, ""))
    for text in (shown(view), as_markdown(view), html_page(view)):
        assert str(tmp_path) not in text and text.count("a net.onnx") == 2


def test_a_command_that_no_shell_takes_is_shown_as_it_is() -> None:
    view = view_of(blocks.Command("trtopt build 'half"))
    assert "trtopt build 'half" in shown(view) and "trtopt build 'half" in as_markdown(view)


def test_a_command_and_a_path_are_whole_however_narrow_the_terminal_is() -> None:
    path = "store/" + "a" * 70 + "/model.engine"
    text = shown(view_of(blocks.Command(f"trtopt profile {path}"), line(path)), 60)
    assert [part.strip() for part in text.splitlines()[-3:]] == ["trtopt profile \\", path, path]


def test_words_are_read_in_a_terminal_too_narrow_for_the_numbers_beside_them() -> None:
    columns = (Column(""), Column("gate", "text"), *blocks.numbers("before", "limit"))
    rows = (("passed", "top-1 agreement", "1.0000", "at least 0.9900 (default)"), ("failed", "kernels", "", ""))
    text = shown(view_of(Table(columns, rows)), 40)
    flat = " ".join(text.split())
    assert "passed top-1 agreement: before 1.0000, limit at least 0.9900 (default) failed kernels" in flat
    assert "gate" in shown(view_of(Table(columns, rows)), 80)  # the headings of a table


def test_limits_of_names_count_columns_of_words_as_wrapped() -> None:
    words = "fp16 fp32 -> int8 fp32 fp16 and more"
    columns = (Column("layer", "name"), Column("type"), Column("kernels", on="wide"))
    rows = tuple((Name(f"encoder.layer.{index}.attention.self"), words, "fused differently") for index in range(2))
    text = shown(view_of(Table(columns, rows)), 56)
    assert "encoder.layer.1.attention.self" in text and "kernels" not in text
