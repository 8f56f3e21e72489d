"""KeepAlive: comments to the client of a stream that waits for its first token, so that no proxy in between
disconnects.

The head of the response is sent with the first comment. So an error before that has its own status; a later one is an
event of a stream with status 200. Until the first byte of the answer, the request may still be sent to another
instance, because the client has received nothing from any.
"""

from __future__ import annotations

import asyncio

from router.serving.response import ClientResponse

__all__ = ["KeepAlive"]


class KeepAlive:
    """Sends a comment every ``seconds``, from its creation until ``stop``."""

    __slots__ = ("_own_head", "_response", "_seconds", "_timer")

    def __init__(self, response: ClientResponse, seconds: float, own_head: bytes) -> None:
        """
        Args:
            own_head: the router's own header lines for the response.
        """
        self._response = response
        self._seconds = seconds
        self._own_head = own_head
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_timer)

    def stop(self) -> None:
        """Stop sending comments."""
        self._timer.cancel()

    def _on_timer(self) -> None:
        self._response.send_comment(self._own_head)
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._on_timer)
