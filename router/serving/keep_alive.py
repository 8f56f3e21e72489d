"""KeepAlive: comments to the client of a stream that waits for its first token, so that no proxy before it hangs up.

The head of the response goes out with the first comment. So an error that comes earlier than that has its own status;
one that comes later is an event of a stream with status 200. Until the first byte of the answer the request may still
be sent to another instance, as the client has seen nothing of any.
"""

from __future__ import annotations

import asyncio

from router.serving.response import ClientResponse

__all__ = ["KeepAlive"]


class KeepAlive:
    """Sends a comment each ``seconds``, from its making until ``stop``."""

    __slots__ = ("_own_head", "_response", "_seconds", "_timer")

    def __init__(self, response: ClientResponse, seconds: float, own_head: bytes) -> None:
        """
        Args:
            own_head: the router's own lines, for the head of the response.
        """
        self._response = response
        self._seconds = seconds
        self._own_head = own_head
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_timer)

    def stop(self) -> None:
        """Send no more."""
        self._timer.cancel()

    def _on_timer(self) -> None:
        self._response.send_comment(self._own_head)
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._on_timer)
