"""Sparse attention with a prefill and a decode instance: the responses equal those of a mixed instance.

Prefill does not send its index. The entry of a block is a function of the block's keys, so decode computes it from the
blocks that it receives, from prefill or from the pool.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.end_to_end.cluster import QUESTION, Instance, Router, ask, instance, router
from tests.end_to_end.test_prefill_decode import text
from tests.support import plain_http
from tests.support.mooncake import MooncakeMaster, mooncake_master
from tests.support.nursery import run_forked
from tests.support.waiting import wait_until

BLOCK = 32
DENSE_BOUNDARY, OFFLOAD_BOUNDARY = 400, 800
BLOCKS = 256
RETRIEVAL = (
    *("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS)),
    *("--enable-retrieval", "--retrieval-topk-percent", "0.1"),
    *("--retrieval-init-tokens", str(BLOCK), "--retrieval-local-tokens", str(2 * BLOCK)),
    *("--retrieval-dense-boundary", str(DENSE_BOUNDARY), "--retrieval-offload-boundary", str(OFFLOAD_BOUNDARY)),
)


@contextlib.contextmanager
def side(
    role: str, folder: Path, model: Path, towards: Router, master: MooncakeMaster, **options: Any
) -> Iterator[Instance]:
    flags = ("--splitwise-role", role, "--router", f"127.0.0.1:{towards.port}")
    with instance(folder, model, *RETRIEVAL, *flags, master=master, **options) as running:
        yield running


def conversations(about: str) -> list[list[dict[str, str]]]:
    """Return a conversation for dense attention, and one for sparse attention."""
    return [[{"role": "user", "content": f"{about} {times}: {QUESTION * times}"}] for times in (1, 3, 6)]


def ask_at_once(url: str, questions: Sequence[list[dict[str, str]]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(questions)) as threads:
        return list(threads.map(lambda messages: ask(url, messages, max_tokens=40), questions))


def list_results(answers: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, int] | None]]:
    """Return the text of each response, and the numbers of read blocks and of all blocks."""
    return [(text(answer), answer["usage"].get("retrieval_details")) for answer in answers]


def handed_over(decode: Instance) -> dict[str, float]:
    return {way: decode.metric(f'kvstore_handed_over_total{{way="{way}"}}') for way in ("direct", "pool", "computed")}


def without_transfer_engine(folder: Path) -> dict[str, str]:
    """Return an environment in which Mooncake's store can be imported, but not its transfer engine."""
    (folder / "sitecustomize.py").write_text('import sys\n\nsys.modules["mooncake.engine"] = None\n')
    return {"PYTHONPATH": str(folder)}


def check_that_blocks_are_free_while_they_are_looked_up(url: str, decode: Instance) -> None:
    """Assert that the blocks of an offloaded prompt are free during the response."""
    body = {"messages": conversations("offloaded")[-1], "max_tokens": 2500, "temperature": 0, "stream": True}
    with plain_http.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=100) as answer:
        lines = answer.iter_lines()
        next(lines)
        wait_until(lambda: decode.metric("fastdeploy:available_gpu_block_num") >= BLOCKS - 2, "blocks to be free")
        assert decode.metric("fastdeploy:num_requests_running") == 1


def test_a_pair_responds_like_a_mixed_instance_with_each_way_of_the_hand_over(tmp_path: Path, model: Path) -> None:
    directly, by_pool = conversations("directly"), conversations("by the pool")
    with instance(tmp_path, model, *RETRIEVAL) as one:
        expected = {"direct": ask_at_once(one.url, directly), "pool": ask_at_once(one.url, by_pool)}
    for answers in expected.values():
        dense, sparse, offloaded = (answer["usage"] for answer in answers)
        assert dense["prompt_tokens"] < DENSE_BOUNDARY <= sparse["prompt_tokens"] <= OFFLOAD_BOUNDARY
        assert offloaded["prompt_tokens"] > OFFLOAD_BOUNDARY
        assert "retrieval_details" not in dense
        for details in (sparse["retrieval_details"], offloaded["retrieval_details"]):
            assert 0 < details["blocks_read"] < 0.5 * details["blocks_total"]

    with (
        mooncake_master(tmp_path / "master.log") as master,
        router(tmp_path) as between,
        side("decode", tmp_path, model, between, master) as decode,
    ):
        with side("prefill", tmp_path, model, between, master) as prefill:
            between.wait_for(prefill=1, decode=1)
            assert list_results(ask_at_once(between.url, directly)) == list_results(expected["direct"])
            assert handed_over(decode) == {"direct": len(directly), "pool": 0, "computed": 0}
            check_that_blocks_are_free_while_they_are_looked_up(between.url, decode)

        environ = without_transfer_engine(tmp_path)
        with side("prefill", tmp_path, model, between, master, port=prefill.port, environ=environ) as another:
            assert "Prompts are transferred only through the pool" in another.process.output
            short = [{"role": "user", "content": "Are you there?"}]
            wait_until(lambda: ask(between.url, short, max_tokens=1)["status"] == 200, "the pair to serve")
            before = handed_over(decode)
            assert list_results(ask_at_once(between.url, by_pool)) == list_results(expected["pool"])
            after = handed_over(decode)
            added = {way: after[way] - before[way] for way in after}
            # On a busy machine the pool may be slow, and then the instance does not wait for it.
            assert (added["direct"], added["pool"] + added["computed"]) == (0, len(by_pool))
            assert added["pool"] > 0


def test_the_quality_script_without_a_model_prints_one_sentence(tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "examples" / "retrieval" / "quality.py"
    command = [sys.executable, str(program), "--model", "/nonexistent", "--output", str(tmp_path / "output")]
    ended = run_forked(command)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("quality.py: --model '/nonexistent': there is no such folder; ")
