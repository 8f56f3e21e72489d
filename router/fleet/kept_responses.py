"""KeptResponses: the instances that keep answers of ``/v1/responses``, by the answers' ids.

A request that goes on from an answer (``previous_response_id``), reads it or deletes it has to go where it is kept.
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
    """Knows of the last ``MAX_RESPONSES`` answers, this process's and those that others report."""

    def __init__(self, publish: Callable[[str, str, str], None]) -> None:
        """
        Args:
            publish: is given id, instance and owner of each answer that ``note_answer`` finds, for the other processes.
        """
        self._publish = publish
        self._keepers: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def note_answer(self, data: bytes, instance: str, owner: str = "") -> None:
        """Note the id of the answer that begins with ``data``.

        Args:
            instance: that keeps it, by its key.
            owner: the tag of the client that asked for it; ``""`` where clients have no keys.
        """
        if found := _ID.search(data, 0, _HEAD_BYTES):
            response_id = found.group(1).decode()
            self.add_keeper(response_id, instance, owner)
            self._publish(response_id, instance, owner)

    def add_keeper(self, response_id: str, instance: str, owner: str = "") -> None:
        """Note that this instance, by its key, keeps the answer of this client."""
        self._keepers[response_id] = instance, owner
        if len(self._keepers) > MAX_RESPONSES:
            self._keepers.popitem(last=False)

    def find_keeper(self, response_id: str) -> str | None:
        """The key of the instance that keeps the answer; None where it is not known."""
        return self._keepers.get(response_id, (None, ""))[0]

    def is_open_to(self, response_id: str, client: str) -> bool:
        """Whether the client with this tag may ask for the answer: its own; any one, where clients have no keys.

        One that is not known here may be another client's.
        """
        return not client or self._keepers.get(response_id, ("", ""))[1] == client

    def on_told(self, _sender: str, content: Any) -> None:
        """Another process reports an answer."""
        self.add_keeper(*content)
