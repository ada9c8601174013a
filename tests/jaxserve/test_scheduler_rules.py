"""What the scheduler promises, rule by rule, in cases a person can follow by hand."""

import dataclasses

import pytest

from jaxserve.errors import ConfigError, ContextLengthError, InvalidRequestError, QueueFullError
from jaxserve.limits import SchedulerConfig
from jaxserve.request import Request, RequestStatus
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import Scheduler, SchedulerOutput

CONFIG = SchedulerConfig(
    max_num_seqs=4, max_num_batched_tokens=32, max_model_len=200, page_size=4, num_pages=101
)
TOKEN = 7  # what the device samples where a test does not care


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_scheduler(clock: Clock | None = None, **changes) -> Scheduler:
    return Scheduler(dataclasses.replace(CONFIG, **changes), clock=clock or Clock())


def make_request(name: str, prompt: list[int] | int = 4, max_tokens: int | None = 16, **fields) -> Request:
    """A request; a number as prompt is a length, and gives tokens no other name has."""
    if isinstance(prompt, int):
        prompt = [1000 + ord(name[0])] * prompt
    params = fields.pop("params", SamplingParams(max_tokens=max_tokens))
    return Request(name, prompt, params, arrival_time=100.0, **fields)


def add(scheduler: Scheduler, name: str, *args, **fields) -> Request:
    request = make_request(name, *args, **fields)
    scheduler.add_request(request)
    return request


def sizes(output: SchedulerOutput) -> dict[str, int]:
    return {part.request.request_id: part.num_scheduled_tokens for part in output.scheduled}


def finish_step(scheduler: Scheduler, output: SchedulerOutput, token: int = TOKEN) -> list[Request]:
    sampled = {part.request.request_id: token for part in output.scheduled if part.samples}
    advanced = scheduler.update(output, sampled)
    scheduler.check_integrity()
    return advanced


def step(scheduler: Scheduler, token: int = TOKEN) -> dict[str, int]:
    """One whole step; {request id: tokens computed}."""
    output = scheduler.schedule()
    scheduler.check_integrity()
    finish_step(scheduler, output, token)
    return sizes(output)


# Tokens of a step.


def test_a_long_prompt_is_computed_in_chunks_and_samples_after_the_last():
    scheduler = make_scheduler()
    add(scheduler, "a", prompt=70)
    parts = []
    for _ in range(4):
        output = scheduler.schedule()
        parts += [
            (p.num_computed_tokens, p.num_scheduled_tokens, p.samples, p.upload) for p in output.scheduled
        ]
        finish_step(scheduler, output)
    assert parts == [(0, 32, False, True), (32, 32, False, False), (64, 6, True, False), (70, 1, True, False)]


def test_decodes_come_first_then_running_prompts_then_new_ones():
    scheduler = make_scheduler()
    add(scheduler, "a", prompt=4)
    step(scheduler)
    add(scheduler, "b", prompt=40)
    assert step(scheduler) == {"a": 1, "b": 31}
    add(scheduler, "c", prompt=50)
    output = scheduler.schedule()
    assert list(sizes(output).items()) == [("a", 1), ("b", 9), ("c", 22)]
    assert output.num_tokens == 32


def test_a_long_prompt_of_a_higher_priority_does_not_hold_decodes_up():
    scheduler = make_scheduler(policy="priority")
    add(scheduler, "a", prompt=4, priority=1)
    step(scheduler)
    add(scheduler, "b", prompt=90, priority=0)
    assert [step(scheduler)["b"] for _ in range(3)] == [31, 31, 28]


def test_a_budget_below_the_number_of_decodes_is_kept():
    scheduler = make_scheduler(max_num_batched_tokens=2)
    for name in "abc":
        add(scheduler, name, prompt=1, max_tokens=2)
    assert [step(scheduler) for _ in range(3)] == [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {"c": 1}]


