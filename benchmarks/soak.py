"""Soak test: random conversations with prefill and decode instances that are killed, suspended and restarted at random.

    python benchmarks/soak.py [--minutes 10] [--seed N] [--prefill 2] [--decode 2] [--logs FOLDER]

Real instances run behind the real router with a real Mooncake pool. The model has two layers, and there are few KV
blocks and a small pool, so that evictions, preemptions, chunked prefill, direct hand-overs and loads all happen. First,
an instance without any cache computes the right answers. Then users hold the same conversations, with and without
streams; some hang up. Meanwhile instances and the master are killed and started again, or suspended for some seconds.
At any time, at least one instance of each role is undisturbed. In the last fifth of the time, there are no faults.

The program prints the figures with their bars; it exits with 1 if a bar is violated.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.make_model import WORDS, make_model
from engine.model.packed_linear import round_up_rows
from kvstore_backend.cli.report import show_progress
from tests.support.mooncake import MooncakeMaster, mooncake_master
from tests.support.ports import free_port, free_ports
from tests.support.processes import Child, child

LAYERS = 2
BATCHED = 128  # tokens computed in a step
BLOCK, BLOCKS, SEQUENCES, LONGEST = 16, 128, 6, 1024  # an instance has blocks for two of the longest conversations
SEGMENT = "16MiB"  # memory that an instance gives to the pool: 512 blocks
MARGIN = 1e-3  # smallest lead of the right token in nats, so that rounding (2e-5) never changes an answer
CONVERSATIONS, TURNS, ANSWER = 96, 5, 48
USERS = 8
HANGS_UP = 0.06  # share of requests

DEADLINE = 60.0  # seconds within which a request must end
TRIES = 20  # most attempts of a user after incomplete answers
WARM = 30.0  # seconds after which a process must not grow any more
MIB_GROWN = 48.0  # allowed growth of an instance: its part of the pool, and free memory that malloc does not return
FDS_GROWN, FDS_PER_END = (
    12,
    3,
)  # allowed new descriptors; Mooncake's client does not close some for each process that ended
IDLE_SECONDS = (
    75.0  # seconds until all blocks must be free; for 60 s, D does not release blocks that a lost P may still write to
)

Message = dict[str, str]


# --- right answers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation: the messages of the request, and the words of the right answer."""

    messages: tuple[Message, ...]
    words: tuple[str, ...]


