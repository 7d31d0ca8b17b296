"""Child processes: what is told of one that ends."""

import asyncio
import os
from pathlib import Path

import pytest

from shoal.errors import ChildDied
from shoal.process import Child
from shoal.train.client import TrainerProcess


@pytest.mark.parametrize(
    ("module", "last_words"), [("this", "Namespaces are one honking great idea"), ("colorsys", "code 0")]
)
def test_the_last_words_of_a_process_are_its_own_and_not_those_of_one_before_it(
    tmp_path: Path, module: str, last_words: str
) -> None:
    log = tmp_path / "log"
    log.write_text("the last words of an earlier process\n")

    async def run() -> None:
        async with Child("short", module, [], log, os.environ) as child:
            await child.line(60)

    with pytest.raises(ChildDied) as raised:
        asyncio.run(run())
    assert last_words in str(raised.value)
    assert "earlier" not in str(raised.value)


def test_a_trainer_that_hangs_is_given_up(tmp_path: Path) -> None:
    class Hanging(Child):
        def command(self, fd: int) -> list[str]:
            return ["sleep", "60"]

    async def run() -> None:
        async with Hanging("trainer", "", [], tmp_path / "log", os.environ) as child:
            await TrainerProcess(child, timeout_s=0.05).save(tmp_path)

    with pytest.raises(ChildDied, match=r"has not answered Save for 0\.05 s"):
        asyncio.run(run())
