"""The reference instance: any decoder checkpoint that transformers loads, behind FastDeploy's own flags.

A request goes from top to bottom, and its tokens come back up:

api_server.py        python -m engine.api_server: an instance's start, from its command line on
serving/             the instance itself, and the HTTP server around it
args.py              the command line and the environment, in FastDeploy's names
fastdeploy_flags.py  FastDeploy's other flags: taken without effect, or refused
protocol.py          OpenAI's request bodies, checked; the shapes of responses and errors
completions.py       chat and plain completions over generations: prompts in, JSON objects and event streams out
apis/                OpenAI's Responses and Anthropic's Messages, translated onto chat
dialects/            how a pair is asked: FastDeploy's way, and those of vLLM and SGLang for tests of routers
generation/          one request's way through the instance, by its role: mixed, prefill or decode
detokenizer.py       token ids -> text, piece by piece
token_bytes.py       token id -> the bytes it stands for
core.py              the loop on the engine's one thread: admit, schedule, run, sample, emit
cache_hints.py       cache_control: how long a prompt's blocks are worth keeping, as a request says it
request.py           Request, as a client asks for it, and Sequence, as the engine works on it
scheduler.py         which sequence computes how many tokens in the next step; free of tensors
block_manager.py     which KV block belongs to which sequence; the prefix cache; free of tensors
model_runner.py      the checkpoint, its KV memory, and one forward pass
weights.py           which weights a model has, and the namespace of their KV
memory_budget.py     how many KV blocks there are, beside the memory of sparse attention
out_of_memory.py     memory that cannot be had, told in a sentence
device_copies.py     the numbers of a step, on their way to the device and back
packed_linear.py     linear layers with weights as oneDNN wants them, for CPUs
attention/           attention over paged KV memory: exact, and sparse by retrieval
retrieval_config.py  the sizes of sparse attention; free of tensors
prefill_progress.py  how far long prompts are, in the log
sampler.py           logits -> the next token of each sequence
kv_codec.py          KV blocks in fewer bytes, in the pool
pool_connector.py    between the engine's blocks and the pool: loads and saves on threads of their own
saved_blocks.py      cached blocks that the pool had, for putting them again where it has lost them
kept_blocks.py       which blocks the pool was asked to keep, and when it is to be asked again
pool_use.py          why a prompt took blocks from the pool, or none
why_miss/            why a request that is over was a miss, told from the requests that the instance remembers
staging.py           KV memory as the pool and hand-overs reach it: itself, or by way of host buffers
background.py        work beside a running step
disaggregation/      prefill -> decode hand-over of a prompt's KV
registration.py      the heartbeat to the router
trace.py             a request's way in the log, for a person debugging
tracing.py           spans for OpenTelemetry: a request and its phases, under the span of who asked
metrics.py           Prometheus metrics, under FastDeploy's names where it has them
logs.py              the instance's log file, and the lines that an operator must see
make_model.py        python -m engine.make_model: a small checkpoint for machines that cannot download one
"""

import importlib.util
import sys

from engine.args import set_native_defaults

# Before anything of this package imports torch: its thread pool reads the environment once, when it is loaded.
set_native_defaults()

if _missing := [name for name in ("torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]:
    _sentence = f"the engine needs {', '.join(_missing)}: pip install '/path/to/this/repository[engine]'"
    if sys.argv[0] == "-m":  # python -m engine...., whose own name is not there yet
        sys.exit(f"engine: {_sentence}")
    raise ModuleNotFoundError(_sentence)
