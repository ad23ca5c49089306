"""The control plane: which tokens run in the next step, and on which pages."""

from tokenspeed_engine.scheduler._scheduler import (
    AbortStatus,
    CommitResult,
    DebugOwners,
    EventStatus,
    Plan,
    RequestOptions,
    Role,
    Scheduler,
    SchedulerConfig,
    SchedulerStats,
    SubmitStatus,
)

__all__ = [
    "AbortStatus",
    "CommitResult",
    "DebugOwners",
    "EventStatus",
    "Plan",
    "RequestOptions",
    "Role",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "SubmitStatus",
]
