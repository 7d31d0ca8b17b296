"""Tools run inside of the workspace, say what went wrong, and are the same through MCP."""

import json
from dataclasses import replace

import pytest

from shoal.environments.trl import tools_json
from shoal.errors import TaskError
from shoal.workspace.fork import LIMITS, fork
from shoal.workspace.task import apply, patched
from shoal.workspace.tools import Tools, server
from shoal.workspace.tree import Tree

pytest_plugins = ("small_workspaces",)


async def test_tools_read_edit_and_run_and_say_what_went_wrong(tree: Tree) -> None:
    with fork(tree) as workspace:
        tools, hasty = Tools(workspace, LIMITS, 200), Tools(workspace, replace(LIMITS, wall_s=2.0))
        assert await tools.read(".") == "sums.py\ntests/\n"
        assert await tools.read("sums.py", 2) == "     2\t    return a - b\n     3\t\n"
        assert await tools.edit("sums.py", "a - b", "a + b") == "sums.py was written\n"
        assert "expected old_text once, found it 0 times\n[exit code 1]" in await tools.edit("sums.py", "a - b", "")
        assert await tools.edit("new/file", "", "text") == "new/file was written\n"
        assert "exists" in await tools.edit("new/file", "", "text")
        assert await tools.python("import sums; print(sums.add(1, 2))") == "3\n"
        assert await tools.bash("cd new; false") == "[exit code 1]"
        assert await tools.bash("cat file") == "text"
        assert "longer than 2 s" in await hasty.bash("sleep 60")
        long = await tools.bash("printf 'x%.0s' {1..1000}")
        assert "[800 characters left out]" in long
        await tools.bash("cd /workspace; rm sums.py; ln -s /etc/shadow sums.py; mkfifo pipe")
        assert "root" not in await tools.read("sums.py")
        assert "expected a file" in await tools.read("pipe")


@pytest.mark.parametrize("command", ["echo a\0b", f"echo {'x' * 60_000}", f": {'x' * 3_000_000}"])
async def test_a_command_that_no_shell_could_be_given_is_the_model_s_fault_and_no_failure(
    command: str, tree: Tree
) -> None:
    with fork(tree) as workspace:
        assert "expected a command of at most" in await Tools(workspace).bash(command)
        assert await Tools(workspace).bash(f"echo {'x' * 49_900} | wc -c") == "49901\n"


def test_the_schemas_of_tools_have_their_arguments(tree: Tree) -> None:
    with fork(tree) as workspace:
        described = {one["function"]["name"]: one["function"] for one in json.loads(tools_json(Tools(workspace).all()))}
    assert list(described) == ["bash", "edit", "read", "python"]
    assert described["edit"]["parameters"]["required"] == ["path", "old_text", "new_text"]
    assert described["read"]["parameters"]["required"] == ["path"]


async def test_an_mcp_client_uses_the_workspace(tree: Tree) -> None:
    mcp = pytest.importorskip("mcp")

    with fork(tree) as workspace:
        async with mcp.Client(server(Tools(workspace))) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["bash", "edit", "read", "python"]
            await client.call_tool("edit", {"path": "sums.py", "old_text": "a - b", "new_text": "a + b"})
            result = await client.call_tool("bash", {"command": "cat sums.py"})
            assert result.content[0].text == "def add(a, b):\n    return a + b\n"


async def test_a_patch_is_applied_once_and_one_that_does_not_fit_is_refused(tree: Tree) -> None:
    patch = "--- a/sums.py\n+++ b/sums.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a * b\n"

    made = await patched(tree, patch)
    assert await patched(tree, patch) == made
    with fork(made) as workspace:
        assert b"a * b" in (await workspace.run("cat sums.py")).stdout
        with pytest.raises(TaskError, match="does not fit"):
            await apply(workspace, patch)
