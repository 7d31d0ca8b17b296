"""What the process with verifiers serves to the run."""

from shoal.environments.verifiers import verifiers_task

words = verifiers_task("words", taskset="words_taskset", env={"agent": {"runtime": {"type": "subprocess"}}})
