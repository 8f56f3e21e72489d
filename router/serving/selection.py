"""Selection: which instance, or which pair, serves a request.

The set of selectable instances rarely changes, but requests are frequent. So the choice is prepared when the set has
changed (``_Choice``), and a request only applies the policies to it. For a single request some instances are removed:
those that the request excludes, and, at random, those that get less than their full share. The time for this depends on
their number, not on the number of all instances.

In a fleet with several models, each model has its own choices, and policies that learn separately. A fleet with one
model serves requests for any model.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvcommon.hints import did_you_mean
from router.fleet import (
    UNLISTED,
    EngineKind,
    Instance,
    Registration,
    Registry,
    Role,
    ServedModels,
    can_decode_for,
    may_pair,
    pairing_kind,
    share_model,
)
from router.http import ApiError, Usage
from router.policies import POLICIES, Decision, InstanceLoad, Outcome, Policy, RequestFeatures
from router.settings import RouterSettings

__all__ = ["NoInstance", "Selection", "Selector", "explain_unknown_model"]

_PAIR = (Role.PREFILL, Role.DECODE)
# Clients may send, and instances may list, more and longer names than it makes sense to compare.
MAX_NAME_CHARACTERS, MAX_NAMES_COMPARED = 200, 200
# Maximum number of instances of a role named in an error message.
MAX_LISTED = 10
# While some instances get less than their share, or none can be selected, the choice is prepared again after this time.
RENEWAL_SECONDS = 1.0


class NoInstance(Exception):
    """No instance can serve the request; ``error`` is the answer to its client."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class Selection(NamedTuple):
    """The instances that serve a request: ``answering`` generates the answer; ``prefill`` exists in a pair."""

    answering: Instance
    prefill: Instance | None
    decisions: tuple[Decision, ...]
    model: str = ""
    """The model whose policies decided, if models are distinguished."""


