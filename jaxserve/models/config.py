"""What a decoder-only transformer's step needs to know of its checkpoint, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.models.rope import RopeConfig

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a model; static to the compiled step."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    activation: Activation = "silu"
    attention_scale: float | None = None  # scores are multiplied by it; None: head_dim ** -0.5
    attention_soft_cap: float | None = None  # cap * tanh(score / cap)
    logit_soft_cap: float | None = None
    embedding_scale: float | None = None
    qk_norm: bool = False  # RMS norms of each head of q and k, before rope
    unit_offset_norms: bool = False  # norms multiply by 1 + weight
    sandwich_norms: bool = False  # norms after attention and MLP too
    # A layer with window w sees the last w positions, its own among them. (): no layer has a window.
    layer_windows: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None  # of the layers with a window, where theirs differs
    num_experts: int = 0  # 0: the MLP is dense
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False  # the chosen experts' probabilities are made to sum to 1

    def window(self, layer: int) -> int | None:
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def sliding_window(self) -> int | None:
        """The longest window of any layer; None where no layer has one."""
        return max((w for w in self.layer_windows if w is not None), default=None)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rope of the layers without a window, then, where it differs, of those with one."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def num_parameters(self) -> int:
        """Weights in memory; a tied embedding counts once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * self._layer_parameters(self.num_experts) + self.hidden_size + embeddings

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token is multiplied with: its own experts alone, and the output matrix."""
        layers = self.num_layers * self._layer_parameters(self.num_experts_per_token)
        return layers + self.hidden_size + self.vocab_size * self.hidden_size

    def _layer_parameters(self, num_experts: int) -> int:
        """Of one layer, with `num_experts` of its experts (all or those of a token)."""
        h, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = h * (q + 2 * kv) + q * h + (q + 2 * kv) * self.qkv_bias + h * self.o_bias
        norms = (4 if self.sandwich_norms else 2) * h + 2 * self.head_dim * self.qk_norm
        if self.num_experts:
            mlp = self.num_experts * h + num_experts * 3 * h * self.moe_intermediate_size
        else:
            mlp = 3 * h * self.intermediate_size + (2 * self.intermediate_size + h) * self.mlp_bias
        return attention + norms + mlp
