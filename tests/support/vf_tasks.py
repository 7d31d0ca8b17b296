"""What a process with verifiers serves."""

from shoal.environments.verifiers import verifiers_environment

guess = verifiers_environment("guess", taskset="vf_guess", env={"agent": {"runtime": {"type": "subprocess"}}})
