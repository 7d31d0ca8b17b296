"""Foreign bytes become trusted data: size, schema, signature, rates, then this node's own reading and scoring.

ingress       the ingress filter, and the record of each peer
refusals      reasons of refusals, and what each says of an author
rates         token buckets and bounded tables (pure)
claim_verification  claims of peers matched with own tasks
python_tasks  own Python tasks, run by `python_worker` in a sandbox
limits        limits on the cost of one question or answer
offer_reading  an offer as answers to an own task, and their scores
encoding      peers' text as rows of this node's tokenizer (pure)
contents      digests of answers that were taken before, under any name (pure)
"""
