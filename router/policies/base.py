"""What a policy sees and says: plain data, so that the live router, a test and a simulator run the same object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

__all__ = ["Candidate", "Decision", "Policy", "RequestFeatures", "Turns"]


class RequestFeatures(NamedTuple):
    """What a policy may know of a request."""

    prompt_tokens: int
    """Tokens of its prompt, estimated."""


@dataclass(slots=True)
class Candidate:
    """An instance that may be chosen, and what the router has running on it. Policies only read it."""

    key: str
    """``host:port``."""
    requests: int = 0
    """Requests sent to it and not yet answered."""
    tokens: int = 0
    """Prompt tokens of those requests."""


class Decision(NamedTuple):
    """The chosen candidate's key, and the figures that made it the choice."""

    key: str
    reasons: Mapping[str, float | str]


class Policy(Protocol):
    """Chooses one of the candidates; it may keep state of its own, and is called from one thread."""

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """One of ``candidates``, of which there is at least one."""


@dataclass(slots=True)
class Turns:
    """Takes candidates in turn, so that equals share the work."""

    taken: int = field(default=0)

    def next(self, candidates: Sequence[Candidate]) -> Candidate:
        """The candidate whose turn it is."""
        chosen = candidates[self.taken % len(candidates)]
        self.taken += 1
        return chosen

    def least(self, candidates: Sequence[Candidate], load: Callable[[Candidate], int]) -> Candidate:
        """The candidate with the least ``load``; among equals, the one whose turn comes first."""
        start = self.taken % len(candidates)
        self.taken += 1
        return min([*candidates[start:], *candidates[:start]], key=load)
