"""Control plane of the engine: requests, pages, prefix cache and batches, in C++.

The docstrings here are compiled into the extension, and a test holds the signatures against it.
"""

import enum

import numpy as np
from numpy.typing import NDArray

class SubmitStatus(enum.Enum):
    """What became of a submission; a user's mistake is a value, never an exception.

    OK: queued. EMPTY: no prompt token. INVALID_TOKEN: a negative token id. INVALID_LENGTH: max_new_tokens under 1, or
    min_new_tokens negative. TOO_LONG: prompt and max_new_tokens together pass max_model_len. NEVER_FITS: needs more pages than
    the whole pool has. DUPLICATE: the id belongs to a request that lives, or whose last step is in flight.
    """

    OK = 0
    EMPTY = 1
    INVALID_TOKEN = 2
    INVALID_LENGTH = 3
    TOO_LONG = 4
    NEVER_FITS = 5
    DUPLICATE = 6

class AbortStatus(enum.Enum):
    """What became of an abort.

    OK: no further scheduling and no further output. NOT_FOUND: no such request. ALREADY_ENDED: it finished or was aborted
    before, and waits for a step in flight.
    """

    OK = 0
    NOT_FOUND = 1
    ALREADY_ENDED = 2

class SchedulerConfig:
    """Sizes and limits of a scheduler; checked here, frozen afterwards."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        chunk_size: int = 0,
        enable_prefix_cache: bool = True,
        max_in_flight_steps: int = 2,
        max_step_cost: int = 0,
        context_cost_scale: int = 0,
        session_ttl_us: int = 0,
        inter_token_latency_us: int = 0,
        starvation_limit: int = 64,
        num_host_pages: int = 0,
        host_write_through: bool = False,
        load_page_ns: int = 0,
        prefill_token_ns: int = 0,
        external_store: bool = False,
        kv_event_pages: int = 0,
        adaptive_eviction: bool = True,
    ) -> None:
        """Check and keep the values.

        Args:
            num_pages: pages of the pool, at least 1; all of them are used, none is set aside.
            page_size: tokens in a page, at least 1.
            max_num_seqs: requests that run at the same time: rows of the page table.
            max_num_batched_tokens: tokens in one step, at least max_num_seqs.
            max_model_len: tokens in one request, prompt and output together.
            chunk_size: prompt tokens of one request in one step; 0 means as many as the budget allows.
            enable_prefix_cache: share full pages between requests with equal beginnings.
            max_in_flight_steps: steps that may be planned and not committed, 1 to 64.
            max_step_cost: bounds the time of a step, in tokens without context. Decodes always run; prompts share what they
                leave, at least a quarter of it. 0 means no bound.
            context_cost_scale: keys that cost as much to attend to as a token costs without any: a token after p others
                costs 1 + p / context_cost_scale. 0 means that context is free.
            session_ttl_us: how long, on the clock of `Scheduler.advance_clock`, the pages of a session's last turn are kept for
                its next one. All sessions together keep at most half of the pool, those that were parked last; they give way to
                a running request that needs a page, and to the first of the queue when nothing runs. 0 means that sessions keep
                nothing beyond the prefix cache. With a host tier they are copied there when a turn ends, and keep that copy
                alone when their place on the device is wanted: at most half of the host's pages in all.
            inter_token_latency_us: prompts take no more of a step with decodes than lets it end within this time, by the model
                learnt from the times told to `Scheduler.commit`, but at least a quarter of what they could have without
                decodes. 0 means no target.
            starvation_limit: admissions of better priorities, or of deadlines, that a waiting class lets pass before its next
                request goes first, at least 1.
            num_host_pages: pages of the host tier of the prefix cache; 0 means none.
            host_write_through: copy pages to the host as soon as they are full; else ahead of their eviction.
            load_page_ns: nanoseconds to bring one page from the host; 0 means that loading is always worth it.
            prefill_token_ns: nanoseconds to compute one token: a hit on the host is loaded, and a retracted request copied to
                the host, when that is cheaper than computing it again.
            external_store: offer pages of the host to a store behind it.
            kv_event_pages: page hashes that may wait for `take_kv_events`; 0 means that there are no events.
            adaptive_eviction: learn from `advance_clock` when cached pages are wanted again, and drop those that are wanted last;
                otherwise, or where no clock is told, those that were used least recently.
        Raises:
            ValueError: a value is out of range; the message says which, and the remedy.
        """

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
    @property
    def page_size(self) -> int:
        """Tokens in a page."""
    @property
    def max_num_seqs(self) -> int:
        """Requests that run at the same time."""
    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens in one step."""
    @property
    def max_model_len(self) -> int:
        """Tokens in one request, prompt and output together."""
    @property
    def chunk_size(self) -> int:
        """Prompt tokens of one request in one step; 0 means as many as the budget allows."""
    @property
    def enable_prefix_cache(self) -> bool:
        """Whether full pages are shared between requests with equal beginnings."""
    @property
    def max_in_flight_steps(self) -> int:
        """Steps that may be planned and not committed."""
    @property
    def max_step_cost(self) -> int:
        """What the tokens of one step may cost, in tokens without context; 0 means no bound."""
    @property
    def context_cost_scale(self) -> int:
        """Keys that cost as much to attend to as a token costs without any; 0 means that context is free."""
    @property
    def session_ttl_us(self) -> int:
        """How long the pages of a session's last turn are kept, in microseconds; 0 means not at all."""
    @property
    def inter_token_latency_us(self) -> int:
        """Time that a step with decodes should not pass, in microseconds; 0 means no target."""
    @property
    def starvation_limit(self) -> int:
        """Admissions that a waiting class lets pass before its next request goes first."""
    @property
    def num_host_pages(self) -> int:
        """Pages of the host tier; 0 means none."""
    @property
    def host_write_through(self) -> bool:
        """Whether pages are copied to the host as soon as they are full."""
    @property
    def load_page_ns(self) -> int:
        """Nanoseconds to bring one page from the host; 0 means that loading is always worth it."""
    @property
    def prefill_token_ns(self) -> int:
        """Nanoseconds to compute one token."""
    @property
    def external_store(self) -> bool:
        """Whether pages of the host are offered to a store behind it."""
    @property
    def kv_event_pages(self) -> int:
        """Page hashes that may wait to be taken; 0 means that there are no events."""
    @property
    def adaptive_eviction(self) -> bool:
        """Whether eviction learns when pages are wanted again."""
    @property
    def max_pages_per_request(self) -> int:
        """Columns of the page table: what max_model_len needs, at most num_pages."""

