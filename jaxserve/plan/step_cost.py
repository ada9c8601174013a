"""What a step must at least move and compute on each device, counted from shapes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.kv_pool import PoolSpec
from jaxserve.skeleton import ROPE_PATH, Leaf, ModelSkeleton
from pallas_kernels.chips import Chip
from pallas_kernels.pool_layout import HEAD_AXIS
from pallas_kernels.roofline import AttentionShape, Cost, attention_cost, link_seconds


@dataclass(frozen=True)
class Bound:
    """The least seconds of a step: none of the three can be hidden behind itself, each behind the others."""

    memory: float
    arithmetic: float
    links: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.arithmetic, self.links)

    @property
    def limit(self) -> str:
        """The name of what takes longest."""
        return max(("memory", "arithmetic", "links"), key=lambda name: getattr(self, name))


def bound(cost: Cost, link_bytes: float, chip: Chip) -> Bound:
    return Bound(
        Cost(num_bytes=cost.num_bytes).seconds(chip),
        Cost(flops=cost.flops).seconds(chip),
        link_seconds(link_bytes, chip),
    )


def leaf_bytes(leaf: Leaf) -> int:
    """Of one device's part."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def weights_bytes(skeleton: ModelSkeleton) -> int:
    """On each device."""
    return sum(leaf_bytes(leaf) for leaf in skeleton.leaves)


def step_cost(skeleton: ModelSkeleton, pool: PoolSpec, q_lens: Sequence[int], kv_lens: Sequence[int]) -> Cost:
    """On one device of the skeleton's mesh; every row samples a token.

    Weights are read once, of the experts those that a router without preferences reaches; live keys and
    values are read once and new ones written. Of activations, what crosses the step's border: embeddings
    in, hidden states and logits out. Norms count as products, which they are not: a ten-thousandth.
    """
    config, num_tokens, num_rows = skeleton.config, sum(q_lens), len(q_lens)
    num_devices = skeleton.leaves[0].sharding.mesh.size
    element = skeleton.leaves[0].dtype.itemsize
    border = (
        2 * num_tokens * config.hidden_size * element + 2 * num_rows * config.vocab_size * 4 / num_devices
    )
    total = Cost(_weights_read(skeleton, num_tokens) + border, _products(skeleton, num_tokens, num_rows))

    split = num_devices if skeleton.heads.axis else 1
    windows = Counter(config.window(layer) for layer in range(config.num_layers))
    for window, num_layers in windows.items():
        shape = AttentionShape(
            num_q_heads=config.num_heads // split,
            num_kv_heads=pool.shape[HEAD_AXIS] // split,
            k_dim=config.head_dim,
            v_dim=config.head_dim,
            kv_dim=pool.shape[-1],
            q_bytes=element,
            kv_bytes=pool.dtype.itemsize,
            window=window,
        )
        total += attention_cost(q_lens, kv_lens, shape) * num_layers
    return total


def _products(skeleton: ModelSkeleton, num_tokens: int, num_rows: int) -> float:
    """Operations with a device's part of the weights; each token is multiplied with its own experts alone."""
    config, total = skeleton.config, 0.0
    output = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    for leaf in skeleton.leaves:
        rows = float(num_tokens)
        if "experts" in leaf.path:
            rows *= config.num_experts_per_token / config.num_experts
        elif leaf.path[0] == output:
            rows = num_rows
        elif leaf.path == ROPE_PATH or leaf.path[0] == "embed_tokens":
            rows = 0
        total += 2 * rows * math.prod(leaf.sharding.shard_shape(leaf.shape))
    return total


def _weights_read(skeleton: ModelSkeleton, num_tokens: int) -> float:
    config, total = skeleton.config, 0.0
    for leaf in skeleton.leaves:
        share = 1.0
        if "experts" in leaf.path:
            missed = 1 - config.num_experts_per_token / config.num_experts  # by one token
            share = 1 - missed**num_tokens
        elif leaf.path[0] == "embed_tokens" and not config.tie_word_embeddings:
            share = 0.0  # only looked up, a row a token
        total += share * leaf_bytes(leaf)
    return total
