"""Mutations of bytes, JSON, lines with checksums and TOML."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

from trtopt.cache.checksummed import from_line, to_line
from trtopt.report.schema.manifest import DIGEST, with_digest

STRINGS = (
    "", "a" * 5000, "\x1b[31mred\x1b[0m", "\x00", "\ud800", "‮abc", "../../etc/passwd", "/dev/null", "L4", "int8",
    "fp16",
    "1e400", "NaN", "\n\n", "x" * 70 + "\t", "%s%n", "{0}", "[bold]", "</script><script>", "N", "?", "é" * 100, "0",
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 7, 255, 2**31, 2**31 - 1, -(2**31), 2**53, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e-320,
    1e308, -1e308, 3.4e38, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
ODD: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": None}, *NUMBERS, *STRINGS)
_TOML = (
    "1", "-1", "0", "1e400", "nan", "inf", '""', '"\\u001b[31m"', "'''a\nb'''", "[]", "[[]]", "[1, 'a']", "{}",
    "{ a = 1 }", "true", "1979-05-27T07:32:00Z", "07:32:00", "99999999999999999999999", '"/dev/zero"', '"L4"', '"int8"',
    '["x:1x3x8x8"]', '"x:0x3x8x8"', '"\\ud800"', '"' + "a" * 3000 + '"', "[" * 2000, "[" * 200 + "]" * 200,
    '"synthetic"',
)  # fmt: skip
_DEEP = (50, 900, 1100, 20_000, 200_000)


def mutate_bytes(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """Flip, cut, insert, repeat, splice."""
    at = dice.randrange(len(data) + 1)
    end = min(len(data), at + dice.choice((1, 1, 2, 4, 16, 64, 1024)))
    kind = dice.randrange(8)
    if kind == 0 and data:
        found = bytearray(data)
        for _ in range(dice.choice((1, 1, 2, 8))):
            found[dice.randrange(len(found))] ^= 1 << dice.randrange(8)
        return bytes(found)
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + data[end:]
    if kind == 3:
        return data[:at] + dice.randbytes(end - at) + data[end:]
    if kind == 4:
        return data[:at] + data[at:end] * dice.choice((2, 3, 100)) + data[end:]
    if kind == 5:
        start = dice.randrange(len(other) + 1)
        return data[:at] + other[start : start + dice.choice((4, 64, 1024))] + data[end:]
    if kind == 6:
        number = dice.choice((0, 1, 0x7F, 0xFF, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
        size = dice.choice((1, 2, 4, 8))
        return data[:at] + (number % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]
    return data[:at] + dice.choice((b"\xff\xfe", b"\xef\xbb\xbf", b"\x1b]0;t\x07", b"\xc3\x28", b"\0" * 64)) + data[at:]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container within a JSON value with each of its keys."""
    found, waiting = [], [value]
    while waiting:
        item = waiting.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        for key in keys:
            found.append((item, key))
            waiting.append(item[key])
    return found


def mutate_value(value: Any, other: Any, dice: random.Random) -> Any:
    """A copy of a JSON value with one thing wrong."""
    value = copy.deepcopy(value)
    spots = places(value)
    if not spots:
        return dice.choice(ODD)
    holder, key = dice.choice(spots)
    kind = dice.randrange(9)
    if kind <= 2:
        holder[key] = _beside(holder[key], dice)
    elif kind == 3:
        holder[key] = dice.choice(ODD)
    elif kind == 4:
        del holder[key]
    elif kind == 5:
        given = places(other) or spots
        source, name = dice.choice(given)
        holder[key] = copy.deepcopy(source[name])
    elif kind == 6 and isinstance(holder, dict):
        holder[dice.choice((*STRINGS, *map(str, holder)))] = holder.pop(key)
    elif kind == 7 and isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key])] * dice.choice((1, 3, 1000))
    else:
        second, name = dice.choice(spots)
        holder[key], second[name] = copy.deepcopy(second[name]), copy.deepcopy(holder[key])
    return value


