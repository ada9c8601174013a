"""From logits to a token, for every row of a step at once, on the device.

All parameters are per-row values and not variants of the program, so nothing recompiles; what no row of a
batch asks for is skipped at run time (`lax.cond`). The order is vLLM's: bias, allowed and banned tokens;
repetition, presence and frequency penalties; temperature; min_p; top_k; top_p; draw.

Filters find their threshold by bisection over the bits of a float32 instead of sorting the vocabulary: 32
passes of a sum are exact and cheaper than a sort, on accelerators and CPUs alike. Tokens that tie with the
threshold are all kept.

A draw is argmax(logits + Gumbel noise), the noise keyed by fold_in(seed, position) and counted by the token:
it depends on the request, the position and the token alone, never on batch-mates.

On CPUs (`by_row`) the rows that ask for more than the most likely token are done one after the other, so that
the others of the batch cost nothing and a row's vocabulary stays in the cache; and filters look first at the
most likely tokens alone, which nearly always are all that they keep. Both ways give the same tokens.
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
_BLOCK = 256  # tokens searched at once for the largest
_CANDIDATES = 256  # most likely tokens that a filtered draw looks at first


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
    logits: jax.Array,
    inputs: SamplingInputs,
    slot: jax.Array,
    token_table: jax.Array,
    bias_table: jax.Array,
    *,
    by_row: bool = False,
) -> Sampled:
    """Choose one token a row. A row with nothing but NaN still gets a token of the vocabulary.

    Args:
        logits: float32 [num_rows, vocab].
        inputs: the rows' parameters.
        slot: int32 [num_rows]: each row's entry of the two tables.
        token_table: int32 [num_slots + 1, max_tokens]: tokens so far; those from `position` on are ignored.
        bias_table: float32 [num_slots + 1, vocab], added where `has_bias`; -inf forbids a token.
        by_row: how the work is ordered; True is faster on CPUs.
    """
    asks = inputs.has_bias | _is_penalised(inputs) | _is_random(inputs) | inputs.wants_logprobs
    if not by_row:
        return jax.lax.cond(
            asks.any(),
            lambda: _choose(logits, inputs, slot, token_table, bias_table, by_row=False),
            lambda: _most_likely(logits, by_row=False),
        )

    def row(i: jax.Array, sampled: Sampled) -> Sampled:
        def one(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i, 1)

        def choose() -> Sampled:
            own = jax.tree.map(one, inputs)
            chosen = _choose(one(logits), own, one(slot), token_table, bias_table, by_row=True)
            return jax.tree.map(
                lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, i, 0), sampled, chosen
            )

        return jax.lax.cond(asks[i], choose, lambda: sampled)

    num_rows = logits.shape[0]
    after_last = jnp.where(asks, jnp.arange(1, num_rows + 1), 0).max()
    return jax.lax.fori_loop(0, after_last, row, _most_likely(logits, by_row=True))


def _is_penalised(inputs: SamplingInputs) -> jax.Array:
    return (inputs.presence_penalty != 0) | (inputs.frequency_penalty != 0) | (inputs.repetition_penalty != 1)


def _is_random(inputs: SamplingInputs) -> jax.Array:
    return inputs.temperature >= _GREEDY_BELOW


def _most_likely(logits: jax.Array, *, by_row: bool) -> Sampled:
    token_ids = _argmax(logits, by_row)
    return Sampled(token_ids, *_no_logprobs(logits, token_ids))


def _choose(
    logits: jax.Array,
    inputs: SamplingInputs,
    slot: jax.Array,
    token_table: jax.Array,
    bias_table: jax.Array,
    *,
    by_row: bool,
) -> Sampled:
    """`sample` for rows of which one at least asks for something."""
    raw = logits
    logits = jax.lax.cond(
        inputs.has_bias.any(),
        lambda x: jnp.where(inputs.has_bias[:, None], x + bias_table[slot], x),
        lambda x: x,
        logits,
    )
    logits = jax.lax.cond(
        _is_penalised(inputs).any(), lambda x: _penalise(x, inputs, token_table[slot]), lambda x: x, logits
    )
    greedy = _argmax(logits, by_row)
    is_random = _is_random(inputs)
    drawn = jax.lax.cond(is_random.any(), lambda x: _draw(x, inputs, by_row=by_row), lambda x: greedy, logits)
    token_ids = jnp.where(is_random, drawn, greedy)
    details = jax.lax.cond(inputs.wants_logprobs.any(), token_logprobs, _no_logprobs, raw, token_ids)
    return Sampled(token_ids, *details)


def _argmax(x: jax.Array, by_row: bool) -> jax.Array:
    """int32 [num_rows]: argmax over the last axis; the first NaN where there is one."""
    if not by_row:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)
    # XLA's argmax is a slow loop on CPUs, where a maximum is a fast one: the block first, then the place.
    vocab = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (0, -vocab % _BLOCK)), constant_values=-jnp.inf)
    block = jnp.argmax(padded.reshape(x.shape[0], -1, _BLOCK).max(-1), axis=-1)
    tokens = jnp.minimum(block[:, None] * _BLOCK + jnp.arange(_BLOCK)[None, :], vocab - 1)
    place = jnp.argmax(jnp.take_along_axis(x, tokens, axis=-1), axis=-1)
    return jnp.take_along_axis(tokens, place[:, None], axis=-1)[:, 0].astype(jnp.int32)


def sample_over_mesh(
    mesh: Mesh,
    axis: str,
    logits: jax.Array,
    inputs: SamplingInputs,
    slot: jax.Array,
    token_table: jax.Array,
    bias_table: jax.Array,
    *,
    by_row: bool = False,
) -> Sampled:
    """`sample` with the rows dealt out over `axis`, whose devices hold a part of the vocabulary each.

    A device then has its rows' logits whole: one exchange of logits in, one gather of results out, and an
    n-th of the work and of the memory, where sampling across the split vocabulary would talk in every
    reduction of every filter. Everything else comes in and goes out whole: a split by rows that the
    partitioner saw, it would carry back into the layers.
    """
    num_devices, (num_rows, vocab) = mesh.shape[axis], logits.shape
    if num_devices == 1:
        return sample(logits, inputs, slot, token_table, bias_table, by_row=by_row)
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
        sampled = sample(logits, inputs, slot, token_table, bias_table, by_row=by_row)
        return _gather(sampled, axis, num_rows)

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


def _scale(logits: jax.Array, inputs: SamplingInputs) -> jax.Array:
    """Logits under temperature and min_p; exp of one is the probability relative to the most likely token."""
    logits = logits / jnp.maximum(inputs.temperature, _GREEDY_BELOW)[:, None]
    logits = logits - logits.max(-1, keepdims=True)
    return jnp.where(logits < jnp.log(inputs.min_p)[:, None], -jnp.inf, logits)


def _limit(inputs: SamplingInputs, vocab: int) -> jax.Array:
    """int32 [num_rows]: the tokens top_k leaves, `vocab` where it is off."""
    return jnp.where(inputs.top_k > 0, jnp.minimum(inputs.top_k, vocab), vocab)


def _draw(logits: jax.Array, inputs: SamplingInputs, *, by_row: bool) -> jax.Array:
    """int32 [num_rows]: a random token under temperature and filters."""
    num_rows, vocab = logits.shape
    # exp of such a logit is the probability relative to the most likely token's.
    logits = logits / jnp.maximum(inputs.temperature, _GREEDY_BELOW)[:, None]
    logits = logits - logits.max(-1, keepdims=True)
    logits = jnp.where(logits < jnp.log(inputs.min_p)[:, None], -jnp.inf, logits)
    k = jnp.where(inputs.top_k > 0, jnp.minimum(inputs.top_k, vocab), vocab)
    is_cut, is_nucleus = k < vocab, inputs.top_p < 1
    keys = _noise_keys(inputs)

    def draw_of_all(x: jax.Array) -> jax.Array:
        x = jax.lax.cond(is_cut.any(), lambda x: _top_k(x, k), lambda x: x, x)
        x = jax.lax.cond(is_nucleus.any(), lambda x: _top_p(x, inputs.top_p), lambda x: x, x)
        tokens = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), (num_rows, vocab))
        return _argmax(x + _gumbel(keys, tokens), by_row)

    if not by_row or vocab <= _CANDIDATES:
        return draw_of_all(logits)

    # Where filters leave few tokens, the draw is among the most likely ones.
    has_few = is_cut | is_nucleus | (inputs.min_p > 0)
    unsure = jnp.zeros(num_rows, jnp.int32), jnp.zeros(num_rows, bool)
    found, is_sure = jax.lax.cond(
        has_few.all(), lambda x: _draw_of_candidates(x, k, keys, inputs), lambda x: unsure, logits
    )
    return jax.lax.cond(is_sure.all(), lambda x: found, draw_of_all, logits)


def _draw_of_candidates(
    logits: jax.Array, k: jax.Array, keys: jax.Array, inputs: SamplingInputs
) -> tuple[jax.Array, jax.Array]:
    """A draw among the most likely tokens, and whether the filters keep none but these (bool [num_rows]).

    Then it is the draw of the whole vocabulary. logits float32 [num_rows, vocab], their maximum 0.
    """
    vocab = logits.shape[1]
    # From large to small; behind a barrier, since XLA sorts the vocabulary where a part of these is used.
    # One each: over a mesh XLA's decomposition of top_k ends the process at a barrier of the pair.
    top, tokens = (jax.lax.optimization_barrier(part) for part in jax.lax.top_k(logits, _CANDIDATES))
    is_cut = k[:, None] <= _CANDIDATES  # by top_k
    kth = jnp.take_along_axis(top, jnp.minimum(k, _CANDIDATES)[:, None] - 1, axis=-1)
    kth = jnp.where(is_cut, kth, -jnp.inf)
    weight = jnp.where(top >= kth, jnp.exp(top), 0.0)
    whole = jnp.where(is_cut, weight.sum(-1, keepdims=True), jnp.exp(logits).sum(-1, keepdims=True))
    mass = jnp.cumsum(weight / whole, axis=-1)
    before = jnp.pad(mass[:, :-1], ((0, 0), (1, 0)))  # of the tokens more likely than this
    top_p = inputs.top_p[:, None]
    last = (before < _nucleus_mass(top_p)).sum(-1, keepdims=True) - 1
    nucleus = jnp.where(top_p < 1, jnp.take_along_axis(top, last, axis=-1), -jnp.inf)
    threshold = jnp.maximum(kth, nucleus)  # what ties with it is kept
    least = top[:, -1:]
    is_sure = (least < threshold) | (least == -jnp.inf)
    is_sure &= is_cut | (k[:, None] == vocab)  # a wider top_k would change the mass that top_p is a part of
    score = jnp.where(top >= threshold, top + _gumbel(keys, tokens), -jnp.inf)
    best = score.max(-1, keepdims=True)
    return jnp.where(score == best, tokens, vocab).min(-1).astype(jnp.int32), is_sure[:, 0]


def _noise_keys(inputs: SamplingInputs) -> jax.Array:
    """uint32 [num_rows, 2]: each row's seed with the position folded in."""

    def fold(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, position))

    return jax.vmap(fold)(inputs.seed, inputs.position)


