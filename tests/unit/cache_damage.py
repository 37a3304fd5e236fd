"""Random damage to a file."""

from __future__ import annotations

import random
from collections.abc import Iterator


def corruptions(whole: bytes, count: int, dice: random.Random) -> Iterator[tuple[str, bytes | None]]:
    """What was done and what is left; None for a file that is gone. None of them leaves the file as it was."""
    for _ in range(count):
        at = dice.randrange(len(whole))
        length = min(dice.randrange(1, 64), len(whole) - at)
        noise = bytes(byte ^ dice.randrange(1, 256) for byte in whole[at : at + length])
        kind = dice.choice(
            ("bit", "bytes", "cut", "append", "insert", "drop", "zeros", "missing", "empty", "text", "json")
        )
        yield (
            f"{kind} at {at}",
            {
                "bit": _flipped(whole, at, dice.randrange(8)),
                "bytes": whole[:at] + noise + whole[at + length :],
                "cut": whole[:at],
                "append": whole + noise,
                "insert": whole[:at] + noise + whole[at:],
                "drop": whole[:at] + whole[at + length :],
                "zeros": whole[:at] + bytes(len(whole) - at) if any(whole[at:]) else whole[:at],
                "missing": None,
                "empty": b"",
                "text": b"not an entry\n" + whole,
                "json": b'{"format": "trtopt.engine-cache/2", "identity": 7, "sha256": []}\n' + whole,
            }[kind],
        )


def _flipped(whole: bytes, at: int, bit: int) -> bytes:
    data = bytearray(whole)
    data[at] ^= 1 << bit
    return bytes(data)
