"""The models of the zoo: random ones with few parameters, of many architectures that vLLM serves on a CPU.

To add one, add a line to `MODELS`, run `make zoo` or the program with its name, and add its architecture to
`deltasync.vllm.releases`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 320
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "num_mtp_layers": 0,
    "moe_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "sliding_window": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Fields of the configs that have them."""


@dataclass(frozen=True, slots=True)
class Model:
    """One entry: the architecture by vLLM's name, and what its config has besides `SIZES`.

    `saved_as`: the class of transformers that it is made with, if that is another one. `renamed`: patterns of names of
    its tensors, and what replaces them. `fp32`: a pattern of the tensors that the checkpoint has in this type.
    `tensors`: names and shapes of a checkpoint that no class of transformers writes; `{}` is the number of a layer.
    `ranks`: over how many workers the model is sharded. `quantization`: how vLLM quantizes its weights while it loads
    them. `note`: what is special about it, for the table.
    `is_steady`: vLLM repeats its own answers, with deltasync or without; if it does not, only memory is compared.
    `unserved`: why vLLM does not serve it on a CPU, with deltasync or without.
    """

    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    ranks: int = 1
    quantization: str | None = None
    saved_as: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    fp32: str = ""
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    note: str = ""
    is_steady: bool = True
    unserved: str = ""


_TIED = {"tie_word_embeddings": True}
_ODD = {"vocab_size": 323}
_LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_CONV_THEN_FULL = {"layer_types": ["conv", "full_attention"]}
_SLIDING_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
_GEMMA4 = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 32, **_SLIDING_THEN_FULL}
_NOAUX = {"topk_method": "noaux_tc"}
_ROUTER_BIAS = "e_score_correction_bias"
_STATE_SPACE = "A_log|[.]D$|dt_bias"
_EXAONE = {
    r"^model[.]embed_tokens": "transformer.wte",
    r"^model[.]norm": "transformer.ln_f",
    r"^model[.]layers": "transformer.h",
    r"self_attn[.]o_proj": "attn.attention.out_proj",
    r"self_attn": "attn.attention",
    r"mlp[.]gate_proj": "mlp.c_fc_0",
    r"mlp[.]up_proj": "mlp.c_fc_1",
    r"mlp[.]down_proj": "mlp.c_proj",
    r"input_layernorm": "ln_1",
    r"post_attention_layernorm": "ln_2",
}
_INTERNLM2 = {
    "model.tok_embeddings.weight": (VOCABULARY, 128),
    "model.norm.weight": (128,),
    "output.weight": (VOCABULARY, 128),
    "model.layers.{}.attention_norm.weight": (128,),
    "model.layers.{}.ffn_norm.weight": (128,),
    "model.layers.{}.attention.wqkv.weight": (256, 128),
    "model.layers.{}.attention.wo.weight": (128, 128),
    "model.layers.{}.feed_forward.w1.weight": (192, 128),
    "model.layers.{}.feed_forward.w2.weight": (128, 192),
    "model.layers.{}.feed_forward.w3.weight": (192, 128),
}
_NO_FP8_EXPERTS = "the CPU build has no kernel that quantizes activations of experts"
_NO_SCAN = "the CPU build has no kernel for the selective scan"

