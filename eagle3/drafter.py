"""The drafter: one decoder layer that reads the target's hidden states and guesses what comes next.

One token, one index. Row t of the drafter pairs what the target knew after token t with token t+1,
and predicts token t+2:

    tokens     x0   x1   x2   x3   x4        the target has read x0..x3; x4 is its own next token
    feature    f0   f1   f2   f3             fc(three aux states at that token)
    row        0    1    2    3              row t is fed f_t and the embedding of x_{t+1}, at RoPE
                                             position t
    predicts   x2   x3   x4   x5             row 3 drafts x5; then row 3 again, fed its own state
    step 1     .    .    .    x6             and the embedding of x5, at position 4, drafts x6; ...

Parameter names and shapes are those of the checkpoint that engines load (contract.py).

Shapes: N rows, R rows that still draft, H width (the target's), D draft vocabulary,
A query heads, K key-value heads, E head width, Q = A + 2K.

EAGLE-3.1 adds two switches, each against hidden states that outgrow the others ("attention drift"):
`fc_norm` norms each aux state by itself before fc, and `norm_output` feeds a state back after the
final norm instead of before it. What the head reads is the normed state either way.

Source: EAGLE-3, arXiv 2503.01840; SafeAILab/EAGLE, eagle/traineagle3. EAGLE-3.1, arXiv 2605.09992,
as vLLM reads it (model_executor/models/llama_eagle3.py).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3.attention import attend_cache, rotate
from eagle3.config import DrafterParams


@dataclass(frozen=True)
class DraftShape:
    """Every size of the network."""

    hidden_size: int
    vocab_size: int
    """Of the target, V."""
    draft_vocab: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    # As in config.json, absent means false.
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def of(
        cls, params: DrafterParams, hidden_size: int, vocab_size: int, draft_vocab: int
    ) -> "DraftShape":
        """The shape that params.yaml asks for, beside a target of these sizes."""
        return cls(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            draft_vocab=draft_vocab,
            **params.model_dump(),
        )


@dataclass
class DraftCache:
    """Keys and values of the rows decoded so far, for the real loop."""

    keys_NKE: Tensor
    values_NKE: Tensor

    @classmethod
    def empty(cls, shape: DraftShape, like: Tensor) -> "DraftCache":
        """A cache of no rows, on the device and in the dtype of `like`."""
        none = like.new_empty(0, shape.num_key_value_heads, shape.head_dim)
        return cls(none, none)

    @property
    def length(self) -> int:
        """Rows held."""
        return self.keys_NKE.shape[0]

    def append(self, keys_NKE: Tensor, values_NKE: Tensor) -> None:
        """Add rows at the end."""
        self.keys_NKE = torch.cat([self.keys_NKE, keys_NKE])
        self.values_NKE = torch.cat([self.values_NKE, values_NKE])

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` rows: what a rejected draft had added."""
        self.keys_NKE = self.keys_NKE[:length]
        self.values_NKE = self.values_NKE[:length]


class DraftAttention(nn.Module):
    """Projections of an attention whose input is concat(norm(embedding), norm(hidden)).

    W [e; h] = W_e e + W_h h: the halves are applied apart, because every step of the
    training-time test reads the same embeddings again, shifted by one, and only h is new.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.width = width = shape.num_attention_heads * shape.head_dim
        kv_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def embedding_half(self, normed_NH: Tensor) -> Tensor:
        """W_e e for queries, keys and values side by side: [N, Q * E]."""
        width = normed_NH.shape[-1]
        parts = (self.q_proj, self.k_proj, self.v_proj)
        return torch.cat([F.linear(normed_NH, part.weight[:, :width]) for part in parts], dim=-1)

    def query_hidden_half(self, normed_NH: Tensor) -> Tensor:
        """W_h h for queries: [N, A * E]."""
        return F.linear(normed_NH, self.q_proj.weight[:, normed_NH.shape[-1] :])

    def key_value_hidden_half(self, normed_NH: Tensor) -> Tensor:
        """W_h h for keys and values side by side: [N, 2K * E]."""
        width = normed_NH.shape[-1]
        parts = (self.k_proj, self.v_proj)
        return torch.cat([F.linear(normed_NH, part.weight[:, width:]) for part in parts], dim=-1)


class DraftMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, normed_NH: Tensor) -> Tensor:
        """Apply to each row: [N, H] -> [N, H]."""
        return self.down_proj(F.silu(self.gate_proj(normed_NH)) * self.up_proj(normed_NH))


class DraftLayer(nn.Module):
    """The decoder layer; attention itself is chosen by the caller (a cache, or a training step)."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.self_attn = DraftAttention(shape)
        self.mlp = DraftMlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def finish(self, hidden_RH: Tensor, attended_RAE: Tensor) -> Tensor:
        """From attention's output to the layer's: [R, H]."""
        hidden_RH = hidden_RH + self.self_attn.o_proj(attended_RAE.flatten(1))
        return hidden_RH + self.mlp(self.post_attention_layernorm(hidden_RH))