def test_no_more_requests_run_than_there_are_slots_and_slots_are_distinct():
    scheduler = make_scheduler(max_num_seqs=2)
    a, b, c = (add(scheduler, name, max_tokens=2) for name in "abc")
    step(scheduler)
    assert (a.slot, b.slot, c.slot) == (0, 1, None)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    step(scheduler)
    assert a.is_finished
    step(scheduler)
    assert c.slot == 0


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_has_room():
    scheduler = make_scheduler(enable_chunked_prefill=False)
    add(scheduler, "a", prompt=20)
    add(scheduler, "b", prompt=30)
    assert step(scheduler) == {"a": 20}
    assert step(scheduler) == {"a": 1, "b": 30}


def test_without_chunked_prefill_a_resumed_request_longer_than_a_step_is_chunked():
    scheduler = make_scheduler(
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        max_num_batched_tokens=8,
        num_pages=7,
    )
    a, b = add(scheduler, "a", prompt=8, max_tokens=16), add(scheduler, "b", prompt=4, max_tokens=16)
    for _ in range(60):
        step(scheduler)
    assert b.metrics.num_preemptions > 0
    assert len(a.output_token_ids) == len(b.output_token_ids) == 16


def test_a_step_is_empty_when_nothing_waits():
    output = make_scheduler().schedule()
    assert (output.scheduled, output.preempted, output.num_tokens) == ([], [], 0)


# Running ahead.


def test_a_decode_is_scheduled_while_its_token_is_on_the_device():
    scheduler = make_scheduler()
    a = add(scheduler, "a", prompt=4)
    first = scheduler.schedule()
    second = scheduler.schedule()
    (part,) = second.scheduled
    assert (part.num_computed_tokens, part.num_scheduled_tokens, part.samples) == (4, 1, True)
    assert a.num_in_flight == 2
    finish_step(scheduler, first, 5)
    finish_step(scheduler, second, 6)
    assert (a.output_token_ids, a.num_in_flight) == ([5, 6], 0)


def test_nothing_is_computed_after_the_last_token():
    scheduler = make_scheduler()
    a = add(scheduler, "a", prompt=4, max_tokens=2)
    outputs = [scheduler.schedule() for _ in range(4)]
    assert [sizes(output) for output in outputs] == [{"a": 4}, {"a": 1}, {}, {}]
    assert finish_step(scheduler, outputs[0]) == [a]
    assert not a.is_finished
    assert finish_step(scheduler, outputs[1]) == [a]
    assert (a.finish_reason, a.stop_reason, a.num_tokens) == ("length", None, 6)


def test_the_extra_token_of_a_finished_request_is_dropped():
    scheduler = make_scheduler()
    a = add(scheduler, "a", eos_token_ids=frozenset([2]))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert finish_step(scheduler, first, 2) == [a]
    assert finish_step(scheduler, second, 9) == []
    assert (a.output_token_ids, a.finish_reason) == ([2], "stop")
    assert scheduler.allocator.num_used == 0


def test_a_request_with_bad_words_of_several_tokens_does_not_run_ahead():
    scheduler = make_scheduler()
    add(scheduler, "a", bad_words_token_ids=[[3, 4]])
    add(scheduler, "b", bad_words_token_ids=[[3]])
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (sizes(first), sizes(second)) == ({"a": 4, "b": 4}, {"b": 1})
    finish_step(scheduler, first)
    assert sizes(scheduler.schedule()) == {"a": 1, "b": 1}


# Ends.


def test_end_of_sequence_has_no_stop_reason_and_a_stop_id_is_its_own():
    scheduler = make_scheduler()
    eos = frozenset([2, 3])
    a = add(scheduler, "a", params=SamplingParams(stop_token_ids=[3, 9]), eos_token_ids=eos)
    b = add(scheduler, "b", params=SamplingParams(stop_token_ids=[3, 9]), eos_token_ids=eos)
    c = add(scheduler, "c", params=SamplingParams(stop_token_ids=[3], ignore_eos=True))
    scheduler.update(scheduler.schedule(), {"a": 3, "b": 9, "c": 2})
    assert [(r.finish_reason, r.stop_reason) for r in (a, b, c)] == [
        ("stop", None),
        ("stop", 9),
        (None, None),
    ]
    scheduler.update(scheduler.schedule(), {"c": 3})
    assert (c.finish_reason, c.stop_reason) == ("stop", 3)


