"""Random lives of requests on a simulated device that remembers what each place of each page holds.

The device writes, for each computed position, a number that stands for the whole token history up to it, as
a position's keys and values depend on all tokens before. At each scheduled token it looks whether every
earlier position of that request holds the history it should: a page that was reused while held, a wrong
prefix hit or a recompute that was left out shows there. The "model" draws the next token from the history
alone, so each request's output is known beforehand, whatever else happens: a token lost or taken twice shows
at the end.
"""

import random
from dataclasses import dataclass, field, replace

import pytest

from jaxserve.limits import SchedulerConfig
from jaxserve.request import Request, RequestStatus
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import Scheduler, SchedulerOutput

EOS, STOP_ID, VOCAB = 0, 1, 9
PAGE_SIZE = 4


def extend_history(history: int, token: int) -> int:
    return (history * 1_000_003 + token + 1) % (2**61 - 1)


def histories(salt: str | None, tokens: list[int]) -> list[int]:
    """The history number at each position. The salt takes part: no page may be shared between salts."""
    history, result = hash_of_salt(salt), []
    for token in tokens:
        history = extend_history(history, token)
        result.append(history)
    return result


def hash_of_salt(salt: str | None) -> int:
    return 17 if salt is None else 1000 + ord(salt)


def next_token(history: int, seed: int, num_output: int, min_tokens: int) -> int:
    token = (history ^ (seed * 7_919)) % VOCAB
    if num_output < min_tokens and token in (EOS, STOP_ID):
        return 2 + history % (VOCAB - 2)
    return token


def expected_output(request: Request) -> tuple[list[int], str, int | None]:
    """What a request gives when it is alone: (tokens, finish reason, stop reason)."""
    params, output = request.params, []
    history = histories(request.cache_salt, request.prompt_token_ids)[-1]
    while len(request.prompt_token_ids) + len(output) < request.max_total_tokens:
        token = next_token(history, request.seed, len(output), params.min_tokens)
        output.append(token)
        history = extend_history(history, token)
        if len(output) > params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return output, "stop", None
            if token in params.stop_token_ids:
                return output, "stop", token
    return output, "length", None


