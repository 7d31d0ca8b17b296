"""Figures and tables of papers, measured again at a small scale: one folder each, run by `make NAME`.

A folder holds `claim.md` (what the paper claims, and what was found), `experiment.toml` (what is run), the code, and
`results/`: a line per run in runs.jsonl, to which an interrupted experiment adds what is missing, and what is made of
them: results.json, results.md and a plot.
"""
