"""The calls along five flows, checked against the code, as diagrams for docs/developers/flows.md.

`python tools/flow.py` prints the files that a reader opens on the way of one token, and the stays on the way of a
configuration. A line of a flow is a function, indented below the function that calls it. `@ name` says what both sides
name where one does not call the other by name: an HTTP route, a message between processes, a field that holds a
function.
"""

import ast
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "shoal"

TOKEN = """
rollout.orchestrator:Orchestrator._keep_drawn
  rollout.orchestrator:Source.draw
    tasks.jsonl:JsonlService.draw @ Split
rollout.orchestrator:Orchestrator._start_one
  experience.buffer:Buffer.admit
    experience.gate:AdmissionGate.admit
  rollout.orchestrator:Orchestrator._run_group
    rollout.orchestrator:Source.rollouts
    rollout.single_turn:SingleTurn.rollouts
      model.chat_template:ChatRenderer.prompt_ids
      rollout.single_turn:SingleTurn.completions
        engine.pool.engine_pool:EnginePool.generate
          engine.pool.engine_pool:EnginePool._generation
            engine.server.http_client:HttpEngine.generate
              engine.server.routes:EngineServer.generate @ GenerateRequest
                engine.server.routes:EngineServer._answered
                  engine.compute.step_engine:StepEngine.submit
                    engine.compute.scheduler:Scheduler.add
                engine.server.routes:_choice
      model.chat_template:ChatRenderer.message
      reward.service:RewardService.score
        reward.service:RewardService.score_by
          reward.service:RewardService._score_parts
            reward.service:RewardService._score_cached
              reward.scorer:WorkerScorer.score_by
                reward.scorer:WorkerScorer._progress
                  reward.scorer:WorkerScorer._exchange
                    reward.worker:replies @ Batch
                      reward.worker:prepared
                        reward.worker:judge_of
                          reward.worker:_judging
                            reward.worker:number
                      reward.worker:reward_of
    experience.buffer:Buffer.add
      experience.log:insert_group
engine.server.engine_thread:EngineThread._run
  engine.compute.step_engine:StepEngine.step
    engine.compute.step_engine:StepEngine._compute
      engine.compute.step_engine:StepEngine._next_batch
        engine.compute.scheduler:Scheduler.plan
        engine.compute.batch:StepBatch
      engine.compute.batch:StepBatch.logits
      engine.compute.batch:sample
      engine.compute.step_engine:StepEngine._record
        engine.compute.step_engine:StepEngine._finish
run.loop:TrainLoop.run
  run.loop:TrainLoop._groups
    run.policy:Policy.take
      experience.buffer:Buffer.take
  run.loop:TrainLoop._step
    run.policy:Steps.rows
      trainer.advantage:step_samples
    run.loop:TrainLoop._record_and_train
      experience.buffer:Buffer.consumed
        experience.log:insert_step
      run.policy:Steps.train
        trainer.worker:TrainerProcess.step
          trainer.packing:Packer.step
            trainer.packing:Packer.shares
              trainer.packing:micro_batches
              trainer.packing:token_weight
          trainer.worker:answer_to @ Step
            trainer.trainer:Trainer.carry_out
              trainer.trainer:Trainer.ready
                trainer.trainer:Trainer._packed
                  trainer.packing:micro_batch
              trainer.trainer:Trainer.accumulate
                trainer.trainer:Trainer._outputs
                  model.packed:pass_outputs
                trainer.loss:token_loss
              trainer.trainer:Trainer.take_update
                trainer.optim:Optimizer.update
"""

