"""Reads the id of a request's session, and the id of the parent session that started it, from the headers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from router.http import Headers

__all__ = ["KNOWN_HEADERS", "NO_SESSION", "Session", "SessionHeader", "SessionHeaders"]


class Session(NamedTuple):
    """A conversation, or a chain of an agent's requests. Each prompt begins with the previous prompt of the session."""

    id: str
    parent: str
    """The session that started this session, as when an agent starts another agent; ``""`` if none is named."""


NO_SESSION = Session("", "")


class SessionHeader(NamedTuple):
    """A header with a session's id, and headers with the parent's id, of which the first that a client sends counts."""

    name: bytes
    parents: tuple[bytes, ...] = ()


KNOWN_HEADERS = (
    # Dynamo, docs/agents/session-ids.md. These headers have precedence over those of agents.
    SessionHeader(b"x-dynamo-session-id", (b"x-dynamo-parent-session-id",)),
    # Our own headers, which OpenCode sends, too (packages/opencode/src/session/llm.ts).
    SessionHeader(b"x-session-id", (b"x-parent-session-id",)),
    # Claude Code. An agent that the session or another agent has started has an id of its own.
    SessionHeader(b"x-claude-code-agent-id", (b"x-claude-code-parent-agent-id", b"x-claude-code-session-id")),
    SessionHeader(b"x-claude-code-session-id"),
    # Codex (codex-rs/core/src/client.rs).
    SessionHeader(b"session-id"),
)
"""Headers with a session's id. An earlier row has precedence over a later one."""


class SessionHeaders:
    """The headers that name a session: those that an operator has configured, then ``KNOWN_HEADERS``."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """
        Args:
            entries: the headers that an operator has configured, as ``NAME`` or ``NAME:PARENT``.
        """
        own = [entry.lower().encode().split(b":", 1) for entry in entries]
        rows = (*(SessionHeader(name, tuple(parents)) for name, *parents in own), *KNOWN_HEADERS)
        self._rows: Sequence[SessionHeader] = rows
        self._names = frozenset(name for row in rows for name in (row.name, *row.parents))

    def find_session(self, headers: Headers) -> Session:
        """Return the session that a request's headers name; ``NO_SESSION`` if they name none."""
        found = {name: value for name, value in headers if value and name in self._names}
        if found:
            for name, parents in self._rows:
                if name in found:
                    parent = next((found[each] for each in parents if each in found), b"")
                    return Session(found[name].decode("latin-1"), parent.decode("latin-1"))
        return NO_SESSION
