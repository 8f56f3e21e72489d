"""Adds elements to views: texts, tables, bars. All text that comes from outside this package is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from router.console.dashboard.figures import ORIGINS
from router.console.dashboard.words import NOTHING, ORIGIN_NAMES, format_count, format_share

__all__ = [
    "Banner",
    "Markup",
    "draw_blocks",
    "draw_facts",
    "draw_parts",
    "draw_table",
    "put_button",
    "put_head",
    "put_html",
    "put_text",
    "put_tiles",
]


class Markup(ui.html):
    """An element with HTML from this package. All text that comes from outside this package is escaped in it."""

    def __init__(self, content: str = "", tag: str = "div") -> None:
        super().__init__(content, sanitize=False, tag=tag)

    def show(self, content: str) -> None:
        """Show ``content``, which is HTML, unless the element shows it already."""
        if content != self.content:
            self.set_content(content)


def put_html(content: str, tag: str = "div") -> Markup:
    """Put an element that shows ``content``, which is HTML. Escape text from outside this package before the call."""
    return Markup(content, tag)


def put_text(tag: str, text: str, classes: str = "") -> TextElement:
    """Put an element that contains only text."""
    element = TextElement(tag=tag, text=text)
    return element.classes(classes) if classes else element


def put_button(text: str, on_click: Any, kind: str = "") -> ui.button:
    """Put a button. ``kind`` is ``strong`` for the main action, ``danger`` for an action that removes something."""
    return ui.button(text, on_click=on_click, color=None).classes(f"button {kind}").props("flat no-caps")


def put_head(title: str, lead: str) -> ui.element:
    """Put the head of a view, with space for a selector next to the text ``lead``."""
    with ui.element("div").classes("head") as head, ui.element("div"):
        put_text("h1", title)
        put_text("p", lead, "lead")
    return head


def put_tiles(*names: str) -> dict[str, Markup]:
    """Put a row of tiles for values. Return the element for each value, by name."""
    tiles = {}
    with ui.element("dl").classes("tiles"):
        for name in names:
            with ui.element("div").classes("tile"):
                put_text("dt", name)
                tiles[name] = put_html(NOTHING, "dd")
    return tiles


class Banner:
    """A sentence across the page, which can be hidden."""

    def __init__(self) -> None:
        self._box = ui.element("div").classes("banner plain hidden").props('role="status"')
        with self._box:
            self._text = put_text("span", "")

    def show(self, kind: str, text: str) -> None:
        """Show a sentence. ``kind`` is ``bad``, ``warn`` or ``plain``."""
        self._text.set_text(text)
        self._box.classes(replace=f"banner {kind}")

    def hide(self) -> None:
        """Hide the banner."""
        self._box.classes(replace="banner plain hidden")


def draw_parts(shares: Mapping[str, float], *, is_thin: bool = False) -> str:
    """Return the HTML of a bar with parts, such as the prompt tokens from the own cache, from the pool, and computed.

    Args:
        shares: the fraction of each part. If their sum is less than one, the rest of the bar is empty.
        is_thin: whether the bar has a smaller height.
    """
    words = ", ".join(
        f"{ORIGIN_NAMES.get(each, each)} {format_share(share)}" for each, share in shares.items() if share
    )
    parts = "".join(
        f'<i class="{each}" style="width:{share * 100:.2f}%"></i>' for each, share in shares.items() if share > 0
    )
    classes = "parts thin" if is_thin else "parts"
    return f'<div class="{classes}" role="img" aria-label="{escape(words or "nothing yet")}">{parts}</div>'


def draw_table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return the HTML of a table.

    Args:
        heads: the names of the columns, as text.
        rows: the cells, as HTML.
        numbers: indices of the columns that contain numbers.
    """

    def draw_cell(tag: str, column: int, content: str) -> str:
        # On a phone, a row is shown as a card, in which each cell has the name of its column.
        label = ' scope="col"' if tag == "th" else f' data-name="{escape(heads[column])}"'
        return f"<{tag}{label}{' class=num' if column in numbers else ''}>{content}</{tag}>"

    head = "".join(draw_cell("th", column, escape(name)) for column, name in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(draw_cell("td", column, cell) for column, cell in enumerate(row)) + "</tr>" for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="table-box" tabindex="0" role="group" aria-label="{escape(heads[0])}">{table}</div>'


def draw_facts(facts: Mapping[str, str]) -> str:
    """Return the HTML of a row of facts, each with its name. Facts with an empty text are omitted.

    Args:
        facts: the text of each fact, by its name.
    """
    listed = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items() if value
    )
    return f'<dl class="facts">{listed}</dl>'


def draw_blocks(tokens: Mapping[str, float], at_most: int = 96) -> tuple[str, int]:
    """Return the HTML of a prompt as ``at_most`` or fewer squares, coloured by origin, and the tokens per square.

    The squares are in the order in which an instance looks for tokens: its own cache, the pool, all others.
    """
    total = sum(tokens.values())
    size = 1
    while total / size > at_most:
        size *= 2
    squares: list[str] = []
    begun = 0.0
    for origin in [*ORIGINS, *(tokens.keys() - set(ORIGINS))]:
        begun += tokens.get(origin, 0.0)
        while len(squares) * size + size / 2 <= begun or (begun == total and len(squares) * size < total):
            squares.append(f'<i class="{origin if origin in ORIGINS else "unknown"}"></i>')
    words = ", ".join(f"{ORIGIN_NAMES.get(each, each)}: {format_count(count)}" for each, count in tokens.items())
    return f'<div class="blocks" role="img" aria-label="{escape(words)} tokens">{"".join(squares)}</div>', size
