"""The pages of `shoal view`, which show a run from its directory alone.

charts   their numbers as lines to draw
waits    the side that holds a run up, in one sentence
index    their rollouts, so that they can be filtered
tokens   the tokens of one rollout with their numbers
server   the pages, over HTTP

Jinja templates escape every text; static/view.js draws the charts with plotly.js from the wheel of plotly. Pages fetch
nothing from other hosts.
"""
