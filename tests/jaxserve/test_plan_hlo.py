"""What is read from compiled programs: on real ones for eight devices, and on texts counted by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.plan.hlo import (
    Collective,
    aliased_parameters,
    collectives,
    custom_calls,
    is_pool_aliased,
    pool_copies,
)
from jaxserve.plan.hlo_text import Array, parse

pytestmark = pytest.mark.quick
WHOLE = P()
POOL = (3, 5, 2, 4, 8)  # [num_layers, num_pages, num_kv_heads, page_size, kv_dim]
POOL_AVAL = jax.ShapeDtypeStruct(POOL, jnp.float32)
INDEX = jax.ShapeDtypeStruct((), jnp.int32)
ROW = jax.ShapeDtypeStruct((2, 8), jnp.float32)


def compiled(fn, *avals, donate=()):
    return jax.jit(fn, donate_argnums=donate).lower(*avals).compile().as_text()


def over_mesh(fn, *specs, out=WHOLE):
    """`fn` on eight devices, one axis "x"."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)

    def text(*shapes):
        avals = [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, specs, strict=True)
        ]
        return compiled(mapped, *avals)

    return text


# ---- exchanges


def test_a_sum_over_devices_is_one_all_reduce_of_its_operand():
    text = over_mesh(lambda x: jax.lax.psum(x, "x"), P("x"))((8, 16))
    # Each device has 16 floats, and in a ring sends 7/8 of them twice.
    assert collectives(text) == [Collective("all-reduce", 1, 64, 2 * 64 * 7 / 8, False)]


def test_gathering_sends_the_own_part_to_every_other_device():
    text = over_mesh(lambda x: jax.lax.all_gather(x, "x", tiled=True), P("x"))((8, 16))
    assert collectives(text) == [Collective("all-gather", 1, 64, 64 * 7, False)]


def test_exchanging_sends_all_but_the_own_part():
    def exchange(x):  # [8, 16] on each device
        return jax.lax.all_to_all(x, "x", split_axis=0, concat_axis=1, tiled=True)

    text = over_mesh(exchange, P(None, "x"), out=P("x"))((8, 128))
    assert collectives(text) == [Collective("all-to-all", 1, 512, 512 * 7 / 8, False)]


def test_a_loop_s_exchanges_count_as_often_as_it_runs():
    def looped(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(jax.lax.psum(c, "x")), None), x, length=5)[0]

    (found,) = collectives(over_mesh(looped, P())((4, 4)))
    assert (found.kind, found.count, found.num_bytes, found.is_lower_bound) == (
        "all-reduce",
        5,
        5 * 64,
        False,
    )


def test_a_loop_of_unknown_length_gives_a_lower_bound():
    def until(x):
        return jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: jax.lax.psum(c, "x"), x)

    (found,) = collectives(over_mesh(until, P())((4, 4)))
    assert (found.count, found.is_lower_bound) == (1, True)


def test_of_branches_the_one_with_most_counts():
    def branched(x):
        def one(x):
            return jax.lax.psum(x, "x")

        return jax.lax.cond(x[0, 0] > 0, one, lambda x: jnp.tanh(one(jnp.tanh(one(x)))), x)

    (found,) = collectives(over_mesh(branched, P())((4, 4)))
    assert (found.kind, found.count, found.num_bytes) == ("all-reduce", 2, 128)


def test_a_program_for_one_device_exchanges_nothing():
    assert collectives(compiled(lambda x: x + 1, ROW)) == []


# ---- the pool


def write(pool, layer, row):
    return pool.at[layer, 2, :, 1].set(row)


def test_a_donated_pool_that_is_written_into_is_not_copied_and_comes_back_in_its_memory():
    text = compiled(write, POOL_AVAL, INDEX, ROW, donate=0)
    assert pool_copies(text, POOL) == []
    assert aliased_parameters(text) == {(): 0}
    assert is_pool_aliased(text, POOL)


