"""The sampler against plain numpy: one row at a time, sorting where the sampler bisects."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampler import MAX_LOGPROBS, Sampled, SamplingInputs, sample

pytestmark = pytest.mark.quick
VOCAB = 300
MAX_TOKENS = 16
DEFAULTS: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_k": 0,
    "seed": 0,
    "position": 4,
    "num_prompt_tokens": 2,
    "has_bias": False,
    "wants_logprobs": False,
}
# As accelerators do it, and as CPUs do.
_SAMPLE = {by_row: jax.jit(partial(sample, by_row=by_row)) for by_row in (False, True)}
_by_row = False


@pytest.fixture(params=[False, True], ids=["at_once", "by_row"], autouse=True)
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "_by_row", request.param)


def run(
    logits: np.ndarray, rows: list[dict[str, Any]], tokens: np.ndarray | None = None, bias: Any = None
) -> Sampled:
    """One call for all rows; `tokens` and `bias` are the tables, row i using entry i."""
    n = len(rows)
    filled = [{**DEFAULTS, **row} for row in rows]
    seeds = np.array([[r["seed"] >> 32 & 0xFFFFFFFF, r["seed"] & 0xFFFFFFFF] for r in filled], np.uint32)
    columns = {}
    for name, default in DEFAULTS.items():
        dtype = {bool: np.bool_, int: np.int32, float: np.float32}[type(default)]
        columns[name] = seeds if name == "seed" else np.array([r[name] for r in filled], dtype)
    tokens = np.zeros((n + 1, MAX_TOKENS), np.int32) if tokens is None else tokens
    bias = np.zeros((n + 1, logits.shape[1]), np.float32) if bias is None else bias
    return _SAMPLE[_by_row](
        jnp.asarray(logits), SamplingInputs(**columns), jnp.arange(n), jnp.asarray(tokens), jnp.asarray(bias)
    )


def random_logits(n: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, VOCAB)) * 3).astype(np.float32)


def allowed(logits: np.ndarray, row: dict[str, Any]) -> set[int]:
    """Tokens that temperature, min_p, top_k and top_p leave, by sorting."""
    row = {**DEFAULTS, **row}
    scaled = logits.astype(np.float64) / row["temperature"]
    p = np.exp(scaled - scaled.max())
    p[p < row["min_p"]] = 0
    order = np.argsort(-p, kind="stable")
    if row["top_k"] > 0:
        p[order[row["top_k"] :]] = 0
    p /= p.sum()
    mass_before = np.cumsum(p[order]) - p[order]
    return {
        int(i) for i, before in zip(order, mass_before, strict=True) if p[i] > 0 and before < row["top_p"]
    }


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logits = random_logits(4)
    assert run(logits, [{}] * 4).token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-38])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    logits = random_logits(2)
    out = run(logits, [{"temperature": temperature, "wants_logprobs": True}] * 2)
    assert out.token_ids.tolist() == logits.argmax(-1).tolist()
    assert np.isfinite(np.asarray(out.logprob)).all()


@pytest.mark.parametrize(
    "row",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": VOCAB + 7},
        {"top_p": 0.5},
        {"top_p": 1e-4},
        {"top_p": 1e-7},
        {"top_p": 1e-30},
        {"top_p": 0.9999},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.7},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.7},
        {"temperature": 0.3, "top_p": 0.95},
    ],
    ids=str,
)
def test_filters_keep_exactly_the_tokens_that_sorting_keeps(row: dict[str, Any]) -> None:
    row = {"temperature": 1.0, **row}
    logits = random_logits(1)
    n = 400
    out = run(np.repeat(logits, n, 0), [{**row, "seed": seed} for seed in range(n)])
    drawn = set(np.asarray(out.token_ids).tolist())
    kept = allowed(logits[0], row)
    assert drawn <= kept
    if len(kept) <= 5:  # then 400 draws reach each token that is not very unlikely
        p = np.exp(logits[0] / row["temperature"])
        assert {i for i in kept if p[i] / p[list(kept)].sum() > 0.05} <= drawn


def test_draws_follow_the_distribution() -> None:
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, :4] = np.log([0.5, 0.25, 0.2, 0.05])
    n = 4000
    out = run(np.repeat(logits, n, 0), [{"temperature": 1.0, "seed": seed} for seed in range(n)])
    counts = np.bincount(np.asarray(out.token_ids), minlength=4)
    expected = n * np.array([0.5, 0.25, 0.2, 0.05])
    assert ((counts[:4] - expected) ** 2 / expected).sum() < 16.3  # chi square, 3 degrees, p = 0.001
    assert counts[4:].sum() == 0


def test_a_draw_depends_on_seed_and_position_and_not_on_the_batch() -> None:
    logits = random_logits(1)
    row = {"temperature": 1.0, "top_p": 0.95, "seed": 2**63 + 12345, "position": 7}
    alone = int(run(logits, [row]).token_ids[0])
    mates = [{"temperature": 0.7, "seed": s, "top_k": 3, "repetition_penalty": 1.3} for s in range(5)]
    batch = run(np.concatenate([random_logits(5, seed=9), logits]), [*mates, row])
    assert int(batch.token_ids[5]) == alone
    draws = {int(run(logits, [{**row, "position": p}]).token_ids[0]) for p in range(20)}
    assert len(draws) > 1
    high_half = {int(run(logits, [{**row, "seed": s << 32}]).token_ids[0]) for s in range(20)}
    assert len(high_half) > 1


def test_penalties_equal_their_formulas() -> None:
    logits = random_logits(3)
    tokens = np.full((4, MAX_TOKENS), 9, np.int32)  # 9: past the end, must not count
    tokens[:, :6] = [5, 6, 7, 7, 8, 7]  # prompt 5 6, output 7 7 8 7
    rows = [
        {"position": 6, "presence_penalty": 1.5},
        {"position": 6, "frequency_penalty": -0.5},
        {"position": 6, "repetition_penalty": 1.4},
    ]
    expected = logits.copy()
    expected[0, [7, 8]] -= 1.5
    expected[1, 7] += 0.5 * 3
    expected[1, 8] += 0.5
    for i in (5, 6, 7, 8):
        expected[2, i] = expected[2, i] / 1.4 if expected[2, i] > 0 else expected[2, i] * 1.4
    # Each token in turn is forced to the front; the winner tells where the penalised values lie.
    for token in (5, 6, 7, 8, 9):
        for shift in (-0.01, 0.01):
            probe = logits.copy()
            probe[:, 100] = expected[:, token] + shift
            mask = np.full((4, VOCAB), -np.inf, np.float32)
            mask[:, [token, 100]] = 0
            out = run(probe, [{**r, "has_bias": True} for r in rows], tokens, mask)
            assert out.token_ids.tolist() == [token if shift < 0 else 100] * 3


def test_an_extreme_repetition_penalty_still_gives_a_token_of_the_vocabulary() -> None:
    tokens = np.zeros((2, MAX_TOKENS), np.int32)
    out = run(random_logits(1), [{"repetition_penalty": 1e-38, "temperature": 1.0}], tokens)
    assert 0 <= int(out.token_ids[0]) < VOCAB


def test_bias_applies_to_the_rows_that_have_it_and_minus_infinity_forbids() -> None:
    logits = random_logits(3)
    bias = np.zeros((4, VOCAB), np.float32)
    bias[0, 17] = 100.0
    bias[1] = -np.inf
    bias[1, 23] = 0.0
    bias[2, 31] = 100.0
    out = run(logits, [{"has_bias": True}, {"has_bias": True, "temperature": 2.0}, {}], bias=bias)
    assert out.token_ids.tolist() == [17, 23, int(logits[2].argmax())]


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(2)
    bias = np.zeros((3, VOCAB), np.float32)
    bias[0, 17] = 100.0
    rows = [{"has_bias": True, "wants_logprobs": True, "temperature": 0.1}, {"wants_logprobs": True}]
    out = run(logits, rows, bias=bias)
    p = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    order = np.argsort(-logits, axis=-1)
    assert int(out.token_ids[0]) == 17
    assert float(out.logprob[0]) == pytest.approx(p[0, 17], abs=1e-5)
    assert int(out.rank[0]) == 1 + order[0].tolist().index(17)
    assert int(out.rank[1]) == 1
    assert np.asarray(out.top_ids).tolist() == order[:, :MAX_LOGPROBS].tolist()
    np.testing.assert_allclose(
        np.asarray(out.top_logprobs), np.take_along_axis(p, order[:, :MAX_LOGPROBS], 1), atol=1e-5
    )


def noise_of(seed: int, position: int, vocab: int) -> np.ndarray:
    """The noise that a seed has had since the first version, by JAX's own functions."""
    data = jnp.asarray([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], jnp.uint32)
    key = jax.random.fold_in(jax.random.wrap_key_data(data, impl="threefry2x32"), position)
    return np.asarray(jax.random.gumbel(key, (vocab,)))


