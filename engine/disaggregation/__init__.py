"""Prefill -> decode hand-over of a prompt's KV. P (prefill) writes it into the memory of D (decode).

If P cannot, the KV goes through the pool; if that fails too, D computes the prompt.

prefill.py   P's side: requests blocks from D, writes them as they are computed
decode.py    D's side: listens on the connector port, reserves blocks, verifies their bytes
memory.py    access of hand-overs to the instance's KV blocks
landing.py   where P writes the blocks of one reservation, and how they get into KV memory
wire.py      the messages between P and D
transfer.py  Mooncake's TransferEngine

The wire is one TCP connection per request, from P to D's connector port, with one JSON object per line::

    P -> D   begin      request_id, and the prompt: num_tokens, hashes of its full blocks, digest of all its tokens;
                        namespace and protocol if P can write      sent while P's prefill runs
    D -> P   reserved   session, addresses, num_cached      P writes the blocks from the num_cached-th on there;
                                                            D's own prefix cache has those before
             refused    reason                              no free blocks, or P cannot write to D: use the pool
    P -> D   alive                                          every second until it is done
             ready      token, logprobs, digests, own_cached_tokens, pool_cached_tokens
                                                            P wrote every missing block; this is its XXH3-64
    D -> P   accepted                                       all blocks verify: D answers from here on
             rejected                                       they do not: use the pool
    P -> D   saved      own_cached_tokens, pool_cached_tokens    the pool has the blocks that P could save
             failed     reason                              neither way worked; D computes
    D -> P   given_up                                       D needs no blocks any more: its client left, or P was silent
    P -> D   stopped    clean                               P writes no more; clean: every write was acknowledged

Neither side depends on the other. If D receives nothing for ``SILENCE_SECONDS``, loses the connection, or receives an
invalid message or "failed", it computes the prompt itself; P in the same cases continues without D. A reservation that
no request on D claims expires.

**When D may use blocks again that it gave up.** A write that P began may still be in progress, and P's bytes must not
hit a block that another sequence uses by then. D holds such blocks back until

- P sends "stopped" with clean: TransferEngine's write returns 0 only after D's own end has acknowledged that the bytes
  are in memory, so no write is in progress; or
- P sends "stopped" after a failed write, or P's connection ends because its process ended: P begins no more writes, and
  bytes that it gave to the network before arrive within ``LATE_SECONDS`` more of D's own running time; or
- P's connection is lost without a message (TCP keep-alive finds no host there): P may still run behind a broken
  network, where TransferEngine drops a connection without progress after 30 s: ``UNREACHABLE_SECONDS``.

A P that runs but hangs does none of these: D holds its blocks back as long as P hangs. So D always leaves enough blocks
unreserved for its own longest sequence. P likewise holds the blocks that a write reads from until that write has
returned, however the request ended.
"""

from engine.disaggregation.decode import HandoverReceiver, HandoverResult
from engine.disaggregation.memory import BlockMemory
from engine.disaggregation.prefill import HandoverSender, hand_over
from engine.disaggregation.transfer import Transfer, TransferUnavailable, choose_protocol, list_protocols
from engine.disaggregation.wire import Prompt

__all__ = [
    "BlockMemory",
    "HandoverReceiver",
    "HandoverResult",
    "HandoverSender",
    "Prompt",
    "Transfer",
    "TransferUnavailable",
    "choose_protocol",
    "hand_over",
    "list_protocols",
]
