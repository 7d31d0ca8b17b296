"""SAPO's controlled experiment (arXiv 2509.08721) with tiny models: eight nodes, how many groups are one's own."""