def test_nothing_stops_below_min_tokens():
    scheduler = make_scheduler()
    params = SamplingParams(min_tokens=2, max_tokens=9, stop_token_ids=[3])
    a = add(scheduler, "a", params=params, eos_token_ids=frozenset([2]))
    for token in (2, 3):
        step(scheduler, token)
        assert not a.is_finished
    step(scheduler, 3)
    assert (a.output_token_ids, a.stop_reason) == ([2, 3, 3], 3)


def test_max_tokens_zero_runs_the_prompt_and_samples_nothing():
    scheduler = make_scheduler()
    a = add(scheduler, "a", prompt=40, max_tokens=0)
    outputs = [scheduler.schedule() for _ in range(3)]
    assert [sizes(output) for output in outputs] == [{"a": 32}, {"a": 8}, {}]
    assert not any(part.samples for output in outputs for part in output.scheduled)
    assert finish_step(scheduler, outputs[0]) == []
    assert finish_step(scheduler, outputs[1]) == [a]
    assert (a.finish_reason, a.output_token_ids) == ("length", [])


@pytest.mark.parametrize("state", ["waiting", "running", "in flight", "preempted"])
@pytest.mark.parametrize("how", ["abort", "stop string"])
def test_a_request_can_be_ended_in_every_state(state, how):
    scheduler = make_scheduler(num_pages=7, enable_prefix_caching=False)
    other = add(scheduler, "o", prompt=8, max_tokens=16)
    if state != "waiting":
        step(scheduler)
    a = add(scheduler, "a", prompt=12, max_tokens=12)
    outputs = []
    if state != "waiting":
        outputs.append(scheduler.schedule())
        if state != "in flight":
            finish_step(scheduler, outputs.pop())
    while state == "preempted" and a.status is not RequestStatus.PREEMPTED:
        step(scheduler)
    if how == "abort":
        assert scheduler.abort("a") is a
        assert (a.finish_reason, a.stop_reason) == ("abort", None)
    else:
        assert scheduler.finish("a", "stop", "END") is a
        assert (a.finish_reason, a.stop_reason) == ("stop", "END")
    scheduler.check_integrity()
    assert scheduler.allocator.num_used == len(other.page_ids)
    assert a.page_ids == []
    assert a.slot is None
    assert scheduler.abort("a") is None
    assert scheduler.finish("a", "stop", None) is None
    known = list(a.output_token_ids)
    for output in outputs:
        assert a not in finish_step(scheduler, output)
    assert a.output_token_ids == known
    while scheduler.has_unfinished:
        step(scheduler)
    assert len(other.output_token_ids) == 16


def test_a_reused_id_never_gets_the_token_of_the_aborted_request():
    scheduler = make_scheduler()
    old = add(scheduler, "a", prompt=[1, 2, 3])
    first = scheduler.schedule()
    scheduler.abort("a")
    new = add(scheduler, "a", prompt=[4, 5])
    second = scheduler.schedule()
    assert scheduler.update(first, {"a": 50}) == []
    assert scheduler.update(second, {"a": 60}) == [new]
    assert (old.output_token_ids, new.output_token_ids) == ([], [60])


def test_times_are_taken_from_the_clock():
    clock = Clock()
    scheduler = make_scheduler(clock)
    a = add(scheduler, "a", max_tokens=2)
    clock.now = 101.0
    output = scheduler.schedule()
    clock.now = 102.0
    finish_step(scheduler, output)
    output = scheduler.schedule()
    clock.now = 103.0
    finish_step(scheduler, output)
    metrics = a.metrics
    assert (metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time) == (
        100.0,
        101.0,
        102.0,
    )
    assert (metrics.last_token_time, metrics.finished_time) == (103.0, 103.0)


