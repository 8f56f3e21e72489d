"""The reference instance: any decoder checkpoint that transformers loads, behind FastDeploy's own flags."""

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
