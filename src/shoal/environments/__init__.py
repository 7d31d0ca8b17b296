"""Environments written with the public API (`shoal.environment`): games, and adapters of other frameworks.

games          guess_number: a number is found by asking whether it is higher or lower
               hanoi: the towers of Hanoi, a move at a time
               calculator: arithmetic with a tool, called as the model's chat template has tools called
workspace      a file tree is worked on by commands or tools; hidden tests decide
trl            reward functions, tools and environments written for TRL
verifiers      environments written for verifiers
"""
