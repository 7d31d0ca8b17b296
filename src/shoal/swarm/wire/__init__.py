"""The wire format of a swarm and its transports.

envelope    signed, size-limited bytes around one payload
offer       a shared question with its rollouts as text (pure)
options     servers and credentials of a swarm
nats        envelopes through NATS JetStream
server      an embedded nats-server
invitation  the line with which another node joins
"""
