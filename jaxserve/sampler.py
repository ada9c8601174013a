"""From logits to a token, for every row of a step at once, on the device.

All parameters are per-row values and not variants of the program, so nothing recompiles; what no row of a
batch asks for is skipped at run time (`lax.cond`). The order is vLLM's: bias, allowed and banned tokens;
repetition, presence and frequency penalties; temperature; min_p; top_k; top_p; draw.

Filters find their threshold by bisection over the bits of a float32 instead of sorting the vocabulary: 32
passes of a sum are exact and cheaper than a sort, on accelerators and CPUs alike. Tokens that tie with the
threshold are all kept.

A draw is argmax(logits + Gumbel noise), the noise keyed by fold_in(seed, position): it depends on the
request and the position alone, never on batch-mates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

MAX_LOGPROBS = 20
_GREEDY_BELOW = 1e-5  # a temperature under this is 0: dividing by it would overflow


class SamplingInputs(NamedTuple):
    """One step's sampling parameters, each [num_rows]."""

    temperature: jax.Array  # float32; 0 is greedy
    top_p: jax.Array  # float32 in (0, 1]
    min_p: jax.Array  # float32 in [0, 1]
    presence_penalty: jax.Array  # float32
    frequency_penalty: jax.Array  # float32
    repetition_penalty: jax.Array  # float32 > 0
    top_k: jax.Array  # int32; <= 0 is off
    seed: jax.Array  # uint32 [num_rows, 2]: high and low half
    position: jax.Array  # int32: index of the token to sample in its sequence
    num_prompt_tokens: jax.Array  # int32
    has_bias: jax.Array  # bool: the row's entry of the bias table applies
    wants_logprobs: jax.Array  # bool


class Sampled(NamedTuple):
    """A step's result. The log-probabilities are zeros where no row asked for them."""

    token_ids: jax.Array  # int32 [num_rows]
    logprob: jax.Array  # float32 [num_rows]: of the sampled token, raw distribution
    rank: jax.Array  # int32 [num_rows]: 1 is the most likely
    top_ids: jax.Array  # int32 [num_rows, MAX_LOGPROBS]
    top_logprobs: jax.Array  # float32 [num_rows, MAX_LOGPROBS]


def sample(
    logits: jax.Array, inputs: SamplingInputs, slot: jax.Array, token_table: jax.Array, bias_table: jax.Array
) -> Sampled:
    """Choose one token a row.

    Args:
        logits: float32 [num_rows, vocab].
        inputs: the rows' parameters.
        slot: int32 [num_rows]: each row's entry of the two tables.
        token_table: int32 [num_slots + 1, max_tokens]: tokens so far; those from `position` on are ignored.
        bias_table: float32 [num_slots + 1, vocab], added where `has_bias`; -inf forbids a token.
    """
    raw = logits
    logits = jax.lax.cond(
        inputs.has_bias.any(),
        lambda x: jnp.where(inputs.has_bias[:, None], x + bias_table[slot], x),
        lambda x: x,
        logits,
    )
    is_penalised = (
        (inputs.presence_penalty != 0) | (inputs.frequency_penalty != 0) | (inputs.repetition_penalty != 1)
    )
    logits = jax.lax.cond(
        is_penalised.any(), lambda x: _penalise(x, inputs, token_table[slot]), lambda x: x, logits
    )
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_random = inputs.temperature >= _GREEDY_BELOW
    drawn = jax.lax.cond(is_random.any(), lambda x: _draw(x, inputs), lambda x: greedy, logits)
    token_ids = jnp.where(is_random, drawn, greedy)
    details = jax.lax.cond(inputs.wants_logprobs.any(), token_logprobs, _no_logprobs, raw, token_ids)
    return Sampled(token_ids, *details)


def sample_over_mesh(
    mesh: Mesh,
    axis: str,
    logits: jax.Array,
    inputs: SamplingInputs,
    slot: jax.Array,
    token_table: jax.Array,
    bias_table: jax.Array,
) -> Sampled:
    """`sample` with the rows dealt out over `axis`, whose devices hold a part of the vocabulary each.

    A device then has its rows' logits whole: one exchange of logits in, one gather of results out, and an
    n-th of the work and of the memory, where sampling across the split vocabulary would talk in every
    reduction of every filter. Everything else comes in and goes out whole: a split by rows that the
    partitioner saw, it would carry back into the layers.
    """
    num_devices, (num_rows, vocab) = mesh.shape[axis], logits.shape
    if num_devices == 1:
        return sample(logits, inputs, slot, token_table, bias_table)
    rows_each = -(-num_rows // num_devices)
    spare = rows_each * num_devices - num_rows  # rows that repeat the last one
    is_split = vocab % num_devices == 0  # as `jaxserve.sharding` does with the output matrix

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, spare), *((0, 0),) * (x.ndim - 1)), mode="edge")

    def own_rows(x: jax.Array) -> jax.Array:
        start = jax.lax.axis_index(axis) * rows_each
        return jax.lax.dynamic_slice_in_dim(pad(x), start, rows_each)

    def sample_rows(
        logits: jax.Array,  # [num_rows, vocab / num_devices]
        inputs: SamplingInputs,
        slot: jax.Array,
        token_table: jax.Array,
        bias_table: jax.Array,
    ) -> Sampled:
        if is_split:
            logits = jax.lax.all_to_all(pad(logits), axis, split_axis=0, concat_axis=1, tiled=True)
        else:
            logits = own_rows(logits)
        inputs, slot = jax.tree.map(own_rows, (inputs, slot))
        return _gather(sample(logits, inputs, slot, token_table, bias_table), axis, num_rows)

    whole = PartitionSpec()
    vocab_split = PartitionSpec(None, axis if is_split else None)
    fn = jax.shard_map(
        sample_rows,
        mesh=mesh,
        in_specs=(vocab_split, whole, whole, whole, whole),
        out_specs=whole,
        check_vma=False,
    )
    return fn(logits, inputs, slot, token_table, bias_table)


