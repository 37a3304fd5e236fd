"""What a report is made of, before it is known who shows it, and how a terminal does.

A view is a headline and sections of blocks. ``rich`` prints each block; :mod:`trtopt.report.text.markdown` and
:mod:`trtopt.report.html.page` show the same blocks. Texts are plain: nothing in them is markup. Names of a model are
:class:`Name` and :class:`Names`, cut by who shows them, which knows the room there is.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from trtopt.report.schema.analysis import Finding, rank
from trtopt.report.text.format import (
    NO_MORE,
    count,
    from_here,
    percent,
    short_name,
    shorten,
    some_names,
    time_text,
    visible,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
    from rich.table import Table as RichTable
    from rich.text import Text

Style = Literal["", "good", "bad", "warn", "quiet"]
"""How a text is meant: ``warn`` says what to look at, ``quiet`` how to read what stands beside it."""
_COLORS = {"": "", "good": "bold green", "bad": "bold red", "warn": "yellow", "quiet": ""}
_LEAST_NAME, _MOST_NAME, NAME = 16, 60, 40
"""Width of a name in a terminal: the least, the most, and where it stands among others."""
_GOOD_NAME = 34
"""Columns of what only wide terminals show are left out where they leave names less."""
_WRAPPED = 17
"""Width that a column of words is given where names need room."""
_LEAST_WORDS = 10
"""Width below which a column of words is not read any more."""
_BAR = 24
_MOST_FINDINGS, _LONGEST_MESSAGE = 10, 600
_NOISE = "the gain is inside the model's noise"


@dataclass(frozen=True)
class Cell:
    """A text in a table; the number that it is sorted by; how a page marks it (a class, or a sign in Markdown)."""

    text: str
    value: float | None = None
    mark: str = ""


@dataclass(frozen=True)
class Name:
    """A name of the model, and what stands after it and below it.

    Attributes:
        own: The node's or kernel's own name, where ``text`` is the user's: second, where there is room.
        parts: Names of the equal ones that it stands for, with a figure each; a page unfolds them.
    """

    text: str
    after: str = ""
    below: str = ""
    own: str = ""
    parts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Names:
    """Several names of the model, the first ones of which are shown."""

    names: tuple[str, ...]


Inline = str | Cell | Name | Names


def plain_text(item: Inline, width: int = NAME, below: str = "\n> ") -> str:
    """As text, names within ``width``; ``below`` stands before what is below a name."""
    if isinstance(item, Name):
        room = max(width - len(item.after), _LEAST_NAME)
        name, own = short_name(visible(item.text), room, measure=_cells), f" ({visible(item.own)})" if item.own else ""
        name += item.after + (own if _cells(name) + _cells(own) <= room else "")
        return name + (f"{below}{item.below}" if item.below else "")
    if isinstance(item, Names):
        return some_names(item.names, 2, width)
    return item.text if isinstance(item, Cell) else item


def _cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


@dataclass(frozen=True)
class Line:
    """A sentence."""

    text: str = ""
    style: Style = ""

    def __rich__(self) -> Text:
        shown = _text(self.text, _COLORS[self.style])
        if " " not in self.text:  # a path is not broken
            shown.no_wrap, shown.overflow = True, "ignore"
        return shown


@dataclass(frozen=True)
class Command:
    """A line to type in a shell (:func:`typed`); where it is too long for a terminal, it goes on behind a backslash."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        lines = [" "]
        parts: list[str] = []
        for word in typed(self.text):
            if not parts or word.startswith("-") or not parts[-1].startswith("-"):
                parts.append(word)
            else:
                parts[-1] += f" {word}"  # an option and its value stay together
        for word in parts:
            if _cells(lines[-1]) + _cells(word) + 3 > options.max_width:
                lines.append("   ")
            lines[-1] += f" {word}"
        yield Text(" \\\n".join(map(visible, lines)), style="bold", no_wrap=True, overflow="ignore")


def typed(text: str) -> list[str]:
    """The words of a line for a shell, quoted, with files below the current folder named from there; the line as it is
    where no shell takes it, as in a report that others wrote."""
    try:
        return [shlex.quote(from_here(word)) for word in shlex.split(text)]
    except ValueError:
        return [text]


@dataclass(frozen=True)
class Bullets:
    """Sentences beside each other."""

    texts: tuple[str, ...]
    style: Style = ""

    def __rich__(self) -> Group:
        return _group(_text(f"- {visible(text)}", _COLORS[self.style]) for text in self.texts)


