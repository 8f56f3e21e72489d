"""An engine with an HTTP server in this process, for the clients of all APIs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from engine.apis.completions import Completions
from engine.apis.messages import Messages
from engine.apis.response_store import ResponseStore
from engine.apis.responses import Responses
from engine.disaggregation import HandoverReceiver
from engine.generation import Generations, SharedParts
from engine.serving.endpoints import create_app
from engine.serving.http_server import InstanceProtocol
from tests.engine.running import Engine
from tests.support.ports import free_port
from tests.support.waiting import wait_until

MODEL = "words"


@contextlib.asynccontextmanager
async def no_lifespan(_: object) -> AsyncIterator[None]:
    yield


@pytest.fixture(scope="package")
def instance(few_words: Path, word_tokenizer: Any) -> Iterator[SimpleNamespace]:
    """The parts of the instance, and its ``url``."""
    with Engine(few_words, num_blocks=128) as engine:
        generations = Generations(
            SharedParts(engine.core, word_tokenizer, "mixed", engine.block_size, HandoverReceiver())
        )
        completions = Completions(generations, word_tokenizer, MODEL, 500, engine.runner.vocab_size)
        instance: Any = SimpleNamespace(
            core=engine.core,
            engine=engine,
            tracer=None,
            generations=generations,
            completions=completions,
            responses=Responses(completions, ResponseStore()),
            messages=Messages(completions),
            run_lifespan=no_lifespan,
        )
        port = free_port()
        config = uvicorn.Config(
            create_app(instance), "127.0.0.1", port, http=InstanceProtocol, log_config=None, access_log=False
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            wait_until(lambda: server.started, "the server to listen")
            instance.url = f"http://127.0.0.1:{port}"
            yield instance
        finally:
            server.should_exit = True
            thread.join()