def test_a_pool_that_is_not_donated_is_copied_and_not_shared():
    text = compiled(write, POOL_AVAL, INDEX, ROW)
    assert len(pool_copies(text, POOL)) == 1
    assert aliased_parameters(text) == {}
    assert not is_pool_aliased(text, POOL)


def test_using_the_old_pool_after_the_write_costs_a_copy():
    def both(pool, layer, row):
        new = write(pool, layer, row)
        return new, pool[layer, 0, 0, 0] + new[layer, 2, 0, 1], jnp.flip(pool, 1).sum(3)

    text = compiled(both, POOL_AVAL, INDEX, ROW, donate=0)
    assert len(pool_copies(text, POOL)) >= 1


def test_a_pool_computed_anew_is_counted_though_it_takes_the_old_one_s_memory():
    text = compiled(lambda pool: pool * 2, POOL_AVAL, donate=0)
    assert is_pool_aliased(text, POOL)
    assert len(pool_copies(text, POOL)) == 1


def test_a_layer_sliced_out_is_counted():
    def sliced(pool, layer):
        mine = jax.lax.dynamic_index_in_dim(pool, layer, keepdims=False)  # [5, 2, 4, 8]
        return pool, jnp.sort(mine, axis=0)

    assert len(pool_copies(compiled(sliced, POOL_AVAL, INDEX, donate=0), POOL)) >= 1


def test_a_loop_may_carry_the_pool_and_write_into_it():
    def layers(pool, row):
        def body(i, carry):
            pool, x = carry
            pool = write(pool, i, x)
            return pool, jnp.tanh(pool[i, 2, :, 1]) + 1

        return jax.lax.fori_loop(0, 3, body, (pool, row))

    text = compiled(layers, POOL_AVAL, ROW, donate=0)
    assert pool_copies(text, POOL) == []
    assert aliased_parameters(text) == {(0,): 0}


def test_another_donated_array_is_not_taken_for_the_pool():
    text = compiled(lambda table, pool: (table + 1, pool[0, 0]), ROW, POOL_AVAL, donate=0)
    assert aliased_parameters(text) == {(0,): 0}
    assert not is_pool_aliased(text, POOL)


# ---- texts counted by hand, in the manner of compilers that are not always there

TPU_LOOP = """\
HloModule jit_f, is_scheduled=true, \
input_output_alias={ {0}: (1, {}, may-alias), {1, 0}: (2, {}, must-alias) }, num_partitions=8

%add (l: bf16[], r: bf16[]) -> bf16[] {
  %l = bf16[] parameter(0)
  %r = bf16[] parameter(1)
  ROOT %both = bf16[] add(%l, %r)
}

%body (p: (s32[], bf16[4,8], s32[])) -> (s32[], bf16[4,8], s32[]) {
  %p = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)S(1)}, /*index=2*/s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %i.copy = s32[]{:T(128)S(6)} copy(%i)
  %step = s32[]{:T(128)} get-tuple-element(%p), index=2
  %next = s32[]{:T(128)} add(%i.copy, %step)
  %x = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%p), index=1
  %wide = f32[4,8]{1,0:T(8,128)} convert(%x)
  %sum = bf16[4,8]{1,0} all-reduce(%wide), channel_id=1, \
replica_groups=mesh['a'=2,'b'=4] {'b'}, use_global_device_ids=true, to_apply=%add
  ROOT %out = (s32[]{:T(128)}, bf16[4,8]{1,0}, s32[]{:T(128)}) tuple(%next, %sum, %step)
}

%condition (q: (s32[], bf16[4,8], s32[])) -> pred[] {
  %q = (s32[]{:T(128)}, bf16[4,8]{1,0}, s32[]{:T(128)}) parameter(0)
  %limit = s32[]{:T(128)} constant(STOP)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %limit), direction=LT
}

ENTRY %main (a: bf16[4,8]) -> bf16[4,8] {
  %a = bf16[4,8]{1,0} parameter(0), metadata={op_name="a"}
  %start = s32[]{:T(128)} constant(START)
  %two = s32[]{:T(128)} constant(2)
  %tuple = (s32[]{:T(128)}, bf16[4,8]{1,0}, s32[]{:T(128)}) tuple(%start, %a, %two)
  %while = (s32[]{:T(128)}, bf16[4,8]{1,0}, s32[]{:T(128)}) while(%tuple), condition=%condition, body=%body
  %b = bf16[4,8]{1,0} get-tuple-element(%while), index=1
  ROOT %kernel = bf16[4,8]{1,0} custom-call(%b), custom_call_target="tpu_custom_call", \
output_to_operand_aliasing={{}: (0, {})}
}
"""


