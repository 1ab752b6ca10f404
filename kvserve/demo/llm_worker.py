"""The processes of `kvserve demo-llm`: `python -m kvserve.demo.llm_worker alone|prefill|decode`.

Each loads the model, says `ready` on standard output, takes one job as a JSON line from standard
input, says `result` and ends. They share nothing but the server and the token ids of the prompt:
`alone` never stores or fetches, and `decode` starts its job when `prefill` has ended.

Every run that is compared splits its prompt at the same token, so that the same sums are made in
the same order and float32 KV must give the same tokens.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from kvclient import Client, KvserveError
from kvserve.demo.llm_model import CHUNK_TOKENS, Engine, KvMemory, reusable_tokens
from kvserve.demo.llm_prompt import user_message

Job = dict[str, Any]
Result = dict[str, Any]


def say(event: str, **values: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


def alone(engine: Engine, job: Job) -> Result:
    """The uninterrupted run, and how long a full prefill takes to the first token."""
    tokenizer = engine.tokenizer
    messages = [{"role": "user", "content": user_message()}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    reused = reusable_tokens(prompt)
    memory = engine.memory(len(prompt) + job["new_tokens"])

    ttft_s: list[float] = []
    for _ in range(job["repeats"]):
        memory.wipe()
        started = time.perf_counter()
        logits = engine.step(prompt, memory, cached_tokens=0)
        _first_token(logits)
        ttft_s.append(time.perf_counter() - started)
    unsplit, _ = _continue(engine, memory, logits, len(prompt), job["new_tokens"])

    memory.wipe()
    engine.step(prompt[:reused], memory, cached_tokens=0)
    logits = engine.step(prompt[reused:], memory, cached_tokens=reused)
    tokens, logits_digest = _continue(engine, memory, logits, len(prompt), job["new_tokens"])
    return {
        "prompt": prompt,
        "reused_tokens": reused,
        "chunk_tokens": CHUNK_TOKENS,
        "ttft_s": ttft_s,
        "tokens": tokens,
        "logits_digest": logits_digest,
        "unsplit_tokens": unsplit,
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
    }


def prefill(engine: Engine, job: Job) -> Result:
    """Process A: computes the prompt and stores each layer while the next ones compute."""
    prompt: list[int] = job["prompt"]
    memory = engine.memory(len(prompt))
    with Client(job["address"]) as client:
        return {
            dtype: _compute_and_store(engine, client, prompt, dtype, memory)
            for dtype in job["dtypes"]
        }


def _compute_and_store(
    engine: Engine, client: Client, prompt: list[int], dtype: str, memory: KvMemory
) -> Result:
    reused = reusable_tokens(prompt)
    descriptor = engine.descriptor(prompt, dtype)
    outbox = memory if dtype == "float32" else engine.memory(reused, dtype)
    to_outbox = _copy_layer(memory, outbox, reused)
    memory.wipe()
    with client.store(descriptor, outbox.placement(descriptor)) as store:
        sending: list[Future[None]] = []

        def send(layer_index: int) -> None:
            to_outbox(layer_index)
            sending.append(store.post_layer(layer_index))

        engine.step(prompt[:reused], memory, cached_tokens=0, after_layer=send)
        sent_early = sum(layer.done() for layer in sending)
        # A prefill worker owes its caller the first token; the KV of the tail stays here.
        _first_token(engine.step(prompt[reused:], memory, cached_tokens=reused))
        for layer in sending:
            layer.result()
        result = store.finish()
    if not result.is_whole:
        raise RuntimeError(f"not every chunk was stored: {result}")
    return {
        "size_bytes": descriptor.payload_size_bytes,
        "layers": len(sending),
        "layers_sent_early": sent_early,
    }


def decode(engine: Engine, job: Job) -> Result:
    """Process B: fetches what A stored, computes the rest of the prompt and continues."""
    prompt: list[int] = job["prompt"]
    memory = engine.memory(len(prompt) + job["new_tokens"])
    # The first pass of a process pays for torch's buffers; a worker that serves has done that.
    engine.step(prompt[:CHUNK_TOKENS], memory, cached_tokens=0)
    with Client(job["address"]) as client:
        client.server_info()
        return {
            dtype: _fetch_and_continue(engine, client, job, dtype, memory)
            for dtype in job["dtypes"]
        }


def _fetch_and_continue(
    engine: Engine, client: Client, job: Job, dtype: str, memory: KvMemory
) -> Result:
    prompt: list[int] = job["prompt"]
    inbox = memory if dtype == "float32" else engine.memory(reusable_tokens(prompt), dtype)
    ttft_s: list[float] = []
    requests: list[int] = []
    for _ in range(job["repeats"]):
        memory.wipe()
        inbox.wipe()
        requests_before = client.requests["Fetch"]
        started = time.perf_counter()
        logits = _fetch_and_compute(engine, client, prompt, dtype, (inbox, memory))
        _first_token(logits)
        ttft_s.append(time.perf_counter() - started)
        requests.append(client.requests["Fetch"] - requests_before)
    tokens, logits_digest = _continue(engine, memory, logits, len(prompt), job["new_tokens"])
    return {
        "ttft_s": ttft_s,
        "fetch_requests": max(requests),
        "tokens": tokens,
        "logits_digest": logits_digest,
    }


def _fetch_and_compute(
    engine: Engine, client: Client, prompt: list[int], dtype: str, kv: tuple[KvMemory, KvMemory]
) -> torch.Tensor:
    """One fetch; layer i of the model runs as soon as layer i of the prefix is there.

    `kv`: where the fetch lands and where the model reads; for float32 they are the same. An engine
    would compute the chunks that are missing; here they were just stored, so it is an error.
    """
    inbox, memory = kv
    reused = reusable_tokens(prompt)
    descriptor = engine.descriptor(prompt, dtype)
    to_memory = _copy_layer(inbox, memory, reused)
    with client.fetch(descriptor, inbox.placement(descriptor)) as fetch:
        layers = fetch.layers()

        def arrive(layer_index: int) -> None:
            event = next(layers)
            if event.layer_index != layer_index or event.missing:
                raise RuntimeError(f"layer {layer_index} of the prefix is not whole: {event}")
            to_memory(layer_index)

        logits = engine.step(prompt[reused:], memory, cached_tokens=reused, before_layer=arrive)
        fetch.wait()
    return logits


def _copy_layer(source: KvMemory, target: KvMemory, tokens: int) -> Callable[[int], None]:
    """Converts one layer's KV between dtypes; nothing to do where both are the same memory."""

    def copy(layer_index: int) -> None:
        if source is not target:
            target.tensor[layer_index, :, :, :tokens] = source.tensor[layer_index, :, :, :tokens]

    return copy


def _first_token(logits: torch.Tensor) -> int:
    return int(logits.argmax())


def _continue(
    engine: Engine, memory: KvMemory, logits: torch.Tensor, cached_tokens: int, new_tokens: int
) -> tuple[list[int], str]:
    """Greedy tokens up to `new_tokens` or the end token, and a digest of every step's logits."""
    digest = hashlib.sha256(logits.numpy().tobytes())
    tokens = [_first_token(logits)]
    while len(tokens) < new_tokens and tokens[-1] != engine.end_token:
        logits = engine.step(tokens[-1:], memory, cached_tokens=cached_tokens)
        cached_tokens += 1
        digest.update(logits.numpy().tobytes())
        tokens.append(_first_token(logits))
    return tokens, digest.hexdigest()


def main() -> None:
    run = {"alone": alone, "prefill": prefill, "decode": decode}[sys.argv[1]]
    try:
        engine = Engine(with_tokenizer=run is alone)
        say("ready", pid=os.getpid())
        job = sys.stdin.readline()
        if job:
            say("result", **run(engine, json.loads(job)))
    except KvserveError as error:
        say("failed", message=f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
