"""What a process with verifiers serves."""

from shoal.environments.verifiers import verifiers_task

guess = verifiers_task("guess", taskset="vf_guess", env={"agent": {"runtime": {"type": "subprocess"}}})
