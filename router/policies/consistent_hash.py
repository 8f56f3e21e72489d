"""ConsistentHash: the same instance for the same session or user, while it is available and not overloaded."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from router.policies.base import Decision, InstanceLoad, PolicyBase, RequestFeatures, requests_of

__all__ = ["ConsistentHash"]

# Limit of an instance's requests, relative to the average ("Consistent Hashing with Bounded Loads", Mirrokni, Thorup
# and Zadimoghaddam, 2016). Further requests go to the instance that is next in the order of their key.
_BOUND = 1.25
# Requests without a key count as one session if their prompts have these first chunks (about 512 tokens) in common.
_FIRST_CHUNKS = 4


class ConsistentHash(PolicyBase):
    """Rendezvous hashing with bounded loads: each key has its own order of the instances, and uses the first instance.

    If an instance is removed, only its own keys move. A new instance gets only the keys that have it first in their
    order. If a request has no key, the beginning of its prompt is its key. If its prompt is too short for that, the
    instance with the fewest requests is chosen.
    """

    def choose_instance(self, request: RequestFeatures, candidates: Sequence[InstanceLoad]) -> Decision:
        """Choose the candidate that is the first in the order of the request's key, unless it is overloaded."""
        if request.key:
            seed, by = xxhash.xxh3_64_intdigest(request.key.encode(errors="surrogatepass")), "key"
        elif request.chunks:
            seed, by = request.chunks[:_FIRST_CHUNKS][-1], "prefix"
        else:
            chosen = self._turns.take_least(candidates, list(map(requests_of, candidates)))
            return Decision(
                chosen.key,
                {"policy": "consistent_hash", "by": "requests", "requests": chosen.requests},
                request.prompt_tokens,
            )
        bound = _BOUND * (sum(map(requests_of, candidates)) + 1) / len(candidates)
        # The new request is counted, too, so at least one candidate is below the bound.
        chosen, highest, overloaded = candidates[0], -1, 0
        for candidate in candidates:
            if candidate.requests >= bound:
                overloaded += 1
                continue
            rank = xxhash.xxh3_64_intdigest(candidate.key.encode(), seed)
            if rank > highest:
                chosen, highest = candidate, rank
        reasons: dict[str, float | str] = {
            "policy": "consistent_hash",
            "by": by,
            "requests": chosen.requests,
            "overloaded": overloaded,
        }
        return Decision(chosen.key, reasons, request.prompt_tokens)
