"""History: stores the results of the last polls, and computes the increase of counters between them."""

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
    """The result of a poll for one instance: the router's entry, and the metrics that the instance reports."""

    listed: Listed
    figures: InstanceFigures | None = None
    trouble: str = ""
    """Why the instance's metrics are missing, in one sentence; ``""`` if they are known."""


@dataclass(frozen=True, slots=True)
class MasterReport:
    """The result of a poll for one master of the pool."""

    address: str
    figures: MasterFigures | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """The result of one poll of the router, its instances and the masters."""

    time: float
    """Time of the poll, in seconds since 1970."""
    router: RouterFigures | None = None
    trouble: str = ""
    """Why the router's metrics are missing, in one sentence; ``""`` if they are known."""
    listing_trouble: str = ""
    """Why the router does not list its instances (it requires its admin token); ``""`` if it lists them."""
    instances: Mapping[str, InstanceReport] = field(default_factory=dict)
    masters: tuple[MasterReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """A time range that ends now, divided into pieces of equal length."""

    title: str
    seconds: float
    pieces: int

    @property
    def piece_seconds(self) -> float:
        """Length of a piece in seconds."""
        return self.seconds / self.pieces

    def label_pieces(self) -> list[str]:
        """Return a label for each piece of the time range: how long ago the piece ended."""
        labels = []
        for number in range(self.pieces - 1, -1, -1):
            ago = number * self.piece_seconds
            labels.append("now" if not ago else f"{ago / 60:g} min ago" if ago % 60 == 0 else f"{ago:g} s ago")
        return labels


class History:
    """The results of the last polls, oldest first."""

    def __init__(self, seconds: float = HISTORY_SECONDS) -> None:
        self._seconds = seconds
        self._moments: deque[Moment] = deque()

    @property
    def last(self) -> Moment | None:
        """The result of the last poll; None before the first poll."""
        return self._moments[-1] if self._moments else None

    def add(self, moment: Moment) -> None:
        """Store the result of a poll, and delete the results of polls that are older than the history."""
        self._moments.append(moment)
        while self._moments[0].time < moment.time - self._seconds:
            self._moments.popleft()

    def list_moments(self, seconds: float) -> list[Moment]:
        """Return the polls of the last ``seconds``, and the last poll before them."""
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
            span: the time range.
            read: returns the counters of a poll, by the router, instance or master that has reported them. If one
                of them restarts, its counters begin at 0 again, but the sum over all does not decrease.
        """
        pieces: list[dict[K, float]] = [{} for _ in range(span.pieces)]
        if self.last is None:
            return pieces
        # Pieces end at multiples of their length, so that an event is in the same piece at each call.
        end = -(-self.last.time // span.piece_seconds) * span.piece_seconds
        for time, grown in _count_steps(_thin_moments(self.list_moments(span.seconds), span), read):
            number = span.pieces - 1 - int((end - time) // span.piece_seconds)
            if 0 <= number < span.pieces:
                _add_counts(pieces[number], grown)
        return pieces

    def count_unknown_pieces(self, span: Span) -> int:
        """Return the number of pieces of a span that ended before the first poll."""
        if self.last is None:
            return span.pieces
        end = -(-self.last.time // span.piece_seconds) * span.piece_seconds
        known = int((end - self._moments[0].time) // span.piece_seconds) + 1
        return max(0, span.pieces - known)

    def count_span(self, span: Span, read: Callable[[Moment], Mapping[str, Mapping[K, float]]]) -> dict[K, float]:
        """Return the increase of counters in a whole span. ``count_pieces`` describes the arguments."""
        total: dict[K, float] = {}
        for grown in self.count_pieces(span, read):
            _add_counts(total, grown)
        return total

    def average_pieces(self, span: Span, read: Callable[[Moment], float | None]) -> list[float | None]:
        """Return the mean of a metric in each piece of a span; None for a piece without values."""
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


def _thin_moments(moments: Sequence[Moment], span: Span) -> list[Moment]:
    """Return the first and last poll in each piece of a span, and the polls before and after a change of sources.

    The sources are the router, instances and masters that responded (``_list_sources``).

    The increase of counters between these polls is the same as over all polls. With fewer polls, the time for counting
    depends little on the length of the span.
    """
    marks = [(-(-moment.time // span.piece_seconds), _list_sources(moment)) for moment in moments]
    return [
        moment
        for moment, before, own, after in zip(moments, [None, *marks], marks, [*marks[1:], None], strict=False)
        if before != own or own != after
    ]


def _list_sources(moment: Moment) -> list[str]:
    """Return the names of the sources that responded in a poll: the router, instances and masters."""
    found = [key for key, report in moment.instances.items() if report.figures is not None]
    found += [master.address for master in moment.masters if master.figures is not None]
    return found if moment.router is None else ["router", *found]


def _count_steps(
    moments: Sequence[Moment], read: Callable[[Moment], Mapping[str, Mapping[K, float]]]
) -> Iterator[tuple[float, dict[K, float]]]:
    """Yield, for each poll, its time and the increase of each counter, summed over all sources.

    A source is the router, an instance or a master. Its counters are compared with those in its previous response.
    """
    known: dict[str, Mapping[K, float]] = {}
    highest: dict[str, Mapping[K, float]] = {}
    for moment in moments:
        grown: dict[K, float] = {}
        for who, counters in read(moment).items():
            before = known.get(who)
            if before is None or _has_restarted(before, counters):
                _add_counts(grown, {} if before is None else counters)
                highest[who] = counters
            else:
                reached = highest[who]
                highest[who] = {name: max(count, reached.get(name, 0.0)) for name, count in counters.items()}
                _add_counts(grown, {name: count - reached.get(name, 0.0) for name, count in highest[who].items()})
            known[who] = counters
        yield moment.time, grown


def _has_restarted(before: Mapping[K, float], after: Mapping[K, float]) -> bool:
    """Return whether a source has restarted: the sum of the counters that it still has is less than before.

    One counter may decrease without a restart, because vLLM counts cached tokens when a prompt begins, and all of its
    tokens when it ends: in the meantime fewer tokens seem to be computed. A counter may also end, because its instance
    is no longer registered at the router.
    """
    names = before.keys() & after.keys()
    return sum(after[name] for name in names) < sum(before[name] for name in names)


def _add_counts(total: dict[K, float], counts: Mapping[K, float]) -> None:
    for name, count in counts.items():
        total[name] = total.get(name, 0.0) + count