# Preemption and order.


def fill_until_preemption(scheduler: Scheduler) -> SchedulerOutput:
    for _ in range(50):
        output = scheduler.schedule()
        if output.preempted:
            return output
        finish_step(scheduler, output)
    raise AssertionError("nothing was preempted")


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "c"), ("priority", "a")])
def test_the_last_in_order_is_preempted(policy, victim):
    scheduler = make_scheduler(num_pages=8, policy=policy)
    requests = {name: add(scheduler, name, priority=p) for name, p in [("a", 2), ("b", 0), ("c", 1)]}
    output = fill_until_preemption(scheduler)
    assert [request.request_id for request in output.preempted] == [victim]
    assert victim not in sizes(output)
    assert requests[victim].status is RequestStatus.PREEMPTED
    assert scheduler.num_preemptions == requests[victim].metrics.num_preemptions == 1
    scheduler.check_integrity()


def test_a_preempted_request_goes_before_later_ones_and_gives_all_its_tokens():
    scheduler = make_scheduler(num_pages=7, max_num_seqs=2)
    a, b, c = (add(scheduler, name, prompt=8, max_tokens=12) for name in "abc")
    output = fill_until_preemption(scheduler)
    assert output.preempted == [b]
    finish_step(scheduler, output)
    order = []
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        order += [part.request.request_id for part in output.scheduled if part.upload]
        finish_step(scheduler, output)
    assert order[0] == "b"
    assert order.index("c") > order.index("b")
    assert [len(request.output_token_ids) for request in (a, b, c)] == [12, 12, 12]


def test_a_token_in_flight_at_preemption_is_kept_and_awaited():
    scheduler = make_scheduler(num_pages=7, enable_prefix_caching=False)
    add(scheduler, "a", prompt=8, max_tokens=16)
    b = add(scheduler, "b", prompt=8, max_tokens=16)
    previous = scheduler.schedule()
    while not (output := scheduler.schedule()).preempted:
        finish_step(scheduler, previous)
        previous = output
    assert (b.status, b.num_in_flight) == (RequestStatus.PREEMPTED, 1)
    scheduler.abort("a")
    assert sizes(scheduler.schedule()) == {}  # b's token has to arrive first
    known = len(b.output_token_ids)
    assert b in scheduler.update(previous, {"a": 5, "b": 6})
    assert b.output_token_ids[known:] == [6]
    (part,) = scheduler.schedule().scheduled
    assert (part.request, part.upload, part.samples) == (b, True, True)
    assert part.num_scheduled_tokens == b.num_tokens


def test_nobody_is_admitted_in_a_step_that_preempts():
    def schedule_step(number: int, late: bool) -> tuple[Scheduler, SchedulerOutput]:
        scheduler = make_scheduler(num_pages=8, policy="priority", enable_prefix_caching=False)
        for name in "abc":
            add(scheduler, name, max_tokens=16)
        for _ in range(number):
            step(scheduler)
        if late:
            add(scheduler, "d", prompt=1, priority=-1)  # first in order, and one page is enough for it
        return scheduler, scheduler.schedule()

    preempting = next(number for number in range(50) if schedule_step(number, late=False)[1].preempted)
    scheduler, output = schedule_step(preempting, late=True)
    assert output.preempted
    assert scheduler.allocator.num_free > 0
    assert "d" not in sizes(output)
    finish_step(scheduler, output)
    assert "d" in sizes(scheduler.schedule())


def test_nobody_overtakes_a_blocked_head():
    scheduler = make_scheduler(num_pages=11)
    add(scheduler, "a", prompt=20, max_tokens=4)
    step(scheduler)
    add(scheduler, "b", prompt=24, max_tokens=4)
    add(scheduler, "c", prompt=1, max_tokens=4)
    assert step(scheduler) == {"a": 1}
    while "b" not in (computed := step(scheduler)):
        assert "c" not in computed
    assert computed["c"] == 1


