"""Tasks: background work runs to its end, its failures are logged, and the wait for its end has a limit."""

from __future__ import annotations

import asyncio
import gc
import itertools

import pytest

from router.fleet.tasks import Tasks, gather_spread


async def _fail() -> None:
    raise RuntimeError("a flaw")


def test_work_without_an_awaiting_task_runs_to_its_end() -> None:
    done: list[int] = []

    async def work() -> None:
        await asyncio.sleep(0)
        gc.collect()
        done.append(1)

    async def main() -> None:
        tasks = Tasks()
        tasks.run_in_background(work())
        await tasks.close(10.0)

    asyncio.run(main())
    assert done == [1]


def test_a_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        tasks = Tasks()
        tasks.run_in_background(_fail())
        await tasks.close(10.0)

    asyncio.run(main())
    assert "a flaw" in caplog.text


def test_work_that_exceeds_the_limit_is_cancelled() -> None:
    async def main() -> bool:
        tasks = Tasks()
        task = tasks.run_in_background(asyncio.sleep(1000))
        await tasks.close(0.01)
        await asyncio.sleep(0)
        return task.cancelled()

    assert asyncio.run(main())


def test_gather_spread_returns_results_in_order_and_starts_a_part_in_each_iteration() -> None:
    started: list[int] = []
    seen: list[int] = []

    async def work(number: int) -> int:
        started.append(number)
        return number

    async def look() -> None:
        while len(started) < 1000:
            seen.append(len(started))
            await asyncio.sleep(0)

    async def main() -> list[int]:
        looking = asyncio.ensure_future(look())
        results = await gather_spread(map(work, range(1000)))
        await looking
        return results

    assert asyncio.run(main()) == list(range(1000))
    assert max(later - before for before, later in itertools.pairwise(seen)) <= 100


def test_a_cancelled_gather_spread_cancels_its_tasks() -> None:
    states: list[str] = []

    async def work(_: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            states.append("cancelled")
            raise

    async def main(turns: int) -> None:
        gathering = asyncio.ensure_future(gather_spread(map(work, range(200))))
        for _ in range(turns):
            await asyncio.sleep(0)
        gathering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gathering
        assert len(asyncio.all_tasks()) == 1 or await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})

    for turns in (2, 50):
        states.clear()
        asyncio.run(main(turns))
        assert states, turns
        assert set(states) == {"cancelled"}
