"""One step of the engine as a pure function: embed, layers, select rows, sample.

    step(weights, kv_pool, token_table, bias_table, packed)
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
from jaxserve.models.attention import AttendFn
from jaxserve.models.decoder import CausalLM
from jaxserve.models.layers import MODEL_AXIS
from jaxserve.sampler import Sampled, sample_over_mesh, token_logprobs
from jaxserve.sharding import HeadSharding
from pallas_kernels.ragged_paged_attention import AttentionSpec, Rows, ragged_paged_attention

Weights = tuple[jax.Array, ...]


@dataclass(frozen=True)
class StepSpec:
    """What is static in every program of an engine."""

    graphdef: nnx.GraphDef[Any]
    treedef: jax.tree_util.PyTreeDef
    mesh: Mesh
    heads: HeadSharding
    head_dim: int
    sm_scale: float
    soft_cap: float | None
    platform: str
    chip: str | None  # the device's name in pallas_kernels.chips, where it has one
    attention_implementation: str

    def merge(self, weights: Weights) -> CausalLM:
        """The module with the flat leaves in their places."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, weights))


def make_step(spec: StepSpec, bucket: Bucket) -> Callable[..., Any]:
    """The step's function for one bucket, to be jitted with arguments 1 and 2 donated."""

    def step(
        weights: Weights,
        kv_pool: jax.Array,  # [num_layers, num_pages, num_pool_heads, page_size, row_dim]
        token_table: jax.Array,  # int32 [num_slots + 1, max_model_len]
        bias_table: jax.Array,  # float32 [num_slots + 1, vocab]
        packed: jax.Array,  # int32 [num_rows, COLUMNS + pages_per_seq]
    ) -> tuple[jax.Array, jax.Array, jax.Array, Sampled]:
        model = spec.merge(weights)
        inputs = unpack(packed)
        row, positions = _locate(inputs, bucket)
        token_ids = token_table[inputs.slot[row], positions]  # [num_tokens]
        attend = _attend(spec, bucket, inputs)
        num_live = inputs.cu_q_lens[-1]
        hidden, kv_pool = model(token_ids, positions, attend, kv_pool, num_live)  # [num_tokens, hidden]

        # Rows that sample come first: of the others nothing is asked.
        last = hidden if bucket.decode_only else hidden[jnp.maximum(inputs.cu_q_lens[1:] - 1, 0)]
        num_sampling = inputs.samples.sum(dtype=jnp.int32)
        sampled = sample_over_mesh(
            spec.mesh,
            MODEL_AXIS,
            model.logits(last, num_sampling),
            inputs.sampling,
            inputs.slot,
            token_table,
            bias_table,
            by_row=spec.platform == "cpu",
        )
        # A row that does not sample writes to the dummy slot.
        slot = jnp.where(inputs.samples, inputs.slot, token_table.shape[0] - 1)
        index = jnp.where(inputs.samples, inputs.kv_lens, 0)
        token_table = token_table.at[slot, index].set(sampled.token_ids, mode="promise_in_bounds")
        return kv_pool, token_table, hidden, sampled

    return step


def _locate(inputs: StepInputs, bucket: Bucket) -> tuple[jax.Array, jax.Array]:
    """Each token's row and position in its sequence, int32 [num_tokens] each; padding is at position 0."""
    token = jnp.arange(bucket.num_tokens, dtype=jnp.int32)
    ends = inputs.cu_q_lens[1:]
    row = (
        token
        if bucket.decode_only
        else jnp.searchsorted(ends, token, side="right", method="compare_all").astype(jnp.int32)
    )
    row = jnp.minimum(row, bucket.num_rows - 1)
    is_padding = token >= ends[-1]
    positions = inputs.kv_lens[row] - ends[row] + token
    return row, jnp.where(is_padding, 0, positions)


