"""Measure the gain of the pool with clients of other projects: aiperf, guidellm and ``vllm bench serve``.

    python benchmarks/conventional_clients.py mixed --json FILE
    python benchmarks/conventional_clients.py pairs --json FILE

Install each client in an environment of its own, and put the folders of their programs on the PATH. All of them read
the trace of agents (``agent_trace.py``) in Mooncake's format, make prompts of it, and send four requests at a time to
our router. Behind it are two mixed instances of our engine, or with ``pairs`` two prefill instances and a decode
instance, with the small checkpoint and with own caches as in ``pool_gain.py``, without and with a Mooncake pool. Times
and rates are those that the clients report; cached tokens are those that the router counts. Each run has instances of
its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent_trace import make_trace
from describe_run import describe_run
from pool_gain import AT_ONCE, BEGUN, ENGINE_BLOCK, MAX_TOKENS, ask, choose_flags, write_text

from engine.make_model import make_model
from tests.end_to_end.cluster import instance, router
from tests.support import plain_http
from tests.support.mooncake import mooncake_master

ROLES = {"mixed": ("mixed", "mixed"), "pairs": ("prefill", "prefill", "decode")}
TITLES = {
    "mixed": "Measured by conventional clients",
    "pairs": "Measured by conventional clients, prefill and decode apart",
}
WAYS = ("own caches", "own caches and the pool")
COLUMNS = (("mean TTFT, ms", "lower"), ("requests/s", "higher"), ("cached tokens, %", "higher"))

Row = dict[str, Any]
Figures = tuple[int, float, float]
"""Requests that succeeded, mean milliseconds to the first token, requests a second."""


def run_aiperf(url: str, model: Path, trace: Path, count: int, folder: Path) -> Figures:
    """Measure with aiperf, by chat. Offline, aiperf 0.13.0 finds tokenizers only in the cache of Hugging Face."""
    cached = folder / "hub" / "models--kvstore--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0")
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / "0").symlink_to(model)
    run_client(
        *("aiperf", "profile", "--model", "any", "--url", url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", "kvstore/tiny", "--input-file", trace, "--custom-dataset-type", "mooncake_trace"),
        *("--isl-block-size", ENGINE_BLOCK, "--no-fixed-schedule", "--concurrency", AT_ONCE, "--request-count", count),
        *("--random-seed", 0, "--workers-max", 1, "--record-processors", 1, "--ui-type", "none", "--no-gpu-telemetry"),
        *("--no-server-metrics", "--output-artifact-dir", folder / "aiperf"),
        folder=folder,
    )
    report = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    first, rate = report["time_to_first_token"], report["request_throughput"]
    return int(report["request_count"]["avg"]), first["avg"], rate["avg"]


def run_guidellm(url: str, model: Path, trace: Path, count: int, folder: Path) -> Figures:
    """Measure with guidellm, by chat."""
    run_client(
        *("guidellm", "run", "--backend", f"kind=openai_http,target={url},model=any"),
        *("--profile", f"kind=concurrent,streams={AT_ONCE}", "--constraint", f"kind=max_requests,count={count}"),
        *("--tokenizer", f"kind=huggingface_auto,model={model}"),
        *("--data", f"kind=mooncake,hash_id_block_size={ENGINE_BLOCK},source.kind=json_file,source.path={trace}"),
        *("--output", f"kind=json,path={folder}/guidellm.json", "--disable-console"),
        folder=folder,
    )
    metrics = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    first, rate = metrics["time_to_first_token_ms"]["successful"], metrics["requests_per_second"]["successful"]
    return metrics["request_totals"]["successful"], first["mean"], rate["mean"]


def run_vllm(url: str, model: Path, trace: Path, count: int, folder: Path) -> Figures:
    """Measure with ``vllm bench serve``, by completions with prompts of token ids."""
    run_client(
        *("vllm", "bench", "serve", "--backend", "openai", "--base-url", url, "--model", "any", "--tokenizer", model),
        *("--dataset-name", "timed_trace", "--dataset-path", trace, "--no-self-timed", "--num-prompts", count),
        *("--timed-trace-chunk-hash-size", ENGINE_BLOCK, "--max-concurrency", AT_ONCE, "--temperature", 0),
        *("--disable-tqdm", "--save-result", "--result-dir", folder, "--result-filename", "vllm.json"),
        folder=folder,
    )
    report = json.loads((folder / "vllm.json").read_text())
    return report["completed"], report["mean_ttft_ms"], report["request_throughput"]


CLIENTS: dict[str, Callable[[str, Path, Path, int, Path], Figures]] = {
    "aiperf": run_aiperf,
    "vllm bench serve": run_vllm,
    "guidellm": run_guidellm,
}


def run_client(*argv: object, folder: Path) -> None:
    """Run a client to its end.

    Raises:
        SystemExit: the client has failed; with the end of its output.
    """
    # vLLM makes prompts with Python's hashes, which are to be the same in each run.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder / "hub"), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        list(map(str, argv)), cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{argv[0]} ended with {done.returncode}:\n{done.stdout[-4000:]}")


def find_versions() -> str:
    """Return the versions of the clients."""
    programs = [client.split()[0] for client in CLIENTS]
    outputs = [subprocess.check_output([program, "--version"], text=True) for program in programs]
    return ", ".join(f"{program} {output.split()[-1]}" for program, output in zip(programs, outputs, strict=True))


def count_tokens(url: str) -> Counter[str]:
    """Return how many tokens of each kind (prompt, cached, ...) the router has counted."""
    families = text_string_to_metric_families(plain_http.get(f"{url}/metrics").text)
    samples = (sample for family in families for sample in family.samples if sample.name == "router_tokens_total")
    return Counter({sample.labels["kind"]: int(sample.value) for sample in samples})


def measure(client: str, way: str, part: str, rows: Sequence[Row], folder: Path) -> list[float]:
    """Start pool, router and instances, run a client, and return a figure for each of COLUMNS.

    Raises:
        SystemExit: the client, or one of its requests, has failed.
    """
    folder.mkdir()
    model, trace = folder.parent / "model", folder / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = choose_flags([row["hash_ids"] for row in rows], ENGINE_BLOCK)
    with contextlib.ExitStack() as running:
        master = running.enter_context(mooncake_master(folder / "master.log")) if way == WAYS[1] else None
        front = running.enter_context(router(folder, splitwise=part == "pairs"))
        flags += ["--router", f"127.0.0.1:{front.port}"]
        for role in ROLES[part]:
            own = ["--splitwise-role", role] if part == "pairs" else []
            running.enter_context(instance(folder, model, *flags, *own, master=master))
        front.wait_for(**Counter(ROLES[part]))
        ask(front.url, write_text([-1], ENGINE_BLOCK))
        before = count_tokens(front.url)
        succeeded, first_ms, rate = CLIENTS[client](front.url, model, trace, len(rows), folder)
        tokens = count_tokens(front.url)
        tokens.subtract(before)
    if succeeded != len(rows):
        sys.exit(f"{client}: {succeeded} of {len(rows)} requests succeeded")
    return [round(first_ms), round(rate, 2), round(100 * tokens["cached"] / tokens["prompt"], 1)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(ROLES))
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    described = describe_run("conventional_clients.py", argv, time.gmtime(), os.getloadavg()[0])
    described["versions"] += f", {find_versions()}"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace = make_trace(sessions=40, scale=0.01, block_tokens=ENGINE_BLOCK)
    short = [{name: row[name] for name in names} for row in trace if row["input_length"] < MAX_TOKENS]
    rows = short[BEGUN : BEGUN + options.requests]  # when many sessions have begun
    table: dict[str, Any] = {"section": "cache", "title": TITLES[options.part], "row": "caches", "columns": []}
    table["rows"] = [{"name": way, "ours": way == WAYS[1], "values": []} for way in WAYS]
    spread = f"{len(rows)} requests of the trace of agents, {AT_ONCE} at a time, tokens scaled by 0.01"
    table["spread"] = f"{spread}; one run each"
    table["notes"] = [
        "Each client makes its own prompts from the trace's hash ids: compare lines, not clients. Each own cache has "
        "space for a quarter of the different blocks. Each instance with the pool gives it 256 MiB, which is enough "
        "for all blocks of a run. Own caches are measured first."
    ]
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch) / "model")
        for client in CLIENTS:
            for name, better in COLUMNS:
                column = {"name": f"{client}: {name}", "better": better}
                table["columns"].append(column | ({"plot": True} if better == "lower" else {}))
            for number, way in enumerate(WAYS):
                folder = Path(scratch) / f"{client} {way}".replace(" ", "-")
                values = measure(client, way, options.part, rows, folder)
                print(f"{client}, {way}: {values}, load {os.getloadavg()[0]:.1f}", flush=True)
                table["rows"][number]["values"] += values
            if options.json:
                options.json.write_text(json.dumps(table | described, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
