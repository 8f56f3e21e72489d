"""A step with the code for GPUs, on a CPU: its tokens are the same, and the host waits only once, at the end.

The tests select the code for GPUs (``form_for``). It runs on the memory of the CPU or, if a test needs only shapes, on
torch's device without memory ("meta").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import engine.model.sampler
from engine.model import device_copies
from engine.model.attention import paged
from engine.model.checkpoint import load_model_config
from engine.model.model_runner import ModelRunner
from engine.model.sampler import Choice
from engine.scheduling.request import Request, SamplingParams, Sequence
from engine.scheduling.retrieval_config import Regime, RetrievalConfig
from engine.scheduling.scheduler import Chunk
from tests.engine.checkpoints import ARCHITECTURES, config_of, write_checkpoint
from tests.engine.device_watch import DeviceWatch, HostWaits
from tests.engine.gpu_form import attend_as_on_gpu

BLOCK = 16
# torch warns that it has no such kernel for a CPU.
pytestmark = pytest.mark.filterwarnings("ignore:.*attention.*:UserWarning")

ALL_FEATURES: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 0.8, "seed": 5, "logprobs": 3, "repetition_penalty": 1.3},
    {"temperature": 1.2, "seed": 6, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": frozenset({3, 4}), "logprobs": 0},
]
"""Sampling parameters of several requests. Together, they use all features of a step."""


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the attention for GPUs on each device."""
    attend_as_on_gpu(monkeypatch)


@pytest.fixture
def device_watch(monkeypatch: pytest.MonkeyPatch) -> DeviceWatch:
    """A watch that allows the copy at the end of a step. It does not watch yet."""
    device_watch = DeviceWatch()
    monkeypatch.setattr(engine.model.sampler, "fetch_numbers", device_watch.allow(device_copies.fetch_numbers))
    return device_watch


def build_runner(folder: Path, device: str = "cpu") -> ModelRunner:
    runner = ModelRunner(str(folder), load_model_config(str(folder)), device, torch.float32, BLOCK)
    runner.allocate_kv(40)
    return runner


def steps_with_all_features() -> Iterator[list[Chunk]]:
    """Yield steps: prompts in chunks, together with decodes; then decodes of different and equal lengths."""
    sequences = [
        Sequence(Request(str(i), tuple(range(i, 4 + i + 40 * i)), SamplingParams(9, **params)), BLOCK)
        for i, params in enumerate(ALL_FEATURES)
    ]
    for i, sequence in enumerate(sequences):
        sequence.block_table = list(range(10 * i + 9, 10 * i - 1, -1))
    first, *others = sequences
    yield [Chunk(first, 4)]
    yield [Chunk(first, 1), *(Chunk(sequence, 40) for sequence in others)]
    yield [Chunk(sequence, 7) for sequence in others[1:]]
    yield [Chunk(sequence, len(sequence.token_ids) - sequence.num_computed) for sequence in sequences]
    yield [Chunk(sequence, 1) for sequence in sequences]
    yield [Chunk(sequence, 1) for sequence in sequences[:1]]


def take_steps(runner: ModelRunner) -> list[list[Choice]]:
    """Return the choices of all steps. The next step continues with the chosen tokens."""
    steps: list[list[Choice]] = []
    for chunks in steps_with_all_features():
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        steps.append(runner.run(chunks))
        for chunk in chunks:
            chunk.sequence.num_computed += chunk.num_tokens
        for sequence, choice in zip(sampling, steps[-1], strict=True):
            assert choice
            sequence.token_ids.append(choice[0])
    return steps


def list_tokens(steps: list[list[Choice]]) -> list[int]:
    return [choice[0] for choices in steps for choice in choices if choice]


