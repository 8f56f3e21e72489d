"""Access: which clients may send requests, and how many requests run concurrently.

routes.py       all paths, with their methods and the access that they require
auth.py         Auth: API keys of clients, and the tokens of operators and instances
admission.py    Admission: limits of concurrent requests, and a queue for requests that must wait
line.py         WaitingLine: the order of the queue, by priority and in turn for each client
token_rate.py   TokenRates: limits of tokens per second for each client
cache_salt.py   CacheSalts: a cache_salt for each client
"""

from router.access.admission import Admission, AdmissionClient, Limits
from router.access.auth import Auth
from router.access.routes import FORWARDED, ROUTES, Access, Route, find_route

__all__ = [
    "FORWARDED",
    "ROUTES",
    "Access",
    "Admission",
    "AdmissionClient",
    "Auth",
    "Limits",
    "Route",
    "find_route",
]