MODELS: Mapping[str, Model] = {
    "llama": Model("LlamaForCausalLM"),
    "llama-biases": Model("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, **_TIED, **_ODD}),
    "llama-fp32": Model("LlamaForCausalLM", dtype="float32"),
    "llama-fp16": Model("LlamaForCausalLM", _ODD, dtype="float16"),
    "llama-tp2": Model("LlamaForCausalLM", {**_TIED, **_ODD}, ranks=2),
    "llama-fp8": Model("LlamaForCausalLM", quantization="fp8_per_channel"),
    "llama-fp8-tp2": Model("LlamaForCausalLM", {**_TIED, **_ODD}, ranks=2, quantization="fp8_per_channel"),
    "mistral": Model("MistralForCausalLM"),
    "ministral3": Model("Ministral3ForCausalLM"),
    "qwen2": Model("Qwen2ForCausalLM", _TIED),
    "qwen2_moe": Model("Qwen2MoeForCausalLM"),
    "qwen3": Model("Qwen3ForCausalLM", _TIED),
    "qwen3_moe": Model("Qwen3MoeForCausalLM"),
    "qwen3_moe-odd": Model(
        "Qwen3MoeForCausalLM",
        {"hidden_size": 160, "head_dim": 32, "moe_intermediate_size": 80, "num_experts": 5, **_ODD},
    ),
    "qwen3_moe-fp32": Model("Qwen3MoeForCausalLM", dtype="float32"),
    "qwen3_moe-fp8": Model("Qwen3MoeForCausalLM", quantization="fp8_per_channel", unserved=_NO_FP8_EXPERTS),
    "qwen3_moe-tp2": Model("Qwen3MoeForCausalLM", {"num_key_value_heads": 1}, ranks=2),
    "qwen3_next": Model("Qwen3NextForCausalLM", _LINEAR_THEN_FULL, fp32=_STATE_SPACE),
    "qwen3_5": Model("Qwen3_5ForCausalLM", _LINEAR_THEN_FULL, unserved="it needs torchvision"),
    "mixtral": Model("MixtralForCausalLM"),
    "deepseek_v2": Model("DeepseekV2ForCausalLM", {"num_key_value_heads": 4, "q_lora_rank": None}),
    "deepseek_v2-lora": Model("DeepseekV2ForCausalLM", {"num_key_value_heads": 4}),
    "deepseek_v3": Model(
        "DeepseekV3ForCausalLM", {**_NOAUX, "num_key_value_heads": 4, "q_lora_rank": None}, fp32=_ROUTER_BIAS
    ),
    "deepseek_v3-lora": Model("DeepseekV3ForCausalLM", {**_NOAUX, "num_key_value_heads": 4}),
    "deepseek_v3-mtp": Model("DeepseekV3ForCausalLM", {**_NOAUX, "num_key_value_heads": 4, "num_mtp_layers": 1}),
    "deepseek_v3-tp2": Model("DeepseekV3ForCausalLM", {**_NOAUX, "num_key_value_heads": 4}, ranks=2),
    "gpt_oss": Model("GptOssForCausalLM"),
    "gpt_oss-tp2": Model("GptOssForCausalLM", ranks=2),
    "phi": Model("PhiForCausalLM"),
    "phi3": Model("Phi3ForCausalLM"),
    "phimoe": Model("PhiMoEForCausalLM", {"attention_bias": True, "lm_head_bias": True}, saved_as="PhimoeForCausalLM"),
    "gemma": Model("GemmaForCausalLM"),
    "gemma2": Model("Gemma2ForCausalLM", {"query_pre_attn_scalar": 32}),
    "gemma3": Model("Gemma3ForCausalLM", {"query_pre_attn_scalar": 32, **_SLIDING_THEN_FULL}),
    "gemma3n": Model(
        "Gemma3nForCausalLM",
        {"vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0, **_SLIDING_THEN_FULL},
    ),
    "gemma4": Model("Gemma4ForCausalLM", {**_GEMMA4, "num_experts": None, "moe_intermediate_size": None}),
    "gemma4-moe": Model("Gemma4ForCausalLM", {**_GEMMA4, "enable_moe_block": True, "top_k_experts": 2}),
    "vaultgemma": Model("VaultGemmaForCausalLM", {"query_pre_attn_scalar": 32}),
    "gpt2": Model("GPT2LMHeadModel"),
    "gpt_bigcode": Model("GPTBigCodeForCausalLM"),
    "gpt_neox": Model("GPTNeoXForCausalLM"),
    "gptj": Model("GPTJForCausalLM", {"rotary_dim": 16}),
    "bloom": Model("BloomForCausalLM"),
    "opt": Model("OPTForCausalLM", {"ffn_dim": 192, "word_embed_proj_dim": 128}),
    "opt-projected": Model(
        "OPTForCausalLM", {"ffn_dim": 192, "word_embed_proj_dim": 64, "do_layer_norm_before": False}
    ),
    "falcon": Model("FalconForCausalLM"),
    "falcon-new": Model("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-alibi-tp2": Model("FalconForCausalLM", {"alibi": True, "multi_query": False}, ranks=2),
    "falcon_h1": Model("FalconH1ForCausalLM", {"mamba_d_ssm": 256, "mamba_n_groups": 1}, fp32=_STATE_SPACE),
    "falcon_mamba": Model("FalconMambaForCausalLM", unserved=_NO_SCAN),
    "mamba": Model("MambaForCausalLM", unserved=_NO_SCAN),
    "mamba2": Model("Mamba2ForCausalLM", {"num_heads": 8, "head_dim": 32, "n_groups": 1, "state_size": 16}),
    "jamba": Model("JambaForCausalLM", {"attn_layer_period": 2, "attn_layer_offset": 1}, unserved=_NO_SCAN),
    "zamba2": Model(
        "Zamba2ForCausalLM", {"layers_block_type": ["linear_attention", "hybrid"], "num_key_value_heads": 4}
    ),
    "nemotron": Model("NemotronForCausalLM"),
    "nemotron_h": Model(
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "num_hidden_layers": 3,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
        },
        is_steady=False,
        note="vLLM does not repeat its own answers: memory compared only",
    ),
    "granite": Model("GraniteForCausalLM"),
    "granitemoe": Model("GraniteMoeForCausalLM"),
    "granitemoeshared": Model("GraniteMoeSharedForCausalLM"),
    "granitemoehybrid": Model("GraniteMoeHybridForCausalLM", _LINEAR_THEN_FULL),
    "glm": Model("GlmForCausalLM"),
    "glm4": Model("Glm4ForCausalLM"),
    "glm4_moe": Model(
        "Glm4MoeForCausalLM", {"head_dim": 32, "attention_bias": True, "use_qk_norm": True}, fp32=_ROUTER_BIAS
    ),
    "glm4_moe_lite": Model("Glm4MoeLiteForCausalLM", {"num_key_value_heads": 4, "first_k_dense_replace": 1}),
    "olmo": Model("OlmoForCausalLM"),
    "olmo2": Model("Olmo2ForCausalLM"),
    "olmo3": Model("Olmo3ForCausalLM", _SLIDING_THEN_FULL),
    "olmoe": Model("OlmoeForCausalLM"),
    "olmo_hybrid": Model("OlmoHybridForCausalLM", _LINEAR_THEN_FULL, unserved="its kernels need a Triton for GPUs"),
    "flex_olmo": Model("FlexOlmoForCausalLM"),
    "starcoder2": Model("Starcoder2ForCausalLM"),
    "stablelm": Model("StableLmForCausalLM", {"use_qkv_bias": True}),
    "cohere": Model("CohereForCausalLM", {"use_qk_norm": True}),
    "cohere2": Model("Cohere2ForCausalLM", _SLIDING_THEN_FULL),
    "cohere2_moe": Model("Cohere2MoeForCausalLM", _SLIDING_THEN_FULL),
    "dbrx": Model(
        "DbrxForCausalLM",
        {
            "d_model": 128,
            "n_heads": 4,
            "n_layers": 2,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 64, "moe_top_k": 2},
        },
        unserved="its loader does not find the experts",
    ),
    "ernie4_5": Model("Ernie4_5ForCausalLM"),
    "ernie4_5_moe": Model("Ernie4_5_MoeForCausalLM", {"moe_num_shared_experts": 1}),
    "exaone": Model(
        "ExaoneForCausalLM",
        {"activation_function": "silu", "layer_norm_epsilon": 1e-6},
        saved_as="LlamaForCausalLM",
        renamed=_EXAONE,
    ),
    "exaone4": Model("Exaone4ForCausalLM", _SLIDING_THEN_FULL),
    "exaone_moe": Model("ExaoneMoeForCausalLM", _SLIDING_THEN_FULL),
    "internlm2": Model("InternLM2ForCausalLM", {"bias": False}, saved_as="LlamaForCausalLM", tensors=_INTERNLM2),
    "minicpm": Model(
        "MiniCPMForCausalLM",
        {"scale_emb": 2, "scale_depth": 1.4, "dim_model_base": 64, "num_experts": 0},
        saved_as="LlamaForCausalLM",
    ),
    "minicpm3": Model("MiniCPM3ForCausalLM", {"num_key_value_heads": 4}),
    "mimo": Model("MiMoForCausalLM", saved_as="Qwen2ForCausalLM"),
    "mimo_v2": Model(
        "MiMoV2FlashForCausalLM",
        {
            "layernorm_epsilon": 1e-6,
            "hybrid_layer_pattern": [0, 1],
            "moe_layer_freq": [0, 1],
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "sliding_window_size": 16,
        },
    ),
    "orion": Model("OrionForCausalLM", {"rms_norm_eps": 1e-6}, saved_as="StableLmForCausalLM"),
    "solar": Model(
        "SolarForCausalLM",
        {"bskcn_tv": [0.9, 0.8], **{f"bskcn_{i}": [] for i in range(1, 5)}},
        saved_as="LlamaForCausalLM",
    ),
    "teleflm": Model(
        "TeleFLMForCausalLM",
        {"use_mup": True, "mup_scale_factor": 2.0, "output_mult": 1.0, "input_mult": 1.0},
        saved_as="LlamaForCausalLM",
    ),
    "llama4": Model(
        "Llama4ForCausalLM",
        {"intermediate_size_mlp": 192, "interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
    ),
    "smollm3": Model("SmolLM3ForCausalLM", _TIED),
    "lfm2": Model(
        "Lfm2ForCausalLM", {"conv_dim": 128, "block_dim": 128, "block_auto_adjust_ff_dim": False, **_CONV_THEN_FULL}
    ),
    "lfm2_moe": Model("Lfm2MoeForCausalLM", _CONV_THEN_FULL),
    "hunyuan_dense": Model("HunYuanDenseV1ForCausalLM"),
    "hunyuan_moe": Model("HunYuanMoEV1ForCausalLM"),
    "hy_v3": Model(
        "HYV3ForCausalLM", {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True, "qk_norm": True}
    ),
    "hyperclovax": Model("HyperCLOVAXForCausalLM"),
    "seed_oss": Model("SeedOssForCausalLM"),
    "apertus": Model("ApertusForCausalLM"),
    "arcee": Model("ArceeForCausalLM"),
    "afmoe": Model(
        "AfmoeForCausalLM",
        {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1, **_SLIDING_THEN_FULL},
    ),
    "cwm": Model("CwmForCausalLM", _SLIDING_THEN_FULL),
    "jais2": Model("Jais2ForCausalLM"),
    "mellum": Model("MellumForCausalLM"),
    "dots1": Model("Dots1ForCausalLM"),
    "bamba": Model("BambaForCausalLM", unserved="vLLM has no code for its linear attention"),
    "helium": Model("HeliumForCausalLM"),
    "nanochat": Model("NanoChatForCausalLM"),
}
