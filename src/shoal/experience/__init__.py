"""The durable experience log of a run: admission, staleness, each group used once; and what is derived from it.

gate     when a group may start (pure)
admission  who waits for that, in order (no I/O)
balance  which groups a step trains (pure)
log      the SQLite file, whose tables schema describes
archive  steps that left it, as Parquet
writer   the thread that writes it
uses     what a step trains of them, as the log has it (pure)
buffer   what generation and training talk to
counts   what became of the groups of each task
raw      the rollouts as they are stored, for readers that must not trust them
audit    the promises of a run, checked from its log alone; audit_rows those that need no rollouts, findings the report
export   the log as JSON lines or Parquet
checkpoint  what a resume need not compute again, there whole or not at all
"""

from shoal.experience.buffer import STALE, TOO_FEW, Buffer
from shoal.experience.counts import StepTaskCounts, TaskCounts, step_counts, task_counts
from shoal.experience.gate import AdmissionGate
from shoal.experience.log import INTERRUPTED, Recovered, RunMeta, StepRecord

__all__ = [
    "INTERRUPTED",
    "STALE",
    "TOO_FEW",
    "AdmissionGate",
    "Buffer",
    "Recovered",
    "RunMeta",
    "StepRecord",
    "StepTaskCounts",
    "TaskCounts",
    "step_counts",
    "task_counts",
]
