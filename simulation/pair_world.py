"""World ``pair``: prefill and decode instances of the engine, with a model that computes digests of the prefix as KV.

The engine's own loop, scheduler, block manager, hand-over, generations and pool connector run over the real pool stack
and a model of Mooncake. The correct answer is a function of the prompt. The model runner reads a sequence's whole KV
from its blocks for each token, so that a single wrong byte in a block changes the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch

from engine.core import EngineCore
from engine.disaggregation import BlockMemory, HandoverReceiver, Transfer
from engine.generation import Generations, PairInfo, SharedParts
from engine.generation.choices import Choices
from engine.model.layer_groups import LayerGroups
from engine.model.model_runner import KVShape
from engine.model.sampler import Choice
from engine.pool.staging import open_direct, stage_handovers
from engine.protocol import ApiError, DisaggregateInfo
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.cache_hints import CacheHint
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.request import Sequence as EngineSequence
from engine.scheduling.scheduler import Chunk, Scheduler
from engine.serving.control import Control, ControlFailed
from engine.telemetry.metrics import EngineMetrics
from kvstore_backend.backend import Span
from kvstore_backend.block_hash import extend_block_hashes, root_hash
from kvstore_backend.config import MooncakeSettings, PoolConfig
from kvstore_backend.namespace import BLOCK_PREFIX, Namespace, parse_key
from kvstore_backend.pool import open_pool
from kvstore_backend.resharding import ShardingFamily
from kvstore_backend.wrappers.checked import HEADER_BYTES
from simulation.actors.dialects import FetchPrompt, RetainPrompt, retain_prompts, retained_prompts_of
from simulation.actors.mooncake import TROUBLES, Mooncake, Trouble, in_place
from simulation.world import Event, Outcome, Plan, World

__all__ = ["PairWorld"]

_AT_ONE = ("crash", "pause", "cut", "update", "rest", "forget", "raise-step", "break-step")
_TOGETHER = ("stall", "raise", "slow", "hang-master", "evict", "cut", "pause", "break-step", "break-step", "slow-step")
_HARMLESS = ("evict", "cut", "forget", "break-step", "slow-step", "rest")
"""Faults during which removals from the pool still succeed; see ``_is_harmless``."""
_MASTER = "10.0.0.9:50051"
_BLOCK_SIZE = 4
_ROW_BYTES = 16
_VOCAB_SIZE = 199
_BROKEN = b"\xff" * _ROW_BYTES
"""The KV of a token that stands for NaN: everything that is computed from it is NaN, too."""
_CONNECTOR_PORT = 8500
_KEEP_SECONDS = 30.0
# Requests may wait for the memory of prompts that are retained for this time, in several rounds.
_SETTLE_SECONDS = 220.0
# A prefill instance that keeps a prompt waits 30 s for each choice, one after another; then the pool may hang.
_PATIENCE_SECONDS = 120.0
_WITHDRAWAL_SECONDS = 20.0
# Saves of a request that was ended early may go on for this time.
_SAVING_SECONDS = 10.0


def _extend(digest: bytes, token: int) -> bytes:
    return hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=_ROW_BYTES).digest()


def _root(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(), digest_size=_ROW_BYTES).digest()


def _choose(rows: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(rows, digest_size=4).digest(), "little") % _VOCAB_SIZE


@lru_cache(maxsize=4096)
def answer_of(prompt: tuple[int, ...], salt: str, version: str, count: int) -> tuple[int, ...]:
    """Return the tokens that follow a prompt with this version of the weights."""
    digest, rows = _root(salt + version), b""
    for token in prompt:
        rows += (digest := _extend(digest, token))
    answer: list[int] = []
    while len(answer) < count:
        answer.append(_choose(rows))
        rows += (digest := _extend(digest, answer[-1]))
    return tuple(answer)


def _write_prompt(chain: int, length: int) -> tuple[int, ...]:
    """Return a prompt. Prompts with chain numbers that share all but the last digit have equal first 13 tokens."""
    common = random.Random(chain // 10)
    own = random.Random(chain)
    return tuple((common if i < 13 else own).randrange(_VOCAB_SIZE) for i in range(length))


class _Runner:
    """A model runner. The KV of a token is a digest of the request's salt and all tokens up to this one."""

    def __init__(self, world: PairWorld, num_blocks: int) -> None:
        self._world = world
        self.groups = LayerGroups.of_full(1, _BLOCK_SIZE)
        self.shape = KVShape(1, 1, _BLOCK_SIZE, _ROW_BYTES // 2, torch.uint8)
        axes = (num_blocks, 1, 2, 1, _BLOCK_SIZE, _ROW_BYTES // 2)
        self.kv = torch.full(axes, 0xEE, dtype=torch.uint8)
        self._rows = self.kv.view(num_blocks, _BLOCK_SIZE, _ROW_BYTES).numpy()
        self.namespace = Namespace("digests", "uint8", _BLOCK_SIZE, 1, 1, _ROW_BYTES // 2, "layer,kv,head,token,dim")
        self.family = ShardingFamily(self.namespace, 1, tuple(self.shape.list_axes()), ())
        self.device = torch.device("cpu")
        self.vocab_size = _VOCAB_SIZE
        self.eos_token_ids: frozenset[int] = frozenset()
        self.retrieval = None
        self.version = ""
        self.raises = self.breaks = 0.0
        """Shares of the steps that raise, and of the chunks with KV that becomes NaN."""
        self.at_step_end: list[Callable[[], None]] = []
        """Functions that are called at the end of the next step."""

    def update_weights(self, version: str) -> None:
        """Use the weights of another version."""
        time.sleep(0.5)
        self.version, self.namespace = version, replace(self.namespace, weights_version=version)
        self.family = replace(self.family, own=self.namespace)

    def span(self, block: int) -> Span:
        """Return the address and size of a block."""
        return Span(self.kv.data_ptr() + block * self.shape.nbytes, self.shape.nbytes)

    def view_group(self, number: int) -> torch.Tensor:
        """Return the KV memory of the only group of layers."""
        return self.kv

    def wait_for_device(self) -> None:
        """Do nothing: no work continues after a step."""

    def find_broken_blocks(self, blocks: Sequence[int]) -> list[bool]:
        """Return for each block whether it has a token with KV that is NaN."""
        return [bool((self._rows[block] == 0xFF).all(axis=1).any()) for block in blocks]

    def run(self, chunks: Sequence[Chunk]) -> list[Choice]:
        """Compute the chunks, which takes simulated time; return the next tokens of the chunks that sample."""
        seconds = self._world.step_seconds(sum(chunk.num_tokens for chunk in chunks))
        time.sleep(seconds / 2)
        if self._world.steps.random() < self.raises:
            raise RuntimeError("the step failed")
        choices: list[Choice] = [self._compute(chunk) for chunk in chunks]
        time.sleep(seconds / 2)
        callbacks, self.at_step_end = self.at_step_end, []
        for callback in callbacks:
            callback()
        return [choice for choice, chunk in zip(choices, chunks, strict=True) if chunk.samples]

    def _compute(self, chunk: Chunk) -> Choice:
        sequence, first = chunk.sequence, chunk.sequence.num_computed
        digest = self._row(sequence, first - 1).tobytes() if first else b""
        digest = digest or _root(sequence.request.cache_salt + self.version)
        is_broken = digest == _BROKEN or self._world.steps.random() < self.breaks
        for position in range(first, first + chunk.num_tokens):
            digest = _BROKEN if is_broken else _extend(digest, sequence.token_ids[position])
            self._row(sequence, position)[:] = list(digest)
        if not chunk.samples:
            return None
        rows = [self._row(sequence, position).tobytes() for position in range(first + chunk.num_tokens)]
        return None if _BROKEN in rows else (_choose(b"".join(rows)), None)

    def _row(self, sequence: EngineSequence, position: int) -> Any:
        return self._rows[sequence.block_table[position // _BLOCK_SIZE], position % _BLOCK_SIZE]


def _is_harmless(event: Event) -> bool:
    """Return whether removals from the pool still succeed during this fault."""
    return event.kind in _HARMLESS or (event.kind == "slow" and event.details["factor"] <= 100.0)


class _Tokenizer:
    """A tokenizer in which each token is one letter."""

    def decode(self, tokens: Sequence[int], **_: object) -> str:
        """Return the text of the tokens."""
        return "".join(chr(97 + token % 26) for token in tokens)


def _has_broken(block: bytes) -> bool:
    """Return whether a block has a token with KV that is NaN."""
    return _BROKEN in [block[i : i + _ROW_BYTES] for i in range(0, len(block), _ROW_BYTES)]


@dataclass(eq=False)
class _Leg:
    """One request of a client to one instance, and its answer."""

    name: str
    instance: _Instance
    request: Request
    count: int
    may_fail: bool
    began: float
    num_choices: int = 1
    version: str = ""
    ended: float | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    refusal: str = ""
    is_cancelled: bool = False
    is_aborted: bool = False
    meets_broken: bool = False  # whether the pool may have a block of the prompt with NaN when the request comes
    task: asyncio.Task[None] | None = None

    def list_names(self) -> list[bytes]:
        """Return the hashes of the prompt's blocks."""
        request = self.request
        root = root_hash(request.cache_salt)
        return extend_block_hashes([], request.prompt_token_ids, _BLOCK_SIZE, root)

    def may_save_broken(self, since: float) -> bool:
        """Return whether the request may have saved blocks with NaN since this time."""
        if self.ended is None:
            return True
        is_ended_early = self.is_cancelled or self.is_aborted
        if self.ended <= since:
            return is_ended_early and self.ended > since - _SAVING_SECONDS
        return is_ended_early or "error" in self.reasons.values()

    def expect(self) -> tuple[list[int], str]:
        """Return the tokens of the right answer, and its finish reason."""
        request = self.request
        tokens = list(answer_of(request.prompt_token_ids, request.cache_salt, self.version, self.count))
        stops = [i for i, token in enumerate(tokens) if token in request.params.stop_token_ids]
        return (tokens[: stops[0] + 1], "stop") if stops else (tokens, "length")


class _Instance:
    """One engine without HTTP, with the parts that ``engine/serving/instance.py`` connects."""

    def __init__(self, world: PairWorld, name: str, spec: dict[str, Any]) -> None:
        self.world = world
        self.spec = spec
        self.process = world.make_process(name, host=f"10.0.1.{spec['number']}", offset=spec["offset"])
        self.generations: Generations | None = None
        self.is_stopped = False
        self.is_leaving = False
        self.pauses: list[tuple[float, float]] = []
        self.process.start_loop(self._serve)

    async def _serve(self) -> None:
        world, spec, host = self.world, self.spec, self.process.host
        self.runner = _Runner(world, spec["blocks"])
        runner: Any = self.runner
        settings = MooncakeSettings(
            _MASTER, "P2PHANDSHAKE", protocol="tcp", global_segment_size=spec["segment"], local_buffer_size=0
        )
        pool = None
        metrics = EngineMetrics()
        if spec["pool"]:
            config = PoolConfig(settings, async_write=spec["pool"] == "async")
            pool = open_pool(config, runner.namespace, metrics.registry, facts={})
        self.scheduler = Scheduler(
            BlockManager(spec["blocks"]),
            _BLOCK_SIZE,
            spec["seqs"],
            spec["budget"],
            max_model_len=world.max_model_len,
            prefix_caching=True,
            pool=pool is not None,
        )
        self.core = EngineCore(runner, self.scheduler, metrics, pool=pool, save_outputs=spec["save_outputs"])
        transfer = Transfer(host, "tcp")
        staged = stage_handovers(runner, transfer, 5 * runner.shape.nbytes) if spec["staged"] else None
        self.memory = BlockMemory(self.core, runner, transfer, staged or open_direct(runner, transfer))
        self.receiver = HandoverReceiver(self.memory)
        listener: Any = world.network.open_listener(self.process, _CONNECTOR_PORT)
        await self.receiver.start_listening(listener)
        self.core.start()
        self._end = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.generations = Generations(
            SharedParts(self.core, _Tokenizer(), spec["role"], _BLOCK_SIZE, self.receiver, self.memory)
        )
        retained = retain_prompts(self.receiver, self.memory)
        self.control = Control(self.core, runner, self.generations, lambda: None, has_dynamic_weights=True)
        self.control.on_pause = lambda: retained.drop_all("this instance is paused")
        await self._end.wait()
        await self.receiver.stop_listening()
        await self.loop.run_in_executor(None, self.core.stop)
        self.is_stopped = True

    def stop(self) -> None:
        """Stop the instance in an orderly way."""
        self.is_leaving = True
        if self.generations is not None:
            self.post(self._end.set)

    def call_at_step_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at the end of the present or next step; call it now if the engine has no sequences."""
        if self.generations is not None and self.scheduler.has_sequences:
            self.runner.at_step_end.append(callback)
        else:
            callback()

    def post(self, callback: Any) -> None:
        """Run ``callback`` in the instance's event loop."""
        for loop in self.process.loops:
            loop.post(callback)

    def begin_leg(self, leg: _Leg, info: PairInfo | None) -> None:
        """Begin to answer a request; called in the instance's event loop."""
        assert self.generations is not None
        leg.version = self.runner.version
        try:
            choices = self.generations.begin_choices([(leg.request, info)], leg.num_choices)
        except ApiError as exc:
            leg.refusal, leg.ended = str(exc), self.world.now
            return
        leg.task = asyncio.get_running_loop().create_task(self._follow(leg, choices))

    async def _follow(self, leg: _Leg, choices: Choices) -> None:
        pieces = choices.pieces()
        try:
            async for index, piece in pieces:
                if index in leg.reasons:
                    self.world.fail("once", f"{leg.name} goes on after its end")
                if piece.token_id is not None:
                    leg.tokens.setdefault(index, []).append(piece.token_id)
                if piece.finish_reason:
                    leg.reasons[index] = piece.finish_reason
                    if piece.finish_reason == "error":
                        self.world.expect_withdrawal(leg)
        except asyncio.CancelledError:
            leg.is_cancelled = True
        finally:
            await pieces.aclose()
            leg.ended = self.world.now
            self.world.trace.add(self.process.name, f"{leg.name} ended: {leg.reasons} {leg.tokens}")

    async def order(self, kind: str, seconds: float, version: str) -> None:
        """Pause the instance, update its weights or wait ``seconds``, and resume it."""
        self.pauses.append((self.world.now, math.inf))
        try:
            await self.control.pause()
            if kind == "update":
                await self.control.update_weights(version)
            else:
                await asyncio.sleep(seconds)
        except ControlFailed as exc:
            self.world.trace.add(self.process.name, f"order failed: {exc}")
        await self.control.resume()
        self.pauses[-1] = self.pauses[-1][0], self.world.now


class PairWorld(World):
    """The world ``pair``, which the module's docstring describes."""

    name: ClassVar[str] = "pair"
    max_seconds: ClassVar[float] = 900.0
    max_model_len: ClassVar[int] = 64
    lags: ClassVar[tuple[float, ...]] = (0.0, 0.003, 0.03)
    spreads_over_turns: ClassVar[bool] = True
    allowed_tracebacks: ClassVar[tuple[str, ...]] = ("A step failed", "Mooncake's client raised", "A store raised")

    def draw_plan(self, draw: random.Random) -> Plan:
        """Draw at most two prefill and two decode instances, requests in all dialects, and faults."""
        roles = draw.choice([["prefill", "decode"], ["prefill", "decode", "decode"], ["prefill", "prefill", "decode"]])
        instances = [
            {
                "number": i + 1,
                "role": role,
                "blocks": draw.choice([34, 60, 100]),
                "seqs": draw.choice([2, 4]),
                "budget": draw.choice([6, 16, 64]),
                "segment": draw.choice([32, 128]) * 256,
                "pool": draw.choice(["", "plain", "async", "async"]),
                "save_outputs": draw.random() < 0.3,
                "staged": draw.random() < 0.4,
                "offset": draw.choice([0.0, 20.0]),
            }
            for i, role in enumerate(roles)
        ]
        settings = {"instances": instances, "step": draw.choice([0.001, 0.01, 0.1]), "rpc": draw.choice([2.0, 30.0])}
        # Calls of the pool then take less time than a step, about the same time, or more.
        settings["slowness"] = self.stream("slowness").choice([1.0, 1.0, 10.0, 50.0])
        length = draw.choice([20.0, 60.0, 120.0])
        events: list[Event] = []
        self._draw_requests(draw, events, roles, length)
        self._draw_faults(draw, events, roles, length)
        self._draw_hangs(self.stream("hangs"), events, roles, length)
        self._draw_together(self.stream("together"), events, roles, length)
        if self.stream("trouble").random() < 0.35:
            events = [event for event in events if event.kind == "request" or _is_harmless(event)]
        return Plan(settings, sorted(events, key=lambda event: event.at))

    def _draw_requests(self, draw: random.Random, events: list[Event], roles: list[str], length: float) -> None:
        prefills = [f"e{i}" for i, role in enumerate(roles) if role == "prefill"]
        decodes = [f"e{i}" for i, role in enumerate(roles) if role == "decode"]
        at, pause = 1.0, draw.choice([0.2, 1.0, 2.0])
        haste = self.stream("haste").choice([1.0, 1.0, 10.0])
        while at < length and len(events) < 90:
            at += draw.expovariate(1.0 / pause)
            prefill, decode = draw.choice(prefills), draw.choice(decodes)
            details = self._draw_request(draw, len(events), prefill, haste)
            if draw.random() < 0.05:
                details["lost"] = draw.choice(["p", "d"])
            events.append(Event(round(at, 3), "request", decode, details))

    def _draw_request(self, draw: random.Random, number: int, prefill: str, haste: float) -> dict[str, Any]:
        details: dict[str, Any] = {
            "number": number,
            "dialect": draw.choice(["fastdeploy", "fastdeploy", "vllm", "sglang", "mixed"]),
            "prefill": prefill,
            "chain": draw.choice([10, 11, 20, 21, draw.randrange(100, 900)]),
            "prompt": draw.choice([1, 3, 4, 8, 14, 21, 40]),
            "count": draw.choice([1, 2, 5, 14, 20]),
            "salt": draw.choice(["", "", "", "tenant"]),
            "n": draw.choice([1, 1, 1, 1, 2, 3]),
            "stop": draw.choice([None, None, None, 0, 3]),
            "keep": draw.choice([0.0, 0.0, 0.0, 30.0]),
            "lag": draw.choice([0.0, 0.0, round(draw.expovariate(1.0), 3), -round(draw.expovariate(1.0), 3)]),
        }
        for leg in ("p", "d"):
            how = draw.choice(["", "", "", "", "leave", "abort"])
            if how:
                details[f"{leg}_{how}"] = round(draw.expovariate(haste * (2.0 if draw.random() < 0.7 else 0.2)), 3)
        return details

    def _draw_together(self, draw: random.Random, events: list[Event], roles: list[str], length: float) -> None:
        """Draw moments with several faults, and clients that send long prompts and leave soon.

        Some clients send their prompt again after the faults, and get blocks that were computed or saved during them.
        """
        prefills = [f"e{i}" for i, role in enumerate(roles) if role == "prefill"]
        decodes = [f"e{i}" for i, role in enumerate(roles) if role == "decode"]
        names = [f"e{i}" for i in range(len(roles))]
        number = 1000
        for _ in range(draw.choice([0, 2, 4])):
            at, salt = draw.uniform(5.0, length), draw.choice(["", "", "tenant"])
            kinds = draw.choice([_TOGETHER, [kind for kind in _TOGETHER if kind in (*_HARMLESS, "slow")]])
            for kind in draw.sample(kinds, draw.choice([0, 1, 2, 3])):
                targets = draw.choice([[draw.choice(names)], names]) if kind in _AT_ONE else [""]
                details: dict[str, Any] = {"seconds": round(draw.uniform(0.2, 4.0), 3), "share": 0.5, "factor": 100.0}
                begun_at = round(at + draw.uniform(-0.1, 0.3), 3)
                events += [Event(begun_at, kind, target, details) for target in targets]
            haste, again = draw.choice([0.5, 5.0, 50.0]), draw.choice([0.0, draw.uniform(3.0, 30.0)])
            forgets = [at] * (draw.random() < 0.5) + [at + again - 0.1] * bool(again)
            for name, moment in itertools.product(names, forgets):
                events.append(Event(round(moment, 3), "forget", name, {"seconds": 0.0}))
            family = draw.choice([None, 10 * draw.randrange(100, 900)])  # chains of prompts that are probably new
            for _ in range(draw.choice([3, 8])):
                number += 2
                details = self._draw_request(draw, number, draw.choice(prefills), haste)
                if family is not None:
                    details["chain"] = family + draw.randrange(10)
                details.update(prompt=draw.choice([14, 21, 40]), salt=salt, lag=round(draw.uniform(-0.02, 0.02), 3))
                returning = {name: value for name, value in details.items() if name[1:2] != "_"}
                for leg in ("p", "d"):
                    if draw.random() < 0.3:
                        details[f"{leg}_{draw.choice(['leave', 'abort'])}"] = round(draw.expovariate(haste), 4)
                details["at_step"] = draw.random() < 0.5
                sent_at = at + draw.uniform(0.0, 1.0)
                events.append(Event(round(sent_at, 3), "request", draw.choice(decodes), details))
                if again and draw.random() < 0.5:
                    returning.update(number=number + 1, prefill=draw.choice(prefills))
                    events.append(Event(round(sent_at + again, 3), "request", draw.choice(decodes), returning))

    def _draw_hangs(self, draw: random.Random, events: list[Event], roles: list[str], length: float) -> None:
        """Draw moments at which the pool hangs while instances with emptied caches load from it."""
        for _ in range(draw.choice([0, 0, 2, 6])):
            at, kind = round(draw.uniform(5.0, length), 3), draw.choice(["stall", "hang-master", "raise"])
            details: dict[str, Any] = {"seconds": round(draw.uniform(0.5, 6.0), 3)}
            if kind != "hang-master":
                details["share"] = draw.choice([0.3, 1.0])
            events += [Event(at, "forget", f"e{i}", {"seconds": 0.0}) for i in range(len(roles))]
            events.append(Event(round(at + draw.uniform(0.0, 1.0), 3), kind, "", details))

    def _draw_faults(self, draw: random.Random, events: list[Event], roles: list[str], length: float) -> None:
        kinds = ["kill-master", "hang-master", "crash", "pause", "stall", "flip", "slow", "evict", "cut", "slow-step"]
        kinds += ["update", "rest", "forget", "raise-step", "break-step", "raise", "raise"]
        for _ in range(draw.choice([0, 1, 3, 6])):
            kind = draw.choice(kinds)
            details: dict[str, Any] = {"seconds": round(draw.choice([0.5, 3.0, 8.0, 20.0, 40.0]) * draw.random(), 3)}
            if kind in ("stall", "flip", "evict", "raise"):
                details["share"] = draw.choice([0.05, 0.3, 1.0])
            elif kind == "slow":
                details["factor"] = draw.choice([10.0, 1000.0])
            target = f"e{draw.randrange(len(roles))}" if kind in _AT_ONE else ""
            if kind in ("raise-step", "break-step"):
                details["share"] = draw.choice([0.02, 0.3])
            events.append(Event(round(draw.uniform(2.0, length), 3), kind, target, details))

    def build(self) -> None:
        settings = self.plan.settings
        self.cluster = Mooncake(self, rpc_seconds=settings["rpc"], slowness=settings["slowness"])
        self.instances: dict[str, _Instance] = {}
        self.legs: list[_Leg] = []
        self._broken: list[tuple[float, float]] = []
        self._troubled_until = 0.0
        self._troubled: list[tuple[float, float]] = []  # spans in which a removal from the pool may have failed
        self._step_factor = 1.0
        self._stopping_at: float | None = None
        self.steps = self.stream("steps")
        self._has_faults = any(event.kind != "request" for event in self.plan.events)
        for i, spec in enumerate(settings["instances"]):
            self._start(f"e{i}", spec)

    def _start(self, name: str, spec: dict[str, Any]) -> None:
        self.instances[name] = _Instance(self, name, spec)

    def run(self, plan: Plan | None = None) -> Outcome:
        with in_place(lambda: self.cluster):
            return super().run(plan)

    def step_seconds(self, num_tokens: int) -> float:
        """Draw the duration of a step with this number of tokens."""
        step: float = self.plan.settings["step"]
        return step * (1 + 0.05 * num_tokens) * self.steps.uniform(0.5, 1.5) * self._step_factor

    def perform(self, event: Event) -> None:
        if event.kind == "request":
            self._ask(event.target, dict(event.details))
        else:
            if not _is_harmless(event):
                self._troubled.append((self.now, self.now + event.details["seconds"]))
            self._disturb(event.kind, self.instances.get(event.target), dict(event.details))

    def _ask(self, target: str, details: dict[str, Any]) -> None:
        number, dialect = details["number"], details["dialect"]
        request = Request(
            f"r{number}",
            _write_prompt(details["chain"], details["prompt"]),
            SamplingParams(details["count"], temperature=0.0),
            details["salt"],
            hints=(CacheHint(8, details["keep"]),) if details["keep"] else (),
        )
        if details["stop"] is not None:
            answer = answer_of(request.prompt_token_ids, request.cache_salt, "", details["stop"] + 1)
            request = replace(request, params=replace(request.params, stop_token_ids=frozenset(answer[-1:])))
        prefill, decode = self.instances[details["prefill"]], self.instances[target]
        key = f"k{number}"
        address, own_host = (prefill.process.host, _CONNECTOR_PORT), decode.process.host
        p_info: PairInfo | None = None
        d_info: PairInfo | None = None
        if dialect == "fastdeploy":
            p_info = d_info = DisaggregateInfo(decode_ip=decode.process.host, decode_connector_port=_CONNECTOR_PORT)
        elif dialect == "vllm":
            p_info = RetainPrompt(key, _KEEP_SECONDS)
            d_info = FetchPrompt(key, *address, takes_token=False, own_host=own_host)
        elif dialect == "sglang":
            p_info = RetainPrompt(key, _KEEP_SECONDS, waits_for_decode=True)
            d_info = FetchPrompt(key, *address, takes_token=True, wait_seconds=20.0, own_host=own_host)
        lag = details["lag"]
        if dialect != "mixed" and details.get("lost") != "p":
            self._begin_leg(prefill, "p", request, p_info, details, max(0.0, -lag))
        if details.get("lost") != "d":
            self._begin_leg(decode, "d", request, d_info, details, max(0.0, lag) + (1.0 if dialect == "vllm" else 0.0))

    def _begin_leg(
        self,
        instance: _Instance,
        side: str,
        request: Request,
        info: PairInfo | None,
        details: dict[str, Any],
        lag: float,
    ) -> None:
        later = self.scheduler.call_later
        count = 1 if side == "p" else request.params.max_tokens
        may_fail = details["dialect"] in ("vllm", "sglang")
        leg = _Leg(f"{request.request_id}/{side}", instance, request, count, may_fail, self.now + lag, details["n"])

        def begin() -> None:
            if instance.generations is not None and not instance.is_leaving and instance.process.is_alive:
                self.legs.append(leg)
                # NaN stays in the pool if its request was ended early, or if the pool had a fault when it was removed.
                if self._broken:
                    stored = self._list_stored(math.inf)
                    is_broken = any(_has_broken(stored.get(block, b"")) for block in leg.list_names())
                    leg.meets_broken = is_broken or not self.cluster.is_up
                instance.post(partial(instance.begin_leg, leg, info))

        def leave() -> None:
            if leg.task is not None:
                instance.post(leg.task.cancel)

        def abort() -> None:
            if leg.task is not None and leg.ended is None and instance.generations is not None:
                leg.is_aborted = True
                instance.post(partial(instance.generations.abort_requests, [request.request_id]))

        later(lag, begin)
        for how, end in (("leave", leave), ("abort", abort)):
            if (after := details.get(f"{side}_{how}")) is None:
                continue
            if details.get("at_step"):
                later(lag + after, partial(instance.call_at_step_end, end))
            else:
                later(lag + after, end)

    def _disturb(self, kind: str, instance: _Instance | None, details: dict[str, Any]) -> None:
        cluster, later, seconds = self.cluster, self.scheduler.call_later, details["seconds"]
        self._troubled_until = max(self._troubled_until, self.now + seconds)
        if kind == "kill-master":
            cluster.kill_master()
            later(seconds, cluster.restart_master)
        elif kind == "hang-master":
            cluster.hang_master()
            later(seconds, cluster.wake_master)
        elif kind == "evict":
            cluster.evict_share(details["share"])
        elif kind in TROUBLES:
            trouble = TROUBLES[kind]
            setattr(cluster.trouble, trouble, details["factor" if kind == "slow" else "share"])
            later(seconds, lambda: setattr(cluster.trouble, trouble, getattr(Trouble(), trouble)))
        elif kind == "slow-step":
            self._step_factor = 100.0
            later(seconds, lambda: setattr(self, "_step_factor", 1.0))
        elif instance is not None and instance.process.is_alive and instance.generations is not None:
            process = instance.process
            if kind == "pause":
                process.pause()
                later(seconds, process.resume)
            elif kind == "cut":
                links = self.network.links_of(process.host)
                self.network.set_down(links, True)
                later(seconds, lambda: self.network.set_down(links, False))
            elif kind in ("update", "rest"):
                order = partial(instance.order, kind, seconds, f"v{int(self.now)}")
                instance.post(lambda: asyncio.get_running_loop().create_task(order()))
            elif kind == "forget":
                instance.post(instance.core.clear_prefix_cache)
            elif kind in ("raise-step", "break-step"):
                fault = "raises" if kind == "raise-step" else "breaks"
                setattr(instance.runner, fault, details["share"])
                later(seconds, lambda: setattr(instance.runner, fault, 0.0))
                self._broken.append((self.now, self.now + seconds))
            else:
                process.crash()
                later(seconds, partial(self._start, process.name, instance.spec))

    # Oracles.

    def expect_withdrawal(self, leg: _Leg) -> None:
        """Check some seconds after the failure of a request that the pool has none of its blocks with NaN."""
        failed_at, names = self.now, leg.list_names()

        def look() -> None:
            if any(start < failed_at + 8.0 and end > failed_at - 10.0 for start, end in self._troubled):
                return
            # A request that fails later checks its own blocks. Nobody notices NaN of a request that was ended early.
            used = {name for each in self.legs if each.may_save_broken(failed_at) for name in each.list_names()}
            stored = self._list_stored(failed_at + 0.1)
            # The request may not have seen blocks of another one behind a block that the pool lacks.
            for name in itertools.takewhile(stored.__contains__, names):
                if _has_broken(stored[name]) and name not in used:
                    self.fail("poison", f"{leg.name} failed, and its block {name.hex()[:8]} with NaN stays in the pool")

        if not leg.may_fail:
            self.scheduler.call_later(_WITHDRAWAL_SECONDS, look)

    def _list_stored(self, before: float) -> dict[bytes, bytes]:
        """Return the bytes of the blocks in the pool that were put before this time, by their names."""
        return {
            parse_key(key)[1]: data[HEADER_BYTES:]
            for key, begun_at, data in (self.cluster.list_whole() if self.cluster.is_up else [])
            if key.startswith(BLOCK_PREFIX) and begun_at < before
        }

    def is_at_rest(self) -> bool:
        last = max([self._troubled_until, *(event.at for event in self.plan.events)])
        if self._stopping_at is None and self.now > last + _SETTLE_SECONDS:
            self._check_rest()
            self._stopping_at = self.now
            for instance in self._living():
                self.scheduler.call_later(0.0, instance.stop)
        return self._stopping_at is not None and self.now > self._stopping_at + 60.0

    def _living(self) -> list[_Instance]:
        return [each for each in self.instances.values() if each.process.is_alive]

    def _check_rest(self) -> None:
        """Check that all requests have ended, and that the instances hold no blocks."""
        for leg in self.legs:
            if leg.instance.process.is_alive:
                self._check_leg(leg)
        for instance in self._living():
            name, core = instance.process.name, getattr(instance, "core", None)
            if core is None or instance.generations is None:
                self.fail("rest", f"{name} has not started")
                continue
            blocks = instance.scheduler.blocks
            left = {
                "sequences": instance.scheduler.has_sequences,
                "listeners": len(core._listeners),
                "reservations": len(instance.scheduler.reservations),
                "incoming": len(instance.memory._incoming),
                "live requests": instance.generations.num_live,
                "pending hand-overs": instance.receiver.num_pending,
                "retained prompts": len(retained_prompts_of(instance.receiver)),
                "blocks on their way": core._connector.pending_save_blocks if core._connector else 0,
                "tasks": len(asyncio.all_tasks(instance.loop)) - 1,
            }
            if left := {name: count for name, count in left.items() if count}:
                self.fail("rest", f"{name} has left {left}")
            if blocks.num_available != blocks.num_blocks:
                leaked = [block for block in range(blocks.num_blocks) if blocks.num_references(block)]
                self.fail("references", f"{name}: blocks {leaked} have references without an owner")

    def _check_leg(self, leg: _Leg) -> None:
        """Check that a request ended once, and with the right tokens."""
        if leg.ended is None:
            self.fail("once", f"{leg.name} never ended")
            return
        if leg.refusal:
            return
        expected, usual = leg.expect()
        for index in range(leg.num_choices):
            name, tokens, reason = f"{leg.name}[{index}]", leg.tokens.get(index, []), leg.reasons.get(index)
            if tokens != expected[: len(tokens)]:
                self.fail("tokens", f"{name} was answered {tokens}, not {expected}")
            if reason == usual:
                if len(tokens) != len(expected):
                    self.fail("tokens", f"{name} ended after {len(tokens)} of {len(expected)} tokens")
            elif not (leg.is_cancelled or self._may_end(leg, reason)):
                self.fail("once", f"{name} ended with {reason}, not {usual}")
        if not self._has_faults and leg.ended - leg.began > _PATIENCE_SECONDS:
            self.fail("deadline", f"{leg.name} took {leg.ended - leg.began:.1f} s, and nothing was wrong")

    def _may_end(self, leg: _Leg, reason: str | None) -> bool:
        """Return whether a fault, a pause or an abort explains that a request ended with ``reason``."""
        assert leg.ended is not None
        spans = leg.instance.pauses if reason == "abort" else [(start, end + 30.0) for start, end in self._broken]
        is_disturbed = any(start <= leg.ended and end >= leg.began for start, end in spans)
        is_disturbed |= reason == "error" and leg.meets_broken
        return is_disturbed or (leg.is_aborted if reason == "abort" else leg.may_fail and reason == "error")

    def check_at_rest(self) -> None:
        for instance in self._living():
            if not instance.is_stopped:
                self.fail("rest", f"{instance.process.name} does not stop")
            left = [thread.name for thread in instance.process.threads if not thread.is_ended]
            if left := [each for each in left if not each.startswith(("staging", "kv-"))]:
                self.fail("rest", f"{instance.process.name} has left threads: {left}")