def list_logprobs(steps: list[list[Choice]]) -> list[float]:
    found = [choice[1] for choices in steps for choice in choices if choice and choice[1]]
    return [value for logprobs in found for value in (logprobs.chosen, *(value for _, value in logprobs.top))]


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 2.56,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [9.0] * 4,
    "original_max_position_embeddings": 200,
}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        *((name, {}) for name in ARCHITECTURES),
        ("llama", {"rope_parameters": DYNAMIC}),
        ("llama", {"rope_parameters": LONGROPE}),
    ],
)
def test_steps_with_the_code_for_gpus_choose_the_same_tokens_and_wait_once_each(
    architecture: str,
    changes: dict[str, Any],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    device_watch: DeviceWatch,
) -> None:
    folder = write_checkpoint(config_of(architecture, **changes), tmp_path)
    on_cpu = take_steps(build_runner(folder))
    assert device_watch.times_allowed == len([choices for choices in on_cpu if choices]) == 5
    request.getfixturevalue("as_on_gpu")
    runner = build_runner(folder)
    device_watch.times_allowed = 0
    with device_watch.watching():
        as_on_gpu = take_steps(runner)
    assert device_watch.times_allowed == 5
    assert list_tokens(as_on_gpu) == list_tokens(on_cpu)
    assert len(list_logprobs(on_cpu)) == 10
    assert list_logprobs(as_on_gpu) == pytest.approx(list_logprobs(on_cpu), abs=1e-4)


@pytest.fixture
def without_values(monkeypatch: pytest.MonkeyPatch, device_watch: DeviceWatch) -> DeviceWatch:
    """The end of a step on torch's device without memory ("meta"): the host gets a 1 for each number."""
    fetched = device_watch.allow(lambda numbers: [1.0] * len(numbers))
    monkeypatch.setattr(engine.model.sampler, "fetch_numbers", fetched)
    return device_watch


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_of_a_step_is_on_its_device(
    architecture: str, tmp_path: Path, without_values: DeviceWatch
) -> None:
    """The device has no values, so no part of a step can depend on one."""
    runner = build_runner(write_checkpoint(config_of(architecture), tmp_path), "meta")
    with without_values.watching():
        assert set(list_tokens(take_steps(runner))) == {1}


@pytest.mark.usefixtures("as_on_gpu")
def test_a_host_tensor_in_a_step_of_the_device_is_detected(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, without_values: DeviceWatch
) -> None:
    runner = build_runner(tiny_checkpoint, "meta")
    monkeypatch.setattr(device_copies, "send_tensor", lambda tensor, device: tensor)
    with without_values.watching(), pytest.raises(HostWaits, match="two devices"):
        take_steps(runner)


@pytest.mark.usefixtures("as_on_gpu")
def test_a_step_of_sparse_attention_waits_only_at_its_end(tiny_checkpoint: Path, without_values: DeviceWatch) -> None:
    runner = build_runner(tiny_checkpoint, "meta")
    sizes = RetrievalConfig(BLOCK, init_tokens=16, local_tokens=40, topk_percent=0.3, dense_boundary=0, dense_layers=1)
    runner.enable_retrieval(sizes, 4, 320)
    assert runner.retrieval
    sequences = [Sequence(Request(str(i), (i,) * (150 + i), SamplingParams(9, temperature=0.0)), BLOCK) for i in (1, 2)]
    with without_values.watching(allows_lists=True):
        for step in range(2):
            for sequence in sequences:
                sequence.regime = Regime.SPARSE
                sequence.block_table = list(range(11))
                sequence.token_ids.append(1)
                sequence.num_computed = sequence.num_prompt_tokens + step
                runner.retrieval.index_blocks(sequence)
            assert len(runner.run([Chunk(sequence, 1) for sequence in sequences])) == 2
    assert all(sequence.blocks_read for sequence in sequences)
    assert without_values.times_allowed == 2


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_choosing_from_a_large_vocabulary_waits_once(
    monkeypatch: pytest.MonkeyPatch, device_watch: DeviceWatch, device: str
) -> None:
    if device == "meta":
        fetched = device_watch.allow(lambda numbers: [1.0] * len(numbers))
        monkeypatch.setattr(engine.model.sampler, "fetch_numbers", fetched)
    logits = 8 * torch.randn(len(ALL_FEATURES), 5000, generator=torch.Generator().manual_seed(0))
    moved, seen = logits.to(device), engine.model.sampler.SeenTokens()
    sequences = [
        Sequence(Request(str(i), (i, 7), SamplingParams(9, **each)), BLOCK) for i, each in enumerate(ALL_FEATURES)
    ]
    with device_watch.watching():
        for _ in range(2):
            assert all(engine.model.sampler.sample(moved.clone(), sequences, frozenset({0}), seen))
            for sequence in sequences:
                sequence.token_ids.append(1)
    assert device_watch.times_allowed == 2


