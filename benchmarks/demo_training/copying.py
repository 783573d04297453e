"""First weights with which a small Llama can copy before it has learnt anything.

Copying needs a circuit of two heads: one that writes into every position what stood before it, and one in the next
layer that looks for a position whose predecessor equals the current token, and proposes what stands there (the
"induction head"). A model of this size finds it only after many millions of tokens; setting it up in the first weights
leaves a few minutes of training for everything else. All weights are trained on from there.
Knows nothing about text or training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

#: embedding dimension that is the same for every token, from which purely positional attention is made
CONSTANT = 0
#: spread of the embedding, and of what the first circuit head writes beside it
SPREAD = 0.3
#: weight of the last norm, so that the logits begin small although the embedding is large
LAST_NORM = 0.1
#: constant part of the embedding, in spreads
LEVEL = 4.0


def _orthonormal(rows: int, columns: int) -> Tensor:
    """[rows, columns] with orthonormal rows that leave the constant dimension alone."""
    basis = torch.linalg.qr(torch.randn(columns - 1, rows))[0].T
    return torch.cat([torch.zeros(rows, 1), basis], dim=1)


@torch.no_grad()
def set_up_copying(model: LlamaForCausalLM) -> None:
    """Zero what the layers write, and build the circuit into half of the heads of the first two layers."""
    hidden, heads = model.config.hidden_size, model.config.num_attention_heads // 2
    size = hidden // model.config.num_attention_heads
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embedding = model.model.embed_tokens.weight
    embedding.normal_(std=SPREAD)
    embedding[:, CONSTANT] = LEVEL * SPREAD
    model.model.norm.weight.fill_(LAST_NORM)
    before, match = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    # the directions: token content that is compared, where the predecessor is noted, content that is copied
    content, note, copy = (_orthonormal(heads * size, hidden) for _ in range(3))
    slow = _slow_dimensions(size)
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        before.q_proj.weight[rows], before.k_proj.weight[rows] = _previous_position(size, hidden)
        # rotary positions turn the fast dimensions of queries and keys too far to compare content in them
        before.v_proj.weight[rows] = content[rows] * math.sqrt(hidden / size)
        before.o_proj.weight[:, rows] = note[rows].T * SPREAD * math.sqrt(size) / 4
        match.q_proj.weight[rows] = content[rows] * slow[:, None] * 4
        match.k_proj.weight[rows] = note[rows] * slow[:, None] * 4
        match.v_proj.weight[rows] = copy[rows]
        match.o_proj.weight[:, rows] = copy[rows].T * SPREAD * 4


def _slow_dimensions(size: int) -> Tensor:
    """[size]: 1 where a rotary position turns by less than 0.04 a token, else 0."""
    angles = 10000.0 ** (-torch.arange(size // 2) / (size // 2))
    return (angles < 0.04).float().repeat(2)


def _previous_position(size: int, hidden: int) -> tuple[Tensor, Tensor]:
    """Query and key weights, [size, hidden] each, whose product is largest one position back."""
    half = size // 2
    angles = 10000.0 ** (-torch.arange(half) / half)
    length = (angles > 0.1).float() * 2.5
    query, key = torch.zeros(size, hidden), torch.zeros(size, hidden)
    query[:half, CONSTANT] = length
    key[:half, CONSTANT] = length * angles.cos()
    key[half:, CONSTANT] = length * angles.sin()
    return query, key
