"""One step of the engine as a pure function: embed, layers, select rows, sample.

    step(weights, kv_pool, token_table, bias_table, ints, floats)
        -> (kv_pool, token_table, hidden, Sampled)

The pool and the token table are donated and come back; the weights travel as a flat tuple of leaves, because
a module's state at the jit boundary costs thousands of Python calls a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.batch import Bucket, StepInputs, unpack
from jaxserve.models.layers import MODEL_AXIS
from jaxserve.models.llama import AttendFn, CausalLM
from jaxserve.sampler import Sampled, sample, token_logprobs
from pallas_kernels.kv_write import write_kv
from pallas_kernels.ragged_paged_attention import ragged_paged_attention

Weights = tuple[jax.Array, ...]


@dataclass(frozen=True)
class StepSpec:
    """What is static in every program of an engine."""

    graphdef: nnx.GraphDef[Any]
    treedef: jax.tree_util.PyTreeDef
    mesh: Mesh
    shard_heads: bool
    page_size: int
    sm_scale: float
    platform: str
    attention_implementation: str

    def merge(self, weights: Weights) -> CausalLM:
        """The module with the flat leaves in their places."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, weights))


def make_step(spec: StepSpec, bucket: Bucket) -> Callable[..., Any]:
    """The step's function for one bucket, to be jitted with arguments 1 and 2 donated."""

    def step(
        weights: Weights,
        kv_pool: jax.Array,  # [num_layers, num_pages, num_kv_heads, 2, page_size, head_dim]
        token_table: jax.Array,  # int32 [num_slots + 1, max_model_len]
        bias_table: jax.Array,  # float32 [num_slots + 1, vocab]
        ints: jax.Array,  # int32 [num_rows, INT_COLUMNS + pages_per_seq]
        floats: jax.Array,  # float32 [num_rows, FLOAT_COLUMNS]
    ) -> tuple[jax.Array, jax.Array, jax.Array, Sampled]:
        model = spec.merge(weights)
        inputs = unpack(ints, floats)
        row, positions, is_padding = _locate(inputs, bucket)
        token_ids = token_table[inputs.slot[row], positions]  # [num_tokens]
        page = inputs.page_indices[row, positions // spec.page_size]
        pages = jnp.where(is_padding, 0, page)
        attend = _attend(spec, bucket, inputs, pages, positions % spec.page_size)
        hidden, kv_pool = model(token_ids, positions, attend, kv_pool)  # [num_tokens, hidden]

        last = hidden if bucket.decode_only else hidden[jnp.maximum(inputs.cu_q_lens[1:] - 1, 0)]
        sampled = sample(model.logits(last), inputs.sampling, inputs.slot, token_table, bias_table)
        # A row that does not sample writes to the dummy slot.
        slot = jnp.where(inputs.samples, inputs.slot, token_table.shape[0] - 1)
        index = jnp.where(inputs.samples, inputs.kv_lens, 0)
        token_table = token_table.at[slot, index].set(sampled.token_ids, mode="promise_in_bounds")
        return kv_pool, token_table, hidden, sampled

    return step


def _locate(inputs: StepInputs, bucket: Bucket) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each token's row, position in its sequence, and whether it is padding; [num_tokens] each."""
    token = jnp.arange(bucket.num_tokens, dtype=jnp.int32)
    ends = inputs.cu_q_lens[1:]
    row = token if bucket.decode_only else jnp.searchsorted(ends, token, side="right").astype(jnp.int32)
    row = jnp.minimum(row, bucket.num_rows - 1)
    is_padding = token >= ends[-1]
    positions = inputs.kv_lens[row] - ends[row] + token
    return row, jnp.where(is_padding, 0, positions), is_padding


def _attend(
    spec: StepSpec, bucket: Bucket, inputs: StepInputs, pages: jax.Array, offsets: jax.Array
) -> AttendFn:
    """Write the step's K and V, then attend; over the model axis each device has its own heads."""
    kv_lens, page_indices, cu_q_lens = inputs.kv_lens, inputs.page_indices, inputs.cu_q_lens

    def local(
        layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, kv_pool: jax.Array, *rows: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        kv_lens, page_indices, cu_q_lens, pages, offsets = rows
        kv_pool = write_kv(kv_pool, layer, k, v, pages, offsets)
        out = ragged_paged_attention(
            q,
            kv_pool,
            layer,
            kv_lens,
            page_indices,
            cu_q_lens,
            sm_scale=spec.sm_scale,
            decode_only=bucket.decode_only,
            platform=spec.platform,
            implementation=spec.attention_implementation,
        )
        return out, kv_pool

    rows = (kv_lens, page_indices, cu_q_lens, pages, offsets)
    if spec.mesh.size == 1:
        return lambda layer, q, k, v, kv_pool: local(layer, q, k, v, kv_pool, *rows)

    heads = MODEL_AXIS if spec.shard_heads else None
    per_head, pool = P(None, heads, None), P(None, None, heads)

    def over_mesh(
        layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, kv_pool: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        fn = jax.shard_map(
            local,
            mesh=spec.mesh,
            in_specs=(P(), per_head, per_head, per_head, pool, *(P() for _ in rows)),
            out_specs=(per_head, pool),
            check_vma=False,
        )
        return fn(jnp.asarray(layer, jnp.int32), q, k, v, kv_pool, *rows)

    return over_mesh


def make_score(spec: StepSpec) -> Callable[..., Any]:
    """Log-probabilities of given next tokens at given rows of a step's hidden states (prompt_logprobs)."""

    def score(
        weights: Weights,
        hidden: jax.Array,  # [num_tokens, hidden]
        rows: jax.Array,  # int32 [num_scored]
        targets: jax.Array,  # int32 [num_scored]
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        return token_logprobs(spec.merge(weights).logits(hidden[rows]), targets)

    return score


def make_logits(spec: StepSpec) -> Callable[..., Any]:
    """The raw logits, float32 [num_rows, vocab], of given rows of a step's hidden states."""

    def logits(weights: Weights, hidden: jax.Array, rows: jax.Array) -> jax.Array:
        return spec.merge(weights).logits(hidden[rows])

    return logits
