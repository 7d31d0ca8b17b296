"""Sandboxes for untrusted programs: no network, no files but a work folder, no other processes, and resource limits.

`program` describes a program and its result, `runner` runs it, and `backends` finds the strongest sandbox of this
machine. The other modules run inside the sandbox before the program does.
"""
