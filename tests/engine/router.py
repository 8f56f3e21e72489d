"""A simulated router with only the registration endpoint. It records the registrations."""

from __future__ import annotations

from typing import Any

from tests.support.json_http import Asked, JsonServer

__all__ = ["Router"]


class Router(JsonServer):
    """Accepts registrations; responds 400 if ``refuses``, and without a JSON object if ``is_other_software``."""

    def __init__(self, port: int = 0) -> None:
        self.registered: list[tuple[str, Any]] = []
        self.refuses = False
        self.is_other_software = False
        super().__init__(self._answer, port)
        self.port = self.server_port

    def _answer(self, request: Asked) -> tuple[int, object]:
        self.registered.append((request.path, request.body))
        if self.is_other_software:
            return 200, "a page"
        return (400, {"detail": "no such role"}) if self.refuses else (200, {"status": "success"})