class EventStatus(enum.Enum):
    """What became of an event that another engine caused.

    OK: the request goes on. FINISHED: it was the last thing that the request waited for; its pages return once no step in flight
    touches them. NOT_FOUND: no such request. UNEXPECTED: the request is not in a state that knows the event; nothing was changed.
    """

    OK = 0
    FINISHED = 1
    NOT_FOUND = 2
    UNEXPECTED = 3

class Role(enum.Enum):
    """Which part of a request this engine does.

    LOCAL: all of it. PREFILL: computes the prompt and its first token; another engine reads the pages and goes on. DECODE: another
    engine computes the prompt and writes its pages here.
    """

    LOCAL = 0
    PREFILL = 1
    DECODE = 2

class RequestOptions:
    """What a request says about itself beyond its tokens and lengths; frozen. Texts are numbers here, the same on every rank."""

    def __init__(
        self,
        *,
        session: int = 0,
        salt: str = "",
        priority: int = 0,
        tenant: int = 0,
        tenant_weight: int = 1,
        deadline_us: int = -1,
        role: Role = Role.LOCAL,
    ) -> None:
        """Check and keep the values.

        Args:
            session: the conversation that the request belongs to, 64-bit; 0 means none.
            salt: at most 256 bytes of UTF-8; requests share cached pages only with those of equal salt.
            priority: class, 32-bit; a smaller one goes first.
            tenant: whose share of the machine the request uses, 64-bit, at least 0.
            tenant_weight: that share against the weights of other tenants, at least 1.
            deadline_us: when the first token is due, on the clock of `Scheduler.advance_clock`; -1 means never.
            role: which part of the request this engine does.
        Raises:
            ValueError: a value is out of range.
        """

    @property
    def session(self) -> int:
        """The conversation that the request belongs to; 0 means none."""
    @property
    def salt(self) -> str:
        """Requests share cached pages only with those of equal salt."""
    @property
    def priority(self) -> int:
        """Class; a smaller one goes first."""
    @property
    def tenant(self) -> int:
        """Whose share of the machine the request uses."""
    @property
    def tenant_weight(self) -> int:
        """That share, against the weights of other tenants."""
    @property
    def deadline_us(self) -> int:
        """When the first token is due; -1 means never."""
    @property
    def role(self) -> Role:
        """Which part of the request this engine does."""

