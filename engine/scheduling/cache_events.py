"""Reports changes of the prefix cache as KV events in vLLM's format. All events of one step are published together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

from msgspec.structs import replace

from engine.scheduling.request import Sequence
from kvcommon.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvstore_backend.groups import Group, Kind
from kvstore_backend.resharding.peers import join_runs

__all__ = ["CacheEvents"]

# vLLM's name for the own cache of an instance on any device.
_MEDIUM = "GPU"

# vLLM's names (KVCacheSpecKind) for the kinds of groups.
_KINDS: Mapping[Kind, str] = {
    "full": "full_attention",
    "window": "sliding_window",
    "chunk": "chunked_local_attention",
    "state": "mamba",
}


class CacheEvents:
    """Collects the KV events of each step, and publishes them together. Call all methods on the engine's thread.

    Args:
        publish: called with the events of each step; it must not block.
    """

    def __init__(self, publish: Callable[[list[Event]], None]) -> None:
        self._publish = publish
        self._events: list[Event] = []
        self._group_of: dict[bytes, int] = {}  # block name -> group index; empty if the model has one group

    def record_stored_blocks(
        self,
        sequence: Sequence,
        places: SequenceOf[int],
        name_blocks: Callable[[range], SequenceOf[bytes]],
        group: tuple[int, Group] | None = None,
    ) -> None:
        """Record that full blocks of a sequence were published.

        Args:
            sequence: the sequence with the tokens of the blocks.
            places: the indices of the blocks in the sequence.
            name_blocks: returns the names of the blocks with a range of indices.
            group: the group of layers that the blocks belong to, and its index; None if the model has one group.
        """
        size, salt = sequence.block_size, sequence.request.cache_salt
        for run in join_runs(places):
            names = name_blocks(run)
            extra_keys: list[list[str] | None] | None = None
            if salt and run.start == 0:  # as in vLLM: only the first block of a prefix has the salt
                extra_keys = [[salt.encode(errors="backslashreplace").decode()], *[None] * (len(run) - 1)]
            stored = BlockStored(
                block_hashes=[_shorten(name) for name in names],
                parent_block_hash=_shorten(name_blocks(range(run.start - 1, run.start))[0]) if run.start else None,
                token_ids=sequence.token_ids[run.start * size : run.stop * size],
                block_size=size,
                medium=_MEDIUM,
                extra_keys=extra_keys,
            )
            if group:
                number, layers = group
                window = layers.span if layers.kind == "window" else None
                stored = replace(
                    stored,
                    group_idx=number,
                    kv_cache_spec_kind=_KINDS[layers.kind],
                    kv_cache_spec_sliding_window=window,
                )
                self._group_of.update(dict.fromkeys(names, number))
            self._events.append(stored)

    def record_removed_block(self, name: bytes) -> None:
        """Record that the block with this name was removed from the prefix cache."""
        group, last = self._group_of.pop(name, None), self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(_shorten(name))
        else:
            self._events.append(BlockRemoved([_shorten(name)], _MEDIUM, group))

    def record_clear(self) -> None:
        """Record that all blocks were removed from the prefix cache."""
        self._events.append(AllBlocksCleared())
        self._group_of.clear()

    def flush(self) -> None:
        """Publish the events that were recorded since the last call, if there are any."""
        if self._events:
            events, self._events = self._events, []
            self._publish(events)


def _shorten(block_hash: bytes) -> int:
    """Return the last 64 bits of a block's name as a number, which is the form of hashes in vLLM's events."""
    return int.from_bytes(block_hash[-8:], "big")
