"""The cases of ``kvstore certify``: what fails in each, and when.

In each case the first instance answers new prompts and saves their blocks. Then the second instance answers the same
prompts, while the fault begins and ends. The right answers come from a third instance, which has no cache. After the
fault, each of the first two instances must find the blocks of new prompts that the other one has answered.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore_backend.backend import KVStoreError, PoolUnavailable
from kvstore_backend.cli.certify.instances import AT_ONCE, Answer, Instance, make_prompts, make_two_histories
from kvstore_backend.cli.certify.processes import Program
from kvstore_backend.cli.certify.recipe import Change, Recipe
from kvstore_backend.cli.certify.tampering import Tampering

__all__ = ["Case", "NoAnswer", "Result", "Trial", "list_cases"]

_MANY = 4
"""If a case has at least this number of different prompts, the right answers must not all be equal."""
_BEGIN = 0.25
"""Fraction of the prompts that are answered when a fault begins."""

_LASTS = 2 * AT_ONCE
"""Number of answers during a fault: half of the requests ran before the fault began, the other half began later."""

_EVICTED_ROUNDS = 3


@dataclass(frozen=True)
class Result:
    """Result of one case.

    Attributes:
        case: name of the case.
        requests: number of requests with answers that were compared.
        wrong: number of answers that differ from those of the instance without a cache.
        failed: number of requests without an answer.
        longest_seconds: duration of the longest request.
        hits: prompt tokens that came from a cache before and during the fault.
        healed_seconds: time after the fault until the pool was used again; None if that was not required.
        problems: one sentence for each requirement that was not met; empty if the case is passed.
        skipped: reason why the case was not run; empty if it was run.
    """

    case: str
    requests: int = 0
    wrong: int = 0
    failed: int = 0
    longest_seconds: float = 0.0
    hits: float = 0
    healed_seconds: float | None = None
    problems: Sequence[str] = ()
    skipped: str = ""


class NoAnswer(KVStoreError):
    """Error: the instance without a cache did not answer, so the right answers are not known."""


@dataclass(eq=False)
class Trial:
    """The running instances and programs of the pool, and the observations in the current case.

    Attributes:
        recipe: the recipe.
        parts: the programs of the pool, by their names in the recipe.
        first: instance that saves blocks.
        second: instance that loads blocks from the same pool.
        plain: instance without a cache, which gives the right answers.
        tampering: joins the pool for a ``with`` block, to change its values.
        start_changed: starts two instances with a change of the recipe for a ``with`` block: one that shares the pool,
            and one without a cache.
        start_part: starts a program of the pool for a ``with`` block.
        num_prompts: number of prompts in a case.
        seed: seed of the last random prompts.
        result: result of the current case so far.
        problems: sentences about requirements that the current case has not met so far.
    """

    recipe: Recipe
    parts: Mapping[str, Program]
    first: Instance
    second: Instance
    plain: Instance
    tampering: Callable[[], contextlib.AbstractContextManager[Tampering]]
    start_changed: Callable[[Change], contextlib.AbstractContextManager[tuple[Instance, Instance]]]
    start_part: Callable[[str], contextlib.AbstractContextManager[None]]
    num_prompts: int
    seed: int = 0
    result: Result = Result("")
    problems: list[str] = field(default_factory=list)

    def begin(self, case: str) -> None:
        """Begin a case: drop the observations of the last case, and restart programs that have ended.

        The programs are the instances, and the parts of the pool.

        Raises:
            StartFailed: a program did not start again.
        """
        self.result, self.problems = Result(case), []
        parts = [part for name, part in self.parts.items() if name != "joiner"]
        for program in (*parts, *(each.program for each in (self.first, self.second, self.plain))):
            if program.has_ended:
                program.stop()
                program.start()

    def make_prompts(self, *, is_shared: bool = True) -> list[str]:
        """Return new prompts.

        With ``is_shared``, some of them begin with the same words, if the recipe has a metric for hits in the pool.
        """
        self.seed += 1
        is_shared &= bool(self.recipe.instance.hits)  # else hits in its own cache would count as hits in the pool
        return make_prompts(self.seed, self.num_prompts, self.recipe.prompt_words, is_shared=is_shared)

    def make_two_histories(self) -> tuple[list[str], list[str]]:
        """Return prompts to save, and prompts with some of their words at the same positions, but after other words."""
        self.seed += 1
        return make_two_histories(self.seed, self.recipe.prompt_words)

    def save(self, prompts: Sequence[str], saver: Instance | None = None, **members: Any) -> None:
        """Let the first instance, or ``saver``, answer the prompts, and wait until it has saved their blocks.

        ``members`` are further members of each request, such as a ``cache_salt``.
        """
        answers = (saver or self.first).ask_all(prompts, **self.limit(members))
        self.compare(prompts, answers, self.plain, members)
        time.sleep(self.recipe.saved_seconds)

    def load(
        self,
        prompts: Sequence[str],
        begin: Callable[[], None] | None = None,
        end: Callable[[], None] | None = None,
        **members: Any,
    ) -> None:
        """Let the second instance answer the prompts, and compare its answers.

        Meanwhile another thread calls ``begin``, which begins the fault, and later ``end``, which ends the fault.
        ``members`` are further members of each request.
        """
        before = self.second.count_hits(())
        fault = _Fault(len(prompts), begin, end)
        try:
            answers = self.second.ask_all(prompts, fault.on_answered, **self.limit(members))
        finally:
            fault.finish()
        if fault.error:
            self.problems.append(f"the fault of this case could not be caused: {fault.error}")
        self.compare(prompts, answers, self.plain, members)
        self.result = replace(self.result, hits=self.result.hits + self.second.count_hits(answers) - before)

    def compare(
        self, prompts: Sequence[str], answers: Sequence[Answer], plain: Instance, members: Mapping[str, Any]
    ) -> None:
        """Compare answers with those of ``plain``, an instance without a cache; count wrong and failed answers.

        Args:
            prompts: the prompts.
            answers: the answers to compare, in the order of the prompts.
            plain: the instance without a cache, which answers the prompts now.
            members: further members of each request.

        Raises:
            NoAnswer: ``plain`` did not answer.
        """
        before = plain.count_hits(())
        right = plain.ask_all(prompts, **self.limit(members))
        for answer in right:
            if answer.text is None:
                raise NoAnswer(f"the instance without a cache did not answer a prompt: {answer.error}")
        if hits := plain.count_hits(right) - before:
            self.problems.append(f"the instance without a cache read {hits:g} tokens from a cache")
        if len(set(prompts)) >= _MANY and len({answer.text for answer in right}) == 1:
            self.problems.append("all right answers are the same, so this case would not find a wrong answer")
        failures = [answer.error for answer in answers if answer.text is None]
        pairs = zip(answers, right, strict=True)
        wrong = sum(answer.text is not None and answer.text != other.text for answer, other in pairs)
        result = self.result
        self.result = replace(
            result,
            requests=result.requests + len(answers),
            wrong=result.wrong + wrong,
            failed=result.failed + len(failures),
            longest_seconds=max(result.longest_seconds, *(answer.seconds for answer in answers)),
        )
        if failures:
            self.problems.append(f"a request failed: {failures[0]}")

    def require_hits(self) -> None:
        """Record a problem if no tokens came from the pool in this case."""
        if not self.result.hits:
            self.problems.append("no tokens came from the pool, so this case shows nothing")

    def require_recovery(self) -> None:
        """Wait until each instance loads blocks that the other one saves; record a problem if that takes too long."""
        begun = time.monotonic()
        for saver, loader in ((self.first, self.second), (self.second, self.first)):
            while not self._is_shared(saver, loader):
                if time.monotonic() - begun > self.recipe.heal_seconds:
                    self.problems.append(
                        f"{self.recipe.heal_seconds:g} s after the fault, the {loader.name} instance still loads no "
                        f"blocks that the {saver.name} instance computes"
                    )
                    return
        self.result = replace(self.result, healed_seconds=time.monotonic() - begun)

    def _is_shared(self, saver: Instance, loader: Instance) -> bool:
        """Let both instances answer new prompts; return whether ``loader`` loads blocks that ``saver`` has saved."""
        prompts = self.make_prompts()[:2]
        self.save(prompts, saver)
        before = loader.count_hits(())
        answers = loader.ask_all(prompts, **self.limit({}))
        self.compare(prompts, answers, self.plain, {})
        return loader.count_hits(answers) > before

    def finish(self) -> Result:
        """Return the result of the current case, with a problem for each program (instance or part) that has ended."""
        result, problems = self.result, self.problems
        for instance in (self.first, self.second, self.plain):
            if instance.program.has_ended:
                problems = [*problems, f"the {instance.name} instance ended"]
        for name, part in self.parts.items():
            if name != "joiner" and part.has_ended:
                problems = [*problems, f"the part {name} of the pool ended"]
        if result.wrong:
            problems = [f"{result.wrong} of {result.requests} answers are wrong", *problems]
        if result.longest_seconds > self.recipe.stall_seconds:
            problems.append(
                f"one request took {result.longest_seconds:.1f} s; stall_seconds in the recipe is "
                f"{self.recipe.stall_seconds:g}"
            )
        return replace(result, problems=problems)

    def limit(self, members: Mapping[str, Any]) -> dict[str, Any]:
        """Return the members of a request: ``members``, and the recipe's limit for generated tokens."""
        return {"max_tokens": self.recipe.answer_tokens, **members}