class SchedulerStats:
    """Counters and levels at one moment: a plain copy. Counters never decrease."""

    @property
    def num_pages(self) -> int:
        """Pages of the pool: free_pages + owned_pages + cached_pages."""
    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
    @property
    def owned_pages(self) -> int:
        """Pages that belong to one request."""
    @property
    def cached_pages(self) -> int:
        """Pages in the prefix cache, used by requests or not."""
    @property
    def evictable_pages(self) -> int:
        """Cached pages that no request uses: as good as free."""
    @property
    def num_waiting(self) -> int:
        """Requests in the queue, retracted ones included."""
    @property
    def num_running(self) -> int:
        """Requests that prefill or decode."""
    @property
    def num_draining(self) -> int:
        """Requests that ended, were aborted or retracted, and whose pages a step in flight may still write."""
    @property
    def num_outside(self) -> int:
        """Requests that wait for another engine or for copies."""
    @property
    def num_sessions(self) -> int:
        """Sessions whose pages are kept for their next turn."""
    @property
    def num_in_flight_steps(self) -> int:
        """Steps planned and not committed."""
    @property
    def num_steps(self) -> int:
        """Counter of planned steps."""
    @property
    def num_submitted(self) -> int:
        """Counter of accepted requests."""
    @property
    def num_finished(self) -> int:
        """Counter of requests that ended by a stop token or their length."""
    @property
    def num_aborted(self) -> int:
        """Counter of aborted requests."""
    @property
    def num_failed(self) -> int:
        """Counter of requests that lost their other engine."""
    @property
    def num_retractions(self) -> int:
        """Counter of requests put back to the queue for want of pages."""
    @property
    def num_preemptions(self) -> int:
        """Counter of requests put back to the queue for one of a better priority."""
    @property
    def num_evicted_pages(self) -> int:
        """Counter of cached pages dropped, by need or by flush_cache."""
    @property
    def prefix_query_tokens(self) -> int:
        """Counter of prompt tokens looked up in the prefix cache, once for each request that may use it."""
    @property
    def prefix_hit_tokens(self) -> int:
        """Counter of those that were found there."""
    @property
    def prefix_host_hit_tokens(self) -> int:
        """Counter of those of these that came from the host."""
    @property
    def num_host_pages(self) -> int:
        """Pages of the host tier."""
    @property
    def host_cached_pages(self) -> int:
        """Pages of the host tier that hold something, or are being filled."""
    @property
    def num_transfers(self) -> int:
        """Transfers between the tiers that have begun and not ended."""
    @property
    def num_written_back_pages(self) -> int:
        """Counter of pages whose copy to the host was begun."""
    @property
    def num_loaded_back_pages(self) -> int:
        """Counter of pages whose copy from the host was begun."""
    @property
    def num_failed_transfers(self) -> int:
        """Counter of transfers that failed."""
    @property
    def recomputed_tokens(self) -> int:
        """Counter of tokens computed again after retractions."""

