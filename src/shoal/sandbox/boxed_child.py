"""A module of Shoal as a child process for untrusted data or code, in a sandbox if the machine has one."""

from collections.abc import Sequence
from pathlib import Path

from shoal.net.process import Child
from shoal.sandbox.command import WORK_FOLDER, installed_packages, module_command, own_package
from shoal.sandbox.program import Backend, Program


class BoxedChild(Child):
    """A running `python -m module` without the environment of this process.

    Within namespaces the module starts in a sandbox and gets `--boxed`. Elsewhere it confines itself
    (`sandbox.confinement`).
    """

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], log: Path | None, backend: Backend | None
    ) -> None:
        env = {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        super().__init__(name, module, arguments, log, env)
        self._backend = backend

    def command(self, fd: int) -> list[str]:
        """The module's command, within namespaces where the machine has them."""
        if self._backend not in (Backend.BUBBLEWRAP, Backend.NAMESPACES):
            return super().command(fd)
        words = ("python", "-s", "-S", "-B", "-P", "-m", self._module, *self._arguments, "--boxed", "--fd", str(fd))
        module = Program(
            argv=words,
            packages=(*installed_packages(), own_package().parent),
            environment={**self._env, "HOME": WORK_FOLDER, "TMPDIR": WORK_FOLDER},
        )
        return module_command(self._backend, module)