@pytest.mark.parametrize(("start", "stop", "trips"), [(0, 6, 3), (1, 6, 3), (0, 7, 4), (6, 6, 0), (9, 6, 0)])
def test_a_loop_s_length_follows_from_start_step_and_limit(start, stop, trips):
    text = TPU_LOOP.replace("START", str(start)).replace("STOP", str(stop))
    (found,) = collectives(text)
    # The sum is given in bfloat16 whatever its operand was widened to; four devices take part.
    assert found == Collective("all-reduce", trips, trips * 64, trips * 2 * 64 * 3 / 4, False)


def test_a_kernel_that_shares_memory_with_its_operand_makes_no_new_pool():
    text = TPU_LOOP.replace("START", "0").replace("STOP", "2")
    assert custom_calls(text) == {"tpu_custom_call": 1}
    made = pool_copies(text, (1, 4, 8))
    assert sorted(made) == ["sum", "wide"]
    unshared = text.replace("output_to_operand_aliasing={{}: (0, {})}", "backend_config={}")
    assert sorted(pool_copies(unshared, (1, 4, 8))) == ["kernel", "sum", "wide"]


def test_a_kernel_that_shares_one_of_two_results_is_judged_by_the_pool_s():
    text = """\
HloModule m

ENTRY %main (a: f32[4,8]) -> (f32[2], f32[4,8]) {
  %a = f32[4,8]{1,0} parameter(0)
  ROOT %k = (f32[2]{0}, f32[4,8]{1,0}) custom-call(%a), custom_call_target="k", \
output_to_operand_aliasing={{PLACE}: (0, {})}
}
"""
    assert pool_copies(text.replace("PLACE", "1"), (1, 4, 8)) == []
    assert pool_copies(text.replace("PLACE", "0"), (1, 4, 8)) == ["k"]


def test_asynchronous_operations_count_once():
    text = """\
HloModule m, num_partitions=4

ENTRY %main (a: f32[4,8]) -> f32[16,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %gather = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%a), replica_groups=[2,2]<=[4], dimensions={0}
  %moved = (f32[4,8]{1,0:S(1)}, f32[4,8]{1,0}, u32[]{:S(2)}) copy-start(%a)
  %here = f32[4,8]{1,0:S(1)} copy-done(%moved)
  ROOT %done = f32[16,8]{1,0} all-gather-done(%gather)
}
"""
    assert collectives(text) == [Collective("all-gather", 1, 128, 128, False)]
    assert pool_copies(text, (1, 4, 8)) == ["moved"]


def test_nested_places_of_shared_outputs_are_read():
    assert aliased_parameters(TPU_LOOP) == {(0,): 1, (1, 0): 2}


def test_array_types_have_sizes():
    module = parse(
        "HloModule m\n\nENTRY %e (a: s4[3]) -> pred[2,3] {\n"
        "  %a = (s4[3]{0:T(128)E(4)}, f8e4m3fn[5,2]{1,0}, token[], bf16[]) parameter(0)\n"
        "  ROOT %r = pred[2,3]{1,0} constant({ {1,0,1}, {1,1,0} })\n}\n"
    )
    a, r = module.entry.instructions.values()
    assert [x.num_bytes for x in a.arrays] == [2, 10, 0, 2]
    assert r.arrays == (Array("pred", (2, 3)),)


def test_a_text_of_something_else_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("module @jit_f attributes {}")
