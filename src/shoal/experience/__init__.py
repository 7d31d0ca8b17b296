"""The durable experience log of a run: admission, staleness, each group used once.

gate       decides when a group may start (pure)
balance    picks the groups that a step trains (pure)
schema     the tables of the log, and the values of their rows
log        the SQLite file
archive    steps that left the log, as Parquet
writer     the thread that writes the log
buffer     the interface of generation and training
counts     numbers of started, finished, dropped and consumed groups of each task
raw        stored rollouts, for readers that must not trust them
audit      checks the promises of a run from its log alone; audit_rows without rollouts, findings the report
export     the log as JSON lines or Parquet
checkpoint saved state that a resume loads, whole or not at all
"""
