"""Families' programs as the TPU compiler makes them, for a slice that need not be there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.batch import Bucket
from jaxserve.capacity import choose_attention, choose_limits, make_spec
from jaxserve.engine_args import EngineArgs
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import family_by_name
from jaxserve.models.rope import RopeConfig
from jaxserve.plan.bucket import compile_bucket, shard_dims
from jaxserve.plan.hlo import collectives, pool_copies
from jaxserve.sharding import make_mesh
from jaxserve.skeleton import ROPE_PATH, build_skeleton
from jaxserve.step_programs import StepPrograms
from pallas_kernels.aot import CompilerMissingError, abstract_devices
from pallas_kernels.ragged_paged_attention import apply_rope

# Stacks larger than a chip's vector memory: smaller ones are prefetched into it, which looks like a copy.
DENSE = ModelConfig(
    family="llama",
    vocab_size=65544,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=64,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0, head_dim=128, max_position_embeddings=4096),
    max_position_embeddings=4096,
)
FAMILIES = {
    "llama": DENSE,
    "qwen3_moe": dataclasses.replace(
        DENSE,
        family="qwen3_moe",
        qk_norm=True,
        num_experts=32,
        num_experts_per_token=4,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "gemma3_text": dataclasses.replace(
        DENSE,
        family="gemma3_text",
        qk_norm=True,
        unit_offset_norms=True,
        sandwich_norms=True,
        activation="gelu_tanh",
        tie_word_embeddings=True,
        layer_windows=(64, None) * 32,
        local_rope=RopeConfig(theta=1000.0, head_dim=128, max_position_embeddings=4096),
    ),
}
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    try:
        return make_mesh(abstract_devices("v6e:2x4"), 8)
    except CompilerMissingError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _programs_are_not_cached() -> Iterator[None]:
    """One for devices that are not there can be written to the cache and not read back."""
    before = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tpu_reads_stacked_layers_where_they_lie(name: str, mesh: Mesh) -> None:
    """No layer's matrix is copied out of its stack, and devices exchange only what tensor parallelism must:
    a sum after attention, one after the MLP, and one for the embedding, which is split over the vocabulary.
    """
    config = FAMILIES[name]
    skeleton = build_skeleton(family_by_name(name), config, np.dtype(jnp.bfloat16), mesh, 4096)

    def attend(
        layer: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pool: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        window: object = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Of each query, its own value alone; keys keep their part in the result."""
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        own = jnp.repeat(v * jnp.sum(k, axis=-1, keepdims=True), q.shape[1] // v.shape[1], axis=1)
        return q * own, pool

    def run(weights: tuple[jax.Array, ...], ids: jax.Array, positions: jax.Array) -> jax.Array:
        model = nnx.merge(skeleton.graphdef, jax.tree.unflatten(skeleton.treedef, weights))
        return model(ids, positions, attend, jnp.zeros(()))[0]

    avals = tuple(jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding) for s in skeleton.leaves)
    whole = NamedSharding(mesh, P())
    ids = jax.ShapeDtypeStruct((NUM_TOKENS,), jnp.int32, sharding=whole)
    text = jax.jit(run, out_shardings=whole).lower(avals, ids, ids).compile().as_text()

    # A router's matrix is no larger than an activation.
    small = {ROPE_PATH, ("layers", "mlp", "gate", "weight")}
    stacks = [leaf for leaf in skeleton.leaves if len(leaf.shape) > 2 and leaf.path not in small]
    assert all(leaf.shape[0] == config.num_layers for leaf in stacks)
    for leaf in stacks:
        local = leaf.sharding.shard_shape(leaf.shape)
        # Otherwise an activation could be mistaken for the layer's matrix.
        assert math.prod(local[1:]) > NUM_TOKENS * config.hidden_size
        assert pool_copies(text, local) == [], leaf.path
    (sums,) = collectives(text)
    assert (sums.kind, sums.count) == ("all-reduce", 2 * config.num_layers + 1)


# Qwen3-30B-A3B but for the number of its layers (48).
QWEN3_30B_A3B = ModelConfig(
    family="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=3,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1000000.0, head_dim=128, max_position_embeddings=40960),
    max_position_embeddings=40960,
    qk_norm=True,
    num_experts=128,
    num_experts_per_token=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
)


@pytest.mark.parametrize("bucket", [Bucket(64, 64, True), Bucket(256, 8, False)], ids=["decode", "mixed"])
def test_four_key_value_heads_on_eight_chips_need_no_further_exchange(bucket: Bucket, mesh: Mesh) -> None:
    """Each chip finds the head of its queries in its own k and v: a layer exchanges two sums, the rest of
    the step one sum, the logits and the sampled tokens; and the pool of a chip has one head."""
    config, dtype = QWEN3_30B_A3B, np.dtype(jnp.bfloat16)
    args = EngineArgs(model="", max_num_seqs=64, max_num_batched_tokens=256, max_model_len=4096, page_size=16)
    # A pool larger than a chip's vector memory, into which the compiler would move a smaller one.
    limits, pool = choose_limits(args, config, dtype, mesh, 4 << 30)
    skeleton = build_skeleton(family_by_name(config.family), config, dtype, mesh, limits.max_model_len)
    spec = make_spec(skeleton, mesh, "v6e", choose_attention(args, "tpu", "v6e"))
    programs = StepPrograms(spec, skeleton, pool, limits)
    assert shard_dims(programs.kv_pool) == (3, pool.num_pages, 1, 16, 256)
    report = compile_bucket(programs, bucket)
    counts = {c.kind: c.count for c in report.collectives}
    assert counts == {"all-reduce": 2 * config.num_layers + 1, "all-to-all": 1, "all-gather": 1}
    assert report.pool_copies == ()
    assert report.pool_aliased
