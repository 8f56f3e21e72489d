"""The part of a pair that a request has an instance play, in whichever dialect it was asked."""

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
    """Compute the prompt and keep its KV, under a key, until a decode instance asks for it.

    Args:
        key: not that of another prompt that is kept.
        seconds: for how long.
        waits_for_decode: whether the answer waits until decode has it, and is an error if it does not come.
        describe: the members of the answer that tell decode of it.
    """

    key: str
    seconds: float
    waits_for_decode: bool = False
    describe: Callable[[KeptPrompt], dict[str, Any]] = lambda _: {}


@dataclass(frozen=True)
class FetchPrompt:
    """Ask a prefill instance for the KV of a prompt that it keeps, and go on from there, or fail.

    Args:
        key: the prompt's.
        host, port: prefill's connector port.
        takes_token: whether the answer begins with the token that prefill chose, or with one that is chosen here.
        wait_seconds: how long prefill may not have heard of the key yet.
    """

    key: str
    host: str
    port: int
    takes_token: bool
    wait_seconds: float = 0.0


PairInfo: TypeAlias = DisaggregateInfo | KeepPrompt | FetchPrompt
"""FastDeploy's names decode's address, which tells either role all."""


def info_of_choice(info: PairInfo | None, index: int) -> PairInfo | None:
    """The part for the ``index``-th answer of a request, whose prompt is kept and fetched by itself."""
    if index and isinstance(info, (KeepPrompt, FetchPrompt)):
        return dataclasses.replace(info, key=f"{info.key}_{index}")
    return info
