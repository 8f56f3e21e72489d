"""The handling of one request: selection, attempts, the response, resumption.

proxy.py        the data plane: accepts requests, and serves each one: its client, its answer, its end
services.py     the components that serve a request
reading/        the request as the router serves it: parsed, identified, with the head for instances
retry_loop.py   the attempts for it, one after another
plan.py         the legs of an attempt, in the dialects of their instances
dialects/       how requests are sent to the instances of each engine: alone, or as a pair
attempt.py      one try at one instance or one pair
relay.py        the response to its client
resume/         segments of a request that was preempted, or whose instance died, merged into one response
timeline.py     the timeline of the request: for its headers, its record and the log
selection.py    the instance or the pair that serves a request
aborts.py       stops requests at engines when no client waits for them
"""

from router.serving.aborts import ABORT_PATH, Aborter, AbortScope, list_unknown_ids, read_asked_ids
from router.serving.plan import Pairs
from router.serving.proxy import Proxy
from router.serving.selection import Selector, explain_unknown_model
from router.serving.services import Services

__all__ = [
    "ABORT_PATH",
    "AbortScope",
    "Aborter",
    "Pairs",
    "Proxy",
    "Selector",
    "Services",
    "explain_unknown_model",
    "list_unknown_ids",
    "read_asked_ids",
]
