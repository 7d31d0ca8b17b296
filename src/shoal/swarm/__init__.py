"""Nodes that learn from each other's text, owe each other nothing, and trust no one's bytes (SAPO, arXiv 2509.08721).

identity   the key that signs what a node says
envelope   signed, size-limited bytes around one payload
offer      what is shared: a question with its rollouts as text (pure)
trust      which bytes are let in, and what is known of who sent them
contents   which answers were taken before, whoever signed them (pure)
strategy   what is shared and what is taken (pure)
encoding   foreign text as rows of this node's tokenizer (pure)
external   what foreign answers are reinforced with (pure)
exchange   envelopes in memory, for tests and simulations
options    where a swarm meets
nats       envelopes through NATS JetStream
server     a nats-server of one's own
node_files what a node works with, reads, remembers and counts
peer       what everybody in a swarm does
generator  a peer that does not train; `chat` and `rules` answer for it
node       all of these beside the buffer of one training run
"""
