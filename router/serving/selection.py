"""Selection: selects the instance, or the pair, that serves a request.

Requests are frequent, but the set of selectable instances changes rarely. So the candidates are prepared when the set
has changed (``_Choice``), and for a request only the policies run. For one request, some candidates are removed: the
instances that the request excludes and, at random, instances with a weight between 0 and 1. The time for this depends
on the number of removed candidates, not on the number of all instances.

If the instances serve several models, each model has its own candidates and its own policies. If they serve only one
model, it is used for requests with any model name.
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
# Limits for comparing an unknown model name with the known ones: characters of a name, and number of names.
MAX_NAME_CHARACTERS, MAX_NAMES_COMPARED = 200, 200
# Maximum number of instances that an error message names.
MAX_LISTED = 10
# Candidates are prepared again after this time while an instance gets less than its share, or there are no candidates.
RENEWAL_SECONDS = 1.0


class NoInstance(Exception):
    """No instance can serve the request. ``error`` is the response to the client."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class Selection(NamedTuple):
    """The instances for a request: ``answering`` generates the response; ``prefill`` is None if there is no pair."""

    answering: Instance
    prefill: Instance | None
    decisions: tuple[Decision, ...]
    model: str = ""
    """The model whose policies decided; ``""`` if the instances serve only one model."""


