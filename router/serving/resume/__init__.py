"""Resumption: merges the response segments that several instances generate into the one response of the client.

A segment ends when its instance preempts the request (FastDeploy's ``pd_reschedule``), dies or hangs, or completes the
response. After an interruption, the router sends the request again, with the tokens generated so far as the end of the
prompt. The next engine responds with the text of new tokens only. Its usage counts the tokens that were sent again as
prompt tokens, and it does not count them for ``max_tokens``. The mergers turn the segments into one response. They are
pure functions of bytes, without I/O.

The merged response must be exact. If a response that is not streamed cannot be continued exactly, it is generated again
from the beginning, because the client has received nothing of it. If a stream has shown text and cannot be continued
exactly, it ends with an error.

The router has no tokenizer, so a preempted stream may differ from an uninterrupted one in two cases. If the client has
already received the first part of a stop string, the next engine does not recognise the stop string. And presence and
frequency penalties, and a seed, start again with each segment. If an instance dies, a stream is not resumed if one of
these cases is possible (``resumability.py``).

An engine does not send the text of a token that ends within a character. But one event may contain several tokens, of
which only the last ends within a character. Then the router asks an instance for the text of the last tokens
(``/detokenize``), and the tokens of an incomplete character are generated again. If no instance responds, a stream
whose instance has died is not resumed, and a preempted stream may lose this character.

events.py          parses and writes server-sent events, and removes ids that the client did not request
event_template.py  learns the pattern of a stream's usual event, to recognise further events without parsing
resumability.py    finds out why a stream cannot continue exactly after its instance has died
continuation.py    makes the request for the next instance, in the format of its engine
stream.py          merges the segments of a stream
json_merger.py     merges the segments of a response that is not streamed
resumption.py      counts the interruptions of a request, and decides whether it is resumed
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
