"""Running requests hardly feel a long prompt: the rules of `StepPacer`, and whole runs on a simulated device.

No clock is read: a step's time is made up by the test, as a + b * decodes + c * prompt tokens (and more).
"""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, quantiles

import pytest

from jaxserve.engine_args import EngineArgs
from jaxserve.errors import ConfigError
from jaxserve.limits import SchedulerConfig
from jaxserve.pacing import LEAST_CHUNK, StepPacer
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import Scheduler, SchedulerOutput
from tests.jaxserve.tiny import tiny_llm

MOST = 512
SIZES = (16, 64, 128, 256, 512)  # of programs


def told(pacer: StepPacer, *steps: tuple[int, int, float]) -> StepPacer:
    for num_decodes, num_prompt_tokens, seconds in steps:
        pacer.observe(num_decodes, num_prompt_tokens, seconds)
    return pacer


# Rules.


def test_without_decodes_a_step_is_full():
    assert told(StepPacer(2.0), (8, 0, 0.01), (0, 512, 1.0)).num_tokens(0, 1, MOST) == MOST


def test_the_chunk_takes_as_long_as_the_decodes_beside_it():
    pacer = told(StepPacer(2.0), (8, 0, 0.020), (8, 100, 0.050))  # 0.3 ms a prompt token
    assert pacer.num_tokens(8, 1, MOST) == 8 + 66
    assert told(StepPacer(3.0), (8, 0, 0.020), (8, 100, 0.050)).num_tokens(8, 1, MOST) == 8 + 133


def test_a_step_of_decodes_alone_comes_first_where_nothing_is_known():
    pacer = told(StepPacer(2.0), (0, 100, 0.03))
    assert pacer.num_tokens(8, 1, MOST) == 8
    assert told(pacer, (8, 0, 0.030)).num_tokens(8, 1, MOST) == 8 + 100


def test_the_least_chunk_is_given_however_slow_prompts_are():
    assert told(StepPacer(2.0), (8, 0, 0.001), (8, 100, 9.0)).num_tokens(8, 1, MOST) == 8 + LEAST_CHUNK
    assert told(StepPacer(2.0), (8, 0, 0.001)).num_tokens(8, 1, MOST) == 8 + LEAST_CHUNK


@pytest.mark.parametrize("most", [1, 4, 8, 20, 512])
def test_the_limit_of_a_step_is_kept(most):
    pacer = told(StepPacer(2.0), (8, 0, 0.02), (8, 100, 0.02))  # prompt tokens cost nothing
    assert pacer.num_tokens(8, 1, most) == most
    assert told(StepPacer(2.0), (8, 0, 0.01)).num_tokens(8, 1, most) <= most


def test_a_step_goes_not_just_over_a_compiled_size():
    steps = (8, 0, 0.020), (8, 100, 0.050)
    assert told(StepPacer(2.0, [16, 64, 256]), *steps).num_tokens(8, 1, MOST) == 64  # in place of 74
    assert told(StepPacer(3.0, [16, 64, 256]), *steps).num_tokens(8, 1, MOST) == 8 + 133  # far beyond 64
    slow = (8, 0, 0.001), (8, 100, 9.0)
    assert told(StepPacer(2.0, [14]), *slow).num_tokens(8, 1, MOST) == 14  # also by less than the least chunk
    assert told(StepPacer(2.0, [11]), *slow).num_tokens(8, 1, MOST) == 8 + LEAST_CHUNK  # but not by all of it


def test_now_and_then_a_step_of_decodes_alone_is_measured():
    pacer = told(StepPacer(2.0), (8, 0, 0.020))
    given = []
    for _ in range(40):
        total = pacer.num_tokens(8, 1, MOST)
        given.append(total - 8)
        pacer.observe(8, total - 8, 0.020 + 0.0003 * (total - 8))
    assert [i for i, chunk in enumerate(given) if not chunk] == [16, 33]


def test_an_unknown_number_of_decodes_is_measured_sooner():
    pacer = told(StepPacer(2.0), (2, 0, 0.020), *[(16, 50, 0.06)] * 3)
    assert pacer.num_tokens(16, 1, MOST) > 16
    assert told(pacer, (16, 50, 0.06)).num_tokens(16, 1, MOST) == 16