def _beside(value: Any, dice: random.Random) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return dice.choice((*NUMBERS, value + 1, -value, value * 1000, value / 2))
    if isinstance(value, str):
        return dice.choice((*STRINGS, value + dice.choice(STRINGS), value[: len(value) // 2], value.upper()))
    if isinstance(value, list):
        return dice.choice(([], value[::-1], value * 2, [value]))
    if isinstance(value, dict):
        return dice.choice(({}, {"": value}, list(value.values())))
    return dice.choice(ODD)


def _json_text(value: Any) -> bytes:
    return json.dumps(value).encode()


def mutate_json(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """Values of JSON swapped, or its text broken."""
    if dice.random() < 0.2:
        return _broken_json(data, other, dice)
    try:
        return _json_text(mutate_value(json.loads(data), _parsed(other), dice))
    except (ValueError, RecursionError, OverflowError):
        return mutate_bytes(data, other, dice)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _broken_json(data: bytes, other: bytes, dice: random.Random) -> bytes:
    kind = dice.randrange(6)
    numbers = [match.span() for match in re.finditer(rb"-?\d+(\.\d+)?", data[:100_000])]
    strings = [match.span() for match in re.finditer(rb'"[^"\\]*"', data[:100_000])]
    if kind == 0 and numbers:
        start, end = dice.choice(numbers)
        word = dice.choice(
            (b"NaN", b"-Infinity", b"1e999", b"-0", b"00", b"9" * 5000, b"1." + b"0" * 400 + b"1", b"0x1")
        )
        return data[:start] + word + data[end:]
    if kind == 1 and strings:
        start, end = dice.choice(strings)
        word = dice.choice((b'"\\ud800"', b'"\xff"', b'"\\u0000"', b'"a', b"''", b'"\\x"', b'"\x01"'))
        return data[:start] + word + data[end:]
    if kind == 2 and strings:
        start, end = dice.choice(strings)
        depth = dice.choice(_DEEP)
        return data[:start] + b"[" * depth + b"]" * depth + data[end:]
    if kind == 3 and strings:
        start, _ = dice.choice(strings)
        return data[:start] + b'"schema": 1, "layers": [], ' + data[start:]
    if kind == 4:
        return data.decode("utf-8", "replace").encode(dice.choice(("utf-16", "utf-32", "utf-8-sig")), "replace")
    return mutate_bytes(data, other, dice)


def mutate_manifest(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """A manifest as somebody would write it who knows how the hash in it is made; sometimes without that."""
    if dice.random() < 0.25:
        return mutate_json(data, other, dice)
    try:
        fields = mutate_value(json.loads(data), _parsed(other), dice)
        fields = {key: value for key, value in fields.items() if key != DIGEST}
        return with_digest(fields)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return mutate_json(data, other, dice)


def mutate_lines(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """Lines of JSON with checksums; the checksums are mostly made anew."""
    lines = data.split(b"\n")
    at = dice.randrange(len(lines))
    kind = dice.randrange(10)
    if kind == 0:
        return data + b"\n" * dice.choice((1, 1000, 1_000_000))
    if kind == 1:
        lines[at:at] = [lines[at]] * dice.choice((1, 100))
    elif kind == 2:
        lines[at] = mutate_bytes(lines[at], other, dice)
    else:
        try:
            whole = from_line(lines[at])
            if whole is None:
                raise ValueError("no line")
            record = mutate_value(whole, None, dice)
            lines[at] = to_line(record).rstrip(b"\n") if isinstance(record, dict) else _json_text(record)
        except (ValueError, OverflowError):
            lines[at] = mutate_bytes(lines[at], other, dice)
    return b"\n".join(lines)


def mutate_toml(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """Lines swapped, doubled, removed; values and keys replaced."""
    lines = data.decode("utf-8", "replace").split("\n")
    at = dice.randrange(len(lines))
    key, separator, _ = lines[at].partition("=")
    kind = dice.randrange(9)
    if kind <= 2 and separator:
        lines[at] = f"{key}= {dice.choice(_TOML)}"
    elif kind == 3 and separator:
        values = [line.partition("=")[2] for line in other.decode("utf-8", "replace").split("\n") if "=" in line]
        lines[at] = f"{key}={dice.choice(values or ['1'])}"
    elif kind == 4:
        del lines[at]
    elif kind == 5:
        lines.insert(dice.randrange(len(lines)), lines[at])
    elif kind == 6:
        name = dice.choice(
            ("[matrix]", "[gpu]", "[[build]]", "[gpu.L4]", "[profile]", "[a.b.c]", "[build", '[gpu."\\u001b"]')
        )
        lines.insert(at, name)
    elif kind == 7 and separator:
        name = dice.choice(
            ("gpu", "precision", "tflops", "sm", '""', "base", "a.b", "io", "min_shapes", "source", "calib")
        )
        lines[at] = f"{name} = {dice.choice(_TOML)}"
    else:
        return mutate_bytes(data, other, dice)
    return "\n".join(lines).encode("utf-8", "replace")


_WORDS = (
    "--gpu", "--shapes", "--min-shapes", "--opt-shapes", "--max-shapes", "--batch-sweep", "--latency-budget", "--io",
    "--json", "--fp16", "--int8", "--help", "--config", "--html", "--older-than", "--max-size", "--kind", "--min-share",
    "--max-kernels", "--max-accuracy-drop", "--recipes", "--builder", "x:0x3x8x8", "x:-1x3x8x8", "x:99999999999x3x8x8",
    "x:2x3x8x8,x:3x3x8x8", "x:[1,3,8,8]", "x:", ":", "1..256", "1..999999999999", "0", "-1", "nan", "inf", "1e400",
    "9" * 30,
    "L4", "portable", "int8=nan", "engines", "unread-sector", "x:fp16:hwc8", "workspace=1e9999G", "a.html", ".",
    "/dev/null",
)  # fmt: skip


def mutate_arguments(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """Arguments, a line each: exchanged, doubled, left out, or with a few characters wrong."""
    words = data.decode("utf-8", "replace").split("\n")[:40]
    at = dice.randrange(len(words))
    kind = dice.randrange(5)
    if kind == 0:
        words[at] = dice.choice((*_WORDS, *STRINGS))
    elif kind == 1:
        words[at:at] = [dice.choice(_WORDS), dice.choice((*_WORDS, *STRINGS))]
    elif kind == 2:
        del words[at]
    elif kind == 3:
        words[at] = mutate_bytes(words[at].encode("utf-8", "replace"), other[:100], dice).decode("utf-8", "replace")
    else:
        words.insert(at, words[dice.randrange(len(words))])
    return "\n".join(words).encode("utf-8", "surrogatepass")


Mutation = Callable[[bytes, bytes, random.Random], bytes]
