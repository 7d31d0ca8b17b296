"""Trainer: owns the weights that are being trained. Synchronous torch, without network access.

Weights are float32 for any `model.dtype`, so small updates are not rounded away. With bfloat16 the products are
in bfloat16, by `TrainingForward` or under autocast, and written Versions hold bfloat16. Logprobs, losses and statistics
are always float32.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.config import ModelConfig
from shoal.config.training import DecoupledLoss, M2POLoss, TrainConfig
from shoal.errors import ConfigError, TrainerError
from shoal.model import MOST_LOGITS, MOST_LOGITS_OF_GPU
from shoal.model.loading import DTYPES, resolve_device
from shoal.model.packed import TokenOutputs, packed_logprobs, pass_outputs, trained_pass
from shoal.model.routing import replay_routing
from shoal.model.tensor_files import Tensors
from shoal.model.training_forward import Forward, fastest_forward, lay_out, precision
from shoal.trainer import critic, packing
from shoal.trainer.advantage import normalised_after_kl
from shoal.trainer.backends import started
from shoal.trainer.loss import kl, log_linear_prox, square_bound, to_go, token_loss
from shoal.trainer.messages import OTHER_RANK, Step, StepStats, TokensFile
from shoal.trainer.models import TrainedModel
from shoal.trainer.optim import Update
from shoal.trainer.packing import MicroBatch, Minibatch, Packer, RowBatch, Share, Size
from shoal.trainer.ranks import ALONE, Ranks, local, memory_bytes, reduce_later
from shoal.trainer.row_files import fingerprint
from shoal.trainer.sharded_start import loaded
from shoal.trainer.step_stats import StepTotals, TokenNumbers
from shoal.trainer.streams import Streams
from shoal.types import Sample

VALUE_HEAD = "value_head"
STD_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Moment:
    """Moment of an update: after `taken` others of its step, `since_push` steps after `version` was written."""

    version: int | None = None
    since_push: int = 0
    taken: int = 0

    def age(self, version_N: Tensor, config: TrainConfig) -> Tensor:
        """Updates from the weights of each Version to the weights before the step.

        Raises `TrainerError` without a version.
        """
        if self.version is None:
            raise TrainerError("train.loss.behaviour_correction: 'log_linear' needs the version that is being trained")
        return ((self.version - version_N) * config.push_every + self.since_push) * config.minibatches


class Trainer(TrainedModel):
    """The model of a run, which takes training steps.

    Invariant: the weights after a step depend only on the weights, moments and counters before it and on the step's
    groups. So a resumed run that replays its log arrives at the same weights.
    """

    def __init__(
        self,
        path: Path | str,
        model: ModelConfig,
        train: TrainConfig,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        *,
        skip_uninformative: bool = True,
        ranks: Ranks = ALONE,
        files: Tensors | None = None,
    ) -> None:
        """`temperature` and `max_tokens` are the rollouts'.

        With several `ranks` each rank has a trainer, and every call below is made on all of them. `skip_uninformative`
        leaves out rows that give no gradient. The model at `path` is the reference of `train.kl`. Tensors come from
        `files` instead, if given. Raises `ModelError` and `ConfigError`.
        """
        self.device = resolve_device(model.device)
        ranks = replace(ranks, experts_apart=train.backend == "experts", per_layer=train.ranks_per_layer)
        trained, adapters, self._root, self._forward = started(path, model, train, ranks, self.device, files)
        self._value_head = self._new_value_head(trained) if train.advantage == "gae" else None
        value_head = {} if self._value_head is None else dict(self._value_head.named_parameters(prefix=VALUE_HEAD))
        super().__init__(trained, adapters, train, DTYPES[model.dtype], critic=value_head, ranks=ranks)
        sizes = self.model.config.get_text_config()
        self.tokens_per_microbatch = train.tokens_per_microbatch or packing.tokens_per_microbatch(
            self.model.get_input_embeddings().num_embeddings,
            sizes.num_hidden_layers * sizes.hidden_size,
            on_gpu=self.device.startswith("cuda"),
        )
        self._config = train
        self.keep_gradients(ranks.least(memory_bytes(self.device, ranks.count), self.device))
        self._amid_update = False
        self._most_logits = MOST_LOGITS_OF_GPU if self.device.startswith("cuda") else MOST_LOGITS
        self._temperature = temperature
        if packing.loss_mean(train) == "budget" and max_tokens is None:
            raise ConfigError("train.loss_mean: 'budget' needs the answers' rollout.max_tokens")
        has_reference = train.kl.coefficient > 0 or train.teacher_model is not None
        self._packer = Packer(train, self.tokens_per_microbatch, max_tokens or 0, skip_uninformative, ranks.shares)
        if train.router_replay:
            replay_routing(self.model)
        self._reference = self._new_reference(train.teacher_model or path, files) if has_reference else None

    def keep_gradients(self, memory_bytes: int) -> None:
        """Keeps whole gradients in float32 until the last micro-batch of an update, if this memory has room for them.

        Otherwise the ranks sum them after each micro-batch.
        """
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        state = 16 * sum(local(parameter).numel() for parameter in trained)  # weight, gradient and two moments
        self._keeps_gradients = state + 4 * sum(one.numel() for one in trained) <= 0.6 * memory_bytes

    def compute_as_gpu(self) -> None:
        """Computes with the model's own modules and large pieces of the head, wherever its tensors are."""
        self._forward, self._most_logits = self.model, MOST_LOGITS_OF_GPU

    def step(
        self,
        groups: Sequence[Sequence[Sample]],
        version: int | None = None,
        since_push: int = 0,
        *,
        tokens_file: TokensFile | None = None,
    ) -> StepStats:
        """Takes one step of `train.minibatches` updates over the rows of each group, in order: see `carry_out`."""
        shares, sizes = self._packer.step(groups)[self._ranks.share], tuple(map(len, groups))
        return self.carry_out(Step(shares, version, since_push, tokens_file, sizes))

    def carry_out(self, step: Step) -> StepStats:
        """Takes one step, of which this rank computes a share of each update.

        `version` is the newest Version, written `since_push` steps ago; the log-linear proximal weights need both.
        `tokens_file` gets the numbers of each trained token. Raises `TrainerError` for rows that this model cannot
        read, on every rank.
        """
        started, tokens_file = time.perf_counter(), step.tokens_file
        totals = StepTotals(self.device, TokenNumbers() if tokens_file and not self._ranks.repeats else None)
        minibatches, wants_prox = self.ready(step, totals)
        updates: list[Update] = []
        for k, minibatch in enumerate(minibatches):
            at = Moment(step.version, step.since_push, taken=len(updates))
            self.accumulate(self.bounded(minibatch), totals, at, fresh=k == 0 or wants_prox)
            # Without a gradient nothing is learned: moments and schedule stay unchanged.
            if minibatch.informative:
                updates.append(self.take_update())
        totals.add_up(self._ranks)
        if totals.tokens is not None and tokens_file is not None:
            totals.tokens.write(tokens_file, list(step.group_sizes), self._ranks.share)
        weights = fingerprint(self._trained(), self._ranks)
        return totals.stats(updates, minibatches, time.perf_counter() - started, weights)

    def take_update(self) -> Update:
        """Takes one update with the accumulated gradient, and clears that."""
        update = self._optimizer.update()
        lay_out(self._forward)
        return update

    @property
    def loss_mean(self) -> packing.Mean:
        """Denominator of the loss."""
        return packing.loss_mean(self._config)

    def ready(self, step: Step, totals: StepTotals) -> tuple[list[Minibatch], bool]:
        """Packed rows of each update of a step with all that is computed before the first one, and whether these are
        the proximal logprobs too."""
        self._check([row for share in step.shares for batch in share.batches for row in batch.rows])
        self._optimizer.clear_gradient()  # a failed step may have left a part of it
        minibatches = [self._packed(share) for share in step.shares]
        loss = self._config.loss
        wants_prox = isinstance(loss, DecoupledLoss) and loss.behaviour_correction != "log_linear"
        if self._value_head is not None:
            minibatches = [_changed(minibatch, self._with_gae) for minibatch in minibatches]
            batches = [batch for minibatch in minibatches for batch in minibatch.batches if not batch.idle]
            values = [batch.value_N for batch in batches if batch.value_N is not None]
            returns = [batch.return_N for batch in batches if batch.return_N is not None]
            totals.explained_variance = critic.explained_variance(values, returns)
            minibatches = self._normalised(minibatches)
        elif wants_prox:
            # The training forward of the first update is itself the proximal one.
            minibatches[1:] = [_changed(minibatch, self._with_prox) for minibatch in minibatches[1:]]
        if normalised_after_kl(self._config):
            minibatches = self._normalised([_changed(minibatch, self._less_kl) for minibatch in minibatches])
        return minibatches, wants_prox

    def logprobs(self, rows: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Logprobs (nats) of tokens 1..L-1 for each row of L tokens.

        At temperature 1 they equal an engine's `/score`, up to rounding. Neighbouring rows share a common beginning.
        """
        result: list[list[float]] = []
        with torch.no_grad(), self._precision(self._forward):
            for part in packing.in_order(list(map(len, rows)), self.tokens_per_microbatch):
                packed = [rows[i] for i in part]
                token_T = torch.tensor(list(chain.from_iterable(packed)), dtype=torch.long, device=self.device)
                lengths = list(map(len, packed))
                logps = iter(packed_logprobs(self._forward, token_T, lengths, temperature=temperature).tolist())
                result += [list(islice(logps, length))[1:] for length in lengths]
        return result

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        """Loads the files that `save` wrote. Raises `TrainerError` when they are missing or of another model."""
        super().load(directory, optimizer=optimizer)
        lay_out(self._forward)

    def _precision(self, forward: Forward) -> AbstractContextManager[object]:
        """Context of products; sharded weights have the dtype of products while their layer computes."""
        return nullcontext() if self._ranks.count > 1 else precision(forward, self._dtype)

    def _new_reference(self, path: Path | str, files: Tensors | None) -> Forward:
        """Model at `path`, sharded like the trained model."""
        model = loaded(path, self._ranks, self.device, self._dtype, frozen=True, files=files).requires_grad_(False)
        return fastest_forward(model, self._dtype) if self._ranks.count == 1 else model

    def _new_value_head(self, model: PreTrainedModel) -> nn.Linear:
        """Value head with zero weights, so that the first advantages are the rewards."""
        head = nn.Linear(model.get_output_embeddings().weight.shape[1], 1).to(self.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head

    def _check(self, rows: Sequence[Sample]) -> None:
        """Raises `TrainerError` for rows that the model would answer with an index error or with nonsense."""
        wrong = ""
        for row in rows:
            try:
                self.check_row("row of tokens", row.tokens)
            except TrainerError as error:
                wrong = wrong or str(error)
        refusals = torch.tensor(float(bool(wrong)), device=self.device)
        self._ranks.add_up(refusals)  # all ranks must agree before a collective
        if refusals:
            raise TrainerError(wrong or OTHER_RANK)

    def minibatch(self, rows: Sequence[Sample], whole: Size | None = None, *, first: int = 0) -> Minibatch:
        """Packs the rows of one update, and takes this rank's share.

        `whole` is the size of the update when `rows` are a part of it. `first` is the index of the first row in the
        step.
        """
        return self._packed(self._packer.shares(rows, whole, first=first)[self._ranks.share])

    def _packed(self, share: Share) -> Minibatch:
        return Minibatch(
            tuple(map(self.micro_batch, share.batches)), share.informative, share.tokens, share.skipped_tokens
        )

    def micro_batch(self, given: RowBatch) -> MicroBatch:
        """Micro-batch whose forward pass is made already: several models and updates may take it."""
        batch = packing.micro_batch(given.rows, given.weights, self.device, idle=given.idle)
        masks = (m for row in given.rows for m in row.mask)
        rows, at = [row.tokens for row in given.rows], [i for i, m in enumerate(masks) if m]
        could = [one for row in given.rows for one in row.kept or (b"",) * len(row.tokens)]
        kept = [could[i] for i in at] if any(could) else None
        made = trained_pass(rows, at, self._forward, kept=kept, most_logits=self._most_logits)
        return replace(batch, rows=given.places, made=made)

    def _outputs(self, batch: MicroBatch, *, with_entropy: bool = False, model: Forward | None = None) -> TokenOutputs:
        with self._precision(model or self._forward):
            return pass_outputs(
                model or self._forward,
                batch.made,
                temperature=self._temperature,
                entropy=("gradient" if self._config.entropy_bonus > 0 else "value") if with_entropy else None,
                value_head=self._value_head if model is None else None,
                routing_TB=batch.routing_TB if model is None else None,
            )

    @torch.no_grad()
    def _with_prox(self, batch: MicroBatch) -> MicroBatch:
        """Micro-batch with the logprobs under the present weights."""
        return replace(batch, prox_N=self._outputs(batch).logp_N)

    def _normalised(self, minibatches: Sequence[Minibatch]) -> list[Minibatch]:
        """Minibatches with advantages (A - mean) / (std + 1e-8), with mean and std over all tokens of the step."""
        counted = [one.advantage_N for minibatch in minibatches for one in minibatch.batches if self._counts(one)]
        mean, deviation = self._ranks.mean_and_deviation(counted, self.device)

        def normalised(batch: MicroBatch) -> MicroBatch:
            return replace(batch, advantage_N=((batch.advantage_N.double() - mean) / (deviation + STD_EPS)).float())

        return [_changed(minibatch, normalised) for minibatch in minibatches]

    def _counts(self, batch: MicroBatch) -> bool:
        """Whether statistics count the batch here."""
        return not batch.idle and not self._ranks.repeats

    def _less_kl(self, batch: MicroBatch) -> MicroBatch:
        """Micro-batch whose advantages are less the KL penalty of each token and all later tokens of its row."""
        kl_N = to_go(self._kl(batch, batch.behav_N), batch.row_N, len(batch.lengths))
        return replace(batch, advantage_N=batch.advantage_N - self._config.kl.coefficient * kl_N)

    def bounded(self, minibatch: Minibatch) -> Minibatch:
        """Minibatch with the bound of M2PO, which all its tokens under the present weights decide."""
        if not isinstance(self._config.loss, M2POLoss):
            return minibatch
        minibatch = _changed(minibatch, self._with_prox)
        squares = []
        for batch in minibatch.batches:
            assert batch.prox_N is not None
            d_N = batch.prox_N - batch.behav_N
            squares.append(d_N[(d_N * batch.advantage_N > 0) & self._counts(batch)].square())
        bound = square_bound(self._ranks.all_of(squares, self.device), self._config.loss.clip_high)
        return _changed(minibatch, lambda batch: replace(batch, square_bound=bound))

    @torch.no_grad()
    def _with_gae(self, batch: MicroBatch) -> MicroBatch:
        """Micro-batch with advantages by GAE; its `advantage_N` held the rewards."""
        outputs = self._outputs(batch)
        assert outputs.value_N is not None
        reward_N = critic.at_row_ends(batch.advantage_N, batch.row_N)
        if self._reference is not None and self._config.kl.where == "reward":
            reward_N = reward_N - self._config.kl.coefficient * self._kl(batch, batch.behav_N)
        advantage_N, return_N = critic.gae(
            reward_N, outputs.value_N, batch.row_N, len(batch.lengths), self._config.critic.gae_lambda
        )
        return replace(
            batch, prox_N=outputs.logp_N, value_N=outputs.value_N, advantage_N=advantage_N, return_N=return_N
        )

    def accumulate(self, minibatch: Minibatch, totals: StepTotals, at: Moment, *, fresh: bool) -> None:
        """Adds the minibatch's gradient to the parameters. `fresh`: its proximal logprobs are known."""
        config = self._config
        if self._amid_update:
            raise TrainerError("a step failed amid its passes, and ranks have parts of its gradient: start them again")
        self._amid_update = self._ranks.count > 1
        for number, batch in enumerate(minibatch.batches, 1):
            reduce_later(self._root, last=number == len(minibatch.batches), keep=self._keeps_gradients)
            outputs = self._outputs(batch, with_entropy=True)
            logp_N, entropy_N = outputs.logp_N, outputs.entropy_N
            if totals.tokens is not None:
                logp_N.retain_grad()
            assert entropy_N is not None
            before_N = batch.prox_N if batch.prox_N is not None else logp_N.detach()
            prox_N = before_N
            if isinstance(config.loss, DecoupledLoss) and config.loss.behaviour_correction == "log_linear":
                age_N = at.age(batch.version_N, config)
                prox_N = log_linear_prox(logp_N, batch.behav_N, age_N, at.taken)
            penalty_N, advantage_N, kl_N = self._against_reference(batch, logp_N)
            streams = Streams(
                logp_N, prox_N, batch.behav_N, advantage_N, batch.row_N, len(batch.lengths), batch.square_bound
            )
            terms = token_loss(streams, config.loss)
            loss_N = terms.loss_T + penalty_N - config.entropy_bonus * entropy_N
            if outputs.value_N is not None:
                assert batch.value_N is not None
                assert batch.return_N is not None
                value_loss_N = critic.value_loss(outputs.value_N, batch.value_N, batch.return_N, critic.VALUE_CLIP)
                loss_N = loss_N + critic.COEFFICIENT * value_loss_N
                if not batch.idle:
                    totals.add_value_loss(value_loss_N.detach())
            loss = (loss_N * batch.weight_N).sum()
            # Sharding takes the mean over the ranks; the weights want the sum.
            (loss * self._ranks.shares).backward()  # type: ignore[no-untyped-call]
            if not self._counts(batch):
                continue
            gap_N = (before_N - batch.behav_N).abs() if fresh else None
            # No token is sampled by version -1.
            current_N = batch.version_N == (-1 if at.version is None else at.version)
            totals.add(loss.detach(), terms, entropy_N.detach(), gap_N, current_N, kl_N, sum(batch.lengths))
            if totals.tokens is not None:
                totals.tokens.add(batch, logp_N, entropy_N, advantage_N, terms, self._ranks.shares)
        self._amid_update = False

    def _against_reference(self, batch: MicroBatch, logp_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Addition to the loss, the advantages less the KL penalty, and the distance to the reference in nats."""
        config, zero_N = self._config.kl, torch.zeros_like(batch.behav_N)
        if self._reference is None:
            return zero_N, batch.advantage_N, zero_N
        if self._config.teacher_model is not None:
            kl_N = self._kl(batch, batch.behav_N)
            return zero_N, -kl_N, kl_N
        if config.where == "loss":
            kl_N = self._kl(batch, logp_N)
            return config.coefficient * kl_N, batch.advantage_N, kl_N.detach()
        kl_N = self._kl(batch, batch.behav_N)
        if self._value_head is not None or normalised_after_kl(self._config):
            # It is already subtracted from the rewards behind the advantages.
            return zero_N, batch.advantage_N, kl_N
        return zero_N, batch.advantage_N - config.coefficient * to_go(kl_N, batch.row_N, len(batch.lengths)), kl_N

    def _kl(self, batch: MicroBatch, logp_N: Tensor) -> Tensor:
        """Estimated distance to the reference, in nats."""
        with torch.no_grad():
            ref_N = self._outputs(batch, model=self._reference).logp_N
        return kl(logp_N, ref_N, "k1" if self._config.teacher_model is not None else self._config.kl.estimator)


def _changed(minibatch: Minibatch, change: Callable[[MicroBatch], MicroBatch]) -> Minibatch:
    return replace(minibatch, batches=tuple(map(change, minibatch.batches)))