@pytest.mark.parametrize("decodes", range(1, 40))
def test_times_of_other_numbers_of_decodes_are_estimated_from_below(decodes):
    """Where a step takes a + b * decodes, no estimate exceeds it: chunks err towards small ones."""
    seconds = {n: 0.010 + 0.002 * n for n in range(41)}
    exact = told(StepPacer(2.0), (decodes, 0, seconds[decodes]), (decodes, 100, seconds[decodes] + 0.03))
    estimate = told(StepPacer(2.0), (8, 0, seconds[8]), (8, 100, seconds[8] + 0.03))
    assert (
        decodes + LEAST_CHUNK <= estimate.num_tokens(decodes, 1, MOST) <= exact.num_tokens(decodes, 1, MOST)
    )
    between = told(estimate, (40, 0, seconds[40]))
    if decodes >= 8:
        assert abs(between.num_tokens(decodes, 1, MOST) - exact.num_tokens(decodes, 1, MOST)) <= 1


def test_a_disturbed_measurement_changes_nothing():
    steps = [(8, 0, 0.020), *[(8, 100, 0.050)] * 3]
    calm = told(StepPacer(2.0), *steps).num_tokens(8, 1, MOST)
    assert told(StepPacer(2.0), *steps, (8, 100, 1.0)).num_tokens(8, 1, MOST) == calm
    assert told(StepPacer(2.0), *steps, (8, 0, 1.0)).num_tokens(8, 1, MOST) == calm


def test_the_last_tokens_of_a_prompt_say_nothing_of_the_cost():
    pacer = told(StepPacer(2.0), (8, 0, 0.020), (8, 100, 0.050))
    before = pacer.num_tokens(8, 1, MOST)
    assert told(pacer, *[(8, 1, 0.030)] * 5).num_tokens(8, 1, MOST) == before


def test_a_slower_machine_is_followed_both_ways():
    """Chunks follow what a token costs now: four times as much, then as before."""
    pacer = told(StepPacer(2.0), (8, 0, 0.020), *[(8, 100, 0.050)] * 5)
    fast = pacer.num_tokens(8, 1, MOST)
    slow = told(pacer, *[(8, 60, 0.020 + 60 * 0.0012)] * 5).num_tokens(8, 1, MOST)
    assert slow - 8 == pytest.approx((fast - 8) / 4, abs=1)
    assert told(pacer, (8, 0, 0.020), *[(8, 60, 0.020 + 60 * 0.0003)] * 5).num_tokens(8, 1, MOST) == fast


def test_prompts_get_more_where_many_wait():
    pacer = told(StepPacer(2.0), (8, 0, 0.020), (8, 100, 0.050))  # a decode's share is 66 prompt tokens
    chunks = [pacer.num_tokens(8, waiting, MOST) - 8 for waiting in (1, 6, 10, 14, 8000)]
    assert chunks == [66, 66, 133, 199, MOST - 8]
    few = told(StepPacer(2.0), (2, 0, 0.020), (2, 100, 0.050))
    assert [few.num_tokens(2, waiting, MOST) - 2 for waiting in (1, 6, 10)] == [66, 66, 133]


# In the scheduler.


def make_scheduler(pacer: StepPacer | None, **changes) -> Scheduler:
    limits = {
        "max_num_seqs": 40,
        "max_num_batched_tokens": MOST,
        "max_model_len": 50_000,
        "page_size": 32,
        "num_pages": 60_001,
        "enable_prefix_caching": False,
    }
    return Scheduler(SchedulerConfig(**(limits | changes)), clock=lambda: 0.0, pacer=pacer)


def make_request(name: str, num_prompt: int, max_tokens: int) -> Request:
    return Request(name, [7] * num_prompt, SamplingParams(max_tokens=max_tokens), arrival_time=0.0)


def step(scheduler: Scheduler) -> list[int]:
    output = scheduler.schedule()
    scheduler.update(output, {part.request.request_id: 7 for part in output.scheduled if part.samples})
    scheduler.check_integrity()
    return [part.num_scheduled_tokens for part in output.scheduled]


def test_decodes_and_the_chunk_of_a_new_or_running_prompt_make_up_the_step():
    scheduler = make_scheduler(told(StepPacer(2.0), (1, 0, 0.010), (1, 100, 0.040)))
    scheduler.add_request(make_request("a", 600, 50))
    assert [step(scheduler), step(scheduler), step(scheduler)] == [[512], [88], [1]]
    scheduler.add_request(make_request("b", 80, 50))
    scheduler.add_request(make_request("c", 40, 50))
    # 33 tokens fit beside one decode; two are taken to be no slower until they have been measured.
    assert [step(scheduler), step(scheduler), step(scheduler)] == [[1, 33], [1, 33], [1, 14, 19]]


