"""Prefill -> decode hand-over: P writes the prompt's KV into D's memory; else through the pool; else D computes.

prefill.py   P's side: asks D for blocks, writes them as they are computed
kept.py      P's side where D begins: prompts that are kept until D asks for them
decode.py    D's side: listens on the connector port, lends blocks, verifies their bytes
memory.py    the instance's KV blocks as hand-overs reach them
landing.py   where P writes the blocks of one reservation, and how they get into KV memory
wire.py      the messages between P and D
transfer.py  Mooncake's TransferEngine

The wire is one TCP connection per request, from P to D's connector port, with one JSON object a line::

    P -> D   begin      request_id, and the prompt: num_tokens, hashes of its full blocks, digest of all its tokens;
                        namespace and protocol if P can write      at once, while P's prefill runs
    D -> P   reserved   session, addresses, num_cached      where blocks from the num_cached-th on are to be written;
                                                            those before are in D's own prefix cache
             refused    reason                              no room, or D cannot be written to: go by the pool
    P -> D   alive                                          every second until it is done
             ready      token, logprobs, digests, own_cached_tokens, pool_cached_tokens
                                                            every missing block is written, this is its XXH3-64
    D -> P   accepted                                       all of them verify: D answers from here on
             rejected                                       they do not: go by the pool
    P -> D   saved      own_cached_tokens, pool_cached_tokens    the blocks are in the pool, as far as P could
             failed     reason                              neither; D computes
    D -> P   given_up                                       D needs no blocks any more: its client left, or P was silent
    P -> D   stopped    clean                               P writes no more; clean: every write was acknowledged

Nobody depends on any of it. To D silence for ``SILENCE_SECONDS``, a lost connection, nonsense or "failed" only mean
that it computes the prompt itself; to P, that it goes on as if there were no D. A reservation that no request of D's
own claims expires.

**When blocks that D gave up may be used again.** A write that P began may still be under way, and P's bytes must not
hit a block that has become another's. D holds given-up blocks back from everybody until

- P says "stopped, clean": TransferEngine's write returns 0 only after D's own end has acknowledged that the bytes are
  in memory, so nothing is under way; or
- P says "stopped" after a write that failed, or P's connection ends because P's process did: P begins no more, and
  bytes that it gave to the network before arrive within ``LATE_SECONDS`` more of D's own running time; or
- P's connection is lost without a word (TCP keep-alive finds no host there): P may live on behind a broken network,
  where TransferEngine drops a connection without progress after 30 s: ``UNREACHABLE_SECONDS``.

A P that is alive but hung does none of these: its blocks are held back as long as it hangs. So D never lends more
than leaves room for its own longest sequence. Likewise P keeps the blocks that a write reads from until that write has
returned, however the request ended.
"""

from engine.disaggregation.decode import HandoverReceiver, HandoverResult
from engine.disaggregation.kept import KeptPrompt, KeptPrompts, ask_for_prompt
from engine.disaggregation.memory import BlockMemory
from engine.disaggregation.prefill import HandoverSender, hand_over
from engine.disaggregation.transfer import Transfer, TransferUnavailable, choose_protocol, list_protocols
from engine.disaggregation.wire import Prompt

__all__ = [
    "BlockMemory",
    "HandoverReceiver",
    "HandoverResult",
    "HandoverSender",
    "KeptPrompt",
    "KeptPrompts",
    "Prompt",
    "Transfer",
    "TransferUnavailable",
    "ask_for_prompt",
    "choose_protocol",
    "hand_over",
    "list_protocols",
]
