"""Nodes train on each other's text and trust none of each other's bytes (SAPO, arXiv 2509.08721).

wire          what travels, and how: envelopes, offers, exchanges, the NATS server
trust         whose messages are read, and what this node itself makes of them
strategy      which own groups are shared, and which offers are taken
judge, human  challenges for models; people as generators
peer          base class of every participant of a swarm
verification  the way of an offer from the ingress filter to the ready pool
node          the peer that a training run takes groups from
generator     a peer that does not train; `answerers` answer for it
"""
