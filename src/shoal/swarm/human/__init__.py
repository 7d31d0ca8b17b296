"""A node of the swarm whose generator is people: questions on a web page, answers signed and offered to everybody.

questions   what is asked, who answered what, when it becomes an offer (pure)
desk        questions in, offers out: exchange, recogniser, scorer
server      the page and what it asks for
static      the page itself: HTML, style and script as they are
"""