def _gumbel(keys: jax.Array, tokens: jax.Array) -> jax.Array:
    """float32 of `tokens`' shape, int32 [num_rows, n]: each token's noise, whichever others are asked for.

    It is `jax.random.gumbel(key, [vocab])[tokens]` under JAX's default settings, and stays so under others:
    a seed's draws are a promise.
    """
    bits = _threefry(keys, tokens.astype(jnp.uint32))
    # 23 random bits as the mantissa of a number in [1, 2).
    unit = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(unit, jnp.finfo(jnp.float32).tiny)))


def _threefry(keys: jax.Array, count: jax.Array) -> jax.Array:
    """Random bits, uint32 [num_rows, n], for numbers `count` of that shape, under keys uint32 [num_rows, 2].

    Threefry-2x32 with 20 rounds, the two halves of its result folded (Salmon et al., 2011, "Parallel random
    numbers: as easy as 1, 2, 3"). Written out, since JAX's own is a loop on CPUs, four times slower.
    """
    high, low = keys[:, :1], keys[:, 1:]
    parts = high, low, high ^ low ^ jnp.uint32(0x1BD11BDA)
    a, b = jnp.broadcast_to(high, count.shape), count + low
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            a = a + b
            b = ((b << turn) | (b >> (32 - turn))) ^ a
        a = a + parts[(group + 1) % 3]
        b = b + parts[(group + 2) % 3] + jnp.uint32(group + 1)
    return a ^ b


def _top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    """Keep the k [num_rows] largest (and what ties with the last of them)."""
    keys = _ordered_bits(logits)
    threshold = _largest_threshold(keys, lambda kept: kept.sum(-1, dtype=jnp.int32) >= k)
    return jnp.where(keys >= threshold[:, None], logits, -jnp.inf)


def _top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keep the most likely tokens that sum to top_p (Holtzman et al., 2020, arXiv:1904.09751)."""
    keys = _ordered_bits(logits)
    p = jax.nn.softmax(logits, axis=-1)
    target = _nucleus_mass(top_p)
    threshold = _largest_threshold(keys, lambda kept: jnp.where(kept, p, 0.0).sum(-1) >= target)
    return jnp.where((keys >= threshold[:, None]) | (top_p >= 1)[:, None], logits, -jnp.inf)


def _nucleus_mass(top_p: jax.Array) -> jax.Array:
    """The sum of all probabilities can round to less than 1; the most likely token stays for any top_p."""
    return jnp.maximum(top_p - 1e-6, 1e-9)


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
