"""The instance's role for a request of a pair, in any dialect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from engine.disaggregation import KeptPrompt
from engine.protocol import DisaggregateInfo

__all__ = ["FetchPrompt", "KeepPrompt", "PairInfo", "info_of_choice"]


@dataclass(frozen=True)
class KeepPrompt:
    """Compute the prompt and retain its KV, under a key, until a decode instance requests it.

    Args:
        key: not in use by another retained prompt.
        seconds: how long to retain it.
        waits_for_decode: whether the answer waits until decode has the prompt, and is an error if decode does not come.
        describe: returns the members of the answer by which decode finds the prompt.
    """

    key: str
    seconds: float
    waits_for_decode: bool = False
    describe: Callable[[KeptPrompt], dict[str, Any]] = lambda _: {}


@dataclass(frozen=True)
class FetchPrompt:
    """Request from a prefill instance the KV of a prompt that it retains, and continue from there, or fail.

    Args:
        key: the prompt's.
        host, port: prefill's connector port.
        takes_token: whether the answer begins with prefill's token; else the first token is chosen here.
        wait_seconds: how long to wait if prefill does not know the key yet.
    """

    key: str
    host: str
    port: int
    takes_token: bool
    wait_seconds: float = 0.0


PairInfo: TypeAlias = DisaggregateInfo | KeepPrompt | FetchPrompt
"""FastDeploy's pair info names decode's address; both roles need nothing else."""


def info_of_choice(info: PairInfo | None, index: int) -> PairInfo | None:
    """Return the pair info for the ``index``-th answer of a request; its prompt is retained and fetched separately."""
    if index and isinstance(info, (KeepPrompt, FetchPrompt)):
        return dataclasses.replace(info, key=f"{info.key}_{index}")
    return info
