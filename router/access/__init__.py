"""Access: who may ask, and how much at once.

auth.py        Auth: API keys of clients, and the admin token
admission.py   Admission: limits, and the line of requests that wait for their turn
"""

from router.access.admission import Admission
from router.access.auth import Auth

__all__ = ["Admission", "Auth"]