def test_without_a_pacer_or_without_chunks_steps_are_full():
    for scheduler in (
        make_scheduler(None),
        make_scheduler(told(StepPacer(2.0), (1, 0, 0.01), (1, 100, 1.0)), enable_chunked_prefill=False),
    ):
        scheduler.add_request(make_request("a", 4, 50))
        step(scheduler)
        scheduler.add_request(make_request("b", 500, 50))
        assert step(scheduler) == [1, 500]


def test_the_scheduler_tells_the_pacer_what_a_step_was_made_of():
    class Listener(StepPacer):
        def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
            heard.append((num_decodes, num_prompt_tokens, seconds))

    heard: list[tuple[int, int, float]] = []
    scheduler = make_scheduler(told(Listener(2.0)))
    for number in range(3):
        scheduler.add_request(make_request(f"{number}", 20, 50))
    for seconds in (0.5, 0.25):
        output = scheduler.schedule()
        scheduler.update(output, {part.request.request_id: 7 for part in output.scheduled if part.samples})
        scheduler.observe(output, seconds)
    assert heard == [(0, 60, 0.5), (3, 0, 0.25)]


# Whole runs.


@dataclass
class Machine:
    """Seconds of a step: `start` + `row` a decode + `token` a prompt token, and what else real ones have."""

    start: float
    row: float
    token: float
    context: float = 0.0  # a prompt token's attention, for each token before it
    mixed: float = 0.0  # of any step with prompt tokens
    padding: float = 0.0  # what a token costs that only fills a program's size, of a token's cost
    noise: float = 0.0  # every step is longer by up to this share

    def seconds(self, output: SchedulerOutput, draw: random.Random) -> float:
        prompts = [part for part in output.scheduled if part.num_scheduled_tokens > 1]
        decodes = len(output.scheduled) - len(prompts)
        tokens = output.num_tokens - decodes
        padding = min(size for size in SIZES if size >= output.num_tokens) - output.num_tokens
        looks = sum(part.num_scheduled_tokens * part.num_computed_tokens for part in prompts)
        time = self.start + self.row * decodes + self.token * tokens + self.context * looks
        if prompts:
            time += self.mixed + self.padding * self.token * padding
        return time * (1 + draw.random() * self.noise)


MACHINES = {
    "two cores": Machine(0.006, 0.002, 0.0003),
    "two slow cores": Machine(0.030, 0.020, 0.004),
    "many cores": Machine(0.003, 0.0002, 0.00002),
    "an accelerator": Machine(0.008, 0.00002, 0.00001),
    "attention that grows": Machine(0.006, 0.002, 0.0003, context=3e-7),
    "a dear mixed step": Machine(0.006, 0.002, 0.0003, mixed=0.008),
    "padding": Machine(0.006, 0.002, 0.0003, padding=0.25),
    "an accelerator whose padding costs all": Machine(0.020, 0.0001, 0.0002, padding=1.0),
    "noise": Machine(0.006, 0.002, 0.0003, noise=0.4),
}


@dataclass
class Run:
    """An engine's loop, one step ahead, in simulated seconds."""

    machine: Machine
    scheduler: Scheduler
    now: float = 0.0  # when the last results came
    tokens: dict[str, list[float]] = field(default_factory=dict)  # request id -> times
    started: list[str] = field(default_factory=list)  # ids in the order in which their prompts began
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    under_way: deque[tuple[SchedulerOutput, float]] = field(default_factory=deque)

    def step(self) -> None:
        output = self.scheduler.schedule()
        if output.scheduled:
            self.started += [part.request.request_id for part in output.scheduled if part.upload]
            self.under_way.append((output, self.machine.seconds(output, self.draw)))
        if len(self.under_way) > 1 or (self.under_way and not output.scheduled):
            output, seconds = self.under_way.popleft()
            self.now += seconds
            sampled = {part.request.request_id: 7 for part in output.scheduled if part.samples}
            self.scheduler.update(output, sampled)
            self.scheduler.observe(output, seconds)
            for name in sampled:
                self.tokens.setdefault(name, []).append(self.now)

    def until(self, is_over: Callable[[], bool]) -> None:
        for _ in range(100_000):
            if is_over():
                return
            self.step()
        raise AssertionError("this takes for ever")


def gaps(run: Run, names: list[str], start: float, end: float) -> list[float]:
    found = []
    for name in names:
        times = [time for time in run.tokens[name] if start <= time <= end]
        found += [after - before for before, after in pairwise(times)]
    return found


