"""Causal language models: attention of many kinds, mixtures of experts, state spaces and mixtures of those."""

from __future__ import annotations

from typing import Any

from holdall.testing.families._registry import (
    HEADS,
    INNER,
    LAYERS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Made,
    hugging_face,
    register,
    tokens,
)

SPECIAL: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
USUAL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": 128,
    **SPECIAL,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
OLD: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 128,
    **SPECIAL,
}


def _decoder(
    name: str, prefix: str, settings: dict[str, Any], *, model: str = "", kind: str = "decoder", length: int = LENGTH
) -> None:
    @register(kind, name)
    def build() -> Made:
        made = hugging_face(model or f"{prefix}ForCausalLM", f"{prefix}Config", **settings)
        ids = tokens(length=length)
        return made, {"input_ids": ids, "labels": ids.clone()}


_decoder("gpt2", "GPT2", OLD, model="GPT2LMHeadModel")
_decoder("gpt2-no-cache", "GPT2", {**OLD, "use_cache": False}, model="GPT2LMHeadModel")
_decoder(
    "gpt-neo",
    "GPTNeo",
    {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 128,
        "window_size": 16,
        **SPECIAL,
    },
)
_decoder("gpt-neox", "GPTNeoX", USUAL)
_decoder("gptj", "GPTJ", {**OLD, "rotary_dim": 8})
_decoder("codegen", "CodeGen", {**OLD, "rotary_dim": 8})
_decoder("gpt-bigcode", "GPTBigCode", OLD)
_OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "ffn_dim": INNER,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": WIDTH,
    **SPECIAL,
}
_decoder("opt", "OPT", {**_OPT, "num_hidden_layers": LAYERS})
_decoder("opt-layerdrop", "OPT", {**_OPT, "num_hidden_layers": 4, "layerdrop": 0.3})
_SHORT = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, **SPECIAL}
_decoder("bloom", "Bloom", {**_SHORT, "n_layer": LAYERS, "n_head": HEADS})
_decoder("falcon", "Falcon", {**_SHORT, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS})
_decoder("mpt", "Mpt", {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 128})
_decoder("phi", "Phi", USUAL)
_decoder("phi3", "Phi3", USUAL)
_decoder("llama", "Llama", {**USUAL, **GROUPED})
_decoder("llama-eager", "Llama", {**USUAL, **GROUPED, "attn_implementation": "eager"})
_decoder("llama-tied", "Llama", {**USUAL, **GROUPED, "tie_word_embeddings": True})
_decoder("llama-dropout", "Llama", {**USUAL, **GROUPED, "attention_dropout": 0.1})
_decoder("mistral", "Mistral", {**USUAL, **GROUPED, "sliding_window": 16})
_decoder("qwen2", "Qwen2", {**USUAL, **GROUPED})
_decoder("qwen3", "Qwen3", {**USUAL, **GROUPED, "head_dim": 16})
_decoder("gemma", "Gemma", {**USUAL, **GROUPED, "head_dim": 16})
_decoder("gemma2", "Gemma2", {**USUAL, **GROUPED, "head_dim": 16, "sliding_window": 16})
_decoder("gemma3", "Gemma3Text", {**USUAL, **GROUPED, "head_dim": 16, "sliding_window": 16}, model="Gemma3ForCausalLM")
_decoder("olmo", "Olmo", USUAL)
_decoder("olmo2", "Olmo2", USUAL)
_decoder("stablelm", "StableLm", {**USUAL, **GROUPED})
_decoder("starcoder2", "Starcoder2", {**USUAL, **GROUPED})
_decoder("granite", "Granite", {**USUAL, **GROUPED, "logits_scaling": 4.0})
_decoder("cohere", "Cohere", {**USUAL, **GROUPED})
_decoder("smollm3", "SmolLM3", {**USUAL, **GROUPED})
_decoder("helium", "Helium", {**USUAL, **GROUPED, "head_dim": 16})
_decoder("biogpt", "BioGpt", USUAL)

_FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_decoder("mixtral", "Mixtral", {**USUAL, **GROUPED, "num_local_experts": 4, "output_router_logits": True}, kind="mixture")
_decoder("qwen2-moe", "Qwen2Moe", {**USUAL, **GROUPED, **_FEW, "shared_expert_intermediate_size": 64}, kind="mixture")
_decoder("qwen3-moe", "Qwen3Moe", {**USUAL, **GROUPED, **_FEW, "head_dim": 16}, kind="mixture")
_decoder("olmoe", "Olmoe", {**USUAL, "num_experts": 4, "num_experts_per_tok": 2}, kind="mixture")
_decoder(
    "deepseek-v3",
    "DeepseekV3",
    {
        **USUAL,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    kind="mixture",
)
_decoder(
    "gpt-oss",
    "GptOss",
    {**USUAL, **GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    kind="mixture",
)

_decoder("mamba", "Mamba", {**_SHORT, "num_hidden_layers": LAYERS, "state_size": 8}, kind="state space", length=12)
_MAMBA2 = {"num_hidden_layers": LAYERS, "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16}
_decoder("mamba2", "Mamba2", {**_SHORT, **_MAMBA2}, kind="state space")
_RWKV = {"num_hidden_layers": LAYERS, "attention_hidden_size": WIDTH, "context_length": 128}
_decoder("rwkv", "Rwkv", {**_SHORT, **_RWKV}, kind="state space", length=8)
_decoder(
    "jamba",
    "Jamba",
    {
        **USUAL,
        **GROUPED,
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 8,
    },
    kind="state space",
    length=12,
)
_decoder(
    "bamba",
    "Bamba",
    {
        **USUAL,
        **GROUPED,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    kind="state space",
)
_decoder(
    "recurrent-gemma",
    "RecurrentGemma",
    {**USUAL, "num_hidden_layers": 3, "lru_width": WIDTH, "attention_window_size": 16},
    kind="state space",
)
