"""The engine's process: FastDeploy reads its command line, and builds the command of the mover."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

from tests.fastdeploy.link import serve

__all__ = ["main"]

_MOVER = Path(__file__).with_name("mover.py")


class _Kernels(types.ModuleType):
    """Replaces paddle's CUDA kernels, which FastDeploy imports by name and does not call here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _Models:
    """Replaces FastDeploy's registry of models, which imports all models, by one with a single model."""

    def is_text_generation_model(self, *_: object) -> bool:
        return True

    def is_other(self, *_: object) -> bool:
        return False

    is_pooling_model = is_multimodal_model = is_reasoning_model = is_other

    def get_supported_archs(self) -> list[str]:
        return ["Qwen2ForCausalLM"]

    def inspect_model_cls(self, architectures: list[str], _: object) -> tuple[object, str]:
        return types.SimpleNamespace(default_pooling_type="LAST"), architectures[0]


class _Tokenizer:
    vocab = {"a": 0}  # noqa: RUF012  FastDeploy needs its length
    think_truncate_prompt = ""

    def get_vocab(self) -> dict[str, int]:
        return {"\n": 0}

    def tokenize(self, _: str) -> list[str]:
        return []

    convert_tokens_to_ids = tokenize


class _Signal:
    """Replaces the shared memory in which FastDeploy's processes wait for each other. All are ready."""

    def __init__(self, *, array: Any, **_: object) -> None:
        self.value = array + 1


class _RecordedSubprocess:
    """Replaces the module ``subprocess``, and records the command."""

    PIPE = subprocess.PIPE

    def __init__(self) -> None:
        self.command = ""

    def Popen(self, command: str, **_: object) -> types.SimpleNamespace:
        self.command = command
        return types.SimpleNamespace(poll=lambda: None)


def _read_config() -> Any:
    """Return FastDeploy's configuration from this process's command line, as on a machine with CUDA."""
    sys.modules["fastdeploy.model_executor.ops.gpu"] = _Kernels("fastdeploy.model_executor.ops.gpu")
    from fastdeploy import config
    from fastdeploy.engine.args_utils import EngineArgs
    from fastdeploy.entrypoints.openai.utils import make_arg_parser
    from fastdeploy.platforms import current_platform
    from fastdeploy.utils import FlexibleArgumentParser

    type(current_platform).is_cuda = lambda _: True
    config.ModelConfig.registry = _Models()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    return EngineArgs.from_cli_args(arguments).create_engine_config()