@pytest.mark.parametrize("row", [{}, {"top_k": 7}, {"top_p": 0.6}, {"top_p": 0.999}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("scale", [0.3, 3.0])  # filters keep most of the vocabulary, or little of it
def test_the_draws_of_a_seed_are_those_of_jax_random(row: dict[str, Any], scale: float) -> None:
    vocab = 1500  # more than the candidates that filters look at first, and no multiple of a block
    logits = (np.random.default_rng(5).standard_normal((1, vocab)) * scale).astype(np.float32)
    row = {"temperature": 0.8, **row}
    seeds = [2**63 + 17 * i for i in range(30)]
    out = run(np.repeat(logits, 30, 0), [{**row, "seed": seed, "position": 9} for seed in seeds])
    kept = np.isin(np.arange(vocab), list(allowed(logits[0], row)))
    assert out.token_ids.tolist() == [
        int(np.where(kept, logits[0] / 0.8 + noise_of(seed, 9, vocab), -np.inf).argmax()) for seed in seeds
    ]


@pytest.mark.parametrize("row", [{"top_k": 3}, {"top_p": 0.2}], ids=str)
@pytest.mark.parametrize("num_tied", [40, 700])  # fewer and more than the candidates looked at first
def test_all_tokens_that_tie_with_the_threshold_are_kept(row: dict[str, Any], num_tied: int) -> None:
    logits = np.zeros((1, 1500), np.float32)
    tied = np.random.default_rng(0).permutation(1500)[:num_tied]
    logits[0, tied] = 40.0
    n = 20 * num_tied // 4
    out = run(np.repeat(logits, n, 0), [{"temperature": 1.0, **row, "seed": seed} for seed in range(n)])
    drawn = set(out.token_ids.tolist())
    assert drawn <= set(tied.tolist())
    assert len(drawn) > 0.9 * num_tied  # of 5 draws a token, 0.7% of the tokens are left out


@pytest.mark.parametrize("row", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_a_row_of_nothing_but_nan_gets_a_token_and_harms_no_other(row: dict[str, Any]) -> None:
    logits = random_logits(3)
    logits[1] = np.nan
    alone = run(logits[:1], [row]).token_ids.tolist()
    out = run(logits, [row, row, {}]).token_ids.tolist()
    assert [out[0]] == alone
    assert 0 <= out[1] < VOCAB
    assert out[2] == int(logits[2].argmax())


def test_of_equal_logits_the_first_token_is_taken() -> None:
    logits = np.zeros((3, 1500), np.float32)
    logits[1, [300, 301, 1499]] = 1.0
    logits[2, 1499] = 1.0
    assert run(logits, [{}] * 3).token_ids.tolist() == [0, 300, 1499]