class _Fault:
    """Thread that calls ``begin`` when a fraction of the answers has arrived, and ``end`` some answers later.

    Args:
        total: total number of answers.
        begin: begins the fault, or None if there is nothing to do.
        end: ends the fault, or None if there is nothing to do.

    Attributes:
        error: type and message of the first exception that ``begin`` or ``end`` raised; empty if there was none.
    """

    def __init__(self, total: int, begin: Callable[[], None] | None, end: Callable[[], None] | None) -> None:
        self._begin_at = max(1, int(_BEGIN * total))
        self._steps = (begin, end)
        self._changed = threading.Condition()
        self._count = 0
        self._is_finished = False
        self.error = ""
        self._thread = threading.Thread(target=self._run, name="certify-fault", daemon=True)
        self._thread.start()

    def on_answered(self, count: int) -> None:
        """Record the number of answers that have arrived."""
        with self._changed:
            self._count = count
            self._changed.notify_all()

    def finish(self) -> None:
        """Let the thread make its remaining calls of ``begin`` and ``end`` now, and wait until it has ended.

        The thread makes no call if too few answers have arrived to begin the fault.
        """
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        wanted = self._begin_at
        for step in self._steps:
            self._wait_for(wanted)
            if self._count < self._begin_at:
                return  # the requests ended early, as with Ctrl-C
            try:
                if step:
                    step()
            except Exception as exc:
                self.error = self.error or f"{type(exc).__name__}: {exc}"
            wanted = self._count + _LASTS

    def _wait_for(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_finished or self._count >= count)


