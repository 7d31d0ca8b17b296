"""SAPO's figure 3: a judge's pass@1 by training round, swarm against solo, for models of two sizes."""
