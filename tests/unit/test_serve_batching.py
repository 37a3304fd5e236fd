"""The batcher of examples/serve: who runs with whom, who is refused, who is answered."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from trtopt.errors import ClosedError, QueueFullError

sys.path.append(str(Path(__file__).parents[2] / "examples" / "serve"))

from batching import Batcher

Run = Callable[[list[Any]], Awaitable[Sequence[Any]]]


class Gate:
    """Doubles its items, once it is open; keeps the batches."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.batches: list[list[Any]] = []

    async def __call__(self, items: list[Any]) -> list[Any]:
        self.batches.append(items)
        await self.open.wait()
        if "bad" in items:
            raise ValueError("a bad item")
        return [item * 2 for item in items]


def batcher(run: Run, **changes: Any) -> Batcher:
    return Batcher(run, **{"max_batch": 4, "max_delay_s": 0, "max_queue": 8, "calls": 1, **changes})


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_what_waits_together_runs_together_and_each_gets_its_own_reply() -> None:
    async def main() -> None:
        gate = Gate()
        queue = batcher(gate)
        first = queue.submit(0)
        await turns()
        replies = [queue.submit(number) for number in range(1, 8)]
        await turns()
        assert (gate.batches, queue.waiting) == ([[0]], 7)
        gate.open.set()
        assert await asyncio.gather(first, *replies) == [2 * number for number in range(8)]
        assert gate.batches == [[0], [1, 2, 3, 4], [5, 6, 7]]
        await queue.close()

    asyncio.run(main())


def test_a_full_batch_does_not_wait_for_the_delay_and_a_small_one_does() -> None:
    async def main() -> None:
        gate = Gate()
        gate.open.set()
        queue = batcher(gate, max_delay_s=3600, max_batch=2)
        alone = queue.submit(1)
        await turns()
        assert not gate.batches and not alone.done()
        assert await asyncio.gather(alone, queue.submit(2)) == [2, 4]
        last = queue.submit(3)
        await turns()
        await queue.close()
        assert await last == 6
        soon = batcher(gate, max_delay_s=0.01)
        assert await soon.submit(4) == 8
        await soon.close()

    asyncio.run(main())


def test_items_of_different_keys_never_share_a_batch_and_keep_their_order() -> None:
    async def main() -> None:
        gate = Gate()
        queue = batcher(gate)
        busy = queue.submit("busy")
        await turns()
        replies = [queue.submit(item, item[0]) for item in ("a1", "b1", "a2", "b2", "c1", "a3")]
        gate.open.set()
        assert await asyncio.gather(*replies) == [item * 2 for item in ("a1", "b1", "a2", "b2", "c1", "a3")]
        assert gate.batches[1:] == [["a1", "a2", "a3"], ["b1", "b2"], ["c1"]]
        await busy
        await queue.close()

    asyncio.run(main())


def test_one_more_than_may_wait_is_refused() -> None:
    async def main() -> None:
        gate = Gate()
        queue = batcher(gate, max_queue=2)
        replies = [queue.submit(0)]
        await turns()
        replies += [queue.submit(1), queue.submit(2)]
        assert queue.is_full
        with pytest.raises(QueueFullError, match="2 requests wait already"):
            queue.submit(3)
        gate.open.set()
        assert await asyncio.gather(*replies) == [0, 2, 4]
        assert not queue.is_full
        await queue.close()

    asyncio.run(main())


def test_a_request_that_is_cancelled_makes_room_and_changes_no_other_reply() -> None:
    async def main() -> None:
        gate = Gate()
        queue = batcher(gate, max_queue=2)
        running = queue.submit(0)
        await turns()
        waiting, gone = queue.submit(1), queue.submit(2)
        gone.cancel()
        running.cancel()
        await turns()
        assert queue.waiting == 1
        late = queue.submit(3)
        gate.open.set()
        assert await asyncio.gather(waiting, late) == [2, 6]
        assert gate.batches == [[0], [1, 3]]
        lone = queue.submit(4)
        lone.cancel()
        await turns()
        assert await queue.submit(5) == 10
        await queue.close()

    asyncio.run(main())


def test_an_item_that_fails_fails_alone() -> None:
    async def main() -> None:
        gate = Gate()
        queue = batcher(gate)
        busy = queue.submit(0)
        await turns()
        replies = [queue.submit(item) for item in (1, "bad", 2)]
        gate.open.set()
        found = await asyncio.gather(busy, *replies, return_exceptions=True)
        assert found[:2] == [0, 2] and isinstance(found[2], ValueError) and found[3] == 4
        assert await queue.submit(3) == 6
        await queue.close()

    asyncio.run(main())


def test_replies_that_are_too_few_are_an_error_and_the_queue_lives() -> None:
    async def main() -> None:
        async def too_few(items: list[Any]) -> list[Any]:
            return [] if "bad" in items else items

        queue = batcher(too_few)
        replies = asyncio.gather(*map(queue.submit, (1, "bad", 2)), return_exceptions=True)
        found = await asyncio.wait_for(replies, 10)
        assert found[0] == 1 and isinstance(found[1], ValueError) and found[2] == 2
        assert await asyncio.wait_for(queue.submit(3), 10) == 3
        await queue.close()

    asyncio.run(main())


def test_as_many_batches_run_at_a_time_as_there_are_calls() -> None:
    async def main() -> None:
        gate = Gate()
        queue = batcher(gate, max_batch=1, calls=2)
        replies = [queue.submit(number) for number in range(3)]
        await turns()
        assert gate.batches == [[0], [1]]
        gate.open.set()
        assert await asyncio.gather(*replies) == [0, 2, 4]
        await queue.close()

    asyncio.run(main())


def test_closing_answers_what_waits_and_refuses_what_comes() -> None:
    async def main() -> None:
        gate = Gate()
        queue = batcher(gate)
        replies = [queue.submit(number) for number in range(6)]
        await turns()
        closing = asyncio.create_task(queue.close())
        await turns()
        with pytest.raises(ClosedError):
            queue.submit(6)
        assert not closing.done()
        gate.open.set()
        await closing
        assert [reply.result() for reply in replies] == [0, 2, 4, 6, 8, 10]

    asyncio.run(main())