class Selector:
    """Applies the policy of each role to the available instances."""

    def __init__(
        self,
        settings: RouterSettings,
        registry: Registry,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """
        Args:
            clock: the clock of the times in ``registry``.
            chance: returns a random number from 0 to below 1.
        """
        self._registry = registry
        self._router = f"{'https://' if settings.ssl_certfile else ''}HOST:{settings.port}"
        self.aliases = settings.model_aliases
        """The model of each alias."""
        self._clock = clock
        self._chance = chance
        names = {
            Role.MIXED: settings.policy,
            Role.PREFILL: settings.prefill_policy,
            Role.DECODE: settings.decode_policy,
        }
        self.policies: Mapping[Role, Policy] = {
            role: POLICIES[names[role]](settings.policy_options, clock) for role in registry.roles
        }
        """The policy of each role that the router's mode accepts."""
        for policy in self.policies.values():
            registry.events.lost_caches.subscribe(policy.forget_instance)
        self._choice = _Choice((), (), registry.splitwise)
        self._models: ServedModels | None = None
        """The fleet's models, if they are distinguished. Then each model has a choice, created at its first request."""
        self._choices: dict[str, _Choice] = {}
        self._lone_choices: dict[str, _Choice] = {}
        """Choices by model of single instances, for requests without generation."""
        self._siblings: dict[str, Mapping[Role, Policy]] = {}
        self._obstacles: dict[str, ApiError] = {}
        """By model, why no request can be served."""
        self._generation = -1
        self._good_until = -math.inf

    def choose(self, features: RequestFeatures, excluded: Collection[str] = ()) -> Selection:
        """Select an instance, or with --splitwise a pair, none of them in ``excluded``.

        Raises:
            NoInstance: a role has no instance left, no two are compatible, or none serves the request's model.
        """
        now = self._clock()
        if self._generation != self._registry.events.generation or now >= self._good_until:
            self._prepare_choice(now)
        model, choice, policies = "", self._choice, self.policies
        if self._models is not None:
            model = self._find_model(self._models, features.model, now)
            choice, policies = self._find_choice(model, now), self.policies_of(model)
        if excluded or choice.weighted:
            choice = self._narrow_choice(choice, now, excluded) or self._gather_choice(now, excluded, model)
        if choice.empty:
            raise NoInstance(self._explain_none(excluded, model))
        if not self._registry.splitwise:
            mixed, decision = self._apply_policy(policies[Role.MIXED], features, choice.first, now)
            return Selection(mixed, None, (decision,), model)
        prefill, first = self._apply_policy(policies[Role.PREFILL], features, choice.first, now)
        decode, second = self._apply_policy(
            policies[Role.DECODE], features, choice.groups[choice.kinds[prefill.key]], now
        )
        return Selection(decode, prefill, (first, second), model)

    def choose_any(self, features: RequestFeatures, excluded: Collection[str] = ()) -> Selection:
        """Select one instance for a request without generation; in the mode for pairs, a decode instance.

        Raises:
            NoInstance: none is left.
        """
        now = self._clock()
        if self._generation != self._registry.events.generation or now >= self._good_until:
            self._prepare_choice(now)
        model = "" if self._models is None else self._find_model(self._models, features.model, now)
        role = Role.DECODE if self._registry.splitwise else Role.MIXED  # prefill may answer with one token
        choice = self._lone_choices.get(model)
        if choice is None:
            choice = self._lone_choices[model] = self._gather_choice(now, (), model, role)
        if excluded or choice.weighted:
            choice = self._narrow_choice(choice, now, excluded) or self._gather_choice(now, excluded, model, role)
        if choice.empty:
            raise NoInstance(self._explain_missing([role], model))
        instance, decision = self._apply_policy(self.policies_of(model)[role], features, choice.first, now)
        return Selection(instance, None, (decision,), model)

    def choose_keeper(self, features: RequestFeatures, key: str) -> Selection:
        """Select the instance that stores the response which a request continues, even if it gets no new requests.

        Raises:
            NoInstance: it is gone, or does not answer.
        """
        keeper = self._registry.get(key)
        if keeper is None or not keeper.healthy:
            state = "does not answer" if keeper is not None else "is gone"
            message = f"{key} keeps the response, and {state}"
            raise NoInstance(ApiError(404, message, "response_not_found", "previous_response_id"))
        policy = self.policies[keeper.role]
        instance, decision = self._apply_policy(policy, features, _Group([keeper]), self._clock())
        return Selection(instance, None, (decision,))

    def find_obstacle(self) -> str:
        """Return why no request can be served at present, in one sentence; ``""`` if some can."""
        now = self._clock()
        if self._generation != self._registry.events.generation or now >= self._good_until:
            self._prepare_choice(now)
        return self._explain_none((), "").message if self._choice.empty else ""

    def token_seconds(self, role: Role) -> float:
        """Return the learned seconds per token of work for an instance of this role; 0 if not learned."""
        return max(self.policies_of(model)[role].token_seconds for model in ("", *self._siblings))

    def policies_of(self, model: str) -> Mapping[Role, Policy]:
        """Return the policies that decide for a model, and learn from its requests; for ``""``, ``policies``."""
        if not model:
            return self.policies
        if model not in self._siblings:
            self._siblings[model] = {role: policy.make_sibling() for role, policy in self.policies.items()}
        return self._siblings[model]

    def _find_model(self, models: ServedModels, name: object, now: float) -> str:
        """Return the model that a request for ``name`` means; ``""`` if any model is suitable.

        Raises:
            NoInstance: no instance serves it.
        """
        model = models.find(name)
        if model is None:
            self._registry.models_wanted_at = now
            if name in models.gone:
                message = f"no instance serves the model {name!r} any more; all that did are gone"
                raise NoInstance(ApiError(503, message, "no_instance", "model"))
            raise NoInstance(explain_unknown_model(str(name), {*models.names, *self.aliases}))
        return model

    def _find_choice(self, model: str, now: float) -> _Choice:
        if model not in self._choices:
            self._choices[model] = self._gather_choice(now, (), model)
        return self._choices[model]

    def learn(
        self,
        selection: Selection,
        features: RequestFeatures,
        usage: Usage,
        *,
        queued_before: float,
        ttft: float | None,
    ) -> None:
        """Report a result to the policy that selected the instance which computed the prompt, so that it learns.

        Args:
            usage: token counts of that instance.
            queued_before: the work that was queued there.
            ttft: seconds to the first token, if known.
        """
        if usage.cached_tokens is None or not usage.prompt_tokens:
            return  # the engine reports nothing that a policy learns from
        decision = selection.decisions[0]
        outcome = Outcome(
            decision.key, queued_before, ttft, usage.prompt_tokens, usage.cached_tokens, usage.own_cached_tokens
        )
        role = (selection.prefill or selection.answering).role
        policies = self.policies_of(selection.model) if selection.model else self.policies
        policies[role].observe_outcome(features, decision, outcome)

    def _prepare_choice(self, now: float) -> None:
        if self._generation != self._registry.events.generation:
            models = ServedModels(self._registry, self._registry.gone_models)
            self._models = models if models.are_told_apart else None
            for gone in self._siblings.keys() - models.names - {UNLISTED}:
                del self._siblings[gone]
        for prepared in (self._choices, self._lone_choices, self._obstacles):
            prepared.clear()
        self._choice = choice = self._gather_choice(now, ())
        self._generation = self._registry.events.generation
        available = self._list_available(())
        retries = [i.breaker.retry_at for i in available if not i.breaker.admits(now)]
        is_passing = choice.empty or any(i.weight(now) < 1.0 for i in available)
        self._good_until = min(retries, default=math.inf)
        if is_passing:
            self._good_until = min(self._good_until, now + RENEWAL_SECONDS)

    def _gather_choice(
        self, now: float, excluded: Collection[str], model: str = "", alone: Role | None = None
    ) -> _Choice:
        """Return the choice among the preferred instances; among the next group if that one leaves none.

        Args:
            alone: the role of the instances, if single instances are to serve.
        """
        splitwise = self._registry.splitwise and alone is None
        for instances, weighted in self._rank_instances(now, excluded, model, alone):
            choice = _Choice(instances, weighted, splitwise)
            if not choice.empty:
                break
        return choice

    def _rank_instances(
        self, now: float, excluded: Collection[str], model: str, alone: Role | None
    ) -> Iterator[tuple[list[Instance], list[Instance]]]:
        """Yield the selectable instances; then the same plus those that should be avoided, as a last resort.

        Each comes with the list of those that get less than their share.
        """
        roles = self._registry.roles if alone is None else (alone,)
        available = [i for i in self._list_available(excluded, model) if i.role in roles]
        admitted = [i for i in available if i.breaker.admits(now)]
        preferred = []
        for role in roles:
            of_role = [i for i in admitted if i.role is role]
            preferred += [i for i in of_role if i.weight(now) > 0.0] or of_role
        yield preferred, [i for i in preferred if 0.0 < i.weight(now) < 1.0]
        yield admitted, []
        yield available, []

    def _narrow_choice(self, choice: _Choice, now: float, excluded: Collection[str]) -> _Choice | None:
        """Return the choice without the ``excluded`` instances, and without those that this request omits at random.

        An instance takes part with a probability equal to its weight. If no instance of a role would take part, all do.

        Returns:
            None if nothing is left.
        """
        left_out = set(excluded)
        for of_role, count in choice.weighted:
            unlucky = [i.key for i in of_role if self._chance() >= i.weight(now)]
            if len(unlucky) < count:
                left_out.update(unlucky)
        narrowed = choice.leave_out(left_out)
        if narrowed.empty and len(left_out) > len(excluded):
            narrowed = choice.leave_out(excluded)
        return None if narrowed.empty else narrowed

    def _list_available(self, excluded: Collection[str], model: str = "") -> list[Instance]:
        return [i for i in self._registry if i.is_available and i.key not in excluded and i.serves(model)]

    def _apply_policy(
        self, policy: Policy, features: RequestFeatures, group: _Group, now: float
    ) -> tuple[Instance, Decision]:
        decision = policy.choose_instance(features, group.candidates)
        chosen = group.by_key[decision.key]
        if chosen.breaker.state != "closed" and chosen.breaker.admits(now):
            chosen.begin_half_open_trial(now)
        return chosen, decision

    def _explain_none(self, excluded: Collection[str], model: str) -> ApiError:
        """Return why no instance can serve a request; prepared like choices, unless the request excludes instances."""
        if excluded:
            return self._explain_emptiness(excluded, model)
        if model not in self._obstacles:
            self._obstacles[model] = self._explain_emptiness((), model)
        return self._obstacles[model]

    def _explain_emptiness(self, excluded: Collection[str], model: str) -> ApiError:
        available = self._list_available(excluded, model)
        present = {instance.role for instance in available}
        missing = [role for role in self._registry.roles if role not in present]
        return self._explain_missing(missing, model) if missing else _explain_misfit(available)

    def _explain_missing(self, roles: Sequence[Role], model: str) -> ApiError:
        return ApiError(503, "; ".join(self._explain_missing_role(role, model) for role in roles), "no_instance")

    def _explain_missing_role(self, role: Role, model: str) -> str:
        known = [i for i in self._registry if i.role is role and i.serves(model)]
        if known:
            states = "; ".join(
                f"{i.key} is {i.state}{': ' + i.trouble if i.trouble else ''}" for i in known[:MAX_LISTED]
            )
            if len(known) > MAX_LISTED:
                states += f"; and {len(known) - MAX_LISTED} others"
            return f"no {role.value} instance can take the request ({states})"
        flag = "" if role is Role.MIXED else f" --splitwise-role {role.value}"
        whose = "" if model in ("", UNLISTED) else f" that serves {model!r}"
        return (
            f"no {role.value} instance{whose} is registered; start one with{flag} --router {self._router}, "
            "where HOST is this router's address"
        )


class _Group:
    """Instances from which a policy chooses."""

    __slots__ = ("by_key", "candidates", "places")

    def __init__(self, instances: Sequence[Instance]) -> None:
        self.candidates: list[InstanceLoad] = [instance.load for instance in instances]
        self.by_key: dict[str, Instance] = {instance.key: instance for instance in instances}
        """A mapping that may contain more instances than the candidates."""
        self.places = {instance.key: place for place, instance in enumerate(instances)}
        """Their positions in a group from which none was removed."""

    def leave_out(self, keys: Collection[str]) -> _Group:
        """Return the group without the instances of these keys. No instance may have been removed before."""
        places = sorted([self.places[key] for key in keys if key in self.places], reverse=True)
        if not places:
            return self
        narrowed = _Group.__new__(_Group)
        narrowed.by_key, narrowed.places = self.by_key, self.places
        narrowed.candidates = self.candidates.copy()
        for place in places:
            del narrowed.candidates[place]
        return narrowed


class _Choice:
    """A prepared choice: one group for the first instance and, for pairs, a group of partners for each kind of it."""

    __slots__ = ("empty", "first", "groups", "kinds", "weighted")

    def __init__(self, instances: Sequence[Instance], weighted: Sequence[Instance], splitwise: bool) -> None:
        """
        Args:
            weighted: the instances that get less than their share.
        """
        self.groups: list[_Group] = []
        """Groups of decode instances, one for each kind of prefill instance; empty in a narrowed choice."""
        self.kinds: dict[str, int] = {}
        """The position in ``groups`` of the partners, by the key of a prefill instance."""
        if not splitwise:
            self.first = _Group(instances)
        else:
            prefills = [i for i in instances if i.role is Role.PREFILL]
            self._group_partners(prefills, [i for i in instances if i.role is Role.DECODE])
            self.first = _Group([prefill for prefill in prefills if prefill.key in self.kinds])
        self.weighted: list[tuple[list[Instance], int]] = []
        """For each role with such instances: these, and the number of all."""
        for role in {instance.role for instance in weighted}:
            count = sum(instance.role is role for instance in instances)
            self.weighted.append(([i for i in weighted if i.role is role], count))
        self.empty = not self.first.candidates

    def _group_partners(self, prefills: Sequence[Instance], decodes: Sequence[Instance]) -> None:
        """Group the decode instances that may be paired with each prefill instance, if there are any."""
        # Prefill instances that are equal for pairing share a group; usually that is all of them.
        known: dict[object, int | None] = {}
        for prefill in prefills:
            asked = prefill.registration
            kind = (pairing_kind(asked), asked.version, asked.tp_size, asked.connected_decodes, prefill.models)
            if kind not in known:
                fitting = [d for d in decodes if may_pair(asked, d.registration) and share_model(prefill, d)]
                known[kind] = len(self.groups) if fitting else None
                if fitting:
                    self.groups.append(_Group(fitting))
            place = known[kind]
            if place is not None:
                self.kinds[prefill.key] = place

    def leave_out(self, keys: Collection[str]) -> _Choice:
        """Return the choice without the instances of these keys."""
        narrowed = _Choice.__new__(_Choice)
        narrowed.kinds, narrowed.weighted = self.kinds, self.weighted
        narrowed.groups = [group.leave_out(keys) for group in self.groups]
        lonely = {place for place, group in enumerate(narrowed.groups) if not group.candidates}
        if lonely:  # rare: otherwise every request would examine all prefill instances
            keys = {*keys, *(key for key, place in self.kinds.items() if place in lonely)}
        narrowed.first = self.first.leave_out(keys)
        narrowed.empty = not narrowed.first.candidates
        return narrowed


def explain_unknown_model(name: str, known: Iterable[str]) -> ApiError:
    """Return the answer to a request for a model that is not among those ``known``."""
    compared = sorted(known)[:MAX_NAMES_COMPARED]
    shown = name[:MAX_NAME_CHARACTERS]
    hint = did_you_mean(shown, compared) or f"; served are: {', '.join(compared) or 'none'}"
    return ApiError(404, f"no instance serves a model {shown!r}{hint}", "model_not_found", "model")


def _explain_misfit(instances: Sequence[Instance]) -> ApiError:
    """Return why none of the prefill instances may be paired with any of the decode instances."""
    prefills = [i.registration for i in instances if i.role is Role.PREFILL]
    decodes = [i.registration for i in instances if i.role is Role.DECODE]
    if not {*map(pairing_kind, prefills)} & {*map(pairing_kind, decodes)}:
        reason = (
            "prefill and decode must be of one engine, and of vLLM's of one kv_connector; registered are "
            f"prefill {_list_engines(prefills)} and decode {_list_engines(decodes)}"
        )
        return ApiError(503, reason, "no_pair")
    if not any(can_decode_for(p.tp_size, {d.tp_size for d in decodes}) for p in prefills):
        return ApiError(
            400,
            "the tp_size of prefill and decode must be equal, or that of decode 1; registered are prefill "
            f"{sorted({p.tp_size for p in prefills})} and decode {sorted({d.tp_size for d in decodes})}",
            "tp_size_mismatch",
        )
    if not {p.version for p in prefills} & {d.version for d in decodes}:
        reason = (
            "prefill and decode must be of one version; registered are "
            f"prefill {_list_versions(prefills)} and decode {_list_versions(decodes)}"
        )
    elif not any(share_model(p, d) for p in instances for d in instances if (p.role, d.role) == _PAIR):
        served = [ServedModels([i for i in instances if i.role is role]) for role in _PAIR]
        reason = (
            "prefill and decode must serve one model, by one name; registered are "
            f"prefill {served[0].list_names()} and decode {served[1].list_names()}"
        )
    else:
        reason = (
            "prefill instances are paired with decode instances of their version and tp_size that they have "
            "connected to, and none of those can take the request"
        )
    return ApiError(503, reason, "no_pair")


def _list_engines(registrations: Sequence[Registration]) -> str:
    return ", ".join(
        sorted(
            {f"{r.engine.value}{f' ({r.kv_connector.value})' * (r.engine is EngineKind.VLLM)}" for r in registrations}
        )
    )


def _list_versions(registrations: Sequence[Registration]) -> str:
    return ", ".join(sorted({"without a version" if r.version is None else repr(r.version) for r in registrations}))
