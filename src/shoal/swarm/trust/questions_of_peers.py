"""Questions of peers with a truth and an allow-listed checker: the metadata M of SAPO, verified. Pure.

A claim without a receipt may carry its checker. A node that lists the checker in `swarm.checkers` makes a task of the
claim. Checkers that run a user's function or a paid model are never taken, and neither are sums of several. The node's
own limits replace those of a peer's `code`.
"""

import hashlib
import json
from collections.abc import Collection

import msgspec

from shoal.checker import Code, Spec, needs_tests, needs_truth, spec_of, task_spec, to_json, unit_tests
from shoal.errors import TaskError
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.offer import MAX_CHECKER_CHARACTERS, Claim
from shoal.types import Json, Message, Role, Task

TASK_ID = "questions/"
"""Beginning of the ids of such tasks."""
LIMITS = Code()


def checker_of(task: Task) -> str:
    """Checker and tests of an own task as JSON, for its claim; empty for one that no peer would take."""
    spec, tests = task_spec(task), json.loads(task.info).get("tests")
    values: dict[str, Json] = {"scorer": to_json(spec), **({"tests": tests} if tests else {})}
    text = json.dumps(values)
    return text if len(text) <= MAX_CHECKER_CHARACTERS else ""


def task_of_question(claim: Claim, checkers: Collection[str], most_characters: int) -> Task | Reason:
    """Makes a task of a peer's question, truth and checker, if the checker is one of those accepted."""
    try:
        values = json.loads(claim.checker or "null")
        spec = spec_of(values["scorer"], "checker")
        tests = values.get("tests", [])
        if needs_tests(spec):
            unit_tests(tests, "tests")
    except (TaskError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Reason.UNKNOWN_TASK
    name = spec.__struct_config__.tag
    if name not in checkers or (needs_truth(spec) and not (claim.truth or "").strip()):
        return Reason.UNKNOWN_TASK
    if len(claim.question) + len(claim.truth or "") + len(claim.checker) > most_characters:
        return Reason.OUT_OF_BOUNDS
    info: dict[str, Json] = {"scorer": to_json(_limited(spec)), **({"tests": tests} if needs_tests(spec) else {})}
    text = f"{claim.question}\x1e{claim.truth}\x1e{claim.checker}"
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
    asked = (Message(Role.USER, claim.question),)
    return Task(f"{TASK_ID}{digest}", f"questions_{name}", asked, claim.truth, json.dumps(info))


def has_peers_truth(task: Task) -> bool:
    """Tells whether the truth of a task is a peer's word, so that its checker must accept it first."""
    return task.id.startswith(TASK_ID) and task.answer is not None and needs_truth(task_spec(task))


def _limited(spec: Spec) -> Spec:
    if not isinstance(spec, Code):
        return spec
    timeout_s, memory_mb = min(spec.timeout_s, LIMITS.timeout_s), min(spec.memory_mb, LIMITS.memory_mb)
    return msgspec.structs.replace(spec, timeout_s=timeout_s, memory_mb=memory_mb)
