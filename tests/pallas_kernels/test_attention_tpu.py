"""The TPU kernels, interpreted: numbers against the dense oracle, then races and waits on a tiny case.

`interpret=True` is fast and checks the numbers. `InterpretParams(detect_races=True)` also starts memory as
NaN, does copies when they are waited for, and watches every access: that is where a forgotten wait shows. The
last tests put a fault of each kind in and show that these checks fail on it.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention import Rows, ragged_paged_attention, tpu, tpu_decode, tpu_prefill
from pallas_kernels.ragged_paged_attention.cases import CASES, Case
from pallas_kernels.ragged_paged_attention.problem import Problem
from pallas_kernels.ragged_paged_attention.tpu_pages import PageStream
from pallas_kernels.ragged_paged_attention.tpu_tuning import Tuning

# Blocks so small that short contexts take many, and queries many tiles.
SMALL = Tuning(
    fetch_bytes=1 << 15, decode_keys=16, prefill_keys=16, query_tile=16, prefill_rows=32, state_bytes=1 << 24
)
TINY = Case(
    "tiny",
    rows=((1, 20), (19, 21), (1, 9), (2, 40), (1, 8)),
    empty_rows=1,
    page_size=8,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=64,
    num_layers=1,
    layer=0,
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "tuning_of", lambda chip: SMALL)


def check(case: Case, *, interpret: Any = True, tolerance: float = 2e-6, **options: Any) -> None:
    problem = Problem(case, platform="tpu", dtype=options.pop("dtype", "float32"))
    problem.check(*problem.run("mosaic_tpu", interpret=interpret, **options), tolerance=tolerance)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_equals_dense_attention_and_reads_live_memory_only(case: Case) -> None:
    check(case)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.name in ("decodes of ragged lengths", "empty rows behind decodes")],
    ids=lambda case: case.name,
)
def test_decode_only_gives_what_the_general_call_gives(case: Case) -> None:
    check(case, decode_only=True)


@pytest.mark.parametrize("chip", ["v5e", "tpu7x", None])
def test_the_block_sizes_of_chips_give_the_same(chip: str | None) -> None:
    check(Case("mixed", rows=((1, 600), (140, 300), (1, 3)), head_dim=64), chip=chip)


@pytest.mark.usefixtures("small_blocks")
def test_bfloat16_is_right_to_its_own_rounding() -> None:
    check(
        Case("mixed", rows=((1, 70), (20, 50), (1, 3)), head_dim=64, kv_dtype="bfloat16"),
        dtype="bfloat16",
        tolerance=3e-2,
    )


@pytest.mark.usefixtures("small_blocks")
def test_rows_whose_page_table_is_too_big_for_one_call_take_several(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("many", rows=((1, 20), (5, 30), (1, 9), (3, 3), (1, 40)) * 4, empty_rows=1)
    calls: list[int] = []
    inner = tpu.tpu_decode
    monkeypatch.setattr(tpu, "tpu_decode", lambda q, *a, **k: (calls.append(len(q)), inner(q, *a, **k))[1])
    monkeypatch.setattr(tpu, "TABLE_BYTES", 4 * 5 * 8)
    check(case)
    assert calls == [8, 8, 5]
    monkeypatch.setattr(tpu, "TABLE_BYTES", 4 * 4)
    with pytest.raises(NotImplementedError, match="page size"):
        check(case)


@pytest.mark.parametrize(
    ("dtype", "page_size", "is_served"),
    [("float32", 24, True), ("float32", 12, False), ("bfloat16", 8, True), ("bfloat16", 24, False)],
)
def test_pages_that_cannot_be_written_in_whole_pieces_are_refused_by_name_and_left_by_auto(
    dtype: str, page_size: int, is_served: bool
) -> None:
    case = Case("pages", rows=((1, 45), (17, 17)), page_size=page_size, kv_dtype=dtype)
    problem = Problem(case, platform="tpu")
    if not is_served:
        with pytest.raises(NotImplementedError, match=f"pages of {page_size}"):
            problem.run("mosaic_tpu", interpret=True)
    problem.check(*problem.run("auto", interpret=True), tolerance=2e-6)


@pytest.mark.usefixtures("small_blocks")
def test_pages_that_a_row_with_several_queries_writes_may_be_read_by_others_in_the_same_call() -> None:
    """What a prefix hit within a step needs: the second and third row go on from the first row's pages."""
    rng = np.random.default_rng(0)
    rows = Rows(
        jnp.array([33, 17, 25], jnp.int32),
        jnp.array([[1, 2, 3], [1, 4, 9], [1, 5, 9]], jnp.int32),
        jnp.array([0, 33, 34, 43], jnp.int32),
    )
    arrays = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((43, 4, 64), *[(43, 2, 64)] * 2)]
    pool = jnp.full((1, 10, 2, 16, 128), jnp.nan).at[:, 0].set(0.0)

    def run(platform: str, implementation: str) -> Any:
        return ragged_paged_attention(
            *arrays,
            pool,
            0,
            rows,
            spec=TINY.spec(),
            platform=platform,
            implementation=implementation,
            interpret=platform == "tpu",
        )

    np.testing.assert_allclose(run("tpu", "mosaic_tpu")[0], run("cpu", "reference")[0], atol=2e-6, rtol=2e-6)