def test_a_lower_number_of_priority_goes_first_and_arrival_breaks_ties():
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    for name, priority in [("a", 5), ("b", 1), ("c", 1), ("d", -3)]:
        add(scheduler, name, max_tokens=1, priority=priority)
    assert [list(step(scheduler)) for _ in range(4)] == [["d"], ["b"], ["c"], ["a"]]


def test_priorities_do_not_matter_under_fcfs():
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in [("a", 5), ("b", 1)]:
        add(scheduler, name, max_tokens=1, priority=priority)
    assert [list(step(scheduler)) for _ in range(2)] == [["a"], ["b"]]


def test_a_pool_for_one_and_a_half_requests_serves_sixteen():
    scheduler = make_scheduler(num_pages=31, max_num_seqs=16)  # one request takes 20 pages
    requests = [add(scheduler, name, prompt=4, max_tokens=76) for name in "abcdefghijklmnop"]
    for _ in range(2_000):
        step(scheduler)
    assert [len(request.output_token_ids) for request in requests] == [76] * 16
    assert scheduler.num_preemptions >= 50
    assert scheduler.allocator.num_used == 0


# The prefix cache.


def test_a_prefix_shared_by_a_hundred_requests_is_computed_once():
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=1024, page_size=16, num_pages=513
        )
    )
    prefix = list(range(500))
    for index in range(100):
        request = make_request(f"r{index}", [*prefix, *[1000 + index] * 20], max_tokens=4)
        scheduler.add_request(request)
    num_prompt_tokens_computed = 0
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        num_prompt_tokens_computed += sum(
            part.num_scheduled_tokens
            for part in output.scheduled
            if part.num_computed_tokens < part.request.num_prompt_tokens
        )
        finish_step(scheduler, output)
    shared = 496  # 31 full pages
    assert num_prompt_tokens_computed == 520 + 99 * (520 - shared)
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (100 * 520, 99 * shared)


def test_a_wholly_cached_prompt_leaves_a_page_to_compute():
    scheduler = make_scheduler()
    add(scheduler, "a", prompt=[1] * 8)
    b = add(scheduler, "b", prompt=[1] * 8)
    c = add(scheduler, "c", prompt=[1] * 9)
    assert sizes(scheduler.schedule()) == {"a": 8, "b": 4, "c": 1}
    assert (b.num_cached_tokens, c.num_cached_tokens) == (4, 8)


def test_a_page_that_a_single_token_fills_is_found_from_the_next_step_on():
    """Within a step it is not: rows of one token are computed side by side."""
    scheduler = make_scheduler()
    a = add(scheduler, "a", prompt=7)
    step(scheduler)
    known = [*a.prompt_token_ids, TOKEN]  # two full pages once the eighth is computed
    b = add(scheduler, "b", prompt=[*known, 1])
    assert step(scheduler) == {"a": 1, "b": 5}
    c = add(scheduler, "c", prompt=[*known, 2])
    assert step(scheduler)["c"] == 1
    assert (b.num_cached_tokens, c.num_cached_tokens) == (4, 8)


def test_the_output_of_a_request_is_found_by_its_continuation():
    scheduler = make_scheduler()
    a = add(scheduler, "a", prompt=[1] * 6, max_tokens=6)
    while not a.is_finished:
        step(scheduler)
    b = add(scheduler, "b", prompt=[*a.prompt_token_ids, *a.output_token_ids, 3, 3])
    step(scheduler)
    assert b.num_cached_tokens == 8  # the 12th token was sampled but never computed


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, {"cache_salt": "s"}),
        ({}, {"params": SamplingParams(prompt_logprobs=0)}),
        ({"enable_prefix_caching": False}, {}),
    ],
    ids=["other salt", "prompt logprobs need every position", "cache off"],
)
def test_a_prefix_is_not_shared_with(changes, fields):
    scheduler = make_scheduler(**changes)
    add(scheduler, "a", prompt=[1] * 9)
    b = add(scheduler, "b", prompt=[1] * 9, **fields)
    assert sizes(scheduler.schedule()) == {"a": 9, "b": 9}
    assert b.num_cached_tokens == scheduler.prefix_hits == 0


