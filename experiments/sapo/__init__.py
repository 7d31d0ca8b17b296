"""SAPO's controlled experiment (arXiv 2509.08721) on real nodes: `shoal train` processes and a NATS server."""
