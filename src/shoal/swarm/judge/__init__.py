"""The judge sets challenges for models and grades the answers; it has no stake in them (SAPO, arXiv 2509.08721).

messages    signed messages between judge and takers, and the commitment to questions
store       rounds, challenges and graded answers in SQLite
judging     the judge itself
server      the judge over HTTP, with its leaderboard
client      a taker that answers a challenge by a model
"""