@pytest.mark.parametrize("between", [0.0, 3.0])
@pytest.mark.parametrize("num_running", [1, 8, 32])
@pytest.mark.parametrize("machine", MACHINES)
def test_tokens_of_running_requests_keep_coming_while_long_prompts_arrive(machine, num_running, between):
    """Six prompts of 2,000 tokens, all at once or after the other by (what takes) `between` prompts."""
    settings = MACHINES[machine]
    run = Run(settings, make_scheduler(StepPacer(2.0, SIZES)))
    names = [f"running {number}" for number in range(num_running)]
    for name in names:
        run.scheduler.add_request(make_request(name, 50, 40_000))
    run.until(lambda: all(len(run.tokens.get(name, ())) >= 60 for name in names))

    start = run.now
    # What a prompt takes when half of the time goes to decodes, as it should.
    fair = 2 * 2000 * (settings.token + 1000 * settings.context)
    fair += 0.0 if not settings.mixed else 2000 / 16 * settings.mixed
    prompts = [f"prompt {number}" for number in range(6)]
    for number, name in enumerate(prompts):
        run.until(lambda due=start + number * between * fair: run.now >= due)
        run.scheduler.add_request(make_request(name, 2000, 1))
    run.until(lambda: all(name in run.tokens for name in prompts))

    found = gaps(run, names, start, run.now)
    p99 = quantiles(found, n=100)[98]
    assert p99 < 3 * median(found), f"p99 {p99:.4f} s, median {median(found):.4f} s"
    # Nobody starves: prompts begin in order and end in a time that the machine explains.
    assert [name for name in run.started if name in prompts] == prompts
    assert [run.tokens[name] for name in prompts] == sorted(run.tokens[name] for name in prompts)
    assert run.now - start < 6 * fair * max(between, 1.0) * 2.5


@pytest.mark.parametrize("machine", ["two cores", "an accelerator", "padding"])
def test_without_the_pacer_that_does_not_hold(machine):
    """The run above is one in which something can go wrong."""
    run = Run(MACHINES[machine], make_scheduler(None))
    run.scheduler.add_request(make_request("a", 50, 40_000))
    run.until(lambda: len(run.tokens.get("a", ())) >= 60)
    calm = run.tokens["a"][-1] - run.tokens["a"][-2]
    run.scheduler.add_request(make_request("b", 2000, 1))
    start = run.now
    run.until(lambda: "b" in run.tokens)
    found = gaps(run, ["a"], start, run.now)
    assert max(found) > (3 if machine != "an accelerator" else 1.5) * calm


@pytest.mark.parametrize("machine", MACHINES)
def test_a_full_house_of_ordinary_requests_loses_little(machine):
    """32 at once: output is within a tenth of what full steps give, within a fifth where prompts are most of
    the work."""

    def rate(pacer: StepPacer | None, num_prompt: int, num_output: int) -> float:
        run = Run(MACHINES[machine], make_scheduler(pacer, max_num_seqs=32))
        num_added, enough = 0, 150 * num_output
        while sum(map(len, run.tokens.values())) < enough:
            while run.scheduler.num_running + run.scheduler.num_waiting < 32:
                run.scheduler.add_request(make_request(f"{num_added}", num_prompt, num_output))
                num_added += 1
            run.step()
        return enough / run.now

    pacer = StepPacer(2.0, SIZES)
    assert rate(pacer, 200, 100) > 0.9 * rate(None, 200, 100)
    if MACHINES[machine].padding < 1:
        assert rate(pacer, 2000, 60) > 0.8 * rate(None, 2000, 60)


# In the engine.


def test_the_engine_times_every_step_and_outputs_do_not_depend_on_the_pacing():
    prompts = [[3 + (5 * i + j) % 200 for j in range(100)] for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    heard = []
    with tiny_llm() as full, tiny_llm(max_token_gap=1.5) as paced:
        scheduler = paced._engine.scheduler
        assert full._engine.scheduler.pacer is None
        scheduler.observe = lambda output, seconds: heard.append((output.num_tokens, seconds))
        paced.generate(prompts, params)  # everything is compiled
        steps_before = paced.stats().num_steps
        paced.reset_prefix_cache()
        heard.clear()
        again = paced.generate(prompts, params)
        steps = paced.stats().num_steps - steps_before
        expected = full.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in expected]
    assert len(heard) == steps
    assert sum(tokens for tokens, _ in heard) == 4 * (100 + 11)
    assert all(seconds > 0 for _, seconds in heard)


@pytest.mark.parametrize("value", [1.0, 0.5, -1.0, math.inf, math.nan])
def test_a_ratio_that_cannot_work_is_refused(value):
    with pytest.raises(ConfigError, match="max_token_gap"):
        EngineArgs(max_token_gap=value)
