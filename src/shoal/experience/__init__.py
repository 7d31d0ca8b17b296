"""The durable experience log of a run: admission, staleness, each group used once.

gate       decides when a group may start (pure)
admission  queue at the gate, in order of arrival (no I/O)
balance    picks the groups that a step trains (pure)
log        the SQLite file; schema describes its tables
archive    steps that left the log, as Parquet
writer     the thread that writes the log
uses       a step's use of its groups, in the form of the log (pure)
buffer     the interface of generation and training
counts     numbers of started, finished, dropped and consumed groups of each task
raw        stored rollouts, for readers that must not trust them
audit      checks the promises of a run from its log alone; audit_rows without rollouts, findings the report
export     the log as JSON lines or Parquet
checkpoint saved state that a resume loads, whole or not at all
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