# ---- races


def check_closely(case: Case = TINY, *, decode_only: bool = False) -> None:
    """Waits and races, then numbers."""
    problem = Problem(case, platform="tpu")
    interpret = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    # The detector starts anew with each kernel; what it prints stays.
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        out, pool = problem.run("mosaic_tpu", interpret=interpret, decode_only=decode_only)
    assert "RACE DETECTED" not in printed.getvalue(), "a race: " + printed.getvalue()[:1000]
    problem.check(out, pool, tolerance=2e-6)


TINY_BLOCKS = Tuning(
    fetch_bytes=8192, decode_keys=8, prefill_keys=8, query_tile=16, prefill_rows=16, state_bytes=1 << 24
)


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "tuning_of", lambda chip: TINY_BLOCKS)


@pytest.mark.quick
@pytest.mark.usefixtures("tiny_blocks")
def test_no_copy_is_used_before_it_is_waited_for_and_nothing_races() -> None:
    check_closely()


@pytest.mark.usefixtures("tiny_blocks")
def test_nothing_races_in_decode_alone() -> None:
    rows = ((1, 20), (1, 9), (1, 17), (1, 8), (1, 1))
    check_closely(Case("tiny", rows=rows, page_size=8, num_kv_heads=1, head_dim=64), decode_only=True)


def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageStream, "wait", lambda *_: None)


def _one_page_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = PageStream.count
    monkeypatch.setattr(PageStream, "count", lambda self, *a: inner(self, *a) + 1)


def _stale_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = PageStream.zero_after

    def only_merge(self: Any, last: Any, slot: Any, new: Any, slab: Any) -> None:
        if new is not None:
            inner(self, last, slot, new, slab)

    monkeypatch.setattr(PageStream, "zero_after", only_merge)


def _late_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tpu_prefill.OnlineSoftmax.update

    def off_by_one(self: Any, head: Any, q: Any, k: Any, v: Any, is_seen: Any) -> None:
        shifted = jnp.concatenate([is_seen[:, 1:], is_seen[:, -1:]], axis=1)
        inner(self, head, q, k, v, is_seen & shifted)

    monkeypatch.setattr(tpu_prefill.OnlineSoftmax, "update", off_by_one)


def _one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next block lands in the buffer that is being computed on."""
    inner = PageStream.start
    monkeypatch.setattr(
        PageStream, "start", lambda self, row, page, n, slot: inner(self, row, page, n, slot * 0)
    )
    waits = PageStream.wait
    monkeypatch.setattr(
        PageStream, "wait", lambda self, row, page, n, slot: waits(self, row, page, n, slot * 0)
    )
    rows = PageStream.rows
    monkeypatch.setattr(PageStream, "rows", lambda self, slot, step, head: rows(self, slot * 0, step, head))
    zero = PageStream.zero_after
    monkeypatch.setattr(PageStream, "zero_after", lambda self, last, slot, *a: zero(self, last, slot * 0, *a))


def _unordered_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of prefill tiles go out without waiting for those before them: tiles overlap."""
    real = pltpu.make_async_copy

    class NoWait:
        def __init__(self, copy: Any) -> None:
            self.start, self.wait = copy.start, lambda: None

    def copy(source: Any, target: Any, semaphore: Any) -> Any:
        made = real(source, target, semaphore)
        return NoWait(made) if getattr(source, "shape", ())[:1] == (TINY.num_q_heads,) else made

    monkeypatch.setattr(tpu_prefill.pltpu, "make_async_copy", copy)


def _page_outside_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = PageStream._copy

    def beyond(self: Any, row: Any, page: Any, place: Any, slot: Any) -> Any:
        layer, self.layer = self.layer, self.layer + TINY.num_layers
        copy = inner(self, row, page, place, slot)
        self.layer = layer
        return copy

    monkeypatch.setattr(PageStream, "_copy", beyond)


# A fault, and what the check that catches it says.
FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (_no_wait, "nan location mismatch|a race|RACE DETECTED"),
    (_one_page_too_many, "Out-of-bounds"),
    (_page_outside_the_pool, "Out-of-bounds"),
    (_stale_tail, "nan location mismatch"),
    (_late_mask, "Mismatched elements"),
    (_one_buffer, "a race|RACE DETECTED|nan location mismatch|Mismatched elements"),
    (_unordered_results, "nan location mismatch|Mismatched elements|a race|RACE DETECTED"),
]


@pytest.mark.quick
@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize(("fault", "says"), FAULTS, ids=[f.__name__.strip("_") for f, _ in FAULTS])
def test_a_fault_that_is_put_in_is_caught(
    fault: Callable[[pytest.MonkeyPatch], None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, ValueError, jax.errors.JaxRuntimeError), match=says):
        check_closely()


def test_the_decode_kernel_is_what_single_queries_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: Any, **__: Any) -> Any:
        raise RuntimeError("prefill")

    monkeypatch.setattr(tpu, "tpu_prefill", unexpected)
    check(Case("decode", rows=((1, 5), (1, 9))), decode_only=True)
    with pytest.raises(RuntimeError, match="prefill"):
        check(Case("mixed", rows=((1, 5), (2, 9))))
    assert tpu.tpu_decode is tpu_decode.tpu_decode