def test_requests_of_one_salt_share():
    scheduler = make_scheduler()
    for name in "ab":
        add(scheduler, name, prompt=[1] * 9, cache_salt="s")
    assert sizes(scheduler.schedule()) == {"a": 9, "b": 1}


def test_after_a_reset_nothing_computed_before_or_by_those_running_is_found():
    scheduler = make_scheduler(num_pages=7)
    a = add(scheduler, "a", prompt=[1] * 5, max_tokens=6)
    b = add(scheduler, "b", prompt=[1] * 5 + [TOKEN] * 18, max_tokens=1)  # takes the pool: waits for a's end
    step(scheduler)
    scheduler.reset_prefix_cache()
    scheduler.check_integrity()
    while not a.is_finished:
        step(scheduler)
    step(scheduler)
    assert b.is_finished
    assert b.num_cached_tokens == 0


def test_pages_filled_after_a_reset_by_those_running_before_are_not_found():
    scheduler = make_scheduler(num_pages=7)
    a = add(scheduler, "a", prompt=[1] * 2, max_tokens=9)
    b = add(scheduler, "b", prompt=[1] * 2 + [TOKEN] * 21, max_tokens=1)
    step(scheduler)
    scheduler.reset_prefix_cache()  # no page of a is full yet
    while not a.is_finished:
        step(scheduler)
    assert scheduler.allocator.num_cached == 2
    step(scheduler)
    assert b.is_finished
    assert b.num_cached_tokens == 0


def test_a_resumed_request_finds_its_own_pages():
    scheduler = make_scheduler(num_pages=9)
    add(scheduler, "a", prompt=[1] * 12, max_tokens=8)
    b = add(scheduler, "b", prompt=[2] * 12, max_tokens=8)
    output = fill_until_preemption(scheduler)
    finish_step(scheduler, output)
    scheduler.abort("a")
    (part,) = scheduler.schedule().scheduled
    assert part.request is b
    assert part.num_computed_tokens == 12
    assert b.num_cached_tokens == 0  # of the first admission
    assert scheduler.prefix_queries == 24


# Admission.


def test_a_prompt_that_leaves_no_room_is_refused_with_the_context_length():
    scheduler = make_scheduler()
    with pytest.raises(ContextLengthError, match="maximum context length is 200 tokens") as error:
        add(scheduler, "a", prompt=200)
    assert error.value.param == "prompt"
    add(scheduler, "a", prompt=199)


def test_max_tokens_is_cut_to_the_rest_of_the_context():
    scheduler = make_scheduler()
    assert add(scheduler, "a", prompt=190, max_tokens=10**30).max_total_tokens == 200
    assert add(scheduler, "b", prompt=190, max_tokens=None).max_total_tokens == 200
    assert add(scheduler, "c", prompt=190, max_tokens=5).max_total_tokens == 195


def test_max_tokens_is_cut_to_the_pool_and_a_prompt_that_fills_it_is_refused():
    scheduler = make_scheduler(num_pages=11)  # 40 tokens
    with pytest.raises(ContextLengthError, match="maximum context length is 40 tokens"):
        add(scheduler, "a", prompt=40)
    assert not scheduler.has_unfinished
    assert add(scheduler, "c", prompt=30, max_tokens=9).max_total_tokens == 39
    assert add(scheduler, "a", prompt=30, max_tokens=11).max_total_tokens == 40
    assert add(scheduler, "b", prompt=30, max_tokens=None).max_total_tokens == 40
    for _ in range(40):
        step(scheduler)
    assert not scheduler.has_unfinished


def test_without_chunked_prefill_a_prompt_longer_than_a_step_is_refused():
    scheduler = make_scheduler(enable_chunked_prefill=False)
    with pytest.raises(ContextLengthError, match="at most 32 tokens"):
        add(scheduler, "a", prompt=33)


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequestError, match="empty") as error:
        add(make_scheduler(), "a", prompt=[])
    assert error.value.param == "prompt"


