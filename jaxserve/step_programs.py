"""A step's programs: what each takes, and how it is lowered.

The engine compiles them for the devices it has, `jaxserve plan` for devices nobody has at hand. Both come
here, so that what is planned is what is served.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.batch import COLUMNS, Bucket
from jaxserve.compilation import bucket_ladders
from jaxserve.errors import ConfigError
from jaxserve.kv_pool import PoolSpec
from jaxserve.limits import SchedulerConfig
from jaxserve.step import StepSpec, make_step
from jaxserve.weights import ModelSkeleton

Aval = jax.ShapeDtypeStruct  # a shape, a dtype and a sharding; no memory


class StepPrograms:
    """Lowers the step of one engine for any of its buckets. Holds avals, never arrays."""

    def __init__(
        self, spec: StepSpec, skeleton: ModelSkeleton, pool: PoolSpec, limits: SchedulerConfig
    ) -> None:
        self.spec = spec
        self.pages_per_seq = -(-limits.max_model_len // limits.page_size)
        self.replicated = NamedSharding(spec.mesh, P())
        self.weights = tuple(Aval(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in skeleton.leaves)
        per_head = NamedSharding(spec.mesh, P(None, None, spec.heads.axis))
        self.kv_pool = Aval(pool.shape, pool.dtype, sharding=per_head)
        slots = limits.max_num_seqs + 1  # the last one is the dummy slot
        self.tokens = self.host_aval((slots, limits.max_model_len), jnp.int32)
        self.bias = self.host_aval((slots, skeleton.config.vocab_size), jnp.float32)
        # Native kernels are told which rows are live; a float matrix is multiplied with all.
        self.padding_is_cheap = (
            spec.platform == "cpu" and spec.chip is not None and any(leaf.packed for leaf in skeleton.leaves)
        )
        decode, mixed = bucket_ladders(
            limits.max_num_seqs, limits.max_num_batched_tokens, padding_is_cheap=self.padding_is_cheap
        )
        self.buckets = [*decode, *mixed]

    def host_aval(self, shape: tuple[int, ...], dtype: Any) -> Aval:
        """An argument that every device has a copy of."""
        return Aval(shape, dtype, sharding=self.replicated)

    def lower(self, bucket: Bucket) -> jax.stages.Lowered:
        """The step of `bucket`, the pool and the token table donated, ready to be compiled."""
        step = jax.jit(
            make_step(self.spec, bucket),
            donate_argnums=(1, 2),
            out_shardings=(self.kv_pool.sharding, self.replicated, self.replicated, self.replicated),
        )
        # Kernels ask this mesh what device they are compiled for; the process may have another kind.
        with jax.sharding.use_abstract_mesh(self.spec.mesh.abstract_mesh):
            try:
                return step.lower(
                    self.weights,
                    self.kv_pool,
                    self.tokens,
                    self.bias,
                    self.host_aval((bucket.num_rows, COLUMNS + self.pages_per_seq), jnp.int32),
                )
            except NotImplementedError as error:
                raise ConfigError(f"attention_implementation: {error}") from error
