"""Access: who may ask, and how much at once.

auth.py         Auth: API keys of clients, and the admin token
admission.py    Admission: limits, and the line of requests that wait for their turn
line.py         WaitingLine: priorities, and turns of clients within each
token_rate.py   TokenRates: tokens a second of each client
cache_salt.py   CacheSalts: a cache_salt for each client
"""

from router.access.admission import Admission, Limits, SharedAdmission
from router.access.auth import Auth
from router.access.cache_salt import CacheSalts

__all__ = [
    "Admission",
    "Auth",
    "CacheSalts",
    "Limits",
    "SharedAdmission",
]
