"""Configurations as people have them, counted to the last parameter or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samerun.errors import UsageError
from samerun.plan import read_config, shape_of_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0", "use_cache": True,
    "vocab_size": 128256,
}  # fmt: skip


def llama(**changes: Any) -> dict[str, Any]:
    return {**LLAMA, **changes}


GPT2 = {
    "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "n_ctx": 1024,
    "vocab_size": 50257, "activation_function": "gelu_new", "attn_pdrop": 0.1,
}  # fmt: skip
PYTHIA = {
    "model_type": "gpt_neox", "hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32,
    "num_hidden_layers": 32, "vocab_size": 50432, "max_position_embeddings": 2048, "rotary_pct": 0.25,
    "use_parallel_residual": True, "tie_word_embeddings": False,
}  # fmt: skip

PUBLISHED = [
    (LLAMA, 8_030_261_248),  # Llama-3.1-8B
    (llama(vocab_size=32000, intermediate_size=11008, num_key_value_heads=32), 6_738_415_616),  # Llama-2-7B
    (llama(vocab_size=32000, num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64),
     68_976_648_192),  # Llama-2-70B
    (llama(model_type="mistral", vocab_size=32000, sliding_window=4096), 7_241_732_096),  # Mistral-7B-v0.1
    (llama(model_type="qwen2", hidden_size=3584, intermediate_size=18944, num_attention_heads=28,
           num_hidden_layers=28, num_key_value_heads=4, vocab_size=152064), 7_615_616_512),  # Qwen2.5-7B
    (llama(model_type="qwen3", intermediate_size=12288, num_hidden_layers=36, head_dim=128, vocab_size=151936),
     8_190_735_360),  # Qwen3-8B
    (llama(model_type="gemma", hidden_size=2048, intermediate_size=16384, num_attention_heads=8, num_hidden_layers=18,
           num_key_value_heads=1, head_dim=256, vocab_size=256000, tie_word_embeddings=True), 2_506_172_416),
    (GPT2, 124_439_808),
    (PYTHIA, 6_857_302_016),
]  # fmt: skip


@pytest.mark.parametrize(("config", "params"), PUBLISHED)
def test_parameter_counts_of_published_models(config: dict[str, Any], params: int) -> None:
    """The counts that each model's own weights give (model cards, safetensors metadata)."""
    assert shape_of_config(config).num_params == params


def test_a_file_or_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == shape_of_config(LLAMA)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (llama(model_type="mixtral"), "model_type 'mixtral' is not modelled"),
        (llama(num_experts=8), "num_experts=8 is not modelled"),
        (llama(kv_lora_rank=512), "kv_lora_rank=512 is not modelled"),
        (llama(attention_bias=True), "attention_bias=true is not modelled"),
        (llama(mystery=1, other=2), "unknown field mystery, other; if it changes no weight shape, add --ignore"),
        (llama(hidden_size=0), "hidden_size must be a positive whole number"),
        (llama(hidden_size="4096"), "hidden_size must be a positive whole number"),
        (llama(num_hidden_layers=True), "num_hidden_layers must be a positive whole number"),
        ({key: value for key, value in LLAMA.items() if key != "vocab_size"}, "vocab_size is missing"),
        (llama(num_key_value_heads=5), "does not divide num_heads 32"),
        ({}, "model_type None is not modelled"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        shape_of_config(config)
    assert said in str(refused.value)


def test_an_unknown_field_can_be_waived_by_name() -> None:
    assert shape_of_config(llama(mystery=1), ignore=["mystery"]) == shape_of_config(LLAMA)


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        read_config(file)
    with pytest.raises(UsageError, match="does not exist"):
        read_config(tmp_path / "missing.json")
