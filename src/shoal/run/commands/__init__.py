"""The bodies of commands, each in a file; `shoal.cli` reads their arguments and prints their results."""
