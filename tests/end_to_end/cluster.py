"""A whole system of processes, as users start it: a master, a router, instances."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import plain_http
from tests.support.mooncake import MooncakeMaster
from tests.support.ports import free_port
from tests.support.processes import Child, child
from tests.support.trace import Row, ask_row, find_logged
from tests.support.waiting import wait_until

__all__ = ["Instance", "Router", "ask", "check_cached_tokens", "instance", "router"]

QUESTION = "Tell me about the river and the old town behind the hill, and about the people who live there. " * 8

# The block ids of prompts in their order: conversations that alternate, as in Mooncake's trace.
_TURNS = [
    *([0, 1, 2, 3], [0, 4, 5], [0, 1, 2, 3, 6, 7], [0, 4, 5, 8], [0, 7, 9, 10, 11]),
    *([0, 1, 2, 3, 6, 7, 12], [0, 4, 5, 8, 13, 14], [0, 7, 9, 10, 11, 15], [0, 4, 5, 8], [0, 1, 2, 16]),
]


class Instance:
    """A running engine instance."""

    def __init__(self, process: Child, port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    @property
    def log(self) -> str:
        """The instance's log so far."""
        return (self.process.log.parent / f"log_{self.port}" / "api_server.log").read_text()

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels."""
        for line in plain_http.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise AssertionError(f"{self.url}/metrics has no {name}")

    def wait_for_saves(self) -> None:
        """Wait until all saves to the pool have ended."""
        wait_until(lambda: self.metric("kvstore_pending_save_blocks") == 0, "saves to be out")


class Router:
    """A running router."""

    def __init__(self, process: Child, port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def wait_for(self, **numbers: int) -> None:
        """Wait until this number of instances of each role is registered."""

        def registered() -> bool:
            counts = plain_http.get(f"{self.url}/registered_number").json()
            return all(counts[role] == number for role, number in numbers.items())

        wait_until(registered, f"{numbers} at the router")


@contextlib.contextmanager
def router(
    folder: Path, *flags: str, splitwise: bool = True, environ: Mapping[str, str] | None = None
) -> Iterator[Router]:
    """Run a router for prefill and decode instances, or for mixed ones."""
    port = free_port()
    argv = [sys.executable, "-m", "router.launch", "--port", str(port), "--host", "127.0.0.1", *flags]
    argv += ["--splitwise"] if splitwise else []
    argv += [] if "--workers" in flags else ["--workers", "1"]
    with child(argv, folder / f"router-{port}.out", environ, is_forked=True) as process:
        process.wait_for(lambda: plain_http.answers_ok(f"http://127.0.0.1:{port}/health"), "answering")
        yield Router(process, port)


@contextlib.contextmanager
def instance(
    folder: Path,
    model: Path,
    *flags: str,
    port: int | None = None,
    master: MooncakeMaster | None = None,
    environ: Mapping[str, str] | None = None,
    segment: str = "256MiB",
) -> Iterator[Instance]:
    """Run an engine instance. With ``master``, it uses its pool, configured with FastDeploy's environment variables.

    Args:
        segment: the memory that it gives to the pool.
    """
    port = port or free_port()
    argv = [sys.executable, "-m", "engine.api_server", "--model", str(model), "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--max-model-len", "4096", *flags]
    env = {"FD_LOG_DIR": str(folder / f"log_{port}"), **(environ or {})}
    if master is not None:
        argv += ["--kvcache-storage-backend", "mooncake"]
        names = ("master_server_addr", "metadata_server", "local_hostname", "protocol", "global_segment_size")
        settings = master.settings(global_segment_size=segment)
        env |= {f"MOONCAKE_{name.upper()}": str(settings[name]) for name in names}
    is_forked = "PYTHONPATH" not in env  # Python reads this variable only at its start
    with child(argv, folder / f"engine-{port}.out", env, is_forked=is_forked) as process:
        process.wait_for(lambda: plain_http.answers_ok(f"http://127.0.0.1:{port}/health"), "answering", deadline_s=120)
        running = Instance(process, port)
        if master is not None:
            wait_until(lambda: running.metric("kvstore_pool_open") == 1, "the pool to be joined")
        yield running


def ask(url: str, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    """Send a greedy chat completion; return the JSON of the response, with its status as ``status``."""
    body = {"messages": messages, "max_tokens": 150, "temperature": 0, **fields}
    answer = plain_http.post(f"{url}/v1/chat/completions", json=body, timeout=100)
    return {"status": answer.status_code, **answer.json()}


def check_cached_tokens(url: str, computing: Sequence[Instance]) -> None:
    """Assert for some conversations that the usage of each response has the cached tokens in the instances' logs."""
    rows = [Row(number, blocks[1], blocks) for number, blocks in enumerate(_TURNS)]
    told = [ask_row(url, row, tokens_a_block=30) for row in rows]
    assert sum(each.cached_tokens > 0 for each in told) >= 4, told
    ids = {each.request_id for each in told}
    wait_until(lambda: ids <= find_logged(each.log for each in computing).keys(), "the logs")
    logged = find_logged(each.log for each in computing)
    assert [each.cached_tokens for each in told] == [logged[each.request_id] for each in told], told
