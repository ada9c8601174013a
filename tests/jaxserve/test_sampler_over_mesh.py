"""Sampling with the rows dealt out over devices gives what one device gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.plan.hlo import collectives
from jaxserve.sampler import SamplingInputs, sample, sample_over_mesh

NUM_DEVICES = 4
SLOTS, MAX_TOKENS = 6, 16


def mesh():
    return jax.make_mesh((NUM_DEVICES,), ("model",), axis_types=(AxisType.Auto,))


def inputs_of(num_rows, rng):
    """Rows that ask for different things, so that every branch of the sampler runs."""

    def pick(*choices):
        return rng.choice(choices, num_rows)

    return SamplingInputs(
        temperature=jnp.asarray(pick(0.0, 0.7, 1.3), jnp.float32),
        top_p=jnp.asarray(pick(0.8, 1.0), jnp.float32),
        min_p=jnp.asarray(pick(0.0, 0.05), jnp.float32),
        presence_penalty=jnp.asarray(pick(0.0, 0.5), jnp.float32),
        frequency_penalty=jnp.asarray(pick(0.0, 0.3), jnp.float32),
        repetition_penalty=jnp.asarray(pick(1.0, 1.2), jnp.float32),
        top_k=jnp.asarray(pick(0, 5), jnp.int32),
        seed=jnp.asarray(rng.integers(0, 1 << 32, (num_rows, 2)), jnp.uint32),
        position=jnp.asarray(rng.integers(1, MAX_TOKENS, num_rows), jnp.int32),
        num_prompt_tokens=jnp.ones(num_rows, jnp.int32),
        has_bias=jnp.asarray(pick(0, 1), bool),
        wants_logprobs=jnp.asarray(pick(0, 1), bool),
    )


def arguments(num_rows, vocab):
    rng = np.random.default_rng(num_rows * 1000 + vocab)
    return (
        jnp.asarray(rng.standard_normal((num_rows, vocab)) * 3, jnp.float32),
        # A row that wants log-probabilities, so that no device may leave them out for the others.
        inputs_of(num_rows, rng)._replace(wants_logprobs=jnp.ones(num_rows, bool)),
        jnp.asarray(rng.integers(0, SLOTS, num_rows), jnp.int32),
        jnp.asarray(rng.integers(0, vocab, (SLOTS, MAX_TOKENS)), jnp.int32),
        jnp.asarray(rng.standard_normal((SLOTS, vocab)), jnp.float32),
    )


# A vocabulary that the devices divide is split over them; another is whole on each. 600: more than the
# candidates that filters look at first.
@pytest.mark.parametrize("vocab", [64, 61, 600])
@pytest.mark.parametrize("num_rows", [1, 6, 8])
@pytest.mark.parametrize("by_row", [False, True])
def test_every_row_is_as_on_one_device(num_rows, vocab, by_row):
    logits, *rest = arguments(num_rows, vocab)
    expected = jax.jit(sample)(logits, *rest)
    split = P(None, "model" if vocab % NUM_DEVICES == 0 else None)
    logits = jax.device_put(logits, NamedSharding(mesh(), split))
    found = jax.jit(lambda *args: sample_over_mesh(mesh(), "model", *args, by_row=by_row))(logits, *rest)
    for name, a, b in zip(expected._fields, found, expected, strict=True):
        assert a.dtype == b.dtype, name
        if np.issubdtype(a.dtype, np.integer):
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6, err_msg=name)


def test_devices_exchange_logits_once_and_results_once():
    whole = NamedSharding(mesh(), P())
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), arguments(8, 64))
    logits = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh(), P(None, "model")))
    program = jax.jit(lambda *args: sample_over_mesh(mesh(), "model", *args), out_shardings=whole)
    text = program.lower(logits, *avals[1:]).compile().as_text()
    assert {c.kind: c.count for c in collectives(text)} == {"all-to-all": 1, "all-gather": 1}
