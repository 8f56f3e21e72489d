"""Tasks: background work is kept until it is done, its failures are logged, and its end is not waited for too long."""

from __future__ import annotations

import asyncio
import gc

import pytest

from router.fleet.tasks import Tasks


async def _fail() -> None:
    raise RuntimeError("a flaw")


def test_work_that_nobody_awaits_is_done() -> None:
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


def test_work_that_goes_on_beyond_the_patience_is_cancelled() -> None:
    async def main() -> bool:
        tasks = Tasks()
        task = tasks.run_in_background(asyncio.sleep(1000))
        await tasks.close(0.01)
        await asyncio.sleep(0)
        return task.cancelled()

    assert asyncio.run(main())
