"""The reference instance: any decoder checkpoint that transformers loads, behind FastDeploy's own flags.

A request goes from top to bottom, and its tokens come back up:

api_server.py        python -m engine.api_server: an instance's start, from its command line on
serving/             the instance itself, and the HTTP server around it
args.py              the command line and the environment, in FastDeploy's names
fastdeploy_flags.py  FastDeploy's other flags: taken without effect, or refused
protocol.py          OpenAI's request bodies, checked; the shapes of responses and errors
apis/                OpenAI's Responses and Anthropic's Messages, translated onto chat
dialects/            how a pair is asked: FastDeploy's way, and those of vLLM and SGLang for tests of routers
generation/          one request's way through the instance, by its role: mixed, prefill or decode
core.py              the loop on the engine's one thread: admit, schedule, run, sample, emit
scheduling/          which sequence computes how many tokens in the next step, and which blocks it has
model/               one forward pass: the checkpoint, attention, sampling, memory
pool/                between the engine's blocks and the pool
disaggregation/      prefill -> decode hand-over of a prompt's KV
telemetry/           metrics, logs, spans, and why a request was a miss
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
