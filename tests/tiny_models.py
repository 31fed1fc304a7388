"""Small language models with a tokenizer, as checkpoint folders that vLLM can serve."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    # Untrained weights at the usual scale give nearly flat answers, which hide mistakes.
    "initializer_range": 0.15,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}

NAMES = ("qwen3", "qwen3-untied", "qwen3-moe", "llama")


def tiny_model(name: str, *, seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """A model with random bf16 weights; `sizes` replace fields of its config."""
    torch.manual_seed(seed)
    fields = {**_SIZES, **sizes}
    model: PreTrainedModel
    if name == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**fields, tie_word_embeddings=True))
    elif name == "qwen3-untied":
        model = Qwen3ForCausalLM(Qwen3Config(**fields, tie_word_embeddings=False))
    elif name == "qwen3-moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**fields, **_EXPERTS, **sizes}, tie_word_embeddings=False))
    elif name == "llama":
        model = LlamaForCausalLM(LlamaConfig(**fields, tie_word_embeddings=False))
    else:
        raise ValueError(name)
    return model.to(torch.bfloat16)


def save(model: PreTrainedModel, folder: Path) -> Path:
    """The model and a tokenizer of one token for each word `w0`, `w1`, …"""
    model.save_pretrained(folder)
    words = {"<unk>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, model.config.vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    return folder
