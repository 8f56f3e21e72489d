"""History: the last polls of all metrics, and the increase of counters between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from router.console.dashboard.figures import InstanceFigures, Listed, MasterFigures, RouterFigures

__all__ = [
    "History",
    "InstanceReport",
    "MasterReport",
    "Moment",
    "Span",
]

K = TypeVar("K", bound=Hashable)

HISTORY_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """Result of polling one instance: the router's entry for it, and the instance's own metrics if it reports them."""

    listed: Listed
    figures: InstanceFigures | None = None
    trouble: str = ""
    """Why there are no metrics, in one sentence."""


@dataclass(frozen=True, slots=True)
class MasterReport:
    """Result of polling one master of the pool."""

    address: str
    figures: MasterFigures | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """Result of one poll of everything."""

    time: float
    """Seconds since 1970."""
    router: RouterFigures | None = None
    trouble: str = ""
    """Why there are no metrics of the router, in one sentence."""
    listing_trouble: str = ""
    """Why the router does not list its instances: it requires its admin token for this."""
    instances: Mapping[str, InstanceReport] = field(default_factory=dict)
    masters: tuple[MasterReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """Time range that ends now, divided into pieces of equal length."""

    title: str
    seconds: float
    pieces: int

    @property
    def piece_seconds(self) -> float:
        """Length of a piece in seconds."""
        return self.seconds / self.pieces

    def label_pieces(self) -> list[str]:
        """Return for each piece how long ago it ended."""
        labels = []
        for number in range(self.pieces - 1, -1, -1):
            ago = number * self.piece_seconds
            labels.append("now" if not ago else f"{ago / 60:g} min ago" if ago % 60 == 0 else f"{ago:g} s ago")
        return labels


class History:
    """The last polls, oldest first."""

    def __init__(self, seconds: float = HISTORY_SECONDS) -> None:
        self._seconds = seconds
        self._moments: deque[Moment] = deque()

    @property
    def last(self) -> Moment | None:
        """The last poll; None before the first."""
        return self._moments[-1] if self._moments else None

    def add(self, moment: Moment) -> None:
        """Store a poll, and discard those that are too old."""
        self._moments.append(moment)
        while self._moments[0].time < moment.time - self._seconds:
            self._moments.popleft()

    def list_moments(self, seconds: float) -> list[Moment]:
        """Return the polls of the last ``seconds``, and the one before them."""
        moments: list[Moment] = []
        for moment in reversed(self._moments):
            moments.append(moment)
            if moment.time <= self._moments[-1].time - seconds:
                break
        return moments[::-1]

    def count_pieces(
        self, span: Span, read: Callable[[Moment], Mapping[str, Mapping[K, float]]]
    ) -> list[dict[K, float]]:
        """Return the increase of counters in each piece of a span.

        Args:
            read: returns the counters of a poll by their source, so that a source that disappeared or restarted is not
                confused with one with unchanged counters.
        """
        pieces: list[dict[K, float]] = [{} for _ in range(span.pieces)]
        if self.last is None:
            return pieces
        # Pieces end at multiples of their length, so that a counted event stays in its piece.
        end = -(-self.last.time // span.piece_seconds) * span.piece_seconds
        for time, grown in _count_steps(self.list_moments(span.seconds), read):
            number = span.pieces - 1 - int((end - time) // span.piece_seconds)
            if 0 <= number < span.pieces:
                _add_counts(pieces[number], grown)
        return pieces

    def count_span(self, span: Span, read: Callable[[Moment], Mapping[str, Mapping[K, float]]]) -> dict[K, float]:
        """Return the increase of counters in the whole span; ``read`` as in ``count_pieces``."""
        total: dict[K, float] = {}
        for grown in self.count_pieces(span, read):
            _add_counts(total, grown)
        return total

    def average_pieces(self, span: Span, read: Callable[[Moment], float | None]) -> list[float | None]:
        """Return the mean of a metric in each piece of a span; None for pieces without values."""
        found: list[list[float]] = [[] for _ in range(span.pieces)]
        if self.last is None:
            return [None] * span.pieces
        end = -(-self.last.time // span.piece_seconds) * span.piece_seconds
        for moment in self.list_moments(span.seconds):
            number = span.pieces - 1 - int((end - moment.time) // span.piece_seconds)
            value = read(moment)
            if 0 <= number < span.pieces and value is not None:
                found[number].append(value)
        return [sum(values) / len(values) if values else None for values in found]


def _count_steps(
    moments: Sequence[Moment], read: Callable[[Moment], Mapping[str, Mapping[K, float]]]
) -> Iterator[tuple[float, dict[K, float]]]:
    """Yield for each poll the increase of counters since the last poll that had them."""
    known: dict[str, Mapping[K, float]] = {}
    for moment in moments:
        grown: dict[K, float] = {}
        for who, counters in read(moment).items():
            before = known.get(who)
            if before is not None:
                _add_counts(grown, _grow(before, counters))
            known[who] = counters
        yield moment.time, grown


def _grow(before: Mapping[K, float], after: Mapping[K, float]) -> dict[K, float]:
    """Return the increase of each counter. If the counters were reset in between, it is their present value."""
    if any(after.get(name, 0.0) < count for name, count in before.items()):
        return dict(after)
    return {name: count - before.get(name, 0.0) for name, count in after.items()}


def _add_counts(total: dict[K, float], counts: Mapping[K, float]) -> None:
    for name, count in counts.items():
        total[name] = total.get(name, 0.0) + count
