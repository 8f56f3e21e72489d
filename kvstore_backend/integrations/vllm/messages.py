"""Messages that the two halves of the vLLM connector send each other, once a step; free of vLLM.

Ownership of blocks, kept by both halves: a block that is handed to a transfer is *pinned* (vLLM's own reference count
of it is raised) in the scheduler, from the step that plans the transfer until every rank has reported the transfer's
end. A rank reports the end when ``kvstore_backend.transfers`` says that the block is released.
Preempting, finishing or aborting the request meanwhile frees its own reference, and the block is still not used for
anything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore_backend.cuts import Run
from kvstore_backend.integrations.vllm.adapters import Adapter

__all__ = ["Plan", "Report", "Transfer"]


@dataclass(frozen=True)
class Transfer:
    """One load or save.

    Attributes:
        number: names it, within one scheduler.
        request_id: whose.
        names: the pool's names of the blocks, 32 bytes each.
        blocks: vLLM's ids of the same blocks.
        run: of a load, where some of the blocks are to come from another cut of the model.
        adapter: the LoRA adapter that the blocks belong to; none: the model's alone.
    """

    number: int
    request_id: str
    names: Sequence[bytes]
    blocks: Sequence[int]
    run: Run | None = None
    adapter: Adapter | None = None


@dataclass(frozen=True)
class Plan:
    """From the scheduler to every worker.

    Attributes:
        loads: to begin in this step.
        saves: to begin after its forward pass.
        awaited: numbers of saves, begun now or before, whose end is waited for before the step's tokens are told.
        num_tokens: computed in this step, where it computes parts of prompts; else 0.
    """

    loads: Sequence[Transfer] = ()
    saves: Sequence[Transfer] = ()
    awaited: Sequence[int] = ()
    num_tokens: int = 0


@dataclass
class Report:
    """From workers to the scheduler.

    Attributes:
        ended: numbers of transfers that touch no block any more, each with the number of ranks that say so.
        short: requests whose load brought fewer blocks than planned.
        loads: blocks that a load brought, and the seconds it took.
        steps: tokens of a step with parts of prompts, and the seconds it took.
        adapters: digests of LoRA adapters, one of each rank that has read them; None: it has changed.
    """

    ended: Counter[int] = field(default_factory=Counter)
    short: set[str] = field(default_factory=set)
    loads: list[tuple[int, float]] = field(default_factory=list)
    steps: list[tuple[int, float]] = field(default_factory=list)
    adapters: dict[Adapter, list[bytes | None]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.ended or self.short or self.loads or self.steps or self.adapters)

    def add_report(self, other: Report) -> None:
        """Take in another rank's report."""
        self.ended.update(other.ended)
        self.short |= other.short
        self.loads += other.loads
        self.steps += other.steps
        for adapter, digests in other.adapters.items():
            self.adapters.setdefault(adapter, []).extend(digests)
