"""Messages between the two halves of the vLLM connector, once a step; imports nothing from vLLM.

Ownership of blocks, which both halves follow: the scheduler *pins* a block for a transfer (it raises vLLM's own
reference count), from the step that plans the transfer until every rank has reported the transfer's end. A rank reports
the end when ``kvstore_backend.transfers`` releases the block. If the request is preempted, finished or aborted
meanwhile, its own reference is freed, and the block is still not used for anything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore_backend.integrations.vllm.adapters import Adapter
from kvstore_backend.resharding import Run

__all__ = ["Plan", "Report", "Transfer"]


@dataclass(frozen=True)
class Transfer:
    """One load or save.

    Attributes:
        number: identifies it within one scheduler.
        request_id: the request.
        names: the pool's names of the blocks, 32 bytes each.
        blocks: vLLM's ids of the same blocks; if the model has several groups, as in ``memory.py``.
        run: for a load with some blocks from another sharding of the model, those blocks.
        adapter: the LoRA adapter that the blocks belong to; None: only the model's weights.
        num_units: for a load of blocks of several groups, which is complete or has failed: number of the scheduler's
            blocks that it brings; 0: one for each name, and the leading ones are of use alone.
    """

    number: int
    request_id: str
    names: Sequence[bytes]
    blocks: Sequence[int]
    run: Run | None = None
    adapter: Adapter | None = None
    num_units: int = 0


@dataclass(frozen=True)
class Plan:
    """Message from the scheduler to every worker.

    Attributes:
        loads: transfers to begin in this step.
        saves: transfers to begin after its forward pass.
        awaited: numbers of saves, begun now or before, that must end before the step's tokens are returned.
        num_tokens: tokens computed in this step, if it computes parts of prompts; otherwise 0.
    """

    loads: Sequence[Transfer] = ()
    saves: Sequence[Transfer] = ()
    awaited: Sequence[int] = ()
    num_tokens: int = 0


@dataclass
class Report:
    """Message from workers to the scheduler.

    Attributes:
        ended: numbers of transfers that touch no block any more, each with the number of ranks that report it.
        short: requests that loaded fewer blocks than planned.
        loads: number of blocks that a load brought, and its seconds.
        steps: tokens of a step with parts of prompts, and its seconds.
        adapters: digests of LoRA adapters, one from each rank that has read them; None: the adapter has changed.
    """

    ended: Counter[int] = field(default_factory=Counter)
    short: set[str] = field(default_factory=set)
    loads: list[tuple[int, float]] = field(default_factory=list)
    steps: list[tuple[int, float]] = field(default_factory=list)
    adapters: dict[Adapter, list[bytes | None]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether the report has no content."""
        return not (self.ended or self.short or self.loads or self.steps or self.adapters)

    def add_report(self, other: Report) -> None:
        """Add another rank's report."""
        self.ended.update(other.ended)
        self.short |= other.short
        self.loads += other.loads
        self.steps += other.steps
        for adapter, digests in other.adapters.items():
            self.adapters.setdefault(adapter, []).extend(digests)
