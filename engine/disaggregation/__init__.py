"""The hand-over: transfers the KV of a prompt from a prefill instance (P) to a decode instance (D).

In a direct transfer P writes the KV into D's memory. If that fails, P saves the KV to the pool and D loads it. If that
fails, too, D computes the prompt.

prefill.py   P's side: requests blocks from D, and writes the prompt's blocks as they are computed
decode.py    D's side: listens on the connector port, reserves blocks, verifies the bytes that P wrote
memory.py    reserves, writes and verifies KV blocks for hand-overs
incoming.py  the memory to which P writes the blocks of one reservation
wire.py      sends and receives the messages between P and D
transfer.py  Mooncake's TransferEngine, which writes the bytes

Each request has one TCP connection, from P to D's connector port. A message is one line with a JSON object::

    sender   type       members
    P        begin      request_id; the prompt: num_tokens, hashes of its full blocks, digest of all tokens;
                        sampling: how P samples the first token; namespace and protocol, if P can write directly.
                        Sent while P computes the prompt.
    D        reserved   session, addresses, num_cached. P writes the blocks from index num_cached on to the
                        addresses; D has the blocks before them in its prefix cache.
    D        refused    reason. D has no free blocks, or P cannot write to D. P uses the pool.
    P        alive      Sent every second until P is done.
    P        ready      token, logprobs, digests, own_cached_tokens, pool_cached_tokens. P has written all
                        blocks; ``digests`` has the XXH3-64 of each, and ``token`` is the first of the answer.
    D        accepted   All blocks have the right digests. D continues from them.
    D        rejected   A block has a wrong digest. P uses the pool.
    P        saved      own_cached_tokens, pool_cached_tokens. P has saved the blocks to the pool, as far as
                        possible.
    P        failed     reason. No KV will come from P. D computes the prompt.
    D        given_up   D does not need the blocks any more: its client has left, or P did not send messages.
    P        stopped    clean. P does not write any more; clean: all of its writes were acknowledged.

A failure of one side does not stop the other. If D receives nothing for ``SILENCE_SECONDS``, loses the connection, or
receives an invalid message or "failed", it computes the prompt. In the same cases P continues without D. D cancels a
reservation if the request does not arrive at D in time.

If the model has several groups of layers, "blocks" are the blocks of all groups that are needed after the prompt,
ordered by place (``BlockGroups.list_held_blocks``). All bytes of a block are written, even if its layers use only some.

**When D uses the blocks of an ended hand-over again.** A write of P may still be in progress, and must not change a
block that another sequence uses. So D waits until one of these is true:

- P has sent "stopped" with clean. A write of TransferEngine returns 0 only after the receiving process has acknowledged
  that the bytes are in its memory. So no write is in progress.
- P has sent "stopped" after a failed write, or the connection has ended because P's process has ended. Then P starts no
  more writes. Bytes that are on their way arrive within ``LATE_SECONDS`` of D's running time, so D waits as long.
- The connection was lost without a message, and TCP keep-alive does not reach P's host. P may still be running.
  TransferEngine drops a connection without progress after 30 s, so D waits for ``UNREACHABLE_SECONDS``.

If P hangs, none of these happens, and D does not use the blocks again while P hangs. So D always leaves enough blocks
unreserved for its own longest sequence. In the same way P holds the blocks that a write reads until the write has
returned, also if the request has ended before.
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
