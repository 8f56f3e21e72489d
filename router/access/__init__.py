"""Access: which clients may send requests, and how many of them concurrently.

routes.py       every path, with its methods and the access it requires
auth.py         Auth: API keys of clients, and the tokens of operators and instances
admission.py    Admission: limits, and the queue of requests that wait for their turn
line.py         WaitingLine: the queue; priorities, and fair turns of the clients within each priority
token_rate.py   TokenRates: tokens per second of each client
cache_salt.py   CacheSalts: a cache_salt for each client
"""

from router.access.admission import Admission, AdmissionClient, Limits
from router.access.auth import Auth
from router.access.cache_salt import CacheSalts
from router.access.routes import FORWARDED, ROUTES, Access, Route, find_route

__all__ = [
    "FORWARDED",
    "ROUTES",
    "Access",
    "Admission",
    "AdmissionClient",
    "Auth",
    "CacheSalts",
    "Limits",
    "Route",
    "find_route",
]
