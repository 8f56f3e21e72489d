"""The reference engine: serves decoder checkpoints of transformers, with FastDeploy's flags.

The files and folders, in the order in which a request passes them:

api_server.py        python -m engine.api_server: starts an instance from its command line
serving/             the instance and its HTTP server
args.py              the command line and the environment, with FastDeploy's names
fastdeploy_flags.py  FastDeploy's other flags: accepted without effect, or refused
protocol.py          checks OpenAI's request bodies; builds the bodies of usage and errors
apis/                the HTTP APIs: completions and chat, and Responses and Messages, which it translates to chat
generation/          answers one request in the instance's role: mixed, prefill or decode
core.py              the loop on the engine's thread: admits, schedules, runs and samples
scheduling/          chooses the chunks of each step, and allocates blocks
model/               one forward pass: the checkpoint, attention, sampling, memory
pool/                loads blocks from the pool, and saves blocks to it
disaggregation/      the hand-over: transfers a prompt's KV from a prefill to a decode instance
telemetry/           metrics, logs and spans
make_model.py        python -m engine.make_model: writes a small checkpoint for machines that cannot download one
"""

import importlib.util
import sys

from engine.args import set_native_defaults

# This must be before the first import of torch, because torch reads the environment once, at its import.
set_native_defaults()

if _missing := [name for name in ("torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]:
    _sentence = f"the engine needs {', '.join(_missing)}; run pip install '/path/to/this/repository[engine]'"
    if sys.argv[0] == "-m":  # started by python -m engine...; sys.argv[0] is not the module's name yet
        sys.exit(f"engine: {_sentence}")
    raise ModuleNotFoundError(_sentence)
