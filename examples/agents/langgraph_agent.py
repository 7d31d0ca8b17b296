"""LangGraph: its prebuilt ReAct agent; `stream`: the same, streamed token by token; `graph`: a graph of two nodes.

`pip install langgraph langchain-openai`

    agent = { run = ["python", "examples/agents/langgraph_agent.py"], answer_file = "answer.txt" }
"""

import json
import sys
from pathlib import Path

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def graph_of_two_nodes(model):
    """A graph that goes from the model to its tools and back."""
    bound = model.bind_tools([add])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


task = json.loads(sys.stdin.readline())
conversation = {"messages": [("user", task["messages"][-1]["content"])]}
model = ChatOpenAI(model="policy")
if "graph" in sys.argv:
    agent = graph_of_two_nodes(model)
else:
    agent = create_react_agent(model, tools=[add], prompt="Use the tool, then answer with the sum.")
if "stream" in sys.argv:
    parts = [part for part, _ in agent.stream(conversation, stream_mode="messages")]
    last = parts[-1].id
    answer = "".join(part.content for part in parts if part.id == last)
else:
    answer = agent.invoke(conversation)["messages"][-1].content
Path("answer.txt").write_text(str(answer))
