"""The reference instance: any decoder checkpoint that transformers loads, behind FastDeploy's own flags.

A request goes from top to bottom, and its tokens come back up:

api_server.py        python -m engine.api_server: starts an instance from its command line
serving/             the instance itself, and the HTTP server around it
args.py              the command line and the environment, in FastDeploy's names
fastdeploy_flags.py  FastDeploy's other flags: accepted without effect, or refused
protocol.py          OpenAI's request bodies, checked; the shapes of responses and errors
apis/                OpenAI's Responses and Anthropic's Messages, translated onto chat
generation/          how the instance processes one request in its role: mixed, prefill or decode
core.py              the loop on the engine's one thread: admit, schedule, run, sample, emit
scheduling/          which sequence computes how many tokens in the next step, and which blocks it has
model/               one forward pass: the checkpoint, attention, sampling, memory
pool/                transfers between the engine's blocks and the pool
disaggregation/      prefill -> decode transfer (hand-over) of a prompt's KV
telemetry/           metrics, logs and spans
make_model.py        python -m engine.make_model: a small checkpoint for machines that cannot download one
"""

import importlib.util
import sys

from engine.args import set_native_defaults

# Do this before any module of this package imports torch: torch's thread pool reads the environment once, when torch is
# loaded.
set_native_defaults()

if _missing := [name for name in ("torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]:
    _sentence = f"the engine needs {', '.join(_missing)}: pip install '/path/to/this/repository[engine]'"
    if sys.argv[0] == "-m":  # started by python -m engine...; sys.argv[0] is not the module's name yet
        sys.exit(f"engine: {_sentence}")
    raise ModuleNotFoundError(_sentence)
