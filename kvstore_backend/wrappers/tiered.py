"""Combines two backends (tiers): a fast one before a large one.

    get ──► fast ──miss──► large ──copy──► fast
    put ──through──► large, then fast            OK: the large tier has the value
        ──back─────► fast, then large later      OK: a tier has the value, or the value is queued for the large tier

Both tiers together have the capacity of the large tier. The fast tier has copies of some values of the large tier. With
``back`` it also has, for a short time, values that the large tier does not have yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvstore_backend.backend import Health, Status, StorageBackend, Value
from kvstore_backend.wrappers.write_behind import WriteBehindBackend

__all__ = ["TieredBackend"]


class TieredBackend(StorageBackend):
    """Backend with two tiers: a value that ``fast`` lacks is read from ``large`` and copied to ``fast``.

    If one tier fails, the values of the other tier can still be read. But if the other tier returns ``ABSENT``, the
    answer is ``FAILED``, because the failing tier may have the value.

    Args:
        fast: memory or a folder on tmpfs.
        large: a folder on SSD, or Mooncake.
        policy: with ``through``, a put writes to both tiers before it returns; with ``back``, a put writes to ``fast``,
            and to ``large`` in the background (``WriteBehindBackend``).

    Attributes:
        write_behind: with ``back``, the wrapper around ``large`` that writes in the background; otherwise None.
    """

    def __init__(
        self, fast: StorageBackend, large: StorageBackend, policy: Literal["through", "back"] = "through"
    ) -> None:
        self._fast = fast
        self.write_behind = WriteBehindBackend(large) if policy == "back" else None
        self._large: StorageBackend = self.write_behind or large

    def __repr__(self) -> str:
        return f"TieredBackend({self._fast!r} before {self._large!r})"

    def put(self, keys: Sequence[str], values: Sequence[Value]) -> list[Status]:
        if self.write_behind is None or not self._fast.is_ready:
            return self._copy_to_fast(keys, values, self._large.put(keys, values))
        fast = self._fast.put(keys, values)
        large = self._large.put(keys, values)
        return self._fail_if_late([one or other for one, other in zip(fast, large, strict=True)], fast)

    def keep(self, keys: Sequence[str], values: Sequence[Value], seconds: float) -> list[Status]:
        return self._copy_to_fast(keys, values, self._large.keep(keys, values, seconds))

    def get(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        num_late = self._fast.count_late_calls()
        statuses = self._fast.get(keys, targets)
        missing = [i for i, status in enumerate(statuses) if status is not Status.OK]
        # A late read of the fast tier may still write into the targets.
        if not missing or (self._fast.count_late_calls() != num_late and not self._fast.wait_for_late_calls(0)):
            return statuses
        wanted, places = [keys[i] for i in missing], [targets[i] for i in missing]
        found = self._copy_to_fast(wanted, places, self._large.get(wanted, places))
        for i, status in zip(missing, found, strict=True):
            statuses[i] = _combine_statuses(statuses[i], status)
        return statuses

    def exists(self, keys: Sequence[str]) -> list[Status]:
        statuses = self._fast.exists(keys)
        missing = [i for i, status in enumerate(statuses) if status is not Status.OK]
        found = self._large.exists([keys[i] for i in missing]) if missing else []
        for i, status in zip(missing, found, strict=True):
            statuses[i] = _combine_statuses(statuses[i], status)
        return statuses

    def exists_for_all(self, keys: Sequence[str]) -> list[Status]:
        return self._large.exists_for_all(keys)

    def get_for_all(self, keys: Sequence[str], targets: Sequence[Value]) -> list[Status]:
        return self._large.get_for_all(keys, targets)

    def drop_own_copies(self, prefix: str) -> bool:
        """Remove the keys that begin with ``prefix`` from the fast tier and from the queue for the large tier.

        Returns:
            False if some copies may be left.
        """
        is_dropped = self._large.drop_own_copies(prefix)
        return self._fast.clear(prefix) is Status.OK and is_dropped

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        large = self._large.remove(keys, force=force)
        fast = self._fast.remove(keys, force=force)
        return [
            Status.FAILED if Status.FAILED in both else Status.OK if Status.OK in both else Status.ABSENT
            for both in zip(large, fast, strict=True)
        ]

    def clear(self, prefix: str) -> Status:
        large, fast = self._large.clear(prefix), self._fast.clear(prefix)
        return large if fast else fast

    def flush_writes(self, seconds: float) -> bool:
        """Wait until all earlier puts have reached the large tier; return False if ``seconds`` were not enough."""
        return self.write_behind is None or self.write_behind.flush_writes(seconds)

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        self._fast.register(address, nbytes, headroom=headroom)
        self._large.register(address, nbytes, headroom=headroom)

    def unregister(self, address: int, nbytes: int) -> None:
        self._fast.unregister(address, nbytes)
        self._large.unregister(address, nbytes)

    @property
    def is_ready(self) -> bool:
        return self._fast.is_ready or self._large.is_ready

    def wait_for_late_calls(self, seconds: float) -> bool:
        """Wait for the end of calls that missed their deadline, in one tier after the other, ``seconds`` for each."""
        return self._fast.wait_for_late_calls(seconds) and self._large.wait_for_late_calls(seconds)

    def count_late_calls(self) -> int:
        return self._fast.count_late_calls() + self._large.count_late_calls()

    def health(self) -> Health:
        fast, large = self._fast.health(), self._large.health()
        return Health(fast.ok and large.ok, f"fast tier: {fast.detail}; large tier: {large.detail}")

    def close(self) -> None:
        try:
            self._large.close()
        finally:
            self._fast.close()

    def _copy_to_fast(self, keys: Sequence[str], values: Sequence[Value], statuses: list[Status]) -> list[Status]:
        """Copy the values that the large tier has stored or read to the fast tier; return the large tier's answers.

        The answers are ``FAILED`` for all keys if the copy has missed its deadline and still runs.
        """
        done = [i for i, status in enumerate(statuses) if status is Status.OK]
        if not done or not self._fast.is_ready:
            return statuses
        return self._fail_if_late(statuses, self._fast.put([keys[i] for i in done], [values[i] for i in done]))

    def _fail_if_late(self, statuses: list[Status], copied: list[Status]) -> list[Status]:
        """Return ``statuses``; ``FAILED`` for all keys if a put to the fast tier still runs after its deadline."""
        if Status.FAILED in copied and not self._fast.wait_for_late_calls(0):
            return [Status.FAILED] * len(statuses)
        return statuses


def _combine_statuses(fast: Status, large: Status) -> Status:
    """Return the status of a key from the status in the fast tier, which is not ``OK``, and in the large tier."""
    return Status.FAILED if fast is Status.FAILED and large is Status.ABSENT else large
