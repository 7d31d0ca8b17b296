"""Messages and tokens: chat templates, bridges between a drawn answer and the next one, tool calls in drawn text."""

from shoal.render.chat import Answer, ChatRenderer, TemplateReport
from shoal.render.load import load_renderer, local_directory

__all__ = ["Answer", "ChatRenderer", "TemplateReport", "load_renderer", "local_directory"]
