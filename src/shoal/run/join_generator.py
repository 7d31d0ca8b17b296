"""A generator joins a swarm without training: a remote model or a rule answers the tasks of a configuration."""

from contextlib import AsyncExitStack
from pathlib import Path

from shoal.config import Config
from shoal.config.urls import checked_url
from shoal.errors import ConfigError
from shoal.run.join_swarm import FOLDER
from shoal.swarm.chat import ChatModel, ModelAt
from shoal.swarm.claim_verification import OwnTasks
from shoal.swarm.generator import Generator, GeneratorPace
from shoal.swarm.identity import Identity
from shoal.swarm.options import options_of
from shoal.swarm.rules import RuleSolver
from shoal.tasks.library import library_of


def answerer_of(
    config: Config, model_url: str | None, model: str, key: str, rule: str | None
) -> ChatModel | RuleSolver:
    """Chooses the answerer: exactly one of a model's URL and a rule. Raises `ConfigError`."""
    if (model_url is None) == (rule is None):
        raise ConfigError("swarm join: expected either --model-url or --rule; to train, use shoal train")
    if rule is not None:
        return RuleSolver(rule, config.seed)
    assert model_url is not None
    checked_url("--model-url", model_url)
    return ChatModel(ModelAt(model_url, model, key, config.rollout.max_tokens, config.rollout.temperature))


async def generate(config: Config, answerer: ChatModel | RuleSolver, pace: GeneratorPace) -> None:
    """Shares the groups of the pace. Raises a `ShoalError`."""
    if not config.swarm.servers:
        raise ConfigError("swarm.servers: expected where to join, got none")
    from shoal.swarm.nats import NatsExchange

    folder = Path(config.run_dir) / FOLDER
    options = options_of(config.swarm.servers, config.swarm.name)
    with library_of(config) as library:
        own = OwnTasks(library.services)
        try:
            async with AsyncExitStack() as stack:
                exchange = await stack.enter_async_context(NatsExchange(options))
                identity = Identity.load(folder / "identity.pem")
                generator = Generator(
                    exchange, own, library.services, answerer, identity, folder, swarm=config.swarm.name, pace=pace
                )
                if isinstance(answerer, ChatModel):
                    await stack.enter_async_context(answerer)
                await generator.run()
        finally:
            own.close()