def _attend(spec: StepSpec, bucket: Bucket, inputs: StepInputs) -> AttendFn:
    """Rotate, write the step's K and V, attend; over the model axis each device has its own heads."""
    attention = AttentionSpec(
        spec.sm_scale, soft_cap=spec.soft_cap, v_dim=spec.head_dim, decode_only=bucket.decode_only
    )
    rows = Rows(inputs.kv_lens, inputs.page_indices, inputs.cu_q_lens)

    def local(
        window: jax.Array | int | None,
        layer: int | jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv_pool: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        rows: Rows,
    ) -> tuple[jax.Array, jax.Array]:
        return ragged_paged_attention(
            q,
            k,
            v,
            kv_pool,
            layer,
            rows,
            spec=attention,
            platform=spec.platform,
            chip=spec.chip,
            implementation=spec.attention_implementation,
            window=window,
            rope=rope,
        )

    per_head, per_kv_head = P(None, spec.heads.axis), P(None, spec.heads.kv_axis)
    pool = P(None, None, spec.heads.axis)

    def attend(
        layer: int | jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv_pool: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        window: int | jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        if spec.mesh.size == 1:
            return local(window, layer, q, k, v, kv_pool, rope, rows)
        # The window is a traced scalar over a mesh, or absent: None is no array.
        scalars = [jnp.asarray(x, jnp.int32) for x in (layer, window) if x is not None]

        def on_device(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            kv_pool: jax.Array,
            rope: tuple[jax.Array, jax.Array],
            rows: Rows,
            *scalars: jax.Array,
        ) -> tuple[jax.Array, jax.Array]:
            if spec.heads is HeadSharding.REPEATED:
                k, v = _own_head(k), _own_head(v)
            return local(scalars[1] if len(scalars) > 1 else None, scalars[0], q, k, v, kv_pool, rope, rows)

        fn = jax.shard_map(
            on_device,
            mesh=spec.mesh,
            in_specs=(per_head, per_kv_head, per_kv_head, pool, P(), P(), *(P() for _ in scalars)),
            out_specs=(per_head, pool),
            check_vma=False,
        )
        return fn(q, k, v, kv_pool, rope, rows, *scalars)

    return attend


def _own_head(x: jax.Array) -> jax.Array:
    """x [num_tokens, num_kv_heads, head_dim] -> [num_tokens, 1, head_dim]: that of this device's queries."""
    num_sharing = jax.lax.axis_size(MODEL_AXIS) // x.shape[1]
    head = jax.lax.axis_index(MODEL_AXIS) // num_sharing
    return jax.lax.dynamic_slice_in_dim(x, head, 1, axis=1)


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


def make_pool(num_spans: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Sums of a step's hidden states over spans of its tokens (embeddings)."""

    def pool(hidden: jax.Array, spans: jax.Array) -> jax.Array:
        """hidden [num_tokens, hidden], spans int32 [num_spans, 2]: first row and count, those in use first.

        Returns float32 [num_spans, hidden], 0 for spans of no rows.
        """
        row = jnp.arange(hidden.shape[0])[:, None]

        def add(i: jax.Array, sums: jax.Array) -> jax.Array:
            first, count = spans[i, 0], spans[i, 1]
            # Chosen and not multiplied by 0: another request's NaN stays its own.
            is_inside = (row >= first) & (row < first + count)
            chosen = jnp.where(is_inside, hidden, jnp.zeros((), hidden.dtype)).astype(jnp.float32)
            return sums.at[i].set(chosen.sum(axis=0))

        num_used = (spans[:, 1] > 0).sum()
        return jax.lax.fori_loop(0, num_used, add, jnp.zeros((num_spans, hidden.shape[1]), jnp.float32))

    return pool


def make_logits(spec: StepSpec) -> Callable[..., Any]:
    """The raw logits, float32 [num_rows, vocab], of given rows of a step's hidden states."""

    def logits(weights: Weights, hidden: jax.Array, rows: jax.Array) -> jax.Array:
        return spec.merge(weights).logits(hidden[rows])

    return logits