@dataclass
class SimulatedDevice:
    """Runs steps in order. It learns a slot's tokens only by upload and by its own sampling."""

    memory: dict[tuple[int, int], int] = field(default_factory=dict)  # (page, offset) -> history
    slots: dict[int, list[int]] = field(default_factory=dict)  # slot -> its tokens

    def run(self, output: SchedulerOutput) -> dict[str, int]:
        written, rows = set(), []
        for part in output.scheduled:
            request, start = part.request, part.num_computed_tokens
            stop = start + part.num_scheduled_tokens
            if part.upload:
                self.slots[request.slot] = request.prompt_token_ids + request.output_token_ids
            tokens = self.slots[request.slot]
            assert stop <= len(tokens), "a token is computed that the device does not have"
            history = histories(request.cache_salt, tokens)
            for position in range(start, stop):
                place = (request.page_ids[position // PAGE_SIZE], position % PAGE_SIZE)
                assert place[0] != 0, "page 0 is written"
                assert place not in written, "two requests write to one place in a step"
                written.add(place)
                self.memory[place] = history[position]
            rows.append((part, tokens, history[:stop]))
        sampled = {}
        for part, tokens, history in rows:  # a layer writes before it reads
            request = part.request
            held = [
                self.memory.get((request.page_ids[position // PAGE_SIZE], position % PAGE_SIZE))
                for position in range(len(history))
            ]
            assert held == history, f"{request.request_id} reads what it did not write"
            assert part.samples == (len(history) == len(tokens) and len(tokens) < request.max_total_tokens)
            if part.samples:
                num_output = len(tokens) - request.num_prompt_tokens
                token = next_token(history[-1], request.seed, num_output, request.params.min_tokens)
                tokens.append(token)
                sampled[request.request_id] = token
        return sampled


class Simulation:
    """A scheduler, a device, and a loop that runs some steps ahead."""

    def __init__(self, config: SchedulerConfig, seed: int, pinned: list[list[int]] | None = None) -> None:
        self.random = random.Random(seed)
        self.config = config
        self.scheduler = Scheduler(config)
        self.scheduler.pin_prefixes(pinned or [])
        self.device = SimulatedDevice()
        self.in_flight: list[tuple[SchedulerOutput, dict[str, int]]] = []
        self.alive: dict[str, Request] = {}
        self.done: list[Request] = []
        self.cut: set[Request] = set()  # ended by a stop string or an abort
        self.num_added = 0
        self.trace: list[tuple[str, int, int]] = []

    def add(self) -> None:
        draw = self.random
        length = draw.randint(1, 18)
        family = draw.randrange(3)  # prompts of a family share a prefix
        prompt = [family + 2] * draw.randint(0, length)
        prompt += [draw.randrange(VOCAB) for _ in range(length - len(prompt))]
        max_tokens = draw.choice([0, 1, 5, 12, 20, None])
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=draw.choice([0, 0, 3]) if max_tokens is None or max_tokens >= 3 else 0,
            ignore_eos=draw.random() < 0.5,
            stop_token_ids=draw.choice([None, [STOP_ID]]),
            prompt_logprobs=draw.choice([None, None, None, 1]),
        )
        ended = [request.request_id for request in self.done if request.request_id not in self.alive]
        reuse = bool(ended) and draw.random() < 0.3
        request = Request(
            ended[-1] if reuse else f"r{self.num_added}",
            prompt,
            params,
            priority=draw.randrange(3),
            cache_salt=draw.choice([None, None, "a"]),
            arrival_time=0.0,
            seed=draw.randrange(100),
            eos_token_ids=frozenset() if params.ignore_eos else frozenset([EOS]),
            bad_words_token_ids=draw.choice([(), (), [[3, 4]]]),
        )
        self.num_added += 1
        self.alive[request.request_id] = request
        self.scheduler.add_request(request)

    def end_one(self) -> None:
        if self.alive:
            request = self.random.choice(sorted(self.alive.values(), key=lambda r: r.arrival_index))
            reason = self.random.choice(["abort", "stop"])
            ended = self.scheduler.finish(request.request_id, reason, "text" if reason == "stop" else None)
            assert ended is request
            assert self.scheduler.abort(request.request_id) is None
            self.cut.add(request)
            self.retire(request)

    def retire(self, request: Request) -> None:
        assert request.status is RequestStatus.FINISHED
        del self.alive[request.request_id]
        self.done.append(request)

    def step(self, run_ahead: int) -> None:
        """Schedule and run a step while up to `run_ahead` others are under way."""
        self.collect(run_ahead)
        output = self.scheduler.schedule()
        assert output.num_tokens == sum(part.num_scheduled_tokens for part in output.scheduled)
        assert output.num_tokens <= self.config.max_num_batched_tokens
        is_idle = not self.scheduler.has_unfinished
        assert output.scheduled or self.in_flight or is_idle, "requests wait and nothing is under way"
        counts = [part.num_scheduled_tokens for part in output.scheduled]
        assert all(counts), "a part of no tokens"
        assert sorted(counts, key=lambda count: count > 1) == counts, "decodes come first"
        self.trace += [
            (part.request.request_id, part.num_computed_tokens, part.num_scheduled_tokens)
            for part in output.scheduled
        ]
        if output.scheduled:
            self.in_flight.append((output, self.device.run(output)))
        else:
            self.collect(max(0, len(self.in_flight) - 1))

    def collect(self, leave: int) -> None:
        while len(self.in_flight) > leave:
            output, sampled = self.in_flight.pop(0)
            for request in self.scheduler.update(output, sampled):
                if request.is_pin:
                    continue
                assert self.alive[request.request_id] is request
                if request.is_finished:
                    self.retire(request)

    def random_step(self) -> None:
        choice = self.random.random()
        if choice < 0.25 and len(self.alive) < 12:
            self.add()
        elif choice < 0.30:
            self.end_one()
        elif choice < 0.302:
            self.scheduler.reset_prefix_cache()
        else:
            self.step(run_ahead=self.random.choice([0, 1, 1, 1, 1, 2]))
        self.scheduler.check_integrity()

    def drain(self) -> None:
        for _ in range(2_000):
            if not self.scheduler.has_unfinished and not self.in_flight:
                break
            self.step(run_ahead=1)
            self.scheduler.check_integrity()
        assert not self.alive, "requests do not finish"
        assert not self.scheduler.has_unfinished
        assert self.scheduler.allocator.num_used == self.scheduler.num_pinned
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        for request in self.done:
            output, finish_reason, stop_reason = expected_output(request)
            if request in self.cut:
                assert request.output_token_ids == output[: len(request.output_token_ids)]
            else:
                assert request.output_token_ids == output
                assert (request.finish_reason, request.stop_reason) == (finish_reason, stop_reason)


def make_config(seed: int) -> SchedulerConfig:
    """Ten kinds: both policies, prefix cache on and off, chunked or whole prompts, pools of all sizes."""
    return SchedulerConfig(
        max_num_seqs=[6, 3, 8][seed % 3],
        max_num_batched_tokens=[7, 32, 18, 24][seed % 4] if seed % 5 else 20,
        max_model_len=40,
        page_size=PAGE_SIZE,
        num_pages=[11, 14, 60][seed // 2 % 3],  # the largest request takes 10 pages
        enable_prefix_caching=seed % 2 == 0 or seed == 7,
        enable_chunked_prefill=seed % 5 != 0,
        policy="priority" if seed // 2 % 2 else "fcfs",
    )


@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_random_steps_keep_every_history(seed):
    simulation = Simulation(make_config(seed), seed)
    for _ in range(10_000):
        simulation.random_step()
    simulation.drain()
    assert len(simulation.done) == simulation.num_added > 500
    if simulation.config.num_pages < 20:
        assert simulation.scheduler.num_preemptions > 50
    if simulation.config.enable_prefix_caching:
        assert 0 < simulation.scheduler.prefix_hits < simulation.scheduler.prefix_queries
    else:
        assert simulation.scheduler.prefix_queries == 0


@pytest.mark.parametrize("seed", [4, 6, 8, 10])
def test_pinned_prefixes_are_right_and_stay_through_random_lives(seed):
    """Two that every family of prompts may hit, in a pool that holds a longest request and little else."""
    pinned = [[2] * 9, [3] * 4 + [2] * 5]  # two pages each; both are whole beginnings of a family's prompts
    config = replace(make_config(seed), num_pages=16 + seed % 3, enable_prefix_caching=True)
    simulation = Simulation(config, seed, pinned)
    seen = set()
    for _ in range(5_000):
        simulation.random_step()
        seen.add(simulation.scheduler.num_pinned)
    simulation.drain()
    assert simulation.scheduler.num_pinned == 4
    assert seen == {0, 2, 4}, "they were never reset, or not pinned one by one"
    assert simulation.scheduler.num_preemptions > 50
    assert 0 < simulation.scheduler.pinned_hits < simulation.scheduler.prefix_hits


def test_equal_calls_give_equal_schedules():
    traces = []
    for _ in range(2):
        simulation = Simulation(make_config(4), seed=4)
        for _ in range(500):
            simulation.random_step()
        simulation.drain()
        traces.append(simulation.trace)
    assert traces[0] == traces[1]


@pytest.mark.parametrize("broken", ["page freed while held", "wrong hit", "lost token"])
def test_the_simulated_device_sees_what_it_is_there_to_see(broken, monkeypatch):
    """The oracle itself: three faults put into the scheduler do not pass."""
    simulation = Simulation(make_config(4), seed=4)
    scheduler = simulation.scheduler
    if broken == "page freed while held":
        monkeypatch.setattr(scheduler.allocator, "acquire", lambda pages: None)
    elif broken == "wrong hit":
        monkeypatch.setattr(scheduler, "_hashes", lambda request, count: [b"%d" % i for i in range(count)])
    else:
        update = scheduler.update
        monkeypatch.setattr(
            scheduler, "update", lambda output, sampled: update(output, dict.fromkeys(sampled, 2))
        )
    with pytest.raises(AssertionError):  # noqa: PT012
        for _ in range(2_000):
            simulation.random_step()
        simulation.drain()