@dataclass(frozen=True)
class Pairs:
    """Names and values."""

    rows: tuple[tuple[str, Inline], ...]

    def __rich__(self) -> RichTable:
        from rich.table import Table

        result = Table.grid(padding=(0, 3, 0, 0))
        result.add_column(no_wrap=True)
        result.add_column(overflow="fold")
        for name, value in self.rows:
            result.add_row(_text(name), _text(plain_text(value)))
        return result


@dataclass(frozen=True)
class Figures:
    """The figures that matter most: title, value and note of each."""

    rows: tuple[tuple[str, str, str], ...]

    def __rich__(self) -> RichTable:
        return pairs([(title, f"{value}, {note}" if note else value) for title, value, note in self.rows]).__rich__()


@dataclass(frozen=True)
class Column:
    """A heading; a style (``number`` is aligned to the right, and sorted as one); who shows it.

    ``on`` is empty for all, ``wide`` for pages and terminals with room for it, ``page`` for pages.
    """

    title: str
    style: str = ""
    on: Literal["", "wide", "page"] = ""


def numbers(*titles: str, on: Literal["", "wide", "page"] = "") -> list[Column]:
    """Columns of numbers."""
    return [Column(title, "number", on) for title in titles]


@dataclass(frozen=True)
class Table:
    """Rows under headings.

    Attributes:
        most: Rows that a terminal and Markdown show; all of them where it is None.
        noun: What a row is, to say how many are left out; the caller says it where it is empty.
        rest: What else to say of the rows left out.
        sorted_by: The column that the rows are sorted by, the largest first; None for a table that keeps its order.
        style: The class of a page's table; ``jobs`` has a field to filter it.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Inline, ...], ...]
    most: int | None = None
    noun: str = ""
    rest: Callable[[Sequence[tuple[Inline, ...]]], str] = lambda rows: ""
    sorted_by: int | None = None
    style: str = ""
    gap: int = 3

    def shown(self, most: int | None, on: Sequence[str]) -> tuple[Table, str]:
        """The rows and columns that are shown, and a sentence on the rows that are not.

        Columns without a heading in which nothing stands are left out.
        """
        left = self.rows[most:] if most is not None else ()
        rows = self.rows[: len(self.rows) - len(left)]
        keep = [
            index
            for index, column in enumerate(self.columns)
            if column.on in on and (column.title or any(row[index] not in ("", Cell("")) for row in rows))
        ]
        if "page" in on:  # first, where it stays while the others are scrolled
            keep.sort(key=lambda index: self.columns[index].style != "name")
        by = None if self.sorted_by is None else keep.index(self.sorted_by) if self.sorted_by in keep else None
        cut = dataclasses.replace(
            self,
            columns=tuple(self.columns[index] for index in keep),
            rows=tuple(tuple(row[index] for index in keep) for row in rows),
            sorted_by=by,
        )
        return cut, left_out_text(len(left), self.noun, self.rest(left)) if left and self.noun else ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table as RichTable

        shown, left = self._fitting(options.max_width)
        result = RichTable(box=None, pad_edge=False, padding=(0, self.gap, 0, 0), header_style="bold")
        width = shown.name_width(options.max_width)
        rows = [[plain_text(item, width) for item in row] for row in shown.rows]
        for column in shown.columns:
            justify: Literal["left", "right"] = "right" if column.style == "number" else "left"
            whole = column.style in ("number", "name")
            result.add_column(_text(column.title), justify=justify, overflow="fold", no_wrap=whole)
        for row in rows:
            result.add_row(*map(_text, row))
        yield result if shown._leaves_words(rows, options.max_width) else _group(shown._sentences(rows))
        if left:
            yield _text(left)

    def _fitting(self, room: int) -> tuple[Table, str]:
        """What a terminal shows: of the columns for wide ones as many as leave names their room."""
        wide = [index for index, column in enumerate(self.columns) if column.on == "wide"]
        while True:
            shown, left = self.shown(self.most, ("", "wide"))
            if not wide or shown.name_width(room) >= _GOOD_NAME:
                return shown, left
            columns = list(self.columns)
            columns[wide.pop()] = Column("", on="page")
            self = dataclasses.replace(self, columns=tuple(columns))

    def _leaves_words(self, rows: Sequence[Sequence[str]], room: int) -> bool:
        """Whether whole numbers leave the columns of words room to be read; names take what room there is."""
        words = 0
        for index, column in enumerate(self.columns):
            texts = [column.title, *(line for row in rows for line in row[index].split("\n"))]
            widest = max(map(_cells, texts))
            if column.style == "name":
                return True
            if column.style == "number":
                room -= widest + self.gap
            else:
                words += min(widest, _LEAST_WORDS) + self.gap
        return room >= words or not words

    def _sentences(self, rows: Sequence[Sequence[str]]) -> Iterator[Text]:
        """Each row as a sentence, its numbers behind their headings."""
        for row in rows:
            cells = [(column, text) for column, text in zip(self.columns, row, strict=True) if text]
            words = "  ".join(text for column, text in cells if column.style != "number")
            figures = ", ".join(f"{column.title} {text}" for column, text in cells if column.style == "number")
            yield _text(": ".join(filter(None, (words, figures))))

    def name_width(self, room: int) -> int:
        """The width of names in a terminal: what the other columns leave of ``room``."""
        named = {index for row in self.rows for index, item in enumerate(row) if isinstance(item, Name)}
        if not named:
            return NAME
        for index, column in enumerate(self.columns):
            if index not in named:
                texts = [column.title, *(line for row in self.rows for line in plain_text(row[index]).split("\n"))]
                widest = max(map(_cells, texts))
                room -= (widest if column.style else min(widest, _WRAPPED)) + self.gap
        return min(max(room // len(named) - self.gap, _LEAST_NAME), _MOST_NAME)


@dataclass(frozen=True)
class Part:
    """A part of a whole: its words, its value, and that as text; the class of its colour in a page."""

    words: str
    value: float
    text: str
    color: str


@dataclass(frozen=True)
class Split:
    """A whole in parts: a bar; the title says of what where a terminal has no heading for it."""

    parts: tuple[Part, ...]

    @property
    def total(self) -> float:
        return sum(part.value for part in self.parts)

    def __rich__(self) -> RenderableType:
        total = self.total
        rows = [
            (part.words, part.text, percent(part.value / total), "#" * max(round(_BAR * part.value / total), 1))
            for part in sorted(self.parts, key=lambda part: -part.value)
            if part.value > 0
        ]
        return table(("", "time", "share", ""), rows, right=(1, 2), gap=2)


@dataclass(frozen=True)
class Findings:
    """What could be won, the most first; the time they are of; how the gains are to be read."""

    found: tuple[Finding, ...]
    total_us: float
    note: str

    @property
    def ordered(self) -> list[Finding]:
        """By gain; findings that say the same of different nodes are one, with all nodes and the sum of the gains."""
        groups: dict[tuple[str, ...], list[Finding]] = {}
        for finding in self.found:
            key = (finding.rule, finding.severity, finding.message, finding.remedy, finding.command)
            groups.setdefault(key, []).append(finding)
        merged = [
            dataclasses.replace(
                group[0],
                nodes=tuple(node for finding in group for node in finding.nodes),
                gain_us=sum(finding.gain_us for finding in group),
                within_noise=all(finding.within_noise for finding in group),
            )
            for group in groups.values()
        ]
        return sorted(merged, key=rank)

    def message(self, finding: Finding, most: int = _LONGEST_MESSAGE) -> str:
        """What was found, on one line."""
        return shorten(visible(finding.message), most) + (f"; {_NOISE}" if finding.within_noise else "")

    def __rich__(self) -> Group:
        from rich.table import Table

        shown = Table.grid(padding=(0, 3, 0, 0))
        shown.add_column(no_wrap=True)
        shown.add_column(overflow="fold")
        ordered = self.ordered
        for item in ordered[:_MOST_FINDINGS]:
            is_named = not item.nodes or visible(item.nodes[0]) in visible(item.message)
            nodes = "" if is_named else f" ({some_names(item.nodes, 2)})"
            text = _text(f"{item.rule}: {self.message(item)}{nodes}\n> {visible(item.remedy)}")
            act = [] if not item.command else [Command(item.command)] if is_line(item) else [_text(f"> {item.command}")]
            gain = f"-{time_text(item.gain_us)}" if item.gain_us > 0 else item.severity
            shown.add_row(_text(gain), _group([text, *act]))
        return _group([shown, *left_out(len(ordered) - _MOST_FINDINGS, "finding"), line(self.note)])


def is_line(finding: Finding) -> bool:
    """Whether what a finding asks for is a line to type."""
    return finding.command.startswith("trtopt ")


@dataclass(frozen=True)
class Note:
    """What a page says of the block that follows; others leave it out."""

    text: str


@dataclass(frozen=True)
class Plot:
    """A plot, by the name of its element in a page; others leave it out. ``figure`` gives plotly's JSON."""

    name: str
    figure: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Graph:
    """The graph of an engine's layers and their table, which a page alone shows, of the JSON that ``data`` gives."""

    data: Callable[[], str]


