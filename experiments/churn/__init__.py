"""A swarm in which everything dies now and then: nodes, generators, servers and the network."""
