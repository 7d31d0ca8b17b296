"""LangChain: its agent; `graph`: the same with LangGraph; `output` and `functions`: a typed answer, by format or tool.

`pip install langchain langchain-openai`

    agent = { run = ["python", "examples/agents/langchain_agent.py"], answer_file = "answer.txt" }
"""

import json
import sys
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel


class Sum(BaseModel):
    """Answer to the question."""

    answer: int


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


task = json.loads(sys.stdin.readline())
question = task["messages"][-1]["content"]
model = ChatOpenAI(model="policy")
conversation = {"messages": [("user", question)]}
if "output" in sys.argv:
    answer = model.with_structured_output(Sum).invoke(question).answer
elif "functions" in sys.argv:
    answer = model.with_structured_output(Sum, method="function_calling").invoke(question).answer
elif "graph" in sys.argv:
    bound = model.bind_tools([add])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    answer = graph.compile().invoke(conversation)["messages"][-1].content
else:
    agent = create_agent(model, tools=[add], system_prompt="Use the tool, then answer with the sum.")
    answer = agent.invoke(conversation)["messages"][-1].content
Path("answer.txt").write_text(str(answer))
