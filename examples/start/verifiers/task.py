"""What the process with verifiers serves to the run."""

from shoal.environments.verifiers import verifiers_environment

words = verifiers_environment("words", taskset="words_taskset", env={"agent": {"runtime": {"type": "subprocess"}}})