def _build_transfer_command(config: Any) -> str:
    """Return the command with which FastDeploy 2.6 starts its transfer process, here the mover."""
    from fastdeploy.cache_manager import prefix_cache_manager as module

    recorded = _RecordedSubprocess()
    doubles = {
        "subprocess": recorded,
        "IPCSignal": _Signal,
        "EngineCacheQueue": lambda **_: None,
        "get_all_visible_devices": lambda: "CUDA_VISIBLE_DEVICES=0",
        "threading": types.SimpleNamespace(Thread=lambda **_: types.SimpleNamespace(start=lambda: None)),
    }
    vars(module).update(doubles)
    cache, parallel, role = config.cache_config, config.parallel_config, config.scheduler_config.splitwise_role
    cache.total_block_num = 32
    model = config.model_config
    heads = max(1, model.num_key_value_heads // parallel.tensor_parallel_size)
    shape = (cache.total_block_num, heads, cache.block_size, model.head_dim)
    manager = object.__new__(module.PrefixCacheManager)
    manager._get_kv_cache_shape = lambda _: (shape, shape)
    manager.launch_cache_messager = lambda *_: []
    manager.__dict__.update(
        config=config,
        cache_config=cache,
        speculative_config=config.speculative_config,
        splitwise_role=role,
        enable_splitwise=role != "mixed",
        local_data_parallel_id=0,
        num_cpu_blocks=cache.num_cpu_blocks,
    )
    cache.local_cache_queue_port, cache.local_rdma_comm_ports = 0, None
    manager.launch_cache_manager(
        cache, parallel.tensor_parallel_size, ["0"], config.master_ip, parallel.engine_worker_queue_port[0], "", True
    )
    return re.sub(r"\S*/cache_transfer_manager\.py(?= )", str(_MOVER), recorded.command, count=1)


def _build_worker_command(config: Any) -> str:
    """Return the command that starts FastDeploy's worker, here the mover, without ``paddle.distributed.launch``."""
    from fastdeploy.engine import engine as module

    recorded = _RecordedSubprocess()
    vars(module)["subprocess"] = recorded
    processor = types.SimpleNamespace(tokenizer=_Tokenizer(), eos_token_id_len=1, pad_token_id=0)
    engine = object.__new__(module.LLMEngine)
    engine.__dict__.update(
        cfg=config,
        data_processor=processor,
        engine=types.SimpleNamespace(data_processor=processor, mm_max_tokens_per_item=None),
        do_profile=1,
    )
    engine._start_worker_service()
    return re.sub(r"-m paddle\.distributed\.launch .*?/worker_process\.py(?= )", str(_MOVER), recorded.command, count=1)


def _name_blocks(config: Any, tokens: list[int]) -> list[str]:
    """Return the names of full blocks in form 2.6."""
    from fastdeploy.cache_manager.prefix_cache_manager import get_hash_str

    size = config.cache_config.block_size
    names: list[str] = []
    for start in range(0, len(tokens) - size + 1, size):
        names.append(get_hash_str(tokens[start : start + size], names[-1:]))
    return names


def _name_handed_over(config: Any, tokens: list[int]) -> list[str]:
    """Return the names of all blocks, also the partial one, that prefill stores for decode; [] without this feature."""
    from fastdeploy.cache_manager.prefix_cache_manager import PrefixCacheManager

    manager = object.__new__(PrefixCacheManager)
    manager.config = config
    if not hasattr(manager, "_compute_pd_storage_keys"):
        return []
    names: list[str] = manager._compute_pd_storage_keys(types.SimpleNamespace(multimodal_inputs=None), tokens)
    return names


def _name_v1_blocks(config: Any, tokens: list[int]) -> list[str]:
    from fastdeploy.cache_manager.v1.cache_utils import hash_block_tokens

    size, names = config.cache_config.block_size, [""]
    for start in range(0, len(tokens) - size + 1, size):
        names.append(hash_block_tokens(tokens[start : start + size], names[-1]))
    return names[1:]


class _Scheduler:
    """The storage of FastDeploy's engine in form v1, for look-ups."""

    def __init__(self, config: Any) -> None:
        self._config = config.cache_config
        self._storage: Any = None

    def open(self, environ: dict[str, str]) -> None:
        from fastdeploy.cache_manager.v1.storage import create_storage_scheduler

        os.environ.update(environ)
        self._storage = create_storage_scheduler(self._config)

    def match(self, hashes: list[str]) -> int:
        count: int = self._storage.query_prefix_count(
            *([f"{block_hash}_0_{kind}" for block_hash in hashes] for kind in ("key", "value"))
        )
        return count


def main() -> None:
    """Start the mover, and serve calls of a test. ``TEST_FASTDEPLOY_FORM`` is 2.6 or v1."""
    config = _read_config()
    is_v1 = os.environ["TEST_FASTDEPLOY_FORM"] == "v1"
    command = _build_worker_command(config) if is_v1 else _build_transfer_command(config)
    mover = subprocess.Popen(command, shell=True, start_new_session=True)
    threading.Thread(target=lambda: os._exit(mover.wait() or 1), daemon=True).start()  # ends with the mover
    scheduler = _Scheduler(config)
    methods = {
        "command": lambda: command,
        "open": scheduler.open if is_v1 else lambda _: None,
        "match": scheduler.match,
        "name": functools.partial(_name_v1_blocks if is_v1 else _name_blocks, config),
        "name_handed_over": functools.partial(_name_handed_over, config),
    }
    serve("engine", methods)
