"""Tiny configurations of other people's architectures: their own defaults with small numbers.

A number is small by its name, whatever the architecture; `MORE` has what a default leaves unset, or where numbers
depend on each other.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN, LAYERS, HEADS, VOCAB = 32, 2, 4, 96
# A small model of each of forty of timm's modules that take seconds for a step of 4 images.
TIMM: list[str] = """
    coat_tiny convit_tiny cpubone_nano crossvit_tiny_240 cs3darknet_focus_s cspnext_tiny deit_tiny_patch16_224
    densenet121 dla46x_c edgenext_xx_small efficientformerv2_s0 efficientvim_m1 efficientvit_b0 efficientvit_m0
    ese_vovnet19b_slim_dw eva02_tiny_patch14_224 fasternet_t0 fastvit_t8 ghostnet_050 hardcorenas_b
    inception_next_atto lcnet_035 lcnetv2_small levit_128s mnasnet_small mobilevit_xxs pit_ti_224 regnetx_002
    repghostnet_050 repvit_m1 resnet10t rexnet_100 shvit_s1 starnet_s050 test_byobnet test_coatnet test_convnext
    test_mambaout test_nfnet test_vit test_vit_relpos
""".split()  # noqa: SIM905
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "dim",
            "embed_dim",
            "model_dim",
            "lru_width",
            "embedding_size",
            "decoder_hidden_size",
            "emb_dim",
        ),
        HIDDEN,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "hidden_dim",
            "ffn_dim",
            "d_ff",
            "d_inner",
            "n_inner",
            "ffn_hidden_size",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "mlp_hidden_size",
        ),
        64,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "encoder_layers",
            "decoder_layers",
            "num_decoder_layers",
            "num_encoder_layers",
            "num_hidden_groups",
        ),
        LAYERS,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
        HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num", "num_kv_heads"), 2),
    **dict.fromkeys(
        (
            "head_dim",
            "kv_channels",
            "d_kv",
            "attention_head_dim",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "global_head_dim",
            "swa_head_dim",
            "index_head_dim",
        ),
        8,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
            "q_lora_rank",
            "kv_lora_rank",
            "shared_intermediate_size",
            "moe_latent_size",
            "expert_intermediate_size",
        ),
        16,
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "n_positions",
            "max_source_positions",
            "max_target_positions",
            "max_sequence_length",
            "context_length",
            "max_seq_len",
            "seq_length",
        ),
        64,
    ),
    **dict.fromkeys(
        (
            "n_shared_experts",
            "first_k_dense_replace",
            "n_group",
            "topk_group",
            "mamba_n_groups",
            "num_memory_blocks",
            "n_groups",
            "num_shared_experts",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "mamba_n_heads",
            "mamba_d_head",
            "mamba_d_state",
            "state_size",
            "hidden_size_per_layer_input",
            "mamba_num_heads",
            "mamba_head_dim",
            "ssm_state_size",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "num_heads_linear",
        ),
        8,
    ),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 16,
    "attention_window": 16,
    "rotary_dim": 4,
    "decoder_start_token_id": 1,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "max_length": 64,
    "feature_projection_input_dim": 16,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
PER_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "layer_norm_types",
    "attn_layer_types",
    "block_types",
    "hybrid_override_pattern",
)


CHANCE = re.compile("drop|^mask_.*_prob$")
DEPTHS = ("depths", "depth", "stage_num_blocks", "num_blocks_per_stage")


def numbers(have: dict[str, Any]) -> dict[str, Any]:
    small = {name: value for name, value in SMALL.items() if type(have.get(name)) is int}
    if "kv_lora_rank" in small and "num_key_value_heads" in small:
        small["num_key_value_heads"] = HEADS  # latent attention has no groups
    for name in PER_LAYER:
        kinds = list(dict.fromkeys(have.get(name) or [])) if isinstance(have.get(name), list) else []
        if kinds:
            small[name] = (kinds * LAYERS)[: max(LAYERS, len(kinds))]
            layers = [one for one in ("num_hidden_layers", "n_layer", "num_layers") if one in small]
            small |= {one: max(small[one], len(small[name])) for one in layers}
    small |= {name: [1] * len(have[name]) for name in DEPTHS if isinstance(have.get(name), (list, tuple))}
    if isinstance(have.get("num_heads"), (list, tuple)) and "embed_dim" in small:
        small["num_heads"] = [2**stage for stage in range(len(have["num_heads"]))]
    # A layer that one rank leaves out by chance is gathered by the other: both would wait.
    chance = {name: 0.0 for name, value in have.items() if CHANCE.search(name) and isinstance(value, float)}
    if isinstance(have.get("conv_dim"), (list, tuple)):
        small["conv_dim"] = [16] * len(have["conv_dim"])
    return {**small, **chance}


def tiny(config_class: Any) -> Any:
    """A configuration of a class of transformers."""
    default = config_class()
    inner = {name: getattr(default, name, None) for name in getattr(config_class, "sub_configs", None) or {}}
    given = {name: tiny(type(one)) for name, one in inner.items() if one is not None}
    small = numbers({name: value for name, value in default.to_dict().items() if name not in inner})
    return config_class(**{**small, **given, **MORE.get(config_class.model_type, {})})


# What a default leaves unset, or where numbers depend on each other.
MORE: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 97, "patching_threshold": 4.0, "max_position_embeddings": 64},
    "blt_global_transformer": {"hidden_size": 64, "head_dim": None, "num_key_value_heads": None},
    "blt_local_encoder": {"hidden_size_global": 64, "num_key_value_heads": None},
    "blt_local_decoder": {"hidden_size_global": 64, "num_key_value_heads": None},
    "blt_patcher": {"num_key_value_heads": None},
    "convnext": {"patch_size": 4},
    "convnextv2": {"patch_size": 4},
    "cvt": {"depth": [1, 2, 3], "num_heads": [1, 2, 4], "embed_dim": [16, 32, 64]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 8,
        "head_dim": 16,
        "index_n_heads": 2,
        "shared_experts_intermediate_size": 16,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank", "head_dim")},
        **{f"swa_{name}": 8 for name in ("qk_nope_head_dim", "v_head_dim")},
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 8},
    "fsmt": {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB},
    "gemma3n_vision": {"architecture": "mobilenetv3_small_050"},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "intermediate_size": 64,
        "laurel_rank": 8,
    },
    "longcat_flash": {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2},
    "bailing_hybrid": {
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_group_size": 2,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            k: {"rope_type": "default", "rope_theta": 10000.0} for k in ("full_attention", "sliding_attention")
        }
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "esm": {"vocab_size": VOCAB, "mask_token_id": VOCAB - 1, "pad_token_id": 0},
    "esmc": {"num_key_value_heads": HEADS},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "kimi_linear": {"num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "levit": {"image_size": 64, "patch_size": 16},
    "led": {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "luke": {"entity_vocab_size": VOCAB, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "ministral": {"head_dim": 8},
    "mobilebert": {"embedding_size": 16},
    "mobilevitv2": {"image_size": 64, "patch_size": 2},
    "neomme": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "perceiver": {
        "d_model": 32,
        "d_latents": 32,
        "num_latents": 8,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    },
    "qwen4_exp_text": {
        "ngram_vocab_size_base": 64,
        "hc_lowrank": 8,
        "ple_embed_dim": 32,
        "split_ngram_parts": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16],
        "hidden_size": 32,
        "attention_head_size": 8,
        "feed_forward_size": 64,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 2,
    },
    "roc_bert": {
        **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), VOCAB),
        **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim"), 16),
    },
    "segformer": {"sr_ratios": [1, 1, 1, 1]},
    "swin": {"image_size": 64, "patch_size": 4, "window_size": 4},
    "swinv2": {"image_size": 64, "patch_size": 4, "window_size": 4},
    "donut-swin": {"image_size": 64, "patch_size": 4, "window_size": 2},
    "textnet": {"image_size": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "zaya": {"num_experts_per_tok": 1},
}