_TextBlock = Line | Command | Bullets | Pairs | Figures | Table | Split | Findings
Block = _TextBlock | Note | Plot | Graph


@dataclass(frozen=True)
class Section:
    """A part of a report: its title, its blocks, and who shows it: all, ``page`` or ``text`` (all others) only."""

    title: str
    blocks: tuple[Block, ...]
    on: Literal["", "page", "text"] = ""


@dataclass(frozen=True)
class View:
    """A report to be shown.

    Attributes:
        head: The headline.
        lead: What is said before all else.
        sections: The parts; those without a block are not shown.
        kind: What the report is, where the headline does not say it and nobody sees what made it.
        name: Of what the page is: its title.
        warnings: What to look out for: last in a terminal, which ends there; first in others.
    """

    head: Line
    lead: tuple[Block, ...]
    sections: tuple[Section, ...]
    kind: str = ""
    name: str = ""
    warnings: tuple[str, ...] = ()

    def parts(self, on: Literal["page", "text"]) -> list[Section]:
        """The sections that a page or all others show, without blocks that these do not have."""
        found = []
        for section in self.sections:
            blocks = section.blocks if on == "page" else tuple(filter(_is_text, section.blocks))
            if blocks and section.on in ("", on):
                found.append(Section(section.title, blocks))
        return found

    def __rich__(self) -> Group:
        shown: list[Any] = [_text(self.head.text, _COLORS[self.head.style] or "bold")]
        shown += filter(_is_text, self.lead)
        warned = bullets(self.warnings, "warn")
        for section in (*self.parts("text"), *([Section("Warnings", warned)] if warned else [])):
            shown += [_text(), _text(section.title, "bold")] if section.title else []
            shown += [_Indented(block) for block in section.blocks if _is_text(block)]
        return _group(shown)


