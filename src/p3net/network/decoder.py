"""The transformer decoder that refines density tokens by the image's features (eq:attn).

Post-norm layers of self-attention among the tokens, cross-attention to the feature map and a
feed-forward network, without positional encoding. Parameter names are those of
`torch.nn.TransformerDecoder`, so that the authors' checkpoints load.

Shapes: B images, C tokens, N positions of the feature map, d channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p3net.errors import InputError


class Attention(nn.Module):
    """Multi-head attention: queries B×C×d over a memory B×N×d."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise InputError(f"{heads} heads do not divide {width} channels")
        self.heads = heads
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, query: Tensor, memory: Tensor | Sequence[Tensor]) -> Tensor:
        """B×C×d, B×N×d → B×C×d; a memory in parts is attended to one part after the other."""
        if isinstance(memory, Tensor) and not self._turns(query, memory):
            q, k, v = self._project(query, memory)
            mixed = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout if self.training else 0.0
            )
        else:
            mixed = self._turned(query, [memory] if isinstance(memory, Tensor) else memory)
        return cast("Tensor", self.out_proj(mixed.transpose(1, 2).flatten(2)))

    def _turns(self, query: Tensor, memory: Tensor) -> bool:
        """Whether to turn few queries instead of many positions: on a CPU, where it is faster."""
        if memory.device.type != "cpu" or torch.compiler.is_exporting():
            return False
        few, width = query.shape[1:]
        return bool(few * self.heads < width and few < memory.shape[1])

    def _turned(self, query: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """The same with q·(K m) as (qᵀK)·m and Σ a (V m) as V (Σ a m): B×heads×C×d/heads.

        Few queries are turned into the space of the memory's many positions, which need no
        projection. The keys' bias moves all scores of a query alike, which softmax does not see.
        """
        width = query.shape[-1]
        size = width // self.heads
        weight_q, weight_k, weight_v = self.in_proj_weight.chunk(3)
        bias_q, _, bias_v = self.in_proj_bias.chunk(3)
        q = self._split(F.linear(query, weight_q, bias_q) / math.sqrt(size))
        turned = (q @ weight_k.view(self.heads, size, width)).flatten(1, 2)
        mixed, total = self._mix(turned, parts)
        by_head = (len(query), self.heads, query.shape[1], -1)
        values = mixed.view(by_head) @ weight_v.view(self.heads, size, width).transpose(1, 2)
        return values + total.view(by_head) * bias_v.view(self.heads, 1, size)

    def _mix(self, queries: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """B×Q×d queries → the positions weighed by softmax of the scores, and the weights' sums.

        The sums are 1 but for dropout.

        Over parts by a running softmax, with sums relative to the largest score so far and without
        dropout.
        """
        if len(parts) == 1:
            weights = (queries @ parts[0].transpose(1, 2)).softmax(-1)
            if not (self.training and self.dropout):
                return weights @ parts[0], queries.new_ones(*queries.shape[:2], 1)
            weights = F.dropout(weights, self.dropout)
            return weights @ parts[0], weights.sum(-1, keepdim=True)
        peak = queries.new_full((*queries.shape[:2], 1), -math.inf)
        total, mixed = torch.zeros_like(peak), torch.zeros_like(queries)
        for part in parts:
            scores = queries @ part.transpose(1, 2)
            higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
            fade, weights = (peak - higher).exp(), (scores - higher).exp()
            total = total * fade + weights.sum(-1, keepdim=True)
            mixed = mixed * fade + weights @ part
            peak = higher
        return mixed / total, queries.new_ones(*queries.shape[:2], 1)

    def weights(self, query: Tensor, memory: Tensor) -> Tensor:
        """How much each query attends to each position, mean over heads: B×C×N, rows sum to 1."""
        q, k, _ = self._project(query, memory)
        return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1).mean(1)

    def _project(self, query: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values split into heads: B×heads×·×d/heads."""
        width = query.shape[-1]
        q = F.linear(query, self.in_proj_weight[:width], self.in_proj_bias[:width])
        kv = F.linear(memory, self.in_proj_weight[width:], self.in_proj_bias[width:])
        k, v = kv.chunk(2, dim=-1)
        return self._split(q), self._split(k), self._split(v)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention, feed-forward; each added and then normalised."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(width, heads, dropout)
        self.multihead_attn = Attention(width, heads, dropout)
        self.linear1 = nn.Linear(width, hidden)
        self.linear2 = nn.Linear(hidden, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.norm3 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, memory: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """B×C×d, B×N×d → the refined tokens, and the queries its cross-attention used."""
        asked = self.norm1(tokens + self.dropout(self.self_attn(tokens, tokens)))
        tokens = self.norm2(asked + self.dropout(self.multihead_attn(asked, memory)))
        hidden = self.dropout(F.relu(self.linear1(tokens)))
        return self.norm3(tokens + self.dropout(self.linear2(hidden))), asked


class Decoder(nn.Module):
    """L layers: density tokens T and features F → refined tokens T̃."""

    def __init__(self, layers: int, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DecoderLayer(width, heads, hidden, dropout) for _ in range(layers)
        )

    def forward(self, tokens: Tensor, features: Tensor, *, at_once: int | None = None) -> Tensor:
        """B×C×d tokens, B×d×h×w features → B×C×d.

        With `at_once`, that many positions are attended to at a time: the same up to rounding,
        in bounded memory.
        """
        positions = features.flatten(2).transpose(1, 2)
        memory: Tensor | tuple[Tensor, ...] = positions
        if at_once is not None and positions.shape[1] > at_once:
            memory = torch.split(positions, at_once, dim=1)
        for layer in self.layers:
            tokens, _ = layer(tokens, memory)
        return tokens

    def attention_maps(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Cross-attention of every layer and token, mean over heads: B×L×C×h×w (fig:viz)."""
        memory = features.flatten(2).transpose(1, 2)
        maps = []
        for layer in self.layers:
            tokens, asked = layer(tokens, memory)
            maps.append(cast("DecoderLayer", layer).multihead_attn.weights(asked, memory))
        return torch.stack(maps, dim=1).view(*tokens.shape[:1], len(maps), -1, *features.shape[-2:])