class DrafterNet(nn.Module):
    """fc, one layer, a norm and a head over the draft vocabulary. The embedding is the target's."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = DraftLayer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab, bias=False)
        self.fc_norm: nn.ModuleList | None = None
        if shape.fc_norm:
            norms = [nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps) for _ in range(3)]
            self.fc_norm = nn.ModuleList(norms)

    def fuse(self, aux_N3H: Tensor) -> Tensor:
        """Features of the target's three aux states: [N, 3, H] -> [N, H]."""
        if self.fc_norm is not None:
            states = zip(self.fc_norm, aux_N3H.unbind(1), strict=True)
            aux_N3H = torch.stack([norm(aux_NH) for norm, aux_NH in states], dim=1)
        return self.fc(aux_N3H.flatten(1))

    def embedding_half(self, embedding_NH: Tensor) -> Tensor:
        """The part of queries, keys and values that only the fed token decides: [N, Q * E]."""
        return self.midlayer.self_attn.embedding_half(self.midlayer.input_layernorm(embedding_NH))

    def query(self, embedded_RQE: Tensor, hidden_RH: Tensor, positions_R: Tensor) -> Tensor:
        """Rotated queries of rows: [R, A, E]."""
        attention = self.midlayer.self_attn
        width = attention.width
        hidden_half = attention.query_hidden_half(self.midlayer.hidden_norm(hidden_RH))
        query_RAE = (embedded_RQE[:, :width] + hidden_half).unflatten(-1, (-1, attention.head_dim))
        return rotate(query_RAE, positions_R, self.shape.rope_theta)

    def key_value(
        self, embedded_NQE: Tensor, hidden_NH: Tensor, positions_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, of rows: [N, K, E] each."""
        attention = self.midlayer.self_attn
        start = attention.width
        hidden_half = attention.key_value_hidden_half(self.midlayer.hidden_norm(hidden_NH))
        both = (embedded_NQE[:, start:] + hidden_half).unflatten(-1, (-1, attention.head_dim))
        key_NKE, value_NKE = both.chunk(2, dim=1)
        return rotate(key_NKE, positions_N, self.shape.rope_theta), value_NKE

    def finish(self, hidden_RH: Tensor, attended_RAE: Tensor) -> Tensor:
        """From attention's output to the state that is fed back: [R, H]."""
        state_RH = self.midlayer.finish(hidden_RH, attended_RAE)
        return self.norm(state_RH) if self.shape.norm_output else state_RH

    def head_input(self, state_NH: Tensor) -> Tensor:
        """What the head reads of a state as `finish` returns it, the normed state: [N, H]."""
        return state_NH if self.shape.norm_output else self.norm(state_NH)

    def logits(self, state_NH: Tensor) -> Tensor:
        """Scores over the draft vocabulary of states as `finish` returns them: [N, D]."""
        return self.lm_head(self.head_input(state_NH))

    def decode(
        self, embedding_NH: Tensor, hidden_NH: Tensor, positions_N: Tensor, cache: DraftCache
    ) -> Tensor:
        """Run the layer over new rows of one sequence, as a serving engine does.

        The rows' keys and values are appended to the cache; each row attends to what the cache
        held and to the new rows up to itself. `hidden` is a feature (`fuse`) for rows that the
        target has seen, the drafter's own last state for draft steps. Returns states as `finish`
        does, [N, H].
        """
        embedded_NQE = self.embedding_half(embedding_NH)
        query_NAE = self.query(embedded_NQE, hidden_NH, positions_N)
        cache.append(*self.key_value(embedded_NQE, hidden_NH, positions_N))
        attended_NAE = attend_cache(query_NAE, cache.keys_NKE, cache.values_NKE)
        return self.finish(hidden_NH, attended_NAE)
