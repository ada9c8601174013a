"""Which request computes which tokens in the next step: continuous batching over a pool of pages.

Three verbs move a request: `schedule()` chooses a step's tokens, the caller runs it, `update()` takes what
was sampled. There is one counter and no phases: a step moves `num_computed_tokens` towards the number of
tokens; a prompt in chunks, a cached prefix, a resumed request and a decode are the same thing.

The rules:

* A step computes at most `max_num_batched_tokens` tokens. Running requests come first, those that need one
  token before those with a longer piece to compute; then waiting ones are admitted while slots, budget and
  pages last.
* Beside decodes, prompts get the tokens that a `StepPacer` allows by the times it was told of, so that no
  decode waits for a long prompt; without decodes, or without a pacer, all there are.
* Order is by arrival ("fcfs") or by (priority, arrival) ("priority"). Nobody overtakes a blocked head of the
  queue, so under fcfs nobody starves. A priority does not take a running request's place; it decides who goes
  next.
* A request is admitted only when all tokens known now find pages; nothing is set aside for those still to
  come.
* When a running request needs a page and none is free, the last running one in order gives all of its up and
  is computed anew later (through the prefix cache, that is often cheap). Nobody is admitted in such a step.
* What could never fit is refused by `add_request`, so the first in order always advances and everything ends.
* Pinned prefixes are computed as requests of their own; when one ends, the scheduler goes on to hold its
  pages. The caller sees to it that the pool has room for a longest request beside them (`check_prefixes`).
* A position's KV is in the page that `page_ids` names. Full pages of known tokens are registered in the
  prefix cache as soon as the step that fills them is scheduled: the device runs steps in order, and a layer
  writes before it reads. Only a page that a single token fills has to wait for the next step: kernels write
  such tokens while they read for other rows (see `ragged_paged_attention`).

Run-ahead: a next step may be scheduled while one is under way. A decode whose last token is still on the
device is then scheduled with `num_in_flight` = 1. A caller must read `page_ids` and tokens of a step, and
commit to run it, before it calls any other method. A token sampled for a request that has ended meanwhile is
dropped; one for a request preempted meanwhile is kept (it is valid output), and the request resumes only
after it has arrived.

Not thread-safe: one thread owns a scheduler. `SchedulerConfig.total_tokens_limit` may be called from
anywhere.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxserve.errors import InvalidRequestError
from jaxserve.limits import SchedulerConfig
from jaxserve.outputs import FinishReason
from jaxserve.pacing import StepPacer
from jaxserve.page_allocator import PageAllocator, cache_root, page_hashes
from jaxserve.request import Request, RequestStatus
from jaxserve.sampling_params import SamplingParams
from jaxserve.tallies import EngineTallies


@dataclass(slots=True)
class ScheduledRequest:
    """A request's part of a step: `num_scheduled_tokens` positions from `num_computed_tokens` on."""

    request: Request
    num_scheduled_tokens: int
    num_computed_tokens: int  # before this step
    samples: bool  # the last token is among them: one is sampled
    upload: bool  # the slot is newly its own: all that is kept per slot has to be set