@dataclass(frozen=True)
class Case:
    """Case of ``kvstore certify``.

    Attributes:
        name: name of the case, for ``--only`` and the results.
        run: sends the requests and causes the fault; it records problems in the trial.
        lacks: returns what a recipe lacks for this case, as a sentence; empty if it lacks nothing.
        is_quick: whether ``--quick`` includes the case.
        changes_values: whether the case removes, damages or adds values in the pool, and so must list the values.
    """

    name: str
    run: Callable[[Trial], None]
    lacks: Callable[[Recipe], str]
    is_quick: bool = True
    changes_values: bool = False


def list_cases(recipe: Recipe) -> list[Case]:
    """Return all cases in the order of their runs, including a case for each of the recipe's groups and changes."""
    cases = [
        Case("no fault", _run_fault(None, None), lambda recipe: ""),
        Case("evicted between look-up and read", _evict_meanwhile, _lack_pool, changes_values=True),
        Case("bytes flipped", _damage(lambda pool: pool.flip_bytes()), _lack_pool, changes_values=True),
        Case("values truncated", _damage(lambda pool: pool.truncate()), _lack_pool, changes_values=True),
        Case("client leaves during a load", _leave, lambda recipe: ""),
        Case("pool full", _fill, _lack_mooncake, is_quick=False, changes_values=True),
        Case("master killed and restarted", _signal("master", Program.kill, Program.start), _lack_part("master")),
        Case("master hung", _signal("master", Program.hang, Program.resume), _lack_part("master")),
        Case("owner killed", _signal("owner", Program.kill, Program.start), _lack_part("owner")),
        Case("owner hung", _signal("owner", Program.hang, Program.resume), _lack_part("owner")),
        Case("an empty segment joins", _join, _lack_part("joiner"), is_quick=False),
        Case("one prefix with two salts", _salt, _lack_salts),
        Case("same words after other words", _move_words, lambda recipe: ""),
    ]
    cases += [
        Case(f"lost: {name}", _lose_group(keys), _lack_pool, changes_values=True)
        for name, keys in recipe.groups.items()
    ]
    return cases + [Case(name, _change(change), lambda recipe: "") for name, change in recipe.changes.items()]


def _run_fault(begin: Callable[[Trial], None] | None, end: Callable[[Trial], None] | None) -> Callable[[Trial], None]:
    def run(trial: Trial) -> None:
        prompts = trial.make_prompts(is_shared=begin is None)  # else the own cache would hide a fault
        trial.save(prompts)
        trial.load(prompts, begin and (lambda: begin(trial)), end and (lambda: end(trial)))
        trial.require_hits()
        if begin:
            trial.load(prompts[::-1])  # a late read may have changed blocks in the instance's own cache
        trial.require_recovery()

    return run