OFFER = """
run.training:train_and_evaluate
  swarm.node:Node.offer
    swarm.strategy.sharing:Outbox.put
swarm.node:Node._share
  swarm.strategy.sharing:Outbox.next
    swarm.trust.claim_verification:OwnTasks.claim
    swarm.wire.offer:offer_of
  swarm.peer:Peer._share_offer
    swarm.wire.envelope:Signer.frame
    swarm.wire.nats:NatsExchange.publish
swarm.peer:Peer._listen
  swarm.wire.nats:NatsExchange.receive
  swarm.peer:Peer._admit
    swarm.trust.ingress:IngressFilter.admit
      swarm.trust.ingress:IngressFilter._checked
        swarm.wire.envelope:opened
      swarm.wire.envelope:payload_of
      wire:decode
    swarm.node:Node._receive
      swarm.verification:Verification.receive
        swarm.strategy.pending:PendingOffers.add
swarm.verification:Verification.run
  swarm.strategy.pending:PendingOffers.next
  swarm.verification:Verification._read
    swarm.trust.encoding:OfferReader.read
      swarm.trust.claim_verification:OwnTasks.task
      swarm.trust.encoding:encode_offer
    reward.service:RewardService.score
  swarm.verification:Verification._settle
    swarm.trust.ingress:IngressFilter.refuse
    swarm.trust.ingress:IngressFilter.praise
run.loop:TrainLoop._groups
  run.loop:TrainLoop._external_groups
    swarm.node:Node.take
      swarm.node:Node._choose
        swarm.strategy.ready_pool:ReadyPool.choose
          swarm.strategy.choice:apply_taker
      swarm.trust.encoding:rollouts_of
run.loop:TrainLoop._step
  run.policy:Steps.rows
    swarm.strategy.choice:external_rows
run.loop:TrainLoop._record_and_train
  experience.buffer:Buffer.consumed
    experience.log:insert_group
"""

CHAT = """
gateway.server:Gateway._generate
  gateway.server:Gateway._session
  gateway.server:Gateway._read
    gateway.dialects:Dialect.request
    gateway.chat:chat_ask @ AnswerRequest
  gateway.sessions:Session.answers
    gateway.sessions:Session._open
      gateway.sessions:Session._opening
        gateway.sessions:Session._rendered
          gateway.token_tree:TokenTree.attach
          gateway.answer_request:SessionContext.bridge
            gateway.answer_request:SessionContext._joint
              model.chat_template:ChatRenderer.bridge_ids
      gateway.token_tree:TokenTree.open
    gateway.sessions:Session._begin
      gateway.sessions:Session._generate
        gateway.answer_request:TrainedSampler.completion
          gateway.answer_request:TrainedSampler._sampled
            engine.pool.engine_pool:EnginePool.generate
            gateway.answer_text:AnswerText.add
        gateway.token_tree:TokenTree.commit
  gateway.completions:chat_body @ Reply
  gateway.server:_deliver
    gateway.token_tree:TokenTree.deliver
"""

WEIGHTS = """
run.policy:ServedVersions.write
  weights.store:WeightStore.begin
  trainer.worker:TrainerProcess.write_version
    trainer.worker:answer_to @ WriteVersion
      trainer.models:TrainedModels.write_weights
      trainer.models:TrainedModel.count_push
        trainer.optim:Optimizer.count_push
run.policy:ServedVersions.load
  run.policy:ServedVersions.seal
    weights.store:WeightStore.seal
    experience.buffer:Buffer.record_version
  engine.pool.engine_pool:EnginePool.update_weights
    engine.pool.engine_pool:EnginePool._load
      engine.pool.members:Loader.loaded
        engine.pool.members:_load
          engine.server.http_client:HttpEngine.update_weights
            engine.server.routes:EngineServer.update_weights @ UpdateWeightsRequest
              engine.compute.weight_loading:WeightSlots.staged
              engine.compute.step_engine:StepEngine.update
  experience.buffer:Buffer.on_loaded
    experience.gate:AdmissionGate.on_loaded
  weights.store:WeightStore.remove_before
engine.compute.step_engine:StepEngine.step
  engine.compute.step_engine:StepEngine._load_or_drain
    engine.compute.weight_loading:WeightSlots.load
    engine.compute.step_engine:StepEngine._outdate
      engine.compute.scheduler:Scheduler.forget
"""

SETUP = """
cli.__init__:train
  config.__init__:load
  run.training:train_with_progress
    run.training:run_training
      run.prepare:check_start
      run.prepare:prepare
        run.machine.devices:devices_of
        run.prepare:_loaded
        run.prepare:check_functions
        run.prepare:Prepared
      run.roles:launched
      run.training:train
        run.training:opened_run
        run.parts:opened_policy
          run.roles:opened_roles
          run.parts:_ranks
          run.parts:answering
            run.parts:own_scorer
            run.engines:engines
            run.parts:playing
          run.teacher:text_teacher
          run.parts:orchestrator
          run.policy:Policy
            run.policy:ServedVersions
        run.training:swarm_node
          run.join_swarm:joined_peer
        run.training:_run
          run.training:train_and_evaluate
            run.loop:TrainLoop.run
"""

