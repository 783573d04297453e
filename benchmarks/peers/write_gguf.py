"""The benchmark's Llama as a GGUF file for llama.cpp; run by a Python that has `gguf` and `safetensors`.

The layout is that of llama.cpp's own converter: rows of the query and key projections in the order of its rotary
embedding (pairs side by side, where Hugging Face has halves), norms in float32, everything else as in the checkpoint.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
FILE_TYPES = {"F32": gguf.LlamaFileType.ALL_F32, "BF16": gguf.LlamaFileType.MOSTLY_BF16}


def name_of(name: str) -> str:
    """llama.cpp's name of a weight; the head is tied to the embedding and has none."""
    path = name.removesuffix(".weight")
    if not path.startswith("model.layers."):
        return f"{NAMES[path]}.weight"
    _, _, layer, rest = path.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def interleave(rows: Any, heads: int) -> Any:
    """Rows of each head from halves to pairs."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def tensors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, array and type of each weight; bfloat16 as bytes, which numpy has no type for."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    read: Any = safetensors.deserialize  # it tells no types
    for path, found in read((folder / "model.safetensors").read_bytes()):
        halves = found["dtype"] == "BF16"
        array = np.frombuffer(found["data"], np.uint16 if halves else np.float32).reshape(found["shape"])
        name = name_of(path)
        if array.ndim == 1:
            whole = (array.astype(np.uint32) << 16).view(np.float32) if halves else array
            yield name, whole, gguf.GGMLQuantizationType.F32
            continue
        part = name.split(".")[-2]
        array = np.ascontiguousarray(interleave(array, heads[part]) if part in heads else array)
        if halves:
            yield name, array.view(np.uint8), gguf.GGMLQuantizationType.BF16
        else:
            yield name, array, gguf.GGMLQuantizationType.F32


def add_shape(writer: Any, config: dict[str, Any]) -> None:
    """Write the shape of the model."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: Any, tokenizer: dict[str, Any]) -> None:
    """The byte-level vocabulary. An end has to be named, or llama.cpp takes an ordinary token for it."""
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()} | special
    ids = range(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words[number] for number in ids])
    writer.add_token_types([gguf.TokenType.CONTROL if n in special else gguf.TokenType.NORMAL for n in ids])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    (end,) = special
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="config.json, tokenizer.json and model.safetensors")
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    config = json.loads((args.folder / "config.json").read_text())
    writer = gguf.GGUFWriter(args.file, "llama")
    add_shape(writer, config)
    add_tokenizer(writer, json.loads((args.folder / "tokenizer.json").read_text()))
    writer.add_file_type(FILE_TYPES["BF16" if config["torch_dtype"] == "bfloat16" else "F32"])
    for name, array, kind in tensors(args.folder, config):
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