@dataclass(slots=True)
class SchedulerOutput:
    """One step. It may be empty, also while requests are unfinished."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)  # those of one token first
    preempted: list[Request] = field(default_factory=list)
    num_tokens: int = 0
    dispatch_time: float = 0.0  # the engine's clock when it was sent to the device; the engine's to set


class Scheduler:
    """Queue, slots and pages of all unfinished requests. See the module's text for the rules."""

    def __init__(
        self,
        config: SchedulerConfig,
        model_id: str = "",
        clock: Callable[[], float] = time.monotonic,
        pacer: StepPacer | None = None,
    ) -> None:
        self.config = config
        self.pacer = pacer if config.enable_chunked_prefill else None
        self.allocator = PageAllocator(config.num_pages, config.page_size, config.enable_prefix_caching)
        self.num_preemptions = 0
        self.prefix_queries = 0  # tokens looked up in the prefix cache at first admissions
        self.prefix_hits = 0  # tokens found there
        self.pinned_hits = 0  # those of them in pinned pages
        self.tallies = EngineTallies()
        self._model_id = model_id
        self._clock = clock
        self._requests: dict[str, Request] = {}  # all unfinished ones
        self._waiting: list[Request] = []  # sorted by _rank, as is _running
        self._running: list[Request] = []
        self._free_slots = list(range(config.max_num_seqs))  # a heap: low numbers first
        self._num_arrived = 0
        self._cache_epoch = 0
        self._prefixes: list[list[int]] = []  # to be pinned, cut to whole pages
        self._pinned: set[int] = set()  # pages held for them

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, preempted ones included."""
        return len(self._waiting)

    @property
    def num_pinned(self) -> int:
        """Pages held for pinned prefixes, by requests as well or not."""
        return len(self._pinned)

    def add_request(self, request: Request) -> None:
        """Queue a new request; see `add_requests`."""
        self.add_requests([request])

    def add_requests(self, requests: Sequence[Request]) -> None:
        """Queue new requests, all or none, and set their `max_total_tokens`.

        They are what one client asks for at once: a queue that is not full takes them all, or a number above
        the limit would be told for ever to come back later.

        Raises ContextLengthError when one can never fit, QueueFullError when `max_num_seqs + max_queue`
        requests are unfinished, InvalidRequestError for an empty prompt or the id of an unfinished request.
        """
        config = self.config
        ids = {request.request_id for request in requests}
        if len(ids) < len(requests) or not ids.isdisjoint(self._requests):
            raise InvalidRequestError("a request id is already in use", "request_id")
        limits = [config.total_tokens_limit(r.num_prompt_tokens, r.params.max_tokens) for r in requests]
        config.check_queue(len(self._requests))
        for request, limit in zip(requests, limits, strict=True):
            self._queue(request, limit)

    def _queue(self, request: Request, limit: int) -> None:
        assert request.status is RequestStatus.WAITING
        request.max_total_tokens = limit
        self._start_hash_chain(request)
        request.metrics.queued_time = self._clock()
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=self._rank)

    def pin_prefixes(self, prefixes: Sequence[Sequence[int]]) -> None:
        """Compute prefixes in the next steps, and hold their whole pages from then on.

        They serve requests without a `cache_salt`. `check_prefixes` says whether the pool has room.
        """
        size = self.config.page_size
        self._prefixes += [list(prefix[: len(prefix) // size * size]) for prefix in prefixes]
        self._queue_pins()

    def _queue_pins(self) -> None:
        for index, prefix in enumerate(self._prefixes):
            params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
            name = f"pin-{self._cache_epoch}-{index}"
            pin = Request(name, prefix, params, arrival_time=self._clock(), is_pin=True)
            self._queue(pin, len(prefix) + 1)

    def abort(self, request_id: str) -> Request | None:
        """End a request in any state and free its pages at once; None when no unfinished one has this id."""
        return self.finish(request_id, "abort", None)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | int | None) -> Request | None:
        """End a request as decided elsewhere (a stop string). As `abort` otherwise."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason, stop_reason)
        return request

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens and give them their pages."""
        output = SchedulerOutput()
        wanted = [(request, n) for request in self._running if (n := self._num_to_compute(request))]
        wanted.sort(key=lambda item: item[1] > 1)  # stable: decodes first, each kind in order
        budget = self.config.max_num_batched_tokens
        if self.pacer is not None:
            num_decodes = [n for _, n in wanted].count(1)
            num_prompts = len(wanted) - num_decodes + min(len(self._waiting), len(self._free_slots))
            budget = self.pacer.num_tokens(num_decodes, num_prompts, budget)
        plan = self._plan_running(wanted, budget, output.preempted)
        # Nothing is committed before all preemptions are decided: a request planned first may be the victim
        # later.
        scheduled = [self._commit(request, count, upload=False) for request, count in plan.items()]
        budget -= sum(plan.values())
        if self._waiting and not output.preempted and self._is_gate_open():
            while self._waiting and self._free_slots and budget > 0:
                request = self._waiting[0]
                count = self._admit(request, budget)
                if not count:
                    break
                scheduled.append(self._commit(request, count, upload=True))
                budget -= count
        scheduled.sort(key=lambda part: part.num_scheduled_tokens > 1)
        output.scheduled = scheduled
        output.num_tokens = sum(part.num_scheduled_tokens for part in scheduled)
        return output

    def observe(self, output: SchedulerOutput, seconds: float) -> None:
        """A step took so long, from its start on the device to its results."""
        if self.pacer is not None:
            num_decodes = sum(part.num_scheduled_tokens == 1 for part in output.scheduled)
            self.pacer.observe(num_decodes, output.num_tokens - num_decodes, seconds)

    def update(self, output: SchedulerOutput, sampled: Mapping[str, int]) -> list[Request]:
        """Take the token ids that a step sampled, by request id; finish those that end.

        Returns the requests that took a token or ended, in the step's order: the token is the last of
        `output_token_ids`, and `is_finished` tells which ended. Those that ended earlier are left out.
        """
        now, page_size = self._clock(), self.config.page_size
        advanced = []
        for part in output.scheduled:
            request = part.request
            if request.status is RequestStatus.FINISHED:
                continue  # its token is dropped; the id may be another request's by now
            if part.samples:
                request.num_in_flight -= 1
                request.output_token_ids.append(token_id := sampled[request.request_id])
                if not request.is_pin:
                    self.tallies.token(request, now)
                times = request.metrics
                if times.first_token_time is None:
                    times.first_token_time = now
                times.last_token_time = now
                if request.num_computed_tokens >= (request.num_registered_pages + 1) * page_size:
                    self._register_full_pages(request)
                self._finish_if_ended(request, token_id)
            elif part.num_computed_tokens + part.num_scheduled_tokens == request.max_total_tokens:
                # max_tokens 0: only the prompt was asked for.
                self.tallies.prompt_computed(request)
                self._finish(request, "length" if request.pool_from is None else "stop", None)
            else:
                continue
            advanced.append(request)
        return advanced

    def next_wakeup(self) -> float | None:
        """The clock's time at which `scheduler_delay` lets the next request in.

        None when something runs (the loop goes on anyway), nothing waits, or nothing is held back by the
        delay.
        """
        if self._running or not self._waiting or self._is_gate_open():
            return None
        return min(request.arrival_time for request in self._waiting) + self.config.scheduler_delay

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes (for new weights). Later requests share nothing with running ones.

        Pinned ones are computed anew in the next steps.
        """
        for request in [request for request in self._requests.values() if request.is_pin]:
            self.abort(request.request_id)
        self.allocator.free([*self._pinned])
        self._pinned.clear()
        self.allocator.reset_prefix_cache()
        self._cache_epoch += 1
        for request in self._waiting:
            self._start_hash_chain(request)
        self._queue_pins()

    def check_integrity(self) -> None:
        """Raise AssertionError unless queue, slots and pages agree. Takes time in proportion to the pool."""
        size = self.config.page_size
        owned = Counter(page for request in self._running for page in request.page_ids)
        owned.update(self._pinned)
        self.allocator.check_integrity(owned)
        assert sorted(map(id, self._running + self._waiting)) == sorted(map(id, self._requests.values()))
        assert all(self._requests[key].request_id == key for key in self._requests)
        slots = [request.slot for request in self._running if request.slot is not None]
        assert sorted([*slots, *self._free_slots]) == list(range(self.config.max_num_seqs)), "slots are off"
        for queue in (self._running, self._waiting):
            ranks = [self._rank(request) for request in queue]
            assert ranks == sorted(set(ranks)), "a queue is out of order"
        for request in self._running:
            name = request.request_id
            assert request.status is RequestStatus.RUNNING, f"{name} is in the wrong queue"
            assert len(request.page_ids) == -(-request.num_computed_tokens // size), (
                f"{name}: number of pages"
            )
            assert request.num_computed_tokens <= request.num_scheduled_total, f"{name}: computed too far"
            assert request.num_registered_pages <= request.num_computed_tokens // size, f"{name}: registered"
        for request in self._waiting:
            name = request.request_id
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{name}: wrong queue"
            assert request.page_ids == [], f"{name} waits but holds pages"
            assert request.slot is None, f"{name} waits but holds a slot"
            assert request.num_computed_tokens == request.num_registered_pages == 0, f"{name}: not reset"
        for request in self._requests.values():
            assert 0 <= request.num_scheduled_total <= request.max_total_tokens, "too many tokens"

    # Running requests.

    def _plan_running(
        self, wanted: list[tuple[Request, int]], budget: int, preempted: list[Request]
    ) -> dict[Request, int]:
        """How many tokens each running request computes; their pages are allocated, victims preempted."""
        plan: dict[Request, int] = {}
        size = self.config.page_size
        for request, count in wanted:
            count = min(count, budget)
            if not count:
                continue
            room = len(request.page_ids) * size - request.num_computed_tokens
            if room < count:  # now and then, and for a victim of this very step, whose turn it no longer is
                while request.status is RequestStatus.RUNNING and (room := self._room(request)) <= 0:
                    victim = self._running[-1]
                    budget += plan.pop(victim, 0)
                    self._preempt(victim)
                    preempted.append(victim)
                if request.status is not RequestStatus.RUNNING:
                    continue
                count = min(count, room)  # a piece of a prompt shrinks to the pages there are
                self._grow(request, request.num_computed_tokens + count)
            plan[request] = count
            budget -= count
        return plan

    def _num_to_compute(self, request: Request) -> int:
        total = request.num_scheduled_total
        if request.num_in_flight and (request.needs_host_tokens or total >= request.max_total_tokens):
            return 0  # the host has to see the token first, or it is the last one
        return total - request.num_computed_tokens

    def _room(self, request: Request) -> int:
        """Tokens it can compute with the pages it has and those that are free."""
        pages = len(request.page_ids) + self.allocator.num_free
        return pages * self.config.page_size - request.num_computed_tokens

    def _grow(self, request: Request, num_tokens: int) -> None:
        missing = -(-num_tokens // self.config.page_size) - len(request.page_ids)
        if missing > 0:
            pages = self.allocator.allocate(missing)
            assert pages is not None, "pages were counted before"
            request.page_ids += pages

    def _preempt(self, victim: Request) -> None:
        self._running.remove(victim)
        self._release(victim, RequestStatus.PREEMPTED)
        victim.metrics.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, victim, key=self._rank)

    def _commit(self, request: Request, count: int, *, upload: bool) -> ScheduledRequest:
        before = request.num_computed_tokens
        after = request.num_computed_tokens = before + count
        samples = after == request.num_scheduled_total and after < request.max_total_tokens
        if samples:
            request.num_in_flight += 1
        if count > 1:
            self._register_full_pages(request)
        return ScheduledRequest(request, count, before, samples, upload)

    # Waiting requests.

    def _is_gate_open(self) -> bool:
        """Whether `scheduler_delay` lets waiting requests in.

        It does when the oldest has waited that long, when enough wait to take all free slots, or when one of
        them was preempted. An open gate is open for all: that is how requests come to share a step.
        """
        if not self.config.scheduler_delay or len(self._waiting) >= len(self._free_slots):
            return True
        oldest = min(request.arrival_time for request in self._waiting)
        if self._clock() >= oldest + self.config.scheduler_delay:
            return True
        return any(request.status is RequestStatus.PREEMPTED for request in self._waiting)

    def _admit(self, request: Request, budget: int) -> int:
        """Give the head of the queue a slot, its cached prefix, and pages for a first piece.

        Returns the piece's size, `budget` at most; 0, and no change, when it has to wait.
        """
        config = self.config
        if request.num_in_flight:
            return 0
        # What is cached is keys and values: whoever needs hidden states of all the prompt computes it all.
        needs_all = request.params.prompt_logprobs is not None or request.pool_from == 0
        looks_up = config.enable_prefix_caching and not needs_all
        known = request.num_tokens
        # At least one token is left to compute: its logits are needed.
        hits = (
            self.allocator.match_prefix(self._hashes(request, (known - 1) // config.page_size))
            if looks_up
            else []
        )
        cached = len(hits) * config.page_size
        count = min(known - cached, budget)
        # Without chunked prefill it waits for a step that has room for all. Only a resumed request can be too
        # long for any step (prompt and output together); that one is chunked all the same.
        if count < known - cached <= config.max_num_batched_tokens and not config.enable_chunked_prefill:
            return 0
        pages_needed = -(-known // config.page_size) - len(hits)
        if pages_needed > self.allocator.num_free - self.allocator.count_free(hits):
            return 0
        del self._waiting[0]
        insort(self._running, request, key=self._rank)
        self.allocator.acquire(hits)
        request.page_ids = hits
        request.num_computed_tokens = cached
        request.num_registered_pages = len(hits)
        request.slot = heapq.heappop(self._free_slots)
        request.status = RequestStatus.RUNNING
        self._grow(request, cached + count)
        if request.metrics.first_scheduled_time is None:
            request.metrics.first_scheduled_time = self._clock()
            request.num_cached_tokens = cached
            if looks_up and not request.is_pin:
                self.prefix_queries += known
                self.prefix_hits += cached
                self.pinned_hits += config.page_size * sum(page in self._pinned for page in hits)
        return count

    # Prefix cache.

    def _start_hash_chain(self, request: Request) -> None:
        request.cache_root = cache_root(self._model_id, request.cache_salt, self._cache_epoch)
        request.page_hashes = []

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """Hashes of the first `count` full pages of known tokens; computed once and kept with the request."""
        hashes = request.page_hashes
        if len(hashes) < count:
            size = self.config.page_size
            root = hashes[-1] if hashes else request.cache_root
            hashes += page_hashes(request.known_tokens(len(hashes) * size, count * size), size, root)
        return hashes[:count]

    def _register_full_pages(self, request: Request) -> None:
        if not self.config.enable_prefix_caching:
            return
        full = min(request.num_computed_tokens, request.num_tokens) // self.config.page_size
        if full > request.num_registered_pages:
            hashes = self._hashes(request, full)
            for index in range(request.num_registered_pages, full):
                self.allocator.register(request.page_ids[index], hashes[index])
            request.num_registered_pages = full

    def _pin(self, request: Request) -> None:
        """Hold the pages by which others find the prefix that this request has computed."""
        hashes = self._hashes(request, request.num_prompt_tokens // self.config.page_size)
        for page, key in zip(request.page_ids, hashes, strict=True):
            self.allocator.register(page, key)  # where another's page had the hash and has been evicted
        new = [page for page in self.allocator.match_prefix(hashes) if page not in self._pinned]
        self.allocator.acquire(new)
        self._pinned.update(new)

    # Ends.

    def _finish_if_ended(self, request: Request, token_id: int) -> None:
        if len(request.output_token_ids) > request.params.min_tokens:
            if token_id in request.eos_token_ids:
                return self._finish(request, "stop", None)
            if token_id in request.stop_token_ids:
                return self._finish(request, "stop", token_id)
        if request.num_tokens >= request.max_total_tokens:
            self._finish(request, "length", None)

    def _finish(self, request: Request, reason: FinishReason, stop_reason: str | int | None) -> None:
        queue = self._running if request.status is RequestStatus.RUNNING else self._waiting
        index = bisect_left(queue, self._rank(request), key=self._rank)
        assert queue[index] is request
        del queue[index]
        del self._requests[request.request_id]
        if request.is_pin and reason == "length":
            self._pin(request)
        self._release(request, RequestStatus.FINISHED)
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.metrics.finished_time = self._clock()

    def _release(self, request: Request, status: RequestStatus) -> None:
        """Give pages and slot back."""
        self.allocator.free(request.page_ids)
        request.page_ids = []  # a new list: a step under way may still hold the old one
        request.num_computed_tokens = request.num_registered_pages = 0
        if request.slot is not None:
            heapq.heappush(self._free_slots, request.slot)
            request.slot = None
        request.status = status

    def _rank(self, request: Request) -> tuple[int, int]:
        """Place in the order: less goes first and is preempted last. No two requests have the same."""
        return (request.priority if self.config.policy == "priority" else 0, request.arrival_index)