@dataclass(frozen=True)
class _Indented:
    """A block two columns to the right; rich's Padding cuts what is too long to be broken, such as a path."""

    block: _TextBlock

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        shown = console.render(self.block, options.update_width(options.max_width - 2))
        for words in Segment.split_lines(shown):
            yield from (Segment("  "), *words, Segment.line())


def _is_text(block: Block) -> TypeGuard[_TextBlock]:
    return not isinstance(block, (Note, Plot, Graph))


def _text(text: str = "", style: str = "") -> Text:
    """Plain text, in which nothing is taken for markup."""
    from rich.text import Text

    return Text(text, style=style)


def _group(items: Iterable[Any]) -> Group:
    from rich.console import Group

    return Group(*items)


def line(text: str = "", style: Style = "") -> Line:
    """A sentence."""
    return Line(text, style)


def pairs(rows: Iterable[tuple[str, Inline]]) -> Pairs:
    """Names and values."""
    return Pairs(tuple(rows))


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[Inline]],
    *,
    right: Sequence[int] = (),
    most: int | None = None,
    noun: str = "",
    gap: int = 3,
) -> Table:
    """A table by its headings and the columns aligned to the right."""
    columns = tuple(Column(title, "number" if index in right else "") for index, title in enumerate(head))
    return Table(columns, tuple(map(tuple, rows)), most, noun, gap=gap)


def sum_of(rows: Iterable[Sequence[Inline]], column: int) -> float:
    """The sum of the values in a column."""
    return sum(item.value or 0.0 for row in rows if isinstance(item := row[column], Cell))


def bullets(texts: Iterable[str], style: Style = "") -> tuple[Bullets, ...]:
    """Sentences beside each other; none where there are none."""
    found = tuple(texts)
    return (Bullets(found, style),) if found else ()


def left_out(number: int, noun: str, where: str = "") -> list[Line]:
    """A line that says how many rows are left out; none where none are."""
    return [Line(left_out_text(number, noun, where))] if number > 0 else []


def left_out_text(number: int, noun: str, where: str = "") -> str:
    """``and 3 more layers between them; all of them are in the JSON``."""
    return f"and {count(number, f'more {noun}')}{where}; {NO_MORE}"