def _signal(part: str, begin: Callable[[Program], None], end: Callable[[Program], None]) -> Callable[[Trial], None]:
    return _run_fault(lambda trial: begin(trial.parts[part]), lambda trial: end(trial.parts[part]))


def _evict_meanwhile(trial: Trial) -> None:
    for _ in range(_EVICTED_ROUNDS):  # the time between a look-up and its read is short, and the pool is soon empty
        prompts = trial.make_prompts()
        trial.save(prompts)
        with trial.tampering() as pool, _repeat(lambda: pool.evict(0.1)):
            trial.load(prompts)
    trial.require_hits()
    trial.require_recovery()


def _damage(
    damage: Callable[[Tampering], int], trouble: str = "no value in the pool could be damaged"
) -> Callable[[Trial], None]:
    def run(trial: Trial) -> None:
        prompts = trial.make_prompts()
        trial.save(prompts)
        with trial.tampering() as pool:
            if not damage(pool):
                trial.problems.append(f"{trouble}, so this case shows nothing")
        trial.load(prompts)
        trial.require_recovery()

    return run


def _leave(trial: Trial) -> None:
    prompts = trial.make_prompts()
    trial.save(prompts)
    trial.second.ask_and_leave(prompts, [0.002 * 2 ** (number % 8) for number in range(len(prompts))])
    trial.load(prompts)
    trial.require_recovery()


def _fill(trial: Trial) -> None:
    prompts = trial.make_prompts()
    trial.save(prompts[: len(prompts) // 2])
    with trial.tampering() as pool:
        pool.fill()
        trial.save(prompts[len(prompts) // 2 :])
        trial.load(prompts)
    trial.require_recovery()


def _join(trial: Trial) -> None:
    prompts = trial.make_prompts()
    trial.save(prompts)
    with trial.start_part("joiner"):
        trial.load(prompts)
        trial.require_recovery()
    trial.require_recovery()


def _lose_group(keys: str) -> Callable[[Trial], None]:
    return _damage(lambda pool: pool.evict(0.5, keys), f"no key of the pool has {keys!r} in it")


def _salt(trial: Trial) -> None:
    prompts = trial.make_prompts(is_shared=False)
    trial.save(prompts, cache_salt="one tenant")
    trial.load(prompts, cache_salt="another tenant")
    if trial.result.hits:
        trial.problems.append("blocks of a prompt were found in the pool although they were saved with another salt")
    trial.load(prompts, cache_salt="one tenant")
    trial.require_hits()


def _move_words(trial: Trial) -> None:
    for _ in range(2):
        saved, asked = trial.make_two_histories()
        trial.save(saved)
        trial.load(asked)  # the words at their beginning are in the pool
    trial.require_hits()


def _change(change: Change) -> Callable[[Trial], None]:
    def run(trial: Trial) -> None:
        prompts = trial.make_prompts()
        trial.save(prompts)
        if change.request:
            answers = trial.second.ask_all(prompts, **trial.limit(change.request))
            trial.compare(prompts, answers, trial.plain, change.request)
            return
        with trial.start_changed(change) as (changed, plain):
            trial.compare(prompts, changed.ask_all(prompts, **trial.limit({})), plain, {})
            others = trial.make_prompts()
            trial.compare(others, changed.ask_all(others, **trial.limit({})), plain, {})
            time.sleep(trial.recipe.saved_seconds)
            trial.load(others)

    return run


@contextlib.contextmanager
def _repeat(step: Callable[[], object]) -> Iterator[None]:
    """Call ``step`` repeatedly on another thread during the ``with`` block, also after a failure of the pool."""
    ended, errors = threading.Event(), list[Exception]()

    def run() -> None:
        while not ended.wait(0.05):
            try:
                with contextlib.suppress(PoolUnavailable):
                    step()
            except Exception as exc:
                errors.append(exc)
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]


def _lack_pool(recipe: Recipe) -> str:
    return "" if recipe.pool else "the recipe has no pool"


def _lack_mooncake(recipe: Recipe) -> str:
    return "" if "://" in recipe.pool else "the recipe's pool is not Mooncake"


def _lack_part(name: str) -> Callable[[Recipe], str]:
    return lambda recipe: "" if name in recipe.parts else f"the recipe has no part {name}"


def _lack_salts(recipe: Recipe) -> str:
    return "" if recipe.instance.salts else "instance.salts in the recipe is not true"
