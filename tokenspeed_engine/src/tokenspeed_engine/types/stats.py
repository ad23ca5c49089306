"""Where the engine core stands: sizes now, and sums since it started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine core between two steps.

    Attributes:
        num_running: sequences that hold pages.
        num_waiting: sequences that wait for their first step, or for another one after a retraction.
        num_pages: size of the page pool.
        num_free_pages: pages that nothing holds.
        num_cached_pages: pages that only the prefix cache holds; they can be taken when needed.
        num_steps: steps so far.
        num_step_tokens: tokens that were computed in all steps so far.
        num_retractions: running sequences that were sent back to wait for lack of pages, so far.
        num_aborts: requests that were aborted before their end, so far.
        prefix_query_tokens: prompt tokens looked up in the prefix cache so far.
        prefix_hit_tokens: prompt tokens found there so far.
        step_time_s: duration of the last step.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0
    num_retractions: int = 0
    num_aborts: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    step_time_s: float = 0.0

    @property
    def num_owned_pages(self) -> int:
        """Pages that running sequences hold."""
        return self.num_pages - self.num_free_pages - self.num_cached_pages
