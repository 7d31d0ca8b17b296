"""The tables of the log.

    started    a group was admitted            every group has exactly one row here, and then at most one of
    groups     its rollouts were committed     finished_seq is the order of commit
    ended      it failed or was dropped        with the reason; a group that finished may still be dropped
    consumed   it was trained on               finished_seq is the key: a second use cannot be recorded
    steps      the Version under which one training step consumed, and the Version after it
    published  checksums of the Versions
    shards     files of the archive, and the last step that each holds
    checkpoints  the steps after which a checkpoint was saved

All else (counts, staleness, waiting groups, groups that a crash interrupted) is derived from these.
A peer's group has the peer in its row of `started`, where own groups have null. It is written whole, in the transaction
of the step that trains it; no gate counted it, and it waited for nobody.
`after_step` is the last step consumed when a row was written, -1 before the first.
"""

FORMAT = "2"
SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE started(
    started_seq INTEGER PRIMARY KEY AUTOINCREMENT, group_id TEXT NOT NULL UNIQUE, service TEXT NOT NULL,
    admitted_version INTEGER NOT NULL, after_step INTEGER NOT NULL, peer_id TEXT, message_id TEXT);
CREATE TABLE groups(
    finished_seq INTEGER PRIMARY KEY AUTOINCREMENT, group_id TEXT NOT NULL UNIQUE, task BLOB NOT NULL,
    admitted_version INTEGER NOT NULL, after_step INTEGER NOT NULL);
CREATE TABLE rollouts(finished_seq INTEGER NOT NULL, position INTEGER NOT NULL, body BLOB NOT NULL);
CREATE UNIQUE INDEX rollouts_of_group ON rollouts(finished_seq, position);
CREATE TABLE ended(
    group_id TEXT PRIMARY KEY, outcome TEXT NOT NULL, reason TEXT NOT NULL, after_step INTEGER NOT NULL);
CREATE TABLE consumed(
    finished_seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, position INTEGER NOT NULL,
    horizon INTEGER NOT NULL, trained_from INTEGER, masked_tokens INTEGER NOT NULL);
CREATE UNIQUE INDEX consumed_in_step ON consumed(step, position);
CREATE TABLE steps(step INTEGER PRIMARY KEY, version INTEGER NOT NULL, version_after INTEGER NOT NULL);
CREATE TABLE published(version INTEGER NOT NULL, checksum TEXT NOT NULL);
CREATE TABLE checkpoints(step INTEGER NOT NULL);
CREATE TABLE shards(name TEXT PRIMARY KEY, through INTEGER NOT NULL);
"""
