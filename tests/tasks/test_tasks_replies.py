"""The two sides of drawing reasoning-gym questions, without a process between them."""

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from shoal.config import TaskConfig
from shoal.errors import TaskError
from shoal.tasks.procedural_client import CheckSettings, ReasoningGymService, Redraw, Spec
from shoal.tasks.procedural_worker import reply_to
from shoal.types import Receipt


def test_a_reply_is_what_was_asked_for_or_an_error_and_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    checked = reply_to(CheckSettings("chain_sum", '{"min_terms": 1}', 1))
    assert json.loads(msgspec.msgpack.decode(checked.value, type=str))["min_terms"] == 1
    assert (checked.error, checked.kind) == ("", "")
    wrong = reply_to(CheckSettings("chain_sum", '{"min_term": 1}', None))
    assert ("did you mean 'min_terms'" in wrong.error, wrong.kind) == (True, "TaskError")
    other = reply_to(Redraw(Spec("chain_sum", "{}"), Receipt("chain_sum", "0.0.1", "{}", 1, 0)))
    assert ("drawn with reasoning-gym 0.0.1" in other.error, other.kind) == (True, "OtherRelease")


def test_a_rewriting_that_is_no_expression_is_refused_before_the_other_process_is_asked() -> None:
    nobody: Any = None
    with pytest.raises(TaskError, match=r"rewrite\.0"):
        ReasoningGymService(TaskConfig(name="chain_sum", rewrite=[("(", "")]), 0, nobody)


BOXED = """
from shoal.tasks.procedural_worker import BOXED_BYTES, box
box()
bytearray(BOXED_BYTES // 2)
try: bytearray(2 * BOXED_BYTES)
except MemoryError: print("bounded")
"""


def test_a_boxed_process_may_add_a_gibibyte_and_not_two() -> None:
    assert (
        subprocess.run([sys.executable, "-c", BOXED], capture_output=True, text=True, check=True).stdout == "bounded\n"
    )
