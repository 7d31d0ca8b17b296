"""SAPO's controlled experiment (arXiv 2509.08721) with a pretrained model, SmolLM2-135M-Instruct."""
