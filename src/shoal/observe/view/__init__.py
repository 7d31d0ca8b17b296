"""The page on which a run is watched, from its directory alone: `shoal view`.

charts   their numbers as lines to draw
waits    the side that holds a run up, in one sentence
index    their rollouts, so that they can be filtered
tokens   the tokens of one rollout with their numbers
server   the pages, over HTTP

Pages are HTML of Jinja templates that escape every text; static/view.js draws the charts with plotly.js, which comes in
the wheel of plotly, and nothing is fetched from anywhere else.
"""