def _gather(sampled: Sampled, axis: str, num_rows: int) -> Sampled:
    """The first `num_rows` rows of all devices' results; packed, so that it is one transfer."""
    columns = [jax.lax.bitcast_convert_type(x.reshape(x.shape[0], -1), jnp.int32) for x in sampled]
    packed = jax.lax.all_gather(jnp.concatenate(columns, axis=1), axis, tiled=True)[:num_rows]
    ends = np.cumsum([column.shape[1] for column in columns])[:-1]
    parts = jnp.split(packed, ends, axis=1)
    return Sampled(
        *(
            jax.lax.bitcast_convert_type(part, x.dtype).reshape(num_rows, *x.shape[1:])
            for part, x in zip(parts, sampled, strict=True)
        )
    )


def token_logprobs(
    logits: jax.Array, token_ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log-probability and rank of `token_ids` [num_rows], and the most likely tokens, of raw `logits`."""
    norm = jax.nn.logsumexp(logits, axis=-1)  # [num_rows]
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)  # [num_rows, 1]
    rank = 1 + (logits > chosen).sum(-1, dtype=jnp.int32)
    top, top_ids = jax.lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    missing = ((0, 0), (0, MAX_LOGPROBS - top.shape[-1]))  # a vocabulary smaller than that
    top = jnp.pad(top, missing, constant_values=-jnp.inf)
    return chosen[:, 0] - norm, rank, jnp.pad(top_ids.astype(jnp.int32), missing), top - norm[:, None]


def _no_logprobs(
    logits: jax.Array, token_ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    rows = logits.shape[0]
    zeros = jnp.zeros((rows, MAX_LOGPROBS))
    return jnp.zeros(rows), jnp.zeros(rows, jnp.int32), zeros.astype(jnp.int32), zeros


def _penalise(logits: jax.Array, inputs: SamplingInputs, history: jax.Array) -> jax.Array:
    """Repetition (Keskar et al., 2019, arXiv:1909.05858) over prompt and output; the others over output."""
    rows, vocab = logits.shape
    at = jnp.arange(history.shape[1], dtype=jnp.int32)[None, :]
    is_token = at < inputs.position[:, None]
    is_output = is_token & (at >= inputs.num_prompt_tokens[:, None])
    row = jnp.arange(rows)[:, None]
    token = jnp.clip(history, 0, vocab - 1)
    seen = jnp.zeros((rows, vocab), jnp.int32).at[row, token].add(is_token.astype(jnp.int32))
    output = jnp.zeros((rows, vocab), jnp.int32).at[row, token].add(is_output.astype(jnp.int32))
    repetition = inputs.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, repeated, logits)
    logits = logits - inputs.frequency_penalty[:, None] * output
    return logits - inputs.presence_penalty[:, None] * (output > 0)


def _draw(logits: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """int32 [num_rows]: a random token under temperature and filters."""
    temperature = jnp.maximum(inputs.temperature, _GREEDY_BELOW)[:, None]
    logits = logits / temperature
    # exp(logit - max) is the probability relative to the most likely token's.
    logits = logits - logits.max(-1, keepdims=True)
    logits = jnp.where(logits < jnp.log(inputs.min_p)[:, None], -jnp.inf, logits)
    vocab = logits.shape[-1]
    k = jnp.where(inputs.top_k > 0, jnp.minimum(inputs.top_k, vocab), vocab)
    is_filtered = (k < vocab) | (inputs.top_p < 1)
    logits = jax.lax.cond(
        is_filtered.any(), lambda x: _top_p(_top_k(x, k), inputs.top_p), lambda x: x, logits
    )
    return jnp.argmax(logits + _gumbel(inputs, vocab), axis=-1).astype(jnp.int32)


def _gumbel(inputs: SamplingInputs, vocab: int) -> jax.Array:
    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,))

    return jax.vmap(noise)(inputs.seed, inputs.position)  # [num_rows, vocab]


def _top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    """Keep the k [num_rows] largest (and what ties with the last of them)."""
    keys = _ordered_bits(logits)
    threshold = _largest_threshold(keys, lambda kept: kept.sum(-1, dtype=jnp.int32) >= k)
    return jnp.where(keys >= threshold[:, None], logits, -jnp.inf)


def _top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keep the most likely tokens that sum to top_p (Holtzman et al., 2020, arXiv:1904.09751)."""
    keys = _ordered_bits(logits)
    p = jax.nn.softmax(logits, axis=-1)
    # The sum of all probabilities can round to less than 1; the most likely token stays for any top_p.
    target = jnp.maximum(top_p - 1e-6, 1e-9)
    threshold = _largest_threshold(keys, lambda kept: jnp.where(kept, p, 0.0).sum(-1) >= target)
    return jnp.where((keys >= threshold[:, None]) | (top_p >= 1)[:, None], logits, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """float32 -> uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(keys: jax.Array, suffices: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """uint32 [num_rows]: the largest t for which `suffices(keys >= t)` holds (it holds for t = 0)."""

    def one_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(suffices(keys >= candidate[:, None]), candidate, threshold)

    return jax.lax.fori_loop(0, 32, one_bit, jnp.zeros(keys.shape[0], jnp.uint32))
