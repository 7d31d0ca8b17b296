"""Challenges for models, set and marked by somebody without a stake in the answers (SAPO, arXiv 2509.08721).

messages    what judge and takers sign and send
commitment  questions that are fixed before anybody asks, and can be drawn again afterwards (pure)
book        sittings, challenges and marks in SQLite
judging     one judge: issues challenges, marks answers
server      the judge over HTTP, with its leaderboard
page        the leaderboard
taking      a taker: gets a challenge, asks a model, hands in the answers
arm         how a node is trained
comparison  swarm against solo: tests, bands, cohorts (pure)
figure      the comparison as a picture
"""
