"""The checkpoint, its KV memory, and one forward pass over the chunks of a step."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import mmap
import os
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from engine.model.attention import paged
from engine.model.attention.block_index import width_of
from engine.model.attention.retrieval import Retrieval, SparseState, reads_host_memory
from engine.model.device_copies import wait_for_device
from engine.model.out_of_memory import LEAVE_ROOM, LEAVE_ROOM_BESIDE, told_if_too_large
from engine.model.packed_linear import pack_linears
from engine.model.sampler import Choice, SeenTokens, sample
from engine.model.weights import name_weights, read_version
from engine.scheduling.request import GREATEST_PENALTY, LEAST_PENALTY, SamplingDefaults
from engine.scheduling.retrieval_config import Regime, RetrievalConfig
from engine.scheduling.scheduler import Chunk
from kvstore_backend import ConfigError, Namespace, Span, fingerprint_model
from kvstore_backend.manifest import collect_facts
from kvstore_backend.namespace import fingerprint_config
from kvstore_backend.resharding import ShardingFamily, find_family

__all__ = [
    "KVShape",
    "ModelRunner",
    "check_length",
    "choose_device",
    "choose_dtype",
    "load_model_config",
    "load_tokenizer",
]

log = logging.getLogger(__name__)

LAYOUT = "layer,kv,head,token,dim"
# Block sizes of other instances whose blocks this one reads, if one of both sizes divides the other.
_OTHER_BLOCK_SIZES = (16, 32, 64, 128, 256)

# Numbers of a generation_config.json that are defaults for requests, with their minimum and maximum.
_DEFAULTS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, math.inf),
    "repetition_penalty": (LEAST_PENALTY, GREATEST_PENALTY),
}
# Other settings there that change transformers' answers, with the values that change nothing.
_IGNORED_SETTINGS = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "frequency_penalty": 0.0,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "min_p": 0.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "presence_penalty": 0.0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}


@dataclass(frozen=True)
class KVShape:
    """Shape of one KV block: ``[layers, 2, kv_heads, block_size, head_dim]`` of ``dtype``."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of one block in bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    def list_axes(self) -> list[tuple[str, int]]:
        """Return names and sizes of the axes in ``LAYOUT``, the last one's size in bytes."""
        sizes = (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim * self.dtype.itemsize)
        return list(zip(LAYOUT.split(","), sizes, strict=True))


def load_model_config(folder: str) -> Any:
    """Load a checkpoint's text configuration, if this engine can run it.

    Raises:
        ConfigError: no readable config.json, or a feature that the paged attention does not have.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as exc:
        reason = str(exc).strip().splitlines()[0]
        raise ConfigError(f"--model {folder!r} is not a checkpoint that transformers can load: {reason}") from exc
    config = config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        other = ", ".join(sorted(layer_types - {"full_attention"}))
        raise ConfigError(f"--model {folder!r} has layers of type {other}; only full attention is supported so far")
    return config


def check_length(folder: str, config: Any, max_model_len: int) -> None:
    """Check that ``max_model_len`` tokens fit the model's positions, and that its RoPE is fixed within them.

    transformers chooses the frequencies of "longrope" for a whole forward pass, by the largest position in it: one long
    sequence would rotate the keys of all sequences in the same step. Up to the length that the model was first trained
    for, the frequencies are fixed. ("dynamic" scaling begins after ``max_position_embeddings``, which is never
    exceeded.)

    Raises:
        ConfigError: they do not fit, or it is not fixed.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and max_model_len > longest:
        raise ConfigError(f"--max-model-len {max_model_len} is more than the {longest} positions of {folder}")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and max_model_len > rope["original_max_position_embeddings"]:
        raise ConfigError(
            f"--max-model-len {max_model_len}: beyond {rope['original_max_position_embeddings']} tokens the longrope "
            f"scaling of {folder} would depend on what else is in the batch; lower it to that"
        )


