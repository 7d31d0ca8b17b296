"""The checkers of the worker processes, made ready for a task."""

import pytest

from shoal.checker import spec_of
from shoal.errors import TaskError
from shoal.reward.schema import complaint_of
from shoal.reward.worker import judge_of
from shoal.types import Json

SCHEMA: dict[str, Json] = {
    "type": "object",
    "required": ["name", "age"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
        "next": {"$ref": "#"},
    },
    "additionalProperties": False,
}


def value(spec: Json, answer: str, truth: str | None = None) -> float:
    return judge_of(spec_of(spec, "here"), truth)(answer)[0]


@pytest.mark.parametrize(
    ("spec", "truth", "right", "wrong"),
    [
        ("exact", "Blue", " Blue\n", "blue"),
        ({"name": "exact", "ignore_case": True}, "Blue", "blue", "red"),
        ("contains", "blue", "It is blue.", "It is red."),
        ("number", "2", "I say 2.0", "3"),
        ("math", "1/2", "\\boxed{0.5}", "\\boxed{2}"),
        ({"name": "regex", "pattern": "^[ab]+$"}, None, "abba", "abc"),
        ({"name": "regex", "pattern": "[ab]+", "match": "full"}, None, "abba", "abc"),
        ("regex", "^yes", "yes, sir", "no"),
        ({"name": "format", "tags": ["a", "b"]}, None, "<a>1</a> <b>2</b>", "<b>2</b><a>1</a>"),
        ({"name": "length", "at_most": 4}, None, "1234", "12345"),
        ({"name": "length", "at_most": 2, "unit": "words"}, None, "one two", "one two three"),
        ({"name": "language", "script": "latin"}, None, "It is 4.", "Это"),
        ({"name": "json_schema", "schema": SCHEMA}, None, '{"name": "A", "age": 3}', '{"name": "A"}'),
        ({"name": "json_schema", "schema": {}}, '{"a": 1}', '{"a": 1.0}', '{"a": true}'),
        ({"name": "json_schema", "schema": {}}, None, "```json\n[1]\n```", "[1"),
    ],
)
def test_a_right_answer_is_worth_one_and_a_wrong_one_nothing(
    spec: Json, truth: str | None, right: str, wrong: str
) -> None:
    assert (value(spec, right, truth), value(spec, wrong, truth)) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"name": "", "age": 3}, "$.name: '' should be non-empty"),
        ({"name": "A", "age": True}, "$.age: True is not of type 'integer'"),
        ({"name": "A", "age": -1}, "$.age: -1 is less than the minimum of 0"),
        ({"name": "A", "age": 1, "tags": ["a", "c"]}, "$.tags[1]: 'c' is not one of ['a', 'b']"),
        ({"name": "A", "age": 1, "tags": ["a", "a"]}, "$.tags: expected no item twice"),
        (
            {"name": "A", "age": 1, "other": 1},
            "$: Additional properties are not allowed ('other' was unexpected)",
        ),
        ({"name": "A", "age": 1, "next": {"name": "B"}}, "$.next: 'age' is a required property"),
        ([], "$: [] is not of type 'object'"),
    ],
)
def test_a_schema_says_where_and_why_it_refuses(given: Json, why: str) -> None:
    assert complaint_of(SCHEMA)(given) == why


@pytest.mark.parametrize(
    ("items", "unique"),
    [([1, 1.0], False), ([1, True], True), ([{"a": [1]}, {"a": [1.0]}], False), ([[1], {"a": 1}, "a", None], True)],
)
def test_items_are_told_apart_as_json_values(items: Json, unique: bool) -> None:
    assert (complaint_of({"uniqueItems": True})(items) == "") is unique


def test_combined_schemas() -> None:
    even = {"multipleOf": 2}
    for schema, accepted, refused in (
        ({"anyOf": [even, {"const": 3}]}, 3, 5),
        ({"oneOf": [even, {"minimum": 10}]}, 11, 12),
        ({"allOf": [even, {"maximum": 4}]}, 4, 6),
        ({"not": even}, 3, 4),
    ):
        complaint = complaint_of(schema)
        assert complaint(accepted) == ""
        assert complaint(refused) != ""


@pytest.mark.parametrize(
    ("spec", "truth", "why"),
    [
        ("math", None, "expected a task with an answer, which math compares with"),
        ("number", "none", "expected a number"),
        ("regex", "(", "expected a regular expression"),
        ({"name": "json_schema", "schema": {"type": "text"}}, None, "'text' is not valid"),
        ({"name": "json_schema", "schema": {"patternProperties": {}}}, None, "patternProperties is not supported"),
        ({"name": "json_schema", "schema": {"pattern": "(?=a)"}}, None, "as RE2 knows them"),
        ({"name": "json_schema", "schema": {"$ref": "http://a/b"}}, None, "expected one within the schema"),
        ("code", None, "code is not checked by a worker process"),
    ],
)
def test_a_task_that_cannot_be_judged_is_refused(spec: Json, truth: str | None, why: str) -> None:
    with pytest.raises(TaskError, match=why):
        judge_of(spec_of(spec, "here"), truth)
