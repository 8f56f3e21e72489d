"""KeptResponses: which instance stores which answer of ``/v1/responses``, by the answer's id.

A request that continues an answer (``previous_response_id``), reads it or deletes it has to go to that instance.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

__all__ = ["KeptResponses"]

MAX_RESPONSES = 100_000
# An answer, or the first event of a stream, has its id near its beginning.
_HEAD_BYTES = 4096
_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w-]{1,200})"')


class KeptResponses:
    """Index of the last ``MAX_RESPONSES`` answers, of this process and of those that others report."""

    def __init__(self, publish: Callable[[str, str, str], None]) -> None:
        """
        Args:
            publish: called with id, instance and owner of each answer that ``note_answer`` finds, for the other
                processes.
        """
        self._publish = publish
        self._keepers: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def note_answer(self, data: bytes, instance: str, owner: str = "") -> None:
        """Note the id of the answer that begins with ``data``.

        Args:
            instance: key of the instance that stores it.
            owner: tag of the client that sent the request; ``""`` if clients have no keys.
        """
        if found := _ID.search(data, 0, _HEAD_BYTES):
            response_id = found.group(1).decode()
            self.add_keeper(response_id, instance, owner)
            self._publish(response_id, instance, owner)

    def add_keeper(self, response_id: str, instance: str, owner: str = "") -> None:
        """Note that the instance with this key stores this client's answer."""
        self._keepers[response_id] = instance, owner
        if len(self._keepers) > MAX_RESPONSES:
            self._keepers.popitem(last=False)

    def find_keeper(self, response_id: str) -> str | None:
        """Return the key of the instance that stores the answer; None if unknown."""
        return self._keepers.get(response_id, (None, ""))[0]

    def is_open_to(self, response_id: str, client: str) -> bool:
        """Return whether the client with this tag may access the answer: its own; without keys, every answer.

        An answer that is unknown here may belong to another client, so it is not accessible.
        """
        return not client or self._keepers.get(response_id, ("", ""))[1] == client

    def on_told(self, _sender: str, content: Any) -> None:
        """Note an answer that another process reports."""
        self.add_keeper(*content)
