"""Why the prompt of one request did not get more from a cache. Instances are queried only when the user requests it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from nicegui import ui

from router.console.client import RouterClient, RouterError
from router.console.dashboard.views.parts import draw_facts, put_button, put_html, put_text
from router.console.dashboard.words import make_sentence

__all__ = ["MissPanel", "draw_miss"]


class MissPanel:
    """The button for the request that is shown, and the result."""

    def __init__(self, router: RouterClient) -> None:
        self._router = router
        self._request_id = ""
        with ui.element("section").classes("card hidden") as self._card:
            with ui.element("div").classes("card-head"):
                put_text("h2", "Why did no more of its prompt come from a cache?")
                put_button("Ask the instances", self._ask)
            self._told = put_html("").classes("stack").props('role="status"')

    def offer(self, request_id: str) -> None:
        """Offer the query for this request; ``""`` hides it."""
        self._request_id = request_id
        self._told.show("")
        self._card.classes(replace="card" if request_id else "card hidden")

    async def _ask(self) -> None:
        asked = self._request_id
        self._told.show('<p class="note">Asking …</p>')
        try:
            content = draw_miss(await self._router.explain_miss(asked))
        except RouterError as exc:
            content = f"<p>{escape(make_sentence(exc))}</p>"
        if self._request_id == asked:  # else another request is shown meanwhile
            self._told.show(content)


def draw_miss(told: Mapping[str, Any]) -> str:
    """Render the answer of ``/admin/why_miss``. Routers of other versions may omit members."""
    facts = {
        "Reason": str(told.get("reason", "")).replace("_", " "),
        "Computed by": str(told.get("instance", "")),
        "Told by": str(told.get("told_by", "")),
    }
    return f"<p>{escape(make_sentence(str(told.get('why_miss', ''))))}</p>{draw_facts(facts)}"