class Plan:
    """One step: which tokens run, and on which pages. False when nothing can run.

    R requests, T tokens, S sampled tokens. Rows [0, num_decodes) are decodes of one token each, then come prefill chunks; both
    in the order in which they are served. Arrays are read-only views of reused buffers, valid until the plan after the next; asking
    for one later raises RuntimeError.
    """

    @property
    def step(self) -> int:
        """Number of the step, from 0; -1 for an empty plan, which takes no number and is not committed."""
    @property
    def num_requests(self) -> int:
        """R."""
    @property
    def num_tokens(self) -> int:
        """T."""
    @property
    def num_decodes(self) -> int:
        """Rows that decode."""
    @property
    def num_samples(self) -> int:
        """S: tokens that commit expects."""
    @property
    def request_ids(self) -> NDArray[np.int64]:
        """[R] int64, the requests."""
    @property
    def slots(self) -> NDArray[np.int32]:
        """[R] int32, the request's row in the page table, the same as long as it runs."""
    @property
    def query_lens(self) -> NDArray[np.int32]:
        """[R] int32, tokens that the request computes in this step."""
    @property
    def cu_query_lens(self) -> NDArray[np.int32]:
        """[R + 1] int32, where each request's tokens begin; the last entry is T."""
    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """[R] int32, tokens in the request's cache after this step."""
    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[T] int32, tokens to compute; -1 where the token is sampled by a step that is not committed yet."""
    @property
    def positions(self) -> NDArray[np.int32]:
        """[T] int32, position of each token in its sequence."""
    @property
    def slot_mapping(self) -> NDArray[np.int64]:
        """[T] int64, where keys and values go: page * page_size + offset. No two tokens of a plan share one."""
    @property
    def sample_rows(self) -> NDArray[np.int32]:
        """[S] int32, ascending: the rows in [0, R) whose last token yields a new token."""
    @property
    def output_index(self) -> NDArray[np.int32]:
        """[S] int32, tokens that the request had sampled before: the key of its random draw."""
    @property
    def page_updates(self) -> NDArray[np.int32]:
        """[U, 3] int32, (slot, index, page): changes of the page table since the plan before, each entry at most once.

        Applied to a copy of the table before this step runs, they make it equal to `Scheduler.page_table` in all entries that
        the step reads; entries beyond a request's pages may be stale there. Valid for ever.
        """
    @property
    def write_backs(self) -> NDArray[np.int32]:
        """[W, 2] int32, (device page, host page): copies to start before this step, in any order. Valid for ever.

        An empty plan may ask for copies, too. What earlier steps wrote to the device pages must be there first.
        """
    @property
    def write_back_ids(self) -> NDArray[np.int64]:
        """[W] int64, ascending: the transfer that each pair of write_backs belongs to; it ends as a whole. Valid for ever."""
    @property
    def load_backs(self) -> NDArray[np.int32]:
        """[L, 2] int32, (host page, device page): copies to start before this step, behind all steps before it. Valid for ever.

        An empty plan may ask for copies, too.
        """
    @property
    def load_back_ids(self) -> NDArray[np.int64]:
        """[L] int64, ascending: the transfer that each pair of load_backs belongs to; it ends as a whole. Valid for ever."""

    @property
    def remote_prefills(self) -> NDArray[np.int64]:
        """[n, 2] int64, (request, tokens that its cache has): requests whose other pages another engine may write from now on.

        See `Scheduler.pages_of`. An empty plan may have some, too. Valid for ever.
        """

class CommitResult:
    """The E tokens of a step that count, in the order of the plan; those of requests that ended before are left out.

    Arrays are read-only views of reused buffers, valid until the commit after the next; asking for one later raises
    RuntimeError.
    """

    @property
    def step(self) -> int:
        """The committed step."""
    @property
    def num_events(self) -> int:
        """E."""
    @property
    def request_ids(self) -> NDArray[np.int64]:
        """[E] int64."""
    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[E] int32, the new token; a stop token is reported like any other."""
    @property
    def finish_reasons(self) -> NDArray[np.int8]:
        """[E] int8: 0 running, 1 stop token, 2 length. Stop wins where both hold."""
    @property
    def num_prompt_tokens(self) -> NDArray[np.int32]:
        """[E] int32, length of the request's prompt."""
    @property
    def num_cached_tokens(self) -> NDArray[np.int32]:
        """[E] int32, prompt tokens that came from the prefix cache when the request was first admitted."""
    @property
    def num_host_cached_tokens(self) -> NDArray[np.int32]:
        """[E] int32, those of them that came from the host."""
    @property
    def output_index(self) -> NDArray[np.int32]:
        """[E] int32, index of the token in the request's output, from 0."""

class DebugOwners:
    """Who holds each page, found by walking all holders; for tests."""

    @property
    def kind(self) -> NDArray[np.int8]:
        """[num_pages] int8: 0 free, 1 a request, 2 the prefix cache, -1 nobody (a bug)."""
    @property
    def request_id(self) -> NDArray[np.int64]:
        """[num_pages] int64, the holding request, else -1."""
    @property
    def num_owners(self) -> NDArray[np.int32]:
        """[num_pages] int32, holders found: 1, anything else is a bug."""

