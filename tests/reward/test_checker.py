"""How a task names its checker."""

import json

import pytest

from shoal import checker
from shoal.checker import spec_of, task_spec, to_json, unit_tests
from shoal.errors import TaskError
from shoal.types import Json, Receipt, Task


@pytest.mark.parametrize(
    "value",
    [
        "exact",
        {"name": "math", "tolerance": 0.01},
        {"name": "code", "timeout_s": 2.0, "partial": True},
        {
            "name": "weighted",
            "parts": [{"scorer": "math", "weight": 0.9}, {"scorer": {"name": "length", "at_most": 9}}],
        },
    ],
)
def test_a_checker_is_the_same_after_being_written_and_read(value: Json) -> None:
    spec = spec_of(value, "here")
    assert spec_of(json.loads(json.dumps(to_json(spec))), "here") == spec


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("magic", "here: expected one of exact, .*, got 'magic'"),
        (7, "here: expected one of exact, .*, got 7"),
        ({"name": "math", "tol": 1}, "here: tol: unknown parameter; did you mean 'tolerance'?"),
        ({"name": "code", "timeout_s": "x"}, "here: timeout_s: expected float, got str"),
        ({"name": "code", "template": "x"}, r"here: template: expected str matching regex '.*answer.*'"),
        ({"name": "regex", "pattern": "("}, "here: expected a regular expression"),
        ({"name": "function", "path": "x"}, r"here: path: expected str matching regex '.*'"),
        ({"name": "weighted", "parts": []}, "here: parts: expected array of length >= 1"),
        ({"name": "weighted", "parts": [{"scorer": "mtah"}]}, r"parts\[0\].scorer.*: .*'mtah'; did you mean 'math'"),
    ],
)
def test_a_wrong_checker_is_named_with_what_was_expected(value: Json, complaint: str) -> None:
    with pytest.raises(TaskError, match=complaint):
        spec_of(value, "here")


def test_a_test_is_of_one_kind() -> None:
    assert unit_tests([{"call": "f", "args": [1], "returns": 2}], "here")[0].call == "f"
    for wrong in ([], [{}], [{"call": "f", "stdout": "x"}], [{"call": 1}], {}):
        with pytest.raises(TaskError, match="here"):
            unit_tests(wrong, "here")


def test_a_task_without_a_checker_is_its_datasets_business() -> None:
    receipt = Receipt("chain_sum", "0", "{}", 0, 0)
    assert task_spec(Task("t", "t", (), receipt=receipt)) == checker.ReasoningGym()
    assert task_spec(Task("t", "t", (), info='{"scorer": "math"}', receipt=receipt)) == checker.Math()
    with pytest.raises(TaskError, match="expected one of"):
        task_spec(Task("t", "t", ()))
    with pytest.raises(TaskError, match="expected a JSON object"):
        task_spec(Task("t", "t", (), info="["))
