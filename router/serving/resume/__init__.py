"""Resumption: the segments of one answer's generation, merged into the one response that the client gets.

A segment is the part that one instance generated before it preempted the request (FastDeploy's ``pd_reschedule``), died
or hung, or ended the answer. The router then sends the request again, with the tokens generated so far as the end of
the prompt. The engine continues, and answers with the text of the new tokens only; its usage counts the resent ids as
prompt, and its ``max_tokens`` starts from 0 again. The mergers turn segments into one response: pure functions of
bytes, without I/O.

If a seam cannot be exact, nothing is guessed. A complete response starts again from the beginning, because the client
has seen nothing of it; a stream that has shown text and cannot continue exactly is ended with an error.

A router without a tokenizer does not see everything, so a preempted stream may differ from an undisturbed run in two
ways. If the first part of a stop string was shown before the seam, the engine does not recognise it after the seam.
Presence and frequency penalties, and a seed, start again at the seam. After the death of its instance, a stream is not
resumed if one of these may apply (``resumability.py``). Engines hold back a token that ends within a character, but one
event may contain several tokens: then the router queries an instance for the text of the last ones (``/detokenize``),
and the tokens of an incomplete character are generated again. If no instance can answer, a stream is not resumed after
the death of its instance, and a preempted one may lose that character.

events.py          server-sent events and their chunks: parsing, and removing ids that the client did not request
event_template.py  the pattern of a stream's usual event, by which others of it are recognised without parsing
resumability.py    why a stream cannot continue exactly after its instance died
continuation.py    the request for the next instance, in the format of its engine
stream.py          the merger of streams
json_merger.py     the merger of complete responses
resumption.py      how often a request was interrupted, and whether it is resumed
"""

from router.serving.resume.continuation import CannotContinue, continue_stream, needs_prompt
from router.serving.resume.events import EngineFailed, find_engine_failure, strip_usage
from router.serving.resume.json_merger import ResponseMerger
from router.serving.resume.resumability import find_obstacle, streams_token_ids
from router.serving.resume.resumption import Resumption
from router.serving.resume.stream import StreamMerger

__all__ = [
    "CannotContinue",
    "EngineFailed",
    "ResponseMerger",
    "Resumption",
    "StreamMerger",
    "continue_stream",
    "find_engine_failure",
    "find_obstacle",
    "needs_prompt",
    "streams_token_ids",
    "strip_usage",
]
