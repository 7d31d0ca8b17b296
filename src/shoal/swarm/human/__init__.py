"""The human UI is a node whose generators are people: it asks on a web page and shares the signed answers.

questions   open questions with their answers, until they become offers (pure)
human_node  exchange, recogniser and scorer behind the page
server      the page and its requests
static      HTML, style and script of the page
"""
