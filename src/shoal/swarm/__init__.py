"""Nodes train on each other's text and trust none of each other's bytes (SAPO, arXiv 2509.08721).

identity    the key that signs a node's messages
envelope    signed, size-limited bytes around one payload
offer       a shared question with its rollouts as text (pure)
trust       the ingress filter, and the record of each peer
contents    digests of answers that were taken before, under any name (pure)
strategy    choice of own groups to share and of offers to take; weight of the latter (pure)
encoding    peers' text as rows of this node's tokenizer (pure)
exchange    envelopes in memory, for tests and simulations
options     servers and credentials of a swarm
nats        envelopes through NATS JetStream
server      an embedded nats-server
pending     offers that wait for verification
peer        base class of every participant of a swarm
claim_verification  claims of peers matched with own tasks
generator   a peer that does not train; `answerers` answer for it
verification  the way of an offer from the filter to the pool
node        the peer that a training run takes groups from
"""
