"""The judge sets challenges for models and grades the answers; it has no stake in them (SAPO, arXiv 2509.08721).

condition   training of a compared node
messages    signed messages between judge and takers
commitment  questions fixed before any request, and drawable afterwards (pure)
store       rounds, challenges and graded answers in SQLite
judging     the judge itself
server      the judge over HTTP, with its leaderboard
page        the leaderboard
client      a taker that answers a challenge by a model, and the audit of a judge
comparison  swarm against solo: tests, bands, cohorts (pure)
figure      the comparison as a picture
"""
