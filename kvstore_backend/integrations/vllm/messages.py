"""Messages between the connector's scheduler half and its worker halves, once per step. Imports nothing from vLLM.

Rule for the ownership of blocks: the scheduler *pins* the blocks of a transfer, that is, it increases vLLM's reference
counts of the blocks. It pins them in the step that plans the transfer, and unpins them when every rank has reported the
end of the transfer. A rank reports the end when ``kvstore_backend.transfers`` has released the blocks. If the request
is preempted, finished or aborted meanwhile, vLLM releases the request's references, but no other request gets the
blocks.
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
    """One load or save of blocks, which the scheduler plans and the workers carry out.

    Attributes:
        number: id of the transfer, unique within one scheduler.
        request_id: id of the request; empty for blocks that are saved again because the pool lost them.
        names: names of the blocks in the pool, 32 bytes each.
        blocks: vLLM's ids of the blocks. In a model with several groups: ``group * num_blocks + id`` (``memory.py``).
        run: for a load, the blocks that were looked up, if some of them come from another sharding; otherwise None.
        adapter: LoRA adapter with which the blocks were computed, or None.
        num_units: for a load of blocks of several groups: number of units of the prompt (``hybrid.py``) that the load
            brings. Such a load is useful only if it is complete. 0: the model has one group, and the leading blocks are
            useful without the others.
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
    """Message from the scheduler to every worker, for one step.

    Attributes:
        loads: loads that the worker begins in this step.
        saves: saves that the worker begins after the step's forward pass.
        awaited: ids of saves, begun in this step or earlier, that must end before the step's tokens are returned.
        num_tokens: number of tokens that this step computes, if some of them are tokens of prompts; otherwise 0.
    """

    loads: Sequence[Transfer] = ()
    saves: Sequence[Transfer] = ()
    awaited: Sequence[int] = ()
    num_tokens: int = 0


@dataclass
class Report:
    """Message from one worker, or from several, to the scheduler.

    Attributes:
        ended: id of each transfer that has released its blocks -> number of ranks that report it.
        short: ids of requests that loaded fewer blocks than planned.
        loads: for each load, the number of blocks that it brought, and its seconds.
        steps: for each step that computed tokens of prompts, the number of all its tokens, and its seconds.
        adapters: LoRA adapter -> digests of its files, one from each rank that has read them; None: they have changed.
        saved: id of each save after which the pool has all blocks of the save -> number of ranks that report this.
    """

    ended: Counter[int] = field(default_factory=Counter)
    short: set[str] = field(default_factory=set)
    loads: list[tuple[int, float]] = field(default_factory=list)
    steps: list[tuple[int, float]] = field(default_factory=list)
    adapters: dict[Adapter, list[bytes | None]] = field(default_factory=dict)
    saved: Counter[int] = field(default_factory=Counter)

    @property
    def is_empty(self) -> bool:
        """Whether the report has nothing that the scheduler must learn."""
        return not (self.ended or self.short or self.loads or self.steps or self.adapters or self.saved)

    def add_report(self, other: Report) -> None:
        """Add ``other``, the report of another rank, to this report."""
        self.ended.update(other.ended)
        self.saved.update(other.saved)
        self.short |= other.short
        self.loads += other.loads
        self.steps += other.steps
        for adapter, digests in other.adapters.items():
            self.adapters.setdefault(adapter, []).extend(digests)
