"""Reads a Hugging Face `config.json` as people have it.

A field that changes the count and is not modelled (experts, latent attention, vision towers) is refused by name. A
field this table does not know is refused too, with the way to say it does not matter: silence would be a guess.
Source of the fields: the `configuration_*.py` of transformers 4.x for each `model_type` below.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from samerun.errors import UsageError
from samerun.plan.model.shape import Family, Shape

_FAMILIES: Final[dict[str, Family]] = {
    "gpt2": Family.GPT,
    "gpt_neox": Family.GPT,
    "llama": Family.LLAMA,
    "mistral": Family.LLAMA,
    "qwen2": Family.LLAMA,
    "qwen3": Family.LLAMA,
    "phi3": Family.LLAMA,
    "gemma": Family.GEMMA,
    "gemma2": Family.GEMMA,
}

_TIED_BY_DEFAULT: Final = frozenset({"gpt2", "gemma", "gemma2"})

_NOT_MODELLED: Final = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok",
    "kv_lora_rank", "q_lora_rank", "vision_config", "audio_config", "text_config", "encoder_layers", "decoder_layers",
    "state_size", "ssm_cfg", "add_cross_attention", "mlp_bias", "parallel_attn",
)  # fmt: skip

_READ: Final = frozenset({
    "model_type", "num_hidden_layers", "n_layer", "hidden_size", "n_embd", "num_attention_heads", "n_head",
    "num_key_value_heads", "head_dim", "intermediate_size", "n_inner", "vocab_size", "n_positions", "n_ctx",
    "max_position_embeddings", "tie_word_embeddings", "attention_bias", "use_bias",
})  # fmt: skip

_WITHOUT_EFFECT: Final = frozenset({
    "architectures", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id", "eos_token_id",
    "pad_token_id", "hidden_act", "hidden_activation", "activation_function", "initializer_range", "rms_norm_eps",
    "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "rope_scaling", "rope_parameters", "attention_dropout",
    "hidden_dropout", "pretraining_tp", "sliding_window", "max_window_layers", "use_sliding_window", "layer_types",
    "rotary_pct", "rotary_emb_base", "rotary_emb_fraction", "use_parallel_residual", "classifier_dropout",
    "embd_pdrop", "attn_pdrop", "resid_pdrop",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
    "_name_or_path", "name_or_path", "auto_map", "embd_layer", "original_max_position_embeddings",
    "partial_rotary_factor",
    "final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar", "cache_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "unsloth_fixed",
    "unsloth_version", "output_past", "id2label", "label2id", "use_mrope", "rope_type",
    "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "problem_type",
})  # fmt: skip


def read_config(path: str | Path, *, ignore: Collection[str] = ()) -> Shape:
    """The shape in a `config.json` (a file, or the directory that holds one). Raises UsageError naming the field."""
    place = Path(path)
    place = place / "config.json" if place.is_dir() else place
    try:
        config = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            f"{place} does not exist; give a config.json, like --config models/llama/config.json"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{place} is not readable JSON ({error}); give the model's config.json") from error
    if not isinstance(config, dict):
        raise UsageError(f"{place} holds a {type(config).__name__}, expected a JSON object with 'model_type'")
    return shape_of_config(config, where=str(place), ignore=ignore)


def shape_of_config(config: dict[str, Any], *, where: str = "config", ignore: Collection[str] = ()) -> Shape:
    """The shape that a Hugging Face configuration describes. Raises UsageError for what is not modelled."""
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        raise UsageError(
            f"{where}: model_type {kind!r} is not modelled (nor are experts, encoders, state-space models); "
            f"modelled: {', '.join(sorted(_FAMILIES))}"
        )
    _refuse_unknown(config, where, ignore)
    return _gpt_shape(config, where) if _FAMILIES[kind] is Family.GPT else _llama_shape(config, where)


def _refuse_unknown(config: dict[str, Any], where: str, ignore: Collection[str]) -> None:
    for name in _NOT_MODELLED:
        if config.get(name) and name not in ignore:
            raise UsageError(
                f"{where}: {name}={config[name]!r} is not modelled, so the count would be wrong; "
                "pass a model on the meta device to samerun.plan.count_parameters and use --params"
            )
    unknown = sorted(set(config) - _READ - _WITHOUT_EFFECT - set(_NOT_MODELLED) - set(ignore))
    if unknown:
        ways = " ".join(f"--ignore {name}" for name in unknown)
        raise UsageError(f"{where}: unknown field {', '.join(unknown)}; if it changes no weight shape, add {ways}")


def _whole(config: dict[str, Any], where: str, *names: str) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise UsageError(f"{where}: {name} must be a positive whole number, got {value!r}")
        return value
    raise UsageError(f"{where}: {' or '.join(names)} is missing")


def _gpt_shape(config: dict[str, Any], where: str) -> Shape:
    hidden = _whole(config, where, "hidden_size", "n_embd")
    heads = _whole(config, where, "num_attention_heads", "n_head")
    is_neox = config["model_type"] == "gpt_neox"
    ffn = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    return Shape(
        family=Family.GPT,
        num_layers=_whole(config, where, "num_hidden_layers", "n_layer"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        ffn_size=_whole({"intermediate_size": ffn}, where, "intermediate_size"),
        vocab_size=_whole(config, where, "vocab_size"),
        max_positions=0 if is_neox else _whole(config, where, "n_positions", "n_ctx", "max_position_embeddings"),
        is_tied=bool(config.get("tie_word_embeddings", config["model_type"] in _TIED_BY_DEFAULT)),
    )


def _llama_shape(config: dict[str, Any], where: str) -> Shape:
    kind = config["model_type"]
    hidden = _whole(config, where, "hidden_size")
    heads = _whole(config, where, "num_attention_heads")
    if config.get("attention_bias"):
        raise UsageError(f"{where}: attention_bias=true is not modelled for model_type {kind!r}; use --params instead")
    head_size = config.get("head_dim") or (256 if kind.startswith("gemma") else hidden // heads)
    return Shape(
        family=_FAMILIES[kind],
        num_layers=_whole(config, where, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_size=_whole({"head_dim": head_size}, where, "head_dim"),
        ffn_size=_whole(config, where, "intermediate_size"),
        vocab_size=_whole(config, where, "vocab_size"),
        is_tied=bool(config.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT)),
        has_qkv_bias=kind == "qwen2",
        has_qk_norm=kind == "qwen3",
        num_norms_per_layer=4 if kind == "gemma2" else 2,
    )