class Scheduler:
    """Admission, batching, pages, prefix cache, retraction and the end of requests.

    A pure function of its calls: two instances that get the same calls give the same plans, bit by bit. Not thread-safe: one thread
    calls. Steps must run on the device in the order of their plans.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        """Allocate all tables and buffers at their largest size.

        Args:
            config: sizes and limits.
        """
    @property
    def config(self) -> SchedulerConfig:
        """The configuration it was made with."""
    @property
    def page_table(self) -> NDArray[np.int32]:
        """[max_num_seqs, max_pages_per_request] int32, read-only view of the live table, valid for ever; -1 where no page is."""
    def submit(
        self,
        request_id: int,
        token_ids: NDArray[np.int32],
        max_new_tokens: int,
        stop_token_ids: NDArray[np.int32],
        min_new_tokens: int = 0,
        use_prefix_cache: bool = True,
        options: RequestOptions = RequestOptions(),  # noqa: B008 - frozen
    ) -> SubmitStatus:
        """Queue a request.

        Args:
            request_id: 64-bit, unique while the request lives.
            token_ids: [n] int32, the prompt, n >= 1, each at least 0. Copied.
            max_new_tokens: most tokens to sample, at least 1.
            stop_token_ids: [k] int32, tokens that end the request.
            min_new_tokens: a stop token among the first min_new_tokens sampled ones does not end the request.
            use_prefix_cache: False computes the whole prompt, also after a retraction (log-probabilities of the prompt need that);
                its pages may still serve others.
            options: session, salt, priority, tenant and deadline.
        Returns:
            OK, or why the request was not taken.
        Raises:
            TypeError: an array is not one-dimensional, contiguous int32.
        """
    def plan(self) -> Plan:
        """Decide the next step. It may be called before the step before is committed.

        Returns:
            The step, or an empty plan (False) when nothing can run before a commit or a submission.
        Raises:
            RuntimeError: max_in_flight_steps steps are planned and not committed.
        """
    def commit(self, step: int, sampled: NDArray[np.int32], step_time_us: int = 0) -> CommitResult:
        """Take the tokens of the oldest step in flight.

        Args:
            step: its number.
            sampled: [S] int32, the token of each entry of `Plan.sample_rows`, at least 0.
            step_time_us: how long the step took, in microseconds, as rank 0 measured it; 0 means that it was not measured.
        Returns:
            The tokens that count, and which requests ended.
        Raises:
            ValueError: not the oldest step in flight, a wrong number of tokens, a negative token or time; nothing was changed.
        """
    def advance_clock(self, now_us: int) -> None:
        """Tell the time. It is an input like any other: all ranks get rank 0's, at the same place among their calls.

        Args:
            now_us: microseconds of a monotonic clock, at least those told before.
        Raises:
            ValueError: the time goes backwards; nothing was changed.
        """
    def complete_transfers(self, ids: NDArray[np.int64], ok: NDArray[np.bool_]) -> int:
        """Tell that transfers have ended. All ranks get the same calls, at the same place among their calls.

        Args:
            ids: [n] int64, transfers of `Plan.write_back_ids` or `Plan.load_back_ids`.
            ok: [n] bool. True: all pages are copied; steps planned from now on may use the device pages of a load-back. False: none
                of the target pages can be relied on.
        Returns:
            How many of the ids name a transfer in flight; the others change nothing.
        Raises:
            ValueError: the lengths differ; nothing was changed.
        """
    def missing_hashes(self, token_ids: NDArray[np.int32], salt: str = "") -> tuple[int, NDArray[np.uint8]]:
        """What neither the device nor the host has of a prompt.

        Args:
            token_ids: [n] int32.
            salt: as of the request.
        Returns:
            The first missing page, and [k, 32] uint8, the hashes of it and all whole pages behind it. No hashes without a host
            tier: what is fetched would have no place.
        """
    def reserve_host_pages(self, count: int) -> tuple[int, NDArray[np.int32]]:
        """Take pages of the host's pool for data from outside; cached ones make room.

        Args:
            count: how many are wanted.
        Returns:
            A ticket, and the pages: at most `count`. They belong to the caller until the ticket is over.
        Raises:
            ValueError: there is no host tier, or the count is negative.
        """
    def insert_host_pages(self, ticket: int, token_ids: NDArray[np.int32], first_page: int, salt: str = "") -> int:
        """Put pages of a ticket, in its order, into the cache. The ticket is over; pages that were of no use are free again.

        Args:
            ticket: of `reserve_host_pages`.
            token_ids: [n] int32, from the start of the prompt to the end of the last page that was filled.
            first_page: which page of the prompt the ticket's first one is.
            salt: as of the request.
        Returns:
            How many pages the cache took: those that it had meanwhile it does not need, and none fit where those before are gone.
        Raises:
            ValueError: no such ticket, or tokens that are not whole pages, from `first_page` to as many as the ticket has.
        """
    def release_host_pages(self, ticket: int) -> None:
        """Give a ticket's pages back.

        Raises:
            ValueError: no such ticket.
        """
    def begin_store(self, max_pages: int) -> tuple[int, NDArray[np.int32], NDArray[np.uint8]]:
        """Pages that a store outside should keep; each is offered once.

        Args:
            max_pages: about how many.
        Returns:
            A transfer's id (-1: nothing waits), its pages of the host's pool, and their hashes, [n, 32] uint8. They stay as they
            are until `complete_transfers` names the id.
        """
    def take_kv_events(self) -> list[tuple[int, int, str, NDArray[np.uint8], bytes, NDArray[np.int32]]]:
        """What the cache gained and lost since the last call, in order. Empty without `kv_event_pages`.

        Returns:
            (kind, tier, salt, hashes, parent, tokens) each. kind: 0 stored, 1 removed, 2 cleared. tier: 0 device, 1 host. hashes:
            [n, 32] uint8, one for each page. Stored alone: parent, the hash before the first page, and tokens, int32, of the pages.
        """
    def abort(self, request_id: int) -> AbortStatus:
        """End a request at once: it is not scheduled again and yields no token.

        Its pages return now, or when the last step in flight that contains it is committed.

        Args:
            request_id: the request.
        Returns:
            OK, or why there was nothing to abort.
        """
    def bootstrapped(self, request_id: int) -> EventStatus:
        """The two engines of a request have found each other: it waits for its admission.

        Args:
            request_id: a request with a role other than LOCAL.
        """
    def remote_prefill_done(self, request_id: int, first_token: int) -> EventStatus:
        """The other engine has written all pages of the prompt, and will write no more.

        Args:
            request_id: a request of role DECODE that a plan named in `Plan.remote_prefills`.
            first_token: the token that the other engine sampled; it counts as the first of the output and is in no CommitResult.
        Returns:
            OK: the request decodes, or, when it was aborted meanwhile, its pages return. FINISHED: the token was its last.
        """
    def transfer_succeeded(self, request_id: int) -> EventStatus:
        """The other engine has read all pages of the prompt: the request is over here.

        Args:
            request_id: a request of role PREFILL whose prompt is computed; the other engine reads from then on, not before.
        Returns:
            FINISHED, or why the event did not fit.
        """
    def transfer_failed(self, request_id: int) -> EventStatus:
        """The other engine is lost or gave up, and neither reads nor writes any more: the request is over here.

        Args:
            request_id: a request of role PREFILL or DECODE whose other engine has its part still to do.
        Returns:
            FINISHED, or why the event did not fit.
        """
    def pages_of(self, request_id: int) -> NDArray[np.int32]:
        """Pages that a request holds.

        Args:
            request_id: the request.
        Returns:
            [n] int32, in the order of its tokens; a copy. Empty when it holds none.
        """
    def end_session(self, session: int) -> bool:
        """Release what is kept for a session's next turn, which will not come: its pages are the first that the cache gives up.

        Args:
            session: see `RequestOptions`.
        Returns:
            Whether anything was kept.
        """
    def pause(self) -> None:
        """Plan nothing until `resume`. Steps in flight are committed, and requests received and aborted, as ever."""
    def resume(self) -> None:
        """Plan again."""
    def flush_cache(self) -> int:
        """Drop all cached pages that no request uses, those kept for sessions included. Pages in use stay shareable.

        Returns:
            The number of pages dropped.
        """
    def stats(self) -> SchedulerStats:
        """Counters and levels now."""
    def has_work(self) -> bool:
        """Whether any request lives or waits for a step in flight."""
    def debug_owners(self) -> DebugOwners:
        """Walk all holders of pages; cost grows with the pool. For tests."""