class ModelRunner:
    """Owns the weights and the KV memory; computes, samples, and locates blocks in memory.

    Args:
        folder: checkpoint folder.
        config: ``load_model_config(folder)``.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: dtype of weights and KV.
        block_size: tokens in a block.
        has_dynamic_weights: the checkpoint's files may be written while this runs, for ``update_weights``: the weights
            are copied into memory of their own, and their digest is in the namespace. Else they may be mapped from the
            files' pages, which instances share.

    ``allocate_kv`` must be called before ``run``.

    Raises:
        ConfigError: the weights cannot be loaded, or a number in its generation_config.json cannot be used.
    """

    def __init__(
        self,
        folder: str,
        config: Any,
        device: str,
        dtype: torch.dtype,
        block_size: int,
        *,
        has_dynamic_weights: bool = False,
    ) -> None:
        paged.register_attention()
        self._folder = folder
        transformers_logging.disable_progress_bar()
        self.device = torch.device(device)
        _choose_kernels(self.device)
        self.model, self._lacking = _read_model(folder, dtype, is_copied=has_dynamic_weights)
        self.version = read_version(folder)
        """The version of the weights from ``version.yaml`` or the last update; "" if neither gives one."""
        named = name_weights(self.version, self.model) if has_dynamic_weights else self.version
        self.vocab_size = int(self.model.get_output_embeddings().weight.shape[0])
        self._place_model(self.model)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.shape = KVShape(config.num_hidden_layers, kv_heads, block_size, head_dim, dtype)
        self.facts = collect_facts(folder, "fastdeploy-kvstore engine", "kvstore")
        self.namespace = Namespace(
            model=fingerprint_model(folder),
            kv_dtype=str(dtype).removeprefix("torch."),
            block_size=block_size,
            num_layers=self.shape.num_layers,
            num_kv_heads=kv_heads,
            head_size=head_dim,
            layout=LAYOUT,
            weights_version=named,
        )
        self._configuration = fingerprint_config(folder)
        self.family = self._find_family(self.namespace)
        self.eos_token_ids = _eos_token_ids(config, self.model, self.vocab_size)
        self.defaults = _read_defaults(folder, self.model.generation_config)
        _warn_of_ignored_settings(folder, self.model.generation_config)
        self.kv = torch.empty(0)
        self._kv_memory: mmap.mmap | None = None
        self.retrieval: Retrieval | None = None
        self._seen_tokens = SeenTokens()

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate KV memory of ``num_blocks`` blocks.

        It must be zeroed: attention masks unused tokens by weight 0, and 0 times NaN is NaN.

        Raises:
            ConfigError: there is no memory for them.
        """
        shape = self.shape
        axes = (num_blocks, shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        with told_if_too_large(f"{num_blocks} KV blocks; {LEAVE_ROOM_BESIDE}"):
            if self.device.type == "cpu":
                self._kv_memory = _map_on_demand(num_blocks * shape.nbytes)
                self.kv = torch.frombuffer(self._kv_memory, dtype=torch.uint8).view(shape.dtype).view(axes)
            else:
                self.kv = torch.zeros(axes, dtype=shape.dtype, device=self.device)

    def _place_model(self, model: Any) -> None:
        """Put a loaded model on the device, ready to run."""
        with told_if_too_large(f"--model {self._folder!r} on {self.device}; use --device cpu or a smaller one"):
            model.to(self.device).eval()
        _settle_rope(model)
        if self.device.type == "cpu":
            pack_linears(model)
        _shorten_look_ups(model)

    @property
    def has_weights(self) -> bool:
        """Whether the model has weights, so that it can ``run``."""
        return self.model is not None

    def free_weights(self) -> None:
        """Free the memory of the weights; call ``update_weights`` before the next ``run``."""
        self.model = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def update_weights(self, version: str = "") -> None:
        """Load the weights that the checkpoint's folder has now. Must not run concurrently with ``run``.

        ``namespace`` and ``family`` are then those of the new weights; if the old weights stay in use, those of the
        old.

        Args:
            version: version of the weights; "": as ``version.yaml`` says.

        Raises:
            ConfigError: they cannot be loaded, or are another model's; the weights are unchanged if ``has_weights`` is
                still true.
        """
        folder, dtype = self._folder, self.shape.dtype
        fingerprint = fingerprint_model(folder)
        if fingerprint_config(folder) != self._configuration:
            raise ConfigError(f"{folder}: its configuration has changed; only weights can be updated: start again")
        version = version or read_version(folder)
        model, lacking = _read_model(folder, dtype, is_copied=True)
        if lacking != self._lacking:
            names = ", ".join(sorted(lacking - self._lacking)) or "tensors that were not there before"
            raise ConfigError(f"{folder}: its weights are not those of the model that runs: {names}")
        if fingerprint_model(folder) != fingerprint:
            raise ConfigError(f"{folder} has changed while its weights were loaded; update again")
        # Everything that can fail comes before the new weights are used: they never run under the old ones' namespace.
        namespace = replace(self.namespace, model=fingerprint, weights_version=name_weights(version, model))
        facts = collect_facts(folder, "fastdeploy-kvstore engine", "kvstore")
        family = self._find_family(namespace)
        if self.model is None or self.device.type == "cpu":
            self._place_model(model)
            self.model = model
        else:  # without memory for two sets of weights
            running, self.model = self.model, None  # weights of which only a part is new must not run
            try:
                running.load_state_dict(model.state_dict())
            except Exception as exc:  # each device fails in its own way
                reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
                raise ConfigError(
                    f"{folder}: its weights are in part on {self.device}, and then failed: {reason}"
                ) from exc
            self.model = running
        self.namespace, self.version, self.facts, self.family = namespace, version, facts, family

    def _find_family(self, namespace: Namespace) -> ShardingFamily:
        heads = self.shape.num_kv_heads
        return find_family(namespace, heads, self.shape.list_axes(), block_sizes=_OTHER_BLOCK_SIZES)

    def free_kv(self) -> None:
        """Free the KV memory's pages; its addresses stay. Call ``restore_kv`` before the next use."""
        if self._kv_memory is not None:
            self._kv_memory.madvise(mmap.MADV_DONTNEED)  # the next read there returns zeros
        elif self.device.type == "cuda":
            self.kv.untyped_storage().resize_(0)
            torch.cuda.empty_cache()

    def restore_kv(self) -> None:
        """Make the KV memory usable again, with zeros in it.

        Raises:
            ConfigError: there is no memory for it.
        """
        if self.device.type == "cuda":
            with told_if_too_large(f"{len(self.kv)} KV blocks; {LEAVE_ROOM_BESIDE}"):
                self.kv.untyped_storage().resize_(self.kv.numel() * self.kv.element_size())
                self.kv.zero_()

    def enable_retrieval(self, config: RetrievalConfig, max_num_seqs: int, max_model_len: int) -> None:
        """Enable sparse decoding for sequences with a sparse regime; call it after ``allocate_kv``.

        Raises:
            ConfigError: there is no memory for the index.
        """
        with told_if_too_large("the index of retrieval; lower --max-num-seqs or --max-model-len"):
            self.retrieval = Retrieval(config, self.kv, max_num_seqs, max_model_len)

    def try_out(self) -> None:
        """Compute one token, to check that all of the model's attention is ours; it leaves no state.

        Raises:
            ConfigError: a layer attends without transformers' AttentionInterface, or in a way that ours cannot; or
                there is no memory for it.
        """
        batch = paged.PagedBatch(self.kv, [paged.ChunkShape(0, 1, [0])], [0])
        reason = ""
        try:
            with told_if_too_large(f"one token; {LEAVE_ROOM}", any_failure=False):
                self._compute_logits(batch)
        except ConfigError:
            raise
        except Exception as exc:  # each architecture fails in its own way
            reason = str(exc).strip().splitlines()[0]
        self.kv[0] = 0
        if not reason and batch.layers != set(range(self.shape.num_layers)):
            reason = "its layers do not attend through transformers' AttentionInterface"
        if reason:
            kind = type(self.model).__name__
            raise ConfigError(f"--model {self._folder!r}: this engine cannot run a {kind}: {reason}")

    def count_retrieval_bytes(self, config: RetrievalConfig, max_num_seqs: int, max_model_len: int) -> int:
        """Return the maximum bytes that sparse attention takes on the device, in addition to KV blocks.

        They are the index, tables, and on a GPU the blocks that it reads together: working sets of offloaded sequences.
        """
        shape = self.shape
        blocks = -(-max_model_len // shape.block_size)
        vectors = blocks * shape.num_layers * shape.num_kv_heads
        index = vectors * width_of(config.representative, shape.head_dim) * shape.dtype.itemsize
        index += (vectors + blocks) * torch.long.itemsize
        if reads_host_memory(self.device):
            return max_num_seqs * index
        read = sum(config.max_blocks_read(max_model_len, layer) for layer in range(shape.num_layers))
        return max_num_seqs * (index + read * shape.nbytes // shape.num_layers)

    def count_free_bytes(self) -> int:
        """Return the device memory that could be allocated now, in bytes."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        with contextlib.suppress(OSError):  # not Linux
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def span(self, block: int) -> Span:
        """Return the span of a block's bytes."""
        return Span(self.kv.data_ptr() + block * self.shape.nbytes, self.shape.nbytes)

    def find_broken_blocks(self, blocks: SequenceOf[int]) -> list[bool]:
        """Return whether each block holds a NaN or an infinity."""
        return [not bool(self.kv[block].isfinite().all()) for block in blocks]

    @torch.inference_mode()
    def run(self, chunks: SequenceOf[Chunk]) -> list[Choice]:
        """Compute the chunks; return the next token of each chunk that ``samples``, in order.

        The host waits for the device once, at the end.
        """
        token_ids: list[int] = []
        for chunk in chunks:
            start = chunk.sequence.num_computed
            token_ids += chunk.sequence.token_ids[start : start + chunk.num_tokens]
        shapes = [
            paged.ChunkShape(c.sequence.num_computed, c.num_tokens, c.sequence.block_table, c.samples, state)
            for c, state in zip(chunks, map(self._sparse_state, chunks), strict=True)
        ]
        # Only the rows that need a next token go through the vocabulary projection.
        logits = self._compute_logits(paged.PagedBatch(self.kv, shapes, token_ids, self.retrieval))
        sequences = [chunk.sequence for chunk in chunks if chunk.samples]
        if not sequences:
            wait_for_device(self.device)
            return []
        return sample(logits, sequences, self.eos_token_ids, self._seen_tokens)

    def wait_for_device(self) -> None:
        """Wait until the device has finished all its work.

        Raises:
            RuntimeError: a part of it failed.
        """
        wait_for_device(self.device)

    def _sparse_state(self, chunk: Chunk) -> SparseState | None:
        """Return the chunk's sparse state, if it decodes sparsely; prompts, in any chunks, are computed exactly."""
        sequence = chunk.sequence
        if self.retrieval is None or sequence.regime is Regime.DENSE or not sequence.is_decoding:
            return None
        return self.retrieval.state_of(sequence)

    @torch.inference_mode()
    def _compute_logits(self, batch: paged.PagedBatch) -> torch.Tensor:
        """Compute the logits of the batch's ``logit_rows``, ``[rows, vocabulary]``."""
        output = self.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            paged=batch,
            logits_to_keep=batch.logit_rows,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def _read_model(folder: str, dtype: torch.dtype, *, is_copied: bool) -> tuple[Any, frozenset[str]]:
    """Read a checkpoint's model into host memory; return it, and the names of the tensors that its files lack.

    Unless it ``is_copied``, its tensors may be mapped from the pages of the checkpoint's files.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        with told_if_too_large(f"--model {folder!r} on this machine; use a smaller one", any_failure=False):
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=paged.ATTENTION_NAME,
                local_files_only=True,
                output_loading_info=True,
            )
    except ConfigError:
        raise
    except Exception as exc:  # transformers raises many kinds here
        reason = str(exc).strip().splitlines()[0]
        raise ConfigError(f"--model {folder!r} has no weights that transformers can load: {reason}") from exc
    if is_copied:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return model, frozenset(map(str, info["missing_keys"]))


def _choose_kernels(device: torch.device) -> None:
    """Make attention on a GPU use flash attention and similar kernels, not cuDNN, in all of this process.

    For bfloat16 and float16 torch prefers cuDNN on Hopper and later (``check_prefer_cudnn_attention`` in its
    sdp_utils.cpp). cuDNN builds a plan for every new shape, which took 0.4 s in a measurement, and caches all plans;
    here every token of a decode has another shape.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def _settle_rope(model: torch.nn.Module) -> None:
    """Stop layers from checking whether a text is longer than the first length of RoPE, which waits for the device.

    ``check_length`` limits all texts to that length, and a layer begins with its frequencies.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) in ("dynamic", "longrope"):
            module.rope_type = "default"  # type: ignore[assignment]


def _shorten_look_ups(model: torch.nn.Module) -> None:
    """Store submodules and weights where Python looks first, to avoid ``Module.__getattr__``.

    These look-ups were a third of the bytecodes of a layer, and a tenth of the host's time of a decode step, which on a
    GPU is only as fast as its host. An attribute that is set later is found, too: ``Module.__setattr__`` removes the
    stored one.
    """
    for module in model.modules():
        module.__dict__.update(module._modules)
        module.__dict__.update(module._parameters)


def _map_on_demand(nbytes: int) -> mmap.mmap:
    """Map host memory of zeros that the system commits at the first write, in large pages if available.

    With pages of 4 KiB the first load into 16 MiB of it took 44 ms instead of 11, mostly because of page faults.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _eos_token_ids(config: Any, model: Any, vocab_size: int) -> frozenset[int]:
    """The tokens that end a text, without those that the model has no logit of: some checkpoints say -1 for none."""
    ids: set[int] = set()
    for source in (config, model.generation_config):
        eos = getattr(source, "eos_token_id", None)
        ids.update([eos] if isinstance(eos, int) else eos or [])
    return frozenset(token for token in ids if 0 <= token < vocab_size)


def _read_defaults(folder: str, generation_config: Any) -> SamplingDefaults:
    """Read the checkpoint's sampling defaults for requests that give none: the same ones as vLLM reads.

    Raises:
        ConfigError: a number there cannot be used.
    """
    found: dict[str, Any] = {}
    for name, (least, greatest) in _DEFAULTS.items():
        value = getattr(generation_config, name, None)
        if value is None:
            continue
        kinds = int if name == "top_k" else int | float
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= greatest:
            limits = f"from {least:g} to {greatest:g}" if greatest < math.inf else f"of at least {least:g}"
            raise ConfigError(
                f"--model {folder!r}: {name} {value!r} in its generation_config.json is no number {limits}"
            )
        found[name] = max(value, 0) if name == "top_k" else float(value)
    if found:
        log.info("Of requests that do not say it, %s says %s in its generation_config.json", folder, found)
    return SamplingDefaults(max_tokens=_default_max_tokens(folder, generation_config), **found)


def _default_max_tokens(folder: str, generation_config: Any) -> int | None:
    """Return the token limit of an answer if the client gives none; None: as many as the context holds."""
    limit = getattr(generation_config, "max_new_tokens", None)
    if limit is None:
        return None
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(
            f"--model {folder!r}: max_new_tokens {limit!r} in its generation_config.json is no positive number"
        )
    return limit


def _warn_of_ignored_settings(folder: str, generation_config: Any) -> None:
    values = {name: getattr(generation_config, name, None) for name in _IGNORED_SETTINGS}
    names = [name for name, value in values.items() if value not in (None, [], _IGNORED_SETTINGS[name])]
    if names:
        log.warning(
            "Answers may not be transformers': what the generation_config.json of %s says of %s is not done",
            folder,
            ", ".join(names),
        )


def load_tokenizer(folder: str) -> Any:
    """Load the checkpoint's tokenizer.

    Raises:
        ConfigError: there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        # Without a tokenizer's files some classes load an empty vocabulary instead of failing.
        if not tokenizer("a", add_special_tokens=False)["input_ids"]:
            raise ValueError("its vocabulary is empty")
    except Exception as exc:  # transformers raises many kinds here
        reason = str(exc).strip().splitlines()[0]
        raise ConfigError(f"--model {folder!r} has no tokenizer that transformers can load: {reason}") from exc
    return tokenizer


def choose_device(wanted: str) -> str:
    """Return ``cpu`` or ``cuda``; ``auto`` is cuda if there is one.

    Raises:
        ConfigError: cuda is wanted and not available.
    """
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: PyTorch sees no CUDA device; use --device cpu")
    return "cuda" if has_cuda and wanted != "cpu" else "cpu"


def choose_dtype(wanted: str, config: Any) -> torch.dtype:
    """Return the dtype of weights and KV; ``auto`` is the one that the checkpoint was saved in."""
    if wanted != "auto":
        chosen: torch.dtype = getattr(torch, wanted)
        return chosen
    saved = getattr(config, "dtype", None)
    return saved if isinstance(saved, torch.dtype) else torch.float32