def test_the_id_of_an_unfinished_request_is_refused_and_the_first_goes_on():
    scheduler = make_scheduler()
    a = add(scheduler, "a", max_tokens=1)
    with pytest.raises(InvalidRequestError, match="already in use") as error:
        add(scheduler, "a")
    assert error.value.param == "request_id"
    step(scheduler)
    assert a.is_finished
    add(scheduler, "a")


def test_the_queue_takes_max_queue_requests_beyond_the_slots():
    scheduler = make_scheduler(max_num_seqs=2, max_queue=1)
    for name in "abc":
        add(scheduler, name)
    with pytest.raises(QueueFullError):
        add(scheduler, "d")
    scheduler.abort("b")
    add(scheduler, "d")


def test_a_queue_that_is_not_full_takes_several_at_once_and_all_or_none_of_them():
    scheduler = make_scheduler(max_num_seqs=2, max_queue=1)
    add(scheduler, "a")
    with pytest.raises(ContextLengthError):
        scheduler.add_requests([make_request("b"), make_request("c", prompt=10_000)])
    with pytest.raises(InvalidRequestError, match="in use"):
        scheduler.add_requests([make_request("b"), make_request("b")])
    with pytest.raises(InvalidRequestError, match="in use"):
        scheduler.add_requests([make_request("b"), make_request("a")])
    assert scheduler.num_waiting == 1
    scheduler.add_requests([make_request(name) for name in "bcdefgh"])
    assert scheduler.num_waiting == 8
    with pytest.raises(QueueFullError):
        add(scheduler, "i")
    while scheduler.has_unfinished:
        assert step(scheduler)


@pytest.mark.parametrize(
    "change",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"max_model_len": 0},
        {"page_size": 0},
        {"num_pages": 1},
        {"policy": "lifo"},
        {"scheduler_delay": -1.0},
        {"scheduler_delay": float("nan")},
        {"max_queue": -1},
    ],
    ids=str,
)
def test_a_config_that_cannot_work_is_refused(change):
    with pytest.raises(ConfigError):
        dataclasses.replace(CONFIG, **change)


# The delay.


def test_the_delay_holds_a_request_until_it_has_waited():
    clock = Clock()
    scheduler = make_scheduler(clock, scheduler_delay=0.5)
    assert scheduler.next_wakeup() is None
    add(scheduler, "a")
    clock.now = 100.3
    assert step(scheduler) == {}
    assert scheduler.next_wakeup() == 100.5
    add(scheduler, "b")
    clock.now = 100.5
    assert scheduler.next_wakeup() is None
    assert step(scheduler) == {"a": 4, "b": 4}  # both share the step


def test_the_delay_ends_when_the_free_slots_can_be_filled():
    scheduler = make_scheduler(scheduler_delay=0.5)
    for name in "abc":
        add(scheduler, name)
        assert step(scheduler) == {}
    add(scheduler, "d")
    assert len(step(scheduler)) == 4


def test_the_delay_holds_new_requests_beside_running_ones():
    clock = Clock()
    scheduler = make_scheduler(clock, scheduler_delay=0.5)
    add(scheduler, "a")
    clock.now = 101.0
    step(scheduler)
    late = make_request("b")
    late.arrival_time = 101.0
    scheduler.add_request(late)
    assert step(scheduler) == {"a": 1}
    assert scheduler.next_wakeup() is None  # the loop goes on with a
    clock.now = 101.5
    assert step(scheduler) == {"a": 1, "b": 4}


def test_the_delay_does_not_hold_a_preempted_request():
    clock = Clock()
    scheduler = make_scheduler(clock, scheduler_delay=1000.0, num_pages=7)
    for name in "abcd":
        add(scheduler, name, prompt=4, max_tokens=9)
    while scheduler.has_unfinished:
        assert step(scheduler), "held back"
    assert scheduler.num_preemptions > 0