def shallow_model(folder: Path) -> Path:
    """Write a checkpoint with the first layers of the small model; its steps take a few milliseconds."""
    whole, shallow = folder / "whole", folder / "shallow"
    make_model(whole)
    shutil.copytree(whole, shallow)
    dropped = tuple(f"model.layers.{i}." for i in range(LAYERS, 100))
    tensors = load_file(whole / "model.safetensors")
    remaining = {name: tensor for name, tensor in tensors.items() if not name.startswith(dropped)}
    save_file(remaining, shallow / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((shallow / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    (shallow / "config.json").write_text(json.dumps(config))
    return shallow


async def conversations(port: int, choices: random.Random) -> list[list[Turn]]:
    """Return conversations with the answers of the instance at ``port``; several have the same beginning."""
    systems = [_words(choices, 20 * i) for i in range(4)]
    begun = [(random.Random(choices.random()), choices.choice(systems)) for _ in range(CONVERSATIONS)]
    slots = asyncio.Semaphore(SEQUENCES)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:

        async def lead(own: random.Random, system: str) -> list[Turn]:
            messages = [{"role": "system", "content": system}] if system else []
            turns: list[Turn] = []
            for _ in range(own.randint(1, TURNS)):
                messages.append({"role": "user", "content": _words(own, own.choice((5, 30, 120)))})
                async with slots:
                    words = await _clear_answer(client, messages)
                if not words:
                    break
                turns.append(Turn(tuple(messages), words))
                messages.append({"role": "assistant", "content": "".join(words)})
            return turns

        led = await asyncio.gather(*(lead(own, system) for own, system in begun))
    return [turns for turns in led if turns]


async def _clear_answer(client: httpx.AsyncClient, messages: list[Message]) -> tuple[str, ...]:
    """Return an answer's words up to the first one that leads the second-best word by at most ``MARGIN``."""
    fields = {"messages": messages, "max_tokens": ANSWER, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    answer = await client.post("/v1/chat/completions", json=fields)
    answer.raise_for_status()
    tokens = answer.json()["choices"][0]["logprobs"]["content"]

    def is_clear(token: dict[str, Any]) -> bool:
        first, second = (top["logprob"] for top in token["top_logprobs"])
        return bool(first - second > MARGIN)

    return tuple(token["token"] for token in itertools.takewhile(is_clear, tokens))


def _words(choices: random.Random, count: int) -> str:
    return " ".join(choices.choices(WORDS, k=count))


# --- the processes --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Life:
    """One run of a process, and samples of its resources."""

    name: str
    process: Child
    ready_at: float = 0.0
    samples: list[tuple[float, float, int]] = field(default_factory=list)
    """The time, the resident memory in MiB, and the number of open file descriptors of each sample."""

    def sample(self) -> None:
        """Take one sample, if the process still runs."""
        folder = Path("/proc") / str(self.process.pid)
        with contextlib.suppress(OSError, IndexError):
            mib = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            self.samples.append((time.monotonic(), mib, len(list((folder / "fd").iterdir()))))

    def grown(self, warm: float) -> tuple[float, float, int, int] | None:
        """Return MiB after the warm-up and now, and descriptors after the warm-up and now.

        Return None if there are too few samples after the warm-up.
        """
        later = [sample for sample in self.samples if sample[0] > self.ready_at + warm]
        if len(later) < 10:
            return None
        begin, end = later[:5], later[-3:]
        return (
            statistics.median(mib for _, mib, _ in begin),
            statistics.median(mib for _, mib, _ in end),
            max(fds for _, _, fds in begin),
            min(fds for _, _, fds in end),
        )


class Instance:
    """An instance at one address, with all runs of its process."""

    def __init__(self, role: str, number: int, argv: Sequence[str], env: dict[str, str], logs: Path) -> None:
        self.name = f"{role} {number}"
        self.role = role
        self.port, connector = free_ports(2)
        self.key = f"127.0.0.1:{self.port}"
        self._argv = [*argv, "--port", str(self.port), "--pd-comm-port", str(connector)]
        self._env = env
        self._logs = logs / self.name.replace(" ", "-")
        self.lives: list[Life] = []
        self.troubles: list[tuple[float, float]] = []
        """Begin and end of each time in which the instance was killed or suspended."""

    @property
    def life(self) -> Life:
        return self.lives[-1]

    def start(self) -> None:
        """Start a new process."""
        folder = self._logs / str(len(self.lives))
        folder.mkdir(parents=True)
        process = Child(self._argv, folder / "out", {**self._env, "FD_LOG_DIR": str(folder)})
        self.lives.append(Life(self.name, process))

    async def until_ready(self) -> None:
        """Wait until the instance answers and thus registers; then let it compute steps of all lengths."""
        async with _waiting_for(self.name, 120):
            while await self.metrics() is None:
                if self.life.process.exit_code is not None:
                    sys.exit(f"{self.name} ended by itself:\n{self.life.process.output[-3000:]}")
                await asyncio.sleep(0.1)
        await self._compute_all_lengths()
        self.life.ready_at = time.monotonic()

    async def _compute_all_lengths(self) -> None:
        """Send prompts of all lengths for which oneDNN stores code (70 MiB), so that it does not look like a leak."""
        async with httpx.AsyncClient(base_url=f"http://{self.key}", timeout=60) as client:
            for length in sorted({round_up_rows(length) for length in range(1, BATCHED + 1)}):
                prompt = f" {_words(random.Random(length), length)}"
                answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
                answer.raise_for_status()

    async def metrics(self) -> dict[str, float] | None:
        """Return the instance's metrics by name; None if it does not answer."""
        return await read_metrics(self.port)

    def was_in_trouble(self, since: float) -> bool:
        """Return whether the instance was killed or suspended at any time from ``since`` to now."""
        return any(end >= since for _, end in self.troubles)

    @contextlib.contextmanager
    def trouble(self) -> Iterator[None]:
        """Note that the instance is killed or suspended during this ``with`` block."""
        self.troubles.append((time.monotonic(), float("inf")))
        yield
        self.troubles[-1] = (self.troubles[-1][0], time.monotonic())


async def read_metrics(port: int) -> dict[str, float] | None:
    """Return all metrics of the server at ``port`` by name and labels; None if it does not answer."""
    try:
        async with httpx.AsyncClient(timeout=5) as client:
            answer = await client.get(f"http://127.0.0.1:{port}/metrics")
            answer.raise_for_status()
    except httpx.TransportError:
        return None
    lines = (line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


@contextlib.asynccontextmanager
async def _waiting_for(event: str, seconds: float) -> AsyncIterator[None]:
    give_up = asyncio.get_running_loop().call_later(seconds, asyncio.current_task().cancel)  # type: ignore[union-attr]
    try:
        yield
    except asyncio.CancelledError:
        sys.exit(f"waited {seconds:g} s for {event}")
    finally:
        give_up.cancel()


# --- the users ------------------------------------------------------------------------------------------------


@dataclass
class Record:
    """The outcomes of all requests."""

    ends: Counter[str] = field(default_factory=Counter)
    """Number of requests for each outcome: right, wrong, stuck, left, excused: ..., error: ..."""
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    unanswered: int = 0
    details: list[str] = field(default_factory=list)

    def count(self, end: str, detail: str = "") -> None:
        self.ends[end] += 1
        if detail:
            self.details.append(f"{time.strftime('%T')} {end}: {detail}")


class CutOff(Exception):
    """An answer that ended with an error.

    Args:
        kind: the kind of the error.
        message: the text of the error.
        began: whether the answer had begun before.
    """

    def __init__(self, kind: str, message: str, *, began: bool) -> None:
        super().__init__(message)
        self.kind = kind
        self.began = began


class Users:
    """Users that hold conversations through the router until the time ``until``."""

    def __init__(
        self, router: int, script: Sequence[Sequence[Turn]], instances: Sequence[Instance], seed: int, until: float
    ) -> None:
        self.record = Record()
        self._script = script
        self._instances = instances
        self._choices = random.Random(seed)
        self._until = until
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{router}", timeout=None, limits=httpx.Limits(max_connections=None)
        )

    async def run(self) -> None:
        """Run all users until the time is over and each has ended its conversation."""
        async with self._client:
            await asyncio.gather(*(self._user() for _ in range(USERS)))

    async def _user(self) -> None:
        while time.monotonic() < self._until:
            for turn in self._choices.choice(self._script):
                await self._ask(turn)
                await asyncio.sleep(self._choices.uniform(0, 0.3))

    async def _ask(self, turn: Turn) -> None:
        """Send a request until it is answered, at most ``TRIES`` times; sometimes hang up instead."""
        length = self._choices.randint(1, len(turn.words))
        stream = self._choices.random() < 0.6
        expected = "".join(turn.words[:length])
        if self._choices.random() < HANGS_UP:
            with contextlib.suppress(asyncio.TimeoutError, CutOff):
                await asyncio.wait_for(self._answer(turn, length, stream), self._choices.uniform(0, 0.5))
            self.record.count("left")
            return
        for _ in range(TRIES):
            asked = time.monotonic()
            try:
                got = await asyncio.wait_for(self._answer(turn, length, stream), DEADLINE)
            except asyncio.TimeoutError:
                self.record.count("stuck", f"{len(turn.messages)} messages, {length} tokens, stream: {stream}")
            except CutOff as exc:
                self.record.count(*self._judged(exc, asked))
            else:
                self.record.seconds.append(time.monotonic() - asked)
                self.record.tokens += length
                if got == expected:
                    self.record.count("right")
                else:
                    self.record.count("wrong", f"{expected!r} came as {got!r}; stream: {stream}")
                return
            await asyncio.sleep(self._choices.uniform(0.1, 0.5))
        self.record.unanswered += 1

    def _judged(self, error: CutOff, asked: float) -> tuple[str, str]:
        """Return the outcome for an error, and its details.

        The error is excused if it names an instance that was killed or suspended during the answer.
        """
        named = [instance for instance in self._instances if instance.key in str(error)]
        if error.began and any(instance.was_in_trouble(asked) for instance in named):
            return f"excused: {error.kind}", ""
        return f"error: {error.kind}", f"{error} (words had come: {error.began})"

    async def _answer(self, turn: Turn, length: int, stream: bool) -> str:
        body = {"model": "soak", "messages": turn.messages, "max_tokens": length, "temperature": 0, "stream": stream}
        text, ended = "", False
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200 or not stream:
                    answer = json.loads(await response.aread())
                    if response.status_code != 200:
                        raise _cut_off(answer["error"], response.status_code)
                    content: str = answer["choices"][0]["message"]["content"]
                    return content
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        ended |= line == "data: [DONE]"
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise _cut_off(event["error"], 200)
                    text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        except (httpx.TransportError, json.JSONDecodeError) as exc:
            raise CutOff(type(exc).__name__, repr(exc), began=bool(text)) from exc
        if not ended:
            raise CutOff("ended without [DONE]", text, began=bool(text))
        return text


def _cut_off(error: dict[str, Any], status: int) -> CutOff:
    return CutOff(f"{status} {error['code']}", error["message"], began=status == 200)


# --- the faults -----------------------------------------------------------------------------------------------


class Chaos:
    """Random faults: kills or suspends the master and, for each role, at most one instance at a time."""

    def __init__(self, instances: Sequence[Instance], master: Child, logs: Path, seed: int, until: float) -> None:
        self.done: Counter[str] = Counter()
        self.ends: list[float] = []
        """The times at which processes were killed."""
        self.master = Life("mooncake_master", master, time.monotonic())
        self._instances = instances
        self._logs = logs
        self._choices = random.Random(seed)
        self._until = until

    async def run(self) -> None:
        """Cause faults until the time is over; return when all processes run again."""
        await asyncio.gather(self._trouble("prefill"), self._trouble("decode"), self._trouble_master())

    async def _trouble(self, role: str) -> None:
        while await self._pause(3, 15):
            instance = self._choices.choice([instance for instance in self._instances if instance.role == role])
            with instance.trouble():
                if self._choices.random() < 0.3:
                    self.done[f"{role} stopped"] += 1
                    await self._stop_for_a_while(instance.life.process)
                else:
                    self.done[f"{role} killed"] += 1
                    self.ends.append(time.monotonic())
                    await asyncio.to_thread(instance.life.process.kill)
                    await asyncio.sleep(self._choices.uniform(0, 4))
                    instance.start()
                    await instance.until_ready()

    async def _trouble_master(self) -> None:
        while await self._pause(15, 60):
            if self._choices.random() < 0.3:
                self.done["master stopped"] += 1
                await self._stop_for_a_while(self.master.process)
            else:
                self.done["master killed"] += 1
                self.ends.append(time.monotonic())
                await asyncio.to_thread(self.master.process.kill)
                await asyncio.sleep(self._choices.uniform(0, 8))
                log = self._logs / f"master-{self.done['master killed']}.out"
                self.master = Life("mooncake_master", Child(self.master.process.argv, log), time.monotonic())

    async def _stop_for_a_while(self, process: Child) -> None:
        process.signal(signal.SIGSTOP)
        await asyncio.sleep(self._choices.uniform(1, 8))
        process.signal(signal.SIGCONT)

    async def _pause(self, least: float, most: float) -> bool:
        """Wait for a random time, at most until the end; return whether there is time for another fault."""
        end = time.monotonic() + self._choices.uniform(least, most)
        await asyncio.sleep(min(end, self._until) - time.monotonic())
        return end < self._until


# --- the run --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One figure and its bar; ``is_met`` is None for a figure without a bar."""

    name: str
    figure: str
    bar: str = ""
    is_met: bool | None = None


class Soak:
    """The whole system, its users and its faults."""

    def __init__(self, options: argparse.Namespace, logs: Path) -> None:
        self._options = options
        self._logs = logs
        self._choices = random.Random(options.seed)
        self._seconds = 60 * options.minutes
        self._warm = min(WARM, self._seconds / 4)

    async def run(self) -> list[Line]:
        """Run the soak test and return its figures."""
        model = shallow_model(self._logs)
        script = await self._script(model)
        router_port = free_port()
        argv = [sys.executable, "-m", "router.launch", "--host", "127.0.0.1", "--port", str(router_port), "--splitwise"]
        # Shorter than the defaults, because instances are suspended for only some seconds.
        argv += ["--health-check-interval-secs", "1", "--health-check-timeout-secs", "2"]
        argv += ["--access-log", str(self._logs / "access.jsonl")]
        with mooncake_master(self._logs / "master.out") as master, child(argv, self._logs / "router.out") as router:
            router_life = Life("router", router, time.monotonic())
            instances = self._instances(model, master, router_port)
            try:
                for instance in instances:
                    instance.start()
                await asyncio.gather(*(instance.until_ready() for instance in instances))
                await self._until_registered(router_port)
                begun = time.monotonic()
                chaos = Chaos(instances, master.process, self._logs, self._options.seed, begun + 0.8 * self._seconds)
                users = Users(router_port, script, instances, self._options.seed, begun + self._seconds)
                watching = asyncio.create_task(self._watch(instances, router_life, chaos, users))
                try:
                    await asyncio.gather(users.run(), chaos.run())
                    leaks = await self._leaks(instances, router_port)
                    await asyncio.sleep(3)  # so that the last samples are from idle processes
                finally:
                    watching.cancel()
                    chaos.master.process.stop()
                lives = [router_life, chaos.master, *(instance.life for instance in instances)]
                return [
                    *self._troubles(chaos, script),
                    *self._answers(users.record),
                    *leaks,
                    self._tracebacks(),
                    *(line for life in lives for line in self._growth(life, chaos.ends)),
                ]
            finally:
                for instance in instances:
                    if instance.lives:
                        instance.life.process.stop()

    async def _script(self, model: Path) -> list[list[Turn]]:
        """Return the conversations, with the answers of an instance without cache, pool and router."""
        argv = [*self._argv(model), "--no-enable-prefix-caching"]
        reference = Instance("mixed", 0, argv, self._env(), self._logs)
        reference.start()
        try:
            await reference.until_ready()
            return await conversations(reference.port, self._choices)
        finally:
            reference.life.process.stop()

    def _argv(self, model: Path) -> list[str]:
        argv = [sys.executable, "-m", "engine.api_server", "--host", "127.0.0.1", "--device", "cpu"]
        argv += ["--model", str(model), "--max-model-len", str(LONGEST), "--max-num-seqs", str(SEQUENCES)]
        return [*argv, "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS)]

    def _env(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1"}

    def _instances(self, model: Path, master: MooncakeMaster, router: int) -> list[Instance]:
        names = ("master_server_addr", "metadata_server", "local_hostname", "protocol", "global_segment_size")
        settings = master.settings(global_segment_size=SEGMENT)
        env = self._env() | {f"MOONCAKE_{name.upper()}": str(settings[name]) for name in names}
        argv = [*self._argv(model), "--router", f"127.0.0.1:{router}", "--kvcache-storage-backend", "mooncake"]
        argv += ["--max-num-batched-tokens", str(BATCHED), "--enable-output-caching"]
        argv += ["--cache-transfer-protocol", "tcp"]
        return [
            Instance(role, number, [*argv, "--splitwise-role", role], env, self._logs)
            for role, count in (("prefill", self._options.prefill), ("decode", self._options.decode))
            for number in range(count)
        ]

    async def _until_registered(self, router: int) -> None:
        wanted = {"prefill": self._options.prefill, "decode": self._options.decode}
        async with _waiting_for("all instances at the router", 60), httpx.AsyncClient() as client:
            while True:
                counts = (await client.get(f"http://127.0.0.1:{router}/registered_number")).json()
                if all(counts[role] == number for role, number in wanted.items()):
                    return
                await asyncio.sleep(0.1)

    async def _watch(self, instances: Sequence[Instance], router: Life, chaos: Chaos, users: Users) -> None:
        begun = time.monotonic()
        with show_progress("load", self._seconds) as report:
            while True:
                for life in (router, chaos.master, *(instance.life for instance in instances)):
                    life.sample()
                ends = ", ".join(f"{end} {number}" for end, number in sorted(users.record.ends.items()))
                report(min(self._seconds, time.monotonic() - begun), ends)
                await asyncio.sleep(1)

    async def _leaks(self, instances: Sequence[Instance], router: int) -> list[Line]:
        """Check after the last request that no block is in use and no request is running."""
        wanted = {
            "fastdeploy:available_gpu_block_num": float(BLOCKS),
            "kvstore_reserved_blocks": 0.0,
            "fastdeploy:num_requests_running": 0.0,
            "fastdeploy:num_requests_waiting": 0.0,
            "kvstore_pending_save_blocks": 0.0,
        }
        begun = time.monotonic()
        left: dict[str, dict[str, float]] = {}
        while True:
            for instance in instances:
                metrics = await instance.metrics() or {}
                used = {name: metrics.get(name, -1) for name in wanted if metrics.get(name) != wanted[name]}
                left[instance.name] = used
            metrics = await read_metrics(router) or {}
            left["router"] = {
                name: value
                for name, value in metrics.items()
                if value and name.startswith(("router_running_requests", "router_queued", "router_instance_requests"))
            }
            if not any(left.values()) or time.monotonic() - begun > IDLE_SECONDS:
                break
            await asyncio.sleep(0.5)
        figure = f"all after {time.monotonic() - begun:.1f} s"
        if any(left.values()):
            figure = f"not { ({name: values for name, values in left.items() if values}) }"
        lines = [Line("blocks free, none reserved, nothing running", figure, f"{IDLE_SECONDS:g} s", figure[0] == "a")]
        ways: Counter[str] = Counter()
        for instance in instances:
            for name, value in (await instance.metrics() or {}).items():
                if name.startswith(
                    ("kvstore_handed_over_total", "kvstore_preemptions_t", "kvstore_pool_cached_tokens_t")
                ):
                    ways[name] += int(value)
        return lines + [Line(f"  {name} (last lives)", str(number)) for name, number in sorted(ways.items())]

    def _troubles(self, chaos: Chaos, script: Sequence[Sequence[Turn]]) -> list[Line]:
        turns = sum(map(len, script))
        yielded = [Line("conversations, turns in them", f"{len(script)}, {turns}")]
        return yielded + [Line(f"  {trouble}", f"{number} times") for trouble, number in sorted(chaos.done.items())]

    def _answers(self, record: Record) -> list[Line]:
        times = sorted(record.seconds)
        errors = {end: n for end, n in record.ends.items() if end.startswith("error")}
        excused = {end: n for end, n in record.ends.items() if end.startswith("excused")}
        for detail in record.details[:20]:
            print(detail, file=sys.stderr)
        return [
            Line("right answers, tokens in them", f"{record.ends['right']}, {record.tokens}"),
            Line("clients that hung up", str(record.ends["left"])),
            Line(
                "seconds to the whole answer: median, 99 %, most",
                ", ".join(f"{times[min(int(len(times) * q), len(times) - 1)]:.2f}" for q in (0.5, 0.99, 1)),
            ),
            Line("wrong answers", str(record.ends["wrong"]), "0", not record.ends["wrong"]),
            Line(f"requests not ended in {DEADLINE:g} s", str(record.ends["stuck"]), "0", not record.ends["stuck"]),
            Line("requests never answered", str(record.unanswered), "0", not record.unanswered),
            *(Line(f"  {end}", str(n)) for end, n in sorted(excused.items())),
            *(Line(f"  {end}", str(n)) for end, n in sorted(errors.items())),
            Line("errors without an instance's end under them", str(sum(errors.values())), "0", not errors),
        ]

    def _tracebacks(self) -> Line:
        """Count the tracebacks in all logs; no process may log one, also if other processes fail."""
        number = sum(log.read_text(errors="replace").count("Traceback (most") for log in self._logs.rglob("*out"))
        return Line("tracebacks in logs", str(number), "0", not number)

    def _growth(self, life: Life, ends: Sequence[float]) -> list[Line]:
        grown = life.grown(self._warm)
        if grown is None:
            return [Line(f"{life.name}: too young for growth", f"{len(life.samples)} s")]
        mib, mib_now, fds, fds_now = grown
        age = life.samples[-1][0] - life.ready_at
        fds_grown = FDS_GROWN
        if life.name not in ("router", "mooncake_master"):
            fds_grown += FDS_PER_END * sum(end > life.ready_at + self._warm for end in ends)
        return [
            Line(
                f"{life.name}: MiB after {self._warm:.0f} s and {age:.0f} s",
                f"{mib:.0f} -> {mib_now:.0f}",
                f"+ {MIB_GROWN:g}",
                mib_now <= mib + MIB_GROWN,
            ),
            Line(
                f"{life.name}: file descriptors",
                f"{fds} -> {fds_now}",
                f"+ {fds_grown}",
                fds_now <= fds + fds_grown,
            ),
        ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Soak prefill and decode instances in random load and random faults.")
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of load (default %(default)g)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="seed of all random choices")
    parser.add_argument("--prefill", type=int, default=2, help="prefill instances, at least 2 (default %(default)s)")
    parser.add_argument("--decode", type=int, default=2, help="decode instances, at least 2 (default %(default)s)")
    parser.add_argument("--logs", type=Path, help="new folder that keeps every process's output")
    options = parser.parse_args(argv)
    if min(options.prefill, options.decode) < 2:
        parser.error("--prefill and --decode must be at least 2, because one instance of each role is undisturbed")
    print(f"seed {options.seed}, {options.prefill} prefill and {options.decode} decode instances", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        logs: Path = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        lines = asyncio.run(Soak(options, logs.absolute()).run())
    for line in lines:
        missed = "  VIOLATED" if line.is_met is False else ""
        print(f"{line.name:<64}{line.figure:>28}{line.bar:>10}{missed}")
    return int(any(line.is_met is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
