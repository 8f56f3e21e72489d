"""StoredResponses: remembers which instance stores which response of ``/v1/responses``, by the response's id.

A later request may continue a stored response (``previous_response_id``), read it or delete it. The router must send
such a request to the instance that stores the response.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

__all__ = ["StoredResponses"]

MAX_RESPONSES = 100_000
MAX_ID = 300  # characters of an id
# Number of bytes that are searched for the id, which is near the beginning of a response or of its first event.
_HEAD_BYTES = 4096
# Only the first id counts, which is the response's in vLLM and SGLang. A later one may be in a part of the request that
# the engine repeats, such as its metadata. A client of vLLM may choose the id, as ``request_id``; the router's paths
# accept these characters.
_ID = re.compile(rb'"id"\s*:\s*"(?:([A-Za-z0-9_.:~-]{1,%d})")?' % MAX_ID)


class StoredResponses:
    """Index of the last ``MAX_RESPONSES`` stored responses, with the instance that stores each.

    The tag of a client is a digest of its name (``access/auth.py``).
    """

    def __init__(
        self, publish: Callable[[str, str, str], None], ask: Callable[[str], Awaitable[Sequence[Sequence[str]]]]
    ) -> None:
        """
        Args:
            publish: called by ``record_response`` with id, instance and owner of a response, to send these to the other
                processes.
            ask: sends the id of a response to the other processes, and returns the results of their ``dump_response``,
                without None.
        """
        self._publish = publish
        self._ask = ask
        self._instances: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def record_response(self, data: bytes, instance: str, owner: str = "") -> None:
        """Record the id of the response that begins with ``data``.

        Args:
            data: the first bytes of the response.
            instance: key of the instance that stores the response.
            owner: tag of the client that sent the request; ``""`` if clients have no API keys.
        """
        found = _ID.search(data, 0, _HEAD_BYTES)
        if found is not None and found[1]:
            response_id = found[1].decode()
            self.add_response(response_id, instance, owner)
            if self._instances.get(response_id) == (instance, owner):  # a process that started later would believe it
                self._publish(response_id, instance, owner)

    def add_response(self, response_id: str, instance: str, owner: str = "") -> None:
        """Record which instance stores a response.

        Args:
            response_id: id of the response.
            instance: key of the instance.
            owner: tag of the client that sent the request; ``""`` if clients have no API keys.
        """
        if self._instances.get(response_id, ("", owner))[1] != owner:
            return  # otherwise an instance could give a client the response of another client
        self._instances[response_id] = instance, owner
        if len(self._instances) > MAX_RESPONSES:
            self._instances.popitem(last=False)

    async def ask_others(self, response_id: str) -> None:
        """Ask the other processes which instance stores a response.

        This process may not know it because it started later, or because the shared state could not be reached.
        """
        if len(response_id) > MAX_ID:
            return
        for instance, owner in await self._ask(response_id):
            self.add_response(response_id, instance, owner)

    def dump_response(self, response_id: str) -> tuple[str, str] | None:
        """Return instance and owner of a response; None if it is not known."""
        return self._instances.get(response_id)

    def find_instance(self, response_id: str) -> str | None:
        """Return the key of the instance that stores a response; None if no instance is known to store it."""
        return self._instances.get(response_id, (None, ""))[0]

    def is_open_to(self, response_id: str, client: str) -> bool:
        """Return whether the client with the tag ``client`` may access a response.

        If clients have no API keys (the tag is ``""``), a client may access each response. Otherwise it may access only
        a response that this router knows as the client's own.
        """
        return not client or self._instances.get(response_id, ("", ""))[1] == client

    def on_message(self, _sender: str, content: Any) -> None:
        """Record a response that another process reports."""
        self.add_response(*content)
