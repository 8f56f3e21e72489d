"""Resumption: the segments of one answer's generation, merged into the one response that the client gets.

A segment is the part that one instance generated before it preempted the request (FastDeploy's ``pd_reschedule``), died
or hung, or ended it. The router then asks again, with the tokens generated so far as the end of the prompt. The engine
generates on, and answers with the text of the new tokens only; its usage counts the resent ids as prompt, and its
``max_tokens`` starts anew. The mergers turn segments into one response: pure functions of bytes, without I/O.

Where a seam cannot be exact, nothing is guessed. A whole response starts again from the beginning, as the client has
seen nothing of it; a stream that has shown text and cannot go on exactly is given up.

A router without a tokenizer does not see everything, so a preempted stream may differ from an undisturbed run in two
things: a stop string whose first part was shown before the seam is not recognised by the engine after it; presence and
frequency penalties, and a seed, start again at the seam. A stream whose instance died is not resumed where one of them
may be so (``obstacles.py``). Engines hold a token back whose text ends within a character, but one event may bring
several tokens: then an instance is asked for the text of the last ones (``/detokenize``), and those of a character that
is not whole are generated again. Where no instance tells, a stream whose instance died is not resumed, and a preempted
one may lose that character.

events.py        server-sent events and their chunks: read, and stripped of ids that the client did not ask for
shape.py         the shape of a stream's usual event, by which others of it are recognised without parsing
obstacles.py     why a stream whose instance died would not go on exactly
continuation.py  the request for the next instance, in the form that its engine takes
stream.py        the merger of streams
whole.py         the merger of whole responses
choice.py        whether an answer may come in several segments, and by which merger they become one
resuming.py      how often a request was put down, and whether it is taken up again
"""

from router.serving.resume.choice import make_merger
from router.serving.resume.continuation import CannotContinue, continue_stream
from router.serving.resume.events import EngineFailed, find_engine_failure, strip_usage
from router.serving.resume.obstacles import find_obstacle, tells_ids
from router.serving.resume.resuming import Resuming
from router.serving.resume.stream import StreamMerger
from router.serving.resume.whole import ResponseMerger

__all__ = [
    "CannotContinue",
    "EngineFailed",
    "ResponseMerger",
    "Resuming",
    "StreamMerger",
    "continue_stream",
    "find_engine_failure",
    "find_obstacle",
    "make_merger",
    "strip_usage",
    "tells_ids",
]
