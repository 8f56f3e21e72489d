"""Serves one request: selects instances, sends attempts, relays the response, and resumes interrupted responses.

proxy.py        the data plane: accepts requests, and serves each of them from its arrival to its end
services.py     the parts of the router that serve a request
reading/        parses a request
retry_loop.py   sends the attempts of a request, one after another
plan.py         prepares the legs of an attempt, in the dialects of their instances
dialects/       how requests are sent to the instances of each engine: alone, or as a pair
attempt.py      one attempt at one instance or one pair
relay.py        sends the response to the client
resume/         merges the segments of a response that several instances have generated
timeline.py     records the events of a request, for its headers, its record and the log
selection.py    selects the instance or the pair that serves a request
aborts.py       stops requests at engines when no client waits for them
"""

from router.serving.aborts import ABORT_PATH, Aborter, AbortScope, list_unknown_ids, read_asked_ids
from router.serving.plan import Pairs
from router.serving.proxy import Proxy
from router.serving.reading.sessions import SessionHeaders
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
    "SessionHeaders",
    "explain_unknown_model",
    "list_unknown_ids",
    "read_asked_ids",
]