class Operations(TorchDispatchMode):
    """Counts operations of ATen by their names."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("lengths", [(150,), (150, 150, 150), (170, 150, 160)], ids=["one", "equal", "different"])
def test_a_layer_of_a_decode_step_stores_gathers_and_attends_once(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]
) -> None:
    """All operations cost the host the same time, so their number limits the speed of a decode step."""
    runner = build_runner(tiny_checkpoint)
    chunks = []
    for i, length in enumerate(lengths):
        sequence = Sequence(Request(str(i), (i,) * length, SamplingParams(9, temperature=0.0)), BLOCK)
        sequence.block_table, sequence.num_computed = list(range(12 * i, 12 * i + 12)), length - 1
        chunks.append(Chunk(sequence, 1))
    looked_up: list[str] = []
    look_up = torch.nn.Module.__getattr__

    def record_lookup(self: torch.nn.Module, name: str) -> Any:
        looked_up.append(name)
        return look_up(self, name)

    monkeypatch.setattr(torch.nn.Module, "__getattr__", record_lookup)
    with Operations() as operations:
        runner.run(chunks)
    layers = runner.shape.num_layers
    counts = {name: operations.counts[name] for name in ("index_put_", "index_select", "scaled_dot_product_attention")}
    assert counts == {"index_put_": 2 * layers, "index_select": layers, "scaled_dot_product_attention": layers}
    assert operations.counts["index"] <= 1  # rows that need logits
    assert not {"weight", "self_attn", "mlp"} & set(looked_up), "torch's slow lookup of attributes"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch warns of the mode itself
def test_steps_on_a_gpu_choose_the_same_tokens_and_torch_detects_no_wait(tiny_checkpoint: Path) -> None:
    on_cpu = take_steps(build_runner(tiny_checkpoint))
    runner = build_runner(tiny_checkpoint, "cuda")
    take_steps(runner)  # makes everything that is made only once
    try:
        torch.cuda.set_sync_debug_mode("error")
        on_gpu = take_steps(runner)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert list_tokens(on_gpu) == list_tokens(on_cpu)
    assert list_logprobs(on_gpu) == pytest.approx(list_logprobs(on_cpu), abs=1e-3)


@pytest.mark.parametrize(
    "waiting",
    [
        lambda logits: logits[0, 0].item(),
        lambda logits: logits[0].tolist(),
        lambda logits: logits.cpu(),
        lambda logits: bool((logits > 0).all()),
        lambda logits: logits[logits > 0],
        lambda logits: (logits > 0).nonzero(),
        lambda logits: logits[[0]],
        lambda logits: torch.tensor([0, 1], device=logits.device),
        lambda logits: logits[:, : logits.argmax()],
        lambda logits: max(logits[0, :2]),
    ],
    ids=["item", "tolist", "cpu", "if", "boolean index", "nonzero", "list index", "tensor", "slice", "comparison"],
)
def test_a_step_that_waits_before_its_end_is_detected(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, device_watch: DeviceWatch, waiting: Any
) -> None:
    runner = build_runner(tiny_checkpoint)
    compute = runner._compute_logits  # the middle of a step

    def wait_after(batch: paged.PagedBatch) -> torch.Tensor:
        logits = compute(batch)
        waiting(logits)
        return logits

    monkeypatch.setattr(runner, "_compute_logits", wait_after)
    with device_watch.watching(), pytest.raises(HostWaits):
        take_steps(runner)
