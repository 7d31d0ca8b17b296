"""What a process with verifiers serves."""

from shoal.tasks.verifiers_tasks import verifiers_task

guess = verifiers_task("guess", taskset="vf_guess", env={"agent": {"runtime": {"type": "subprocess"}}})
