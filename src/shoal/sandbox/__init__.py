"""Untrusted programs in a box: no network, no files but a work folder, no other processes, and limits on all they use.

`program` says what runs and how it ended, `runner` runs it, `rungs` finds the strongest box this machine can build. The
rest runs inside, before the program does.
"""
