"""A simulated instance with a known speed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from tests.support.json_http import Asked, JsonServer

__all__ = ["timed_instance"]


@contextlib.contextmanager
def timed_instance(token_seconds: float, *, context: int = 600, tokens_per_word: int = 1) -> Iterator[str]:
    """Run a simulated instance; yield its URL. Each token takes ``token_seconds``, and each request a fixed time.

    Args:
        context: maximum number of tokens in a prompt.
        tokens_per_word: with a large number, the noise of a busy machine has no effect.
    """

    def answer(request: Asked) -> tuple[int, object]:
        if request.body is None:
            return 200, {"data": [{"id": "model"}]}
        assert (request.body["model"], request.body["max_tokens"]) == ("model", 2)
        tokens = tokens_per_word * len(request.body["prompt"].split())
        if tokens > context:
            return 400, {"error": {"message": "too long"}}
        time.sleep(0.01 + tokens * token_seconds)
        return 200, {"usage": {"prompt_tokens": tokens}}

    with JsonServer(answer) as server:
        yield f"http://{server.address}"