class Selector:
    """Selects instances: applies the policy of each role to the available instances."""

    def __init__(
        self,
        settings: RouterSettings,
        registry: Registry,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """
        Args:
            settings: the policies and the aliases of models.
            registry: the instances.
            clock: the clock of ``registry``, in seconds.
            chance: returns a random number of at least 0 and less than 1.
        """
        self._registry = registry
        self._router = f"{'https://' if settings.ssl_certfile else ''}HOST:{settings.port}"
        self.aliases = settings.model_aliases
        """Names of models, by their aliases."""
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
        """The policy of each role. Only the roles of the router's mode are contained."""
        for policy in self.policies.values():
            registry.events.lost_caches.subscribe(policy.forget_instance)
        self._choice = _Choice((), (), registry.splitwise)
        self._models: ServedModels | None = None
        """The served models; None if the instances serve only one model."""
        self._choices: dict[str, _Choice] = {}
        """The candidates for each model; prepared at the first request for a model."""
        self._lone_choices: dict[str, _Choice] = {}
        """For each model, the candidates for requests that generate nothing, which one instance serves, not a pair."""
        self._siblings: dict[str, Mapping[Role, Policy]] = {}
        self._obstacles: dict[str, ApiError] = {}
        """For each model that no instance can serve at present, the error for its requests."""
        self._generation = -1
        self._good_until = -math.inf

    def choose(self, features: RequestFeatures, excluded: Collection[str] = ()) -> Selection:
        """Select an instance, or a pair with --splitwise. Instances in ``excluded`` are not used.

        Raises:
            NoInstance: a role has no instance, no instances can form a pair, or none serves the request's model.
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
        """Select one instance for a request that generates nothing; with --splitwise a decode instance.

        Raises:
            NoInstance: no instance is left.
        """
        now = self._clock()
        if self._generation != self._registry.events.generation or now >= self._good_until:
            self._prepare_choice(now)
        model = "" if self._models is None else self._find_model(self._models, features.model, now)
        role = Role.DECODE if self._registry.splitwise else Role.MIXED  # a prefill instance may respond with one token
        choice = self._lone_choices.get(model)
        if choice is None:
            choice = self._lone_choices[model] = self._gather_choice(now, (), model, role)
        if excluded or choice.weighted:
            choice = self._narrow_choice(choice, now, excluded) or self._gather_choice(now, excluded, model, role)
        if choice.empty:
            raise NoInstance(self._explain_missing([role], model))
        instance, decision = self._apply_policy(self.policies_of(model)[role], features, choice.first, now)
        return Selection(instance, None, (decision,), model)

    def choose_named(self, features: RequestFeatures, key: str) -> Selection:
        """Select the instance with this key, which stores the response that the request needs.

        The instance is selected even if it is draining or paused.

        Raises:
            NoInstance: the instance has ended, or does not respond.
        """
        holder = self._registry.get(key)
        if holder is None or not holder.healthy:
            state = "does not answer" if holder is not None else "is gone"
            message = f"{key} stores the response, but {state}"
            raise NoInstance(ApiError(404, message, "response_not_found", "previous_response_id"))
        policy = self.policies[holder.role]
        instance, decision = self._apply_policy(policy, features, _Group([holder]), self._clock())
        return Selection(instance, None, (decision,))

    def find_obstacle(self) -> str:
        """Return why no request can be served at present, in one sentence; ``""`` if requests can be served."""
        now = self._clock()
        if self._generation != self._registry.events.generation or now >= self._good_until:
            self._prepare_choice(now)
        return self._explain_none((), "").message if self._choice.empty else ""

    def token_seconds(self, role: Role) -> float:
        """Return the seconds that an instance of this role needs for one token of work; 0 if no policy has learned it.

        A token of work is a token of ``Decision.work``.
        """
        return max(self.policies_of(model)[role].token_seconds for model in ("", *self._siblings))

    def policies_of(self, model: str) -> Mapping[Role, Policy]:
        """Return the policies for requests of a model; for ``""``, return ``policies``."""
        if not model:
            return self.policies
        if model not in self._siblings:
            self._siblings[model] = {role: policy.make_sibling() for role, policy in self.policies.items()}
        return self._siblings[model]

    def _find_model(self, models: ServedModels, name: object, now: float) -> str:
        """Return the model that a request for ``name`` means; ``""`` if any model is suitable.

        Raises:
            NoInstance: no instance serves a suitable model.
        """
        model = models.find(name)
        if model is None:
            self._registry.models_wanted_at = now
            if name in models.gone:
                message = f"no instance serves the model {name!r} any more; the instances that served it are gone"
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
        seconds: float,
    ) -> None:
        """Report the result of a request to the policy that chose the instance for its prompt.

        Args:
            selection: the instances that served the request.
            features: the features of the request.
            usage: token counts that the instance that computed the prompt has reported.
            queued_before: ``InstanceLoad.queued`` of this instance when the request was sent.
            ttft: seconds to the first token; None if unknown.
            seconds: seconds since the request was sent to the instance.
        """
        if not usage.prompt_tokens:
            return  # policies learn only from reported token counts
        decision = selection.decisions[0]
        outcome = Outcome(
            decision.key,
            queued_before,
            ttft,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.own_cached_tokens,
            usage.completion_tokens,
            seconds,
        )
        role = (selection.prefill or selection.answering).role
        policies = self.policies_of(selection.model) if selection.model else self.policies
        policies[role].observe_outcome(features, decision, outcome)

    def _prepare_choice(self, now: float) -> None:
        if self._generation != self._registry.events.generation:
            models = ServedModels(self._registry, self._registry.gone_models)
            self._models = models if models.are_several else None
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
        """Return the candidates: the preferred instances; if these cannot serve, the next group of instances.

        Args:
            now: the present time.
            excluded: keys of instances that are not used.
            model: the model that the instances must serve; ``""``: any model.
            alone: the role of the instances if one instance should serve alone; else None.
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
        """Yield groups of instances in the order of preference, each with the instances that may be removed at random.

        The first group has the preferred instances: with a weight above 0, and no open breaker. Those with a weight
        below 1 may be removed. The second group adds instances with weight 0, the third those with an open breaker.
        ``_gather_choice`` describes the arguments.
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
        """Return the candidates without ``excluded``, and without instances that are removed at random.

        An instance stays with a probability that is equal to its weight. If no instance of a role would stay, all
        instances of this role stay.

        Returns:
            The remaining candidates; None if there are none.
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
        """Return why no instance can serve a request. Without ``excluded``, the error is stored for later requests."""
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
        of_model = "" if model in ("", UNLISTED) else f" that serves {model!r}"
        return (
            f"no {role.value} instance{of_model} is registered; start one with{flag} --router {self._router}, "
            "where HOST is this router's address"
        )


class _Group:
    """Instances from which a policy chooses one."""

    __slots__ = ("by_key", "candidates", "places")

    def __init__(self, instances: Sequence[Instance]) -> None:
        self.candidates: list[InstanceLoad] = [instance.load for instance in instances]
        self.by_key: dict[str, Instance] = {instance.key: instance for instance in instances}
        """Instances by their keys. Some of them may not be candidates any more."""
        self.places = {instance.key: place for place, instance in enumerate(instances)}
        """The position of each instance in ``candidates``, before instances were removed."""

    def leave_out(self, keys: Collection[str]) -> _Group:
        """Return a copy of this group without the instances that have these keys.

        Call this only for a group from which no instance was removed.
        """
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
    """The prepared candidates: ``first`` for a single instance or for prefill; in pairs, ``groups`` for decode."""

    __slots__ = ("empty", "first", "groups", "kinds", "weighted")

    def __init__(self, instances: Sequence[Instance], weighted: Sequence[Instance], splitwise: bool) -> None:
        """
        Args:
            instances: the candidates.
            weighted: the candidates with a weight between 0 and 1, which may be removed at random.
            splitwise: whether to form pairs.
        """
        self.groups: list[_Group] = []
        """Groups of decode instances. All prefill instances with the same ``pairing_kind`` use the same group."""
        self.kinds: dict[str, int] = {}
        """For each prefill instance, by key, the index of its decode instances in ``groups``."""
        if not splitwise:
            self.first = _Group(instances)
        else:
            prefills = [i for i in instances if i.role is Role.PREFILL]
            self._group_partners(prefills, [i for i in instances if i.role is Role.DECODE])
            self.first = _Group([prefill for prefill in prefills if prefill.key in self.kinds])
        self.weighted: list[tuple[list[Instance], int]] = []
        """For each role with instances in ``weighted``: these instances, and the number of the role's candidates."""
        for role in {instance.role for instance in weighted}:
            count = sum(instance.role is role for instance in instances)
            self.weighted.append(([i for i in weighted if i.role is role], count))
        self.empty = not self.first.candidates

    def _group_partners(self, prefills: Sequence[Instance], decodes: Sequence[Instance]) -> None:
        """Find the group of decode instances with which each prefill instance can form a pair."""
        # Prefill instances that can form pairs with the same decode instances share a group. Usually all of them do.
        known: dict[object, int | None] = {}
        for prefill in prefills:
            registration = prefill.registration
            kind = (
                pairing_kind(registration),
                registration.version,
                registration.tp_size,
                registration.connected_decodes,
                prefill.models,
            )
            if kind not in known:
                fitting = [d for d in decodes if may_pair(registration, d.registration) and share_model(prefill, d)]
                known[kind] = len(self.groups) if fitting else None
                if fitting:
                    self.groups.append(_Group(fitting))
            place = known[kind]
            if place is not None:
                self.kinds[prefill.key] = place

    def leave_out(self, keys: Collection[str]) -> _Choice:
        """Return a copy of the candidates without the instances that have these keys."""
        narrowed = _Choice.__new__(_Choice)
        narrowed.kinds, narrowed.weighted = self.kinds, self.weighted
        narrowed.groups = [group.leave_out(keys) for group in self.groups]
        lonely = {place for place, group in enumerate(narrowed.groups) if not group.candidates}
        if lonely:  # this is rare, so that few requests examine all prefill instances
            keys = {*keys, *(key for key, place in self.kinds.items() if place in lonely)}
        narrowed.first = self.first.leave_out(keys)
        narrowed.empty = not narrowed.first.candidates
        return narrowed


def explain_unknown_model(name: str, known: Iterable[str]) -> ApiError:
    """Return the response to a request for a model that is not one of the ``known`` models."""
    compared = sorted(known)[:MAX_NAMES_COMPARED]
    shown = name[:MAX_NAME_CHARACTERS]
    hint = did_you_mean(shown, compared) or f"; served are: {', '.join(compared) or 'none'}"
    return ApiError(404, f"no instance serves a model {shown!r}{hint}", "model_not_found", "model")


def _explain_misfit(instances: Sequence[Instance]) -> ApiError:
    """Return why no prefill instance can form a pair with a decode instance."""
    prefills = [i.registration for i in instances if i.role is Role.PREFILL]
    decodes = [i.registration for i in instances if i.role is Role.DECODE]
    if not {*map(pairing_kind, prefills)} & {*map(pairing_kind, decodes)}:
        reason = (
            "prefill and decode must run the same engine, and with vLLM the same kv_connector; registered are "
            f"prefill {_list_engines(prefills)} and decode {_list_engines(decodes)}"
        )
        return ApiError(503, reason, "no_pair")
    if not any(can_decode_for(p.tp_size, {d.tp_size for d in decodes}) for p in prefills):
        return ApiError(
            400,
            "prefill and decode must have the same tp_size, or decode tp_size 1; registered are prefill "
            f"{sorted({p.tp_size for p in prefills})} and decode {sorted({d.tp_size for d in decodes})}",
            "tp_size_mismatch",
        )
    if not {p.version for p in prefills} & {d.version for d in decodes}:
        reason = (
            "prefill and decode must have the same version; registered are "
            f"prefill {_list_versions(prefills)} and decode {_list_versions(decodes)}"
        )
    elif not any(share_model(p, d) for p in instances for d in instances if (p.role, d.role) == _PAIR):
        served = [ServedModels([i for i in instances if i.role is role]) for role in _PAIR]
        reason = (
            "prefill and decode must serve the same model under the same name; registered are "
            f"prefill {served[0].list_names()} and decode {served[1].list_names()}"
        )
    else:
        reason = (
            "no pair can take the request; prefill and decode must have the same version and tp_size, and prefill must "
            "be connected to decode"
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
