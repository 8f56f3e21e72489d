"""Who may ask."""

from router.access.admission import Admission
from router.access.auth import Auth

__all__ = ["Admission", "Auth"]