FLOWS = {
    "One token, from its task to the weights": TOKEN,
    "An offer between two nodes": OFFER,
    "A chat request": CHAT,
    "A push of weights": WEIGHTS,
    "A configuration, from the command to the running parts": SETUP,
}
MOST_FILES = 26
"""Files that a reader opens on the way of one token. May only shrink."""
MOST_STAYS = 22
"""Changes of file in reading how a configuration becomes a run, returns to callers counted. May only shrink."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A function of a flow, and the one that calls it."""

    module: str
    function: str
    caller: "Hop | None"
    by: str
    """What both sides name where one does not call the other by name."""

    @property
    def file(self) -> str:
        """Path below src/shoal."""
        return self.module.replace(".", "/") + ".py"

    @property
    def name(self) -> str:
        """The name by which it is called."""
        outer, _, last = self.function.rpartition(".")
        return outer if last == "__init__" else last


def hops(flow: str) -> list[Hop]:
    """The hops of a flow in the order of its lines."""
    found: list[Hop] = []
    above: list[Hop] = []
    for line in flow.strip().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        place, _, by = line.strip().partition(" @ ")
        module, _, function = place.partition(":")
        del above[depth:]
        above.append(Hop(module, function, above[-1] if above else None, by))
        found.append(above[-1])
    return found


@cache
def tree_of(module: str) -> ast.Module:
    """A module's syntax tree."""
    return ast.parse((SOURCE / (module.replace(".", "/") + ".py")).read_text())


def body_of(module: str, function: str) -> ast.AST | None:
    """The definition of a function or class; None where there is none."""
    node: ast.AST = tree_of(module)
    for part in function.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        inner = [one for one in ast.walk(node) if isinstance(one, kinds) and one.name == part]
        if not inner:
            return None
        node = inner[0]
    return node


def named(node: ast.AST) -> set[str]:
    """Every name, attribute and string in a piece of code; strings without what follows a question mark."""
    found: set[str] = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            found.add(one.id)
        elif isinstance(one, ast.Attribute):
            found.add(one.attr)
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            found.add(one.value)
    return found


def faults(flow: str) -> list[str]:
    """What a flow says that the code does not do, one sentence each."""
    wrong = []
    for hop in hops(flow):
        if body_of(hop.module, hop.function) is None:
            wrong.append(f"{hop.module} has no {hop.function}")
        elif hop.caller is not None and (called := body_of(hop.caller.module, hop.caller.function)) is not None:
            if hop.by and not (
                hop.by in named(called) and {hop.by, hop.name} <= named(tree_of(hop.module)) | {hop.name}
            ):
                wrong.append(f"{hop.caller.function} and {hop.module} do not both name {hop.by}")
            if not hop.by and hop.name not in named(called):
                wrong.append(f"{hop.caller.module}:{hop.caller.function} does not call {hop.name}")
    return wrong


def files(flow: str) -> list[str]:
    """The files of a flow, in the order in which they are opened."""
    return list(dict.fromkeys(hop.file for hop in hops(flow)))


def stays(flow: str) -> list[str]:
    """Files in the order of reading, with each return to a caller that goes on to call another file."""
    read: list[str] = []
    for hop in hops(flow):
        caller = [hop.caller.file] if hop.caller is not None and read[-1] != hop.file else []
        for file in (*caller, hop.file):
            if read[-1:] != [file]:
                read.append(file)
    return read


def diagram(flow: str) -> str:
    """A flow as a mermaid sequence diagram with one lifeline for each file."""
    lines = ["sequenceDiagram"]
    for hop in hops(flow):
        if hop.caller is None:
            lines.append(f"    Note over {hop.file}: {hop.function}")
        else:
            by = f" by {hop.by}" if hop.by else ""
            lines.append(f"    {hop.caller.file}->>{hop.file}: {hop.function}{by}")
    return "\n".join(["```mermaid", *lines, "```"])


def page() -> str:
    """The whole of docs/developers/flows.md."""
    head = (
        "# Flows\n\n<!-- Written by `make docs` from tools/flow.py; change the hops there. -->\n\n"
        "Each diagram shows the calls of one flow, in their order; a lifeline is a file of `src/shoal`. `make flow`\n"
        "checks every arrow against the code.\n"
    )
    parts = [
        f"## {title}\n\nThis flow passes {len(files(flow))} files.\n\n{diagram(flow)}\n"
        for title, flow in FLOWS.items()
    ]
    return "\n".join([head, *parts])


def main() -> int:
    wrong = [sentence for flow in FLOWS.values() for sentence in faults(flow)]
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    opened = files(TOKEN)
    print(json.dumps({"files": len(opened), "list": opened, "stays": len(stays(SETUP))}))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
