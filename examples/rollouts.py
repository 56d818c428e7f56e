"""Rollouts sampled from the Megatron model that is being trained, under the layout it is trained in.

`B` episodes of this data-parallel rank, `N` of the whole job, `L` tokens so far, `V` vocabulary (`Vl` its local shard).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from hunt import SUCCESS, Hunt
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

import megatron_pgloss as pg
from megatron_pgloss import megatron as pgm
from megatron_pgloss.megatron.context_parallel import zigzag


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One episode, and one line of a record file."""

    iteration: int
    index: int
    """Place among the iteration's rollouts of all ranks."""
    hidden: int
    """The number to find, which is the prompt of GRPO's groups."""
    tokens: list[int]
    """``bos d d answer d d answer ...``"""
    logprobs: list[float]
    """Log-probs of the two digits of every turn, under the distribution that they were drawn from."""
    reward: float
    success: bool
    advantage: float

    @property
    def name(self) -> str:
        """The sample id."""
        return f"{self.iteration}/{self.index}"


def uniform(*key: int) -> float:
    """A number in [0, 1) that depends on ``key`` alone: the same draw on every layout."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The fields of a micro-batch that `PolicyLossStep.run_model` reads."""

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: None = None


class Policy:
    """The model as a policy: log-probs of the next token, from one forward-only pass of Megatron's schedule.

    For every token the whole prefix is computed again: a model of this size needs no cache, and the pass is the one
    that training uses, on any layout.
    """

    def __init__(self, step: pgm.PolicyLossStep, hunt: Hunt) -> None:
        self.step, self.layout, self.vocab = step, step.layout, hunt.vocab_size
        tp, cp, config = self.layout.tp_size, self.layout.cp_size, step.config
        if self.vocab % tp:
            raise pg.LayoutError("tp does not divide the vocabulary", expected=f"a divisor of {self.vocab}", got=tp)
        self.multiple = (2 * cp if cp > 1 else 1) * (tp if config.sequence_parallel else 1)
        # An interleaved schedule wants whole groups of micro-batches.
        self.micros = self.layout.pp_size if len(step.chunks) > 1 else 1

    @torch.no_grad()
    def next_logprobs(self, tokens_BL: Tensor) -> Tensor:
        """Log-probs of the token after each prefix: int64 [B, L] -> float64 [B, V], the same bits on every rank."""
        count, length = tokens_BL.shape
        rows, width = -(-count // self.micros), -(-length // self.multiple) * self.multiple
        padded = tokens_BL.new_zeros(rows * self.micros, width)
        padded[:count, :length] = tokens_BL
        position_K = (
            zigzag(width, self.layout.cp_rank, self.layout.cp_size)[0]
            if self.layout.cp_size > 1
            else torch.arange(width)
        )
        mine = (position_K == length - 1).nonzero().flatten().tolist()
        device = self.layout.device
        shards = [part[:, position_K].to(device) for part in padded.split(rows)]
        positions = position_K.expand(rows, -1).to(device)
        local = slice(
            self.layout.tp_rank * self.vocab // self.layout.tp_size,
            (self.layout.tp_rank + 1) * self.vocab // self.layout.tp_size,
        )

        def pick(logits: Tensor, non_loss_data: bool = True) -> Tensor:
            out_BV = logits.new_zeros(rows, self.vocab, dtype=torch.float64)
            if mine:
                out_BV[:, local] = logits[:, mine[0]].double()
            return out_BV

        chunks = self.step.chunks
        iterators = [iter(shards) for _ in chunks]
        picked = get_forward_backward_func()(
            forward_step_func=lambda it, model: (self.step.run_model(_Prefix(next(it), positions), model), pick),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=self.micros, seq_length=width, micro_batch_size=rows,
            forward_only=True, collect_non_loss_data=True,
        )  # fmt: skip
        logits_BV = (
            torch.cat(picked) if picked else torch.zeros(len(padded), self.vocab, dtype=torch.float64, device=device)
        )
        # Every number is held by one rank and is 0 on the others, so the sums are exact and the same everywhere.
        for group in (self.layout.tp, self.layout.cp, self.layout.pp):
            if group is not None:
                dist.all_reduce(logits_BV, group=group)
        return logits_BV[:count].log_softmax(-1).cpu()


def play(policy: Policy, hunt: Hunt, hidden_B: Tensor, draw: Callable[[int], Tensor] | None = None):
    """Play whole episodes, all of this rank's at once.

    Args:
        hidden_B: the numbers to find.
        draw: action token number -> float64 [B] uniforms, mapped by the inverse of the cumulative distribution;
            None: the likeliest token (greedy).

    Returns:
        int64 [B, max_length] tokens, float64 [B, 2 turns] log-probs of the policy's tokens, the final state.
    """
    logp_BA = torch.zeros(len(hidden_B), 2 * hunt.turns, dtype=torch.float64)
    done = 0

    def guess(history_BL: Tensor, _: object) -> Tensor:
        nonlocal done
        for _digit in range(2):
            logp_BV = policy.next_logprobs(history_BL)
            if draw is None:
                token_B = logp_BV.argmax(-1)
            else:
                below_BV = logp_BV.exp().cumsum(-1)
                # The last sum may round to below 1.
                token_B = (below_BV[:, :-1] <= draw(done)[:, None]).sum(-1)
            logp_BA[:, done] = logp_BV.gather(1, token_B[:, None])[:, 0]
            history_BL = torch.cat([history_BL, token_B[:, None]], dim=1)
            done += 1
        return history_BL[:, -2:]

    for chunk in policy.step.chunks:
        chunk.eval()
    tokens_BL, state = hunt.play(guess, hidden_B)
    if policy.step.config.expert_model_parallel_size > 1:
        # Experts live on several data-parallel ranks: those still playing need the others in their passes.
        while done < 2 * hunt.turns:
            guess(tokens_BL[:, : 1 + 3 * (done // 2)], state)
    for chunk in policy.step.chunks:
        chunk.train()
    return tokens_BL, logp_BA, state


def greedy_success(policy: Policy, hunt: Hunt) -> float:
    """Share of all hidden numbers that the likeliest tokens find."""
    state = play(policy, hunt, torch.arange(hunt.numbers))[2]
    return float((state.termination == SUCCESS).double().mean())


def group_advantages(reward_N: Tensor, group_N: Tensor, *, scale: bool) -> Tensor:
    """Reward minus the mean of its group, divided by the group's standard deviation where ``scale`` (2402.03300,
    4.1.2). float64 [N], int64 [N] -> float64 [N].

    The advantages of a group whose rewards are all equal are 0.
    """
    out_N = torch.zeros_like(reward_N)
    for group in group_N.unique():
        member_N = group_N == group
        mine = reward_N[member_N]
        if bool(mine.min() < mine.max()):
            out_N[member_N] = (mine - mine.mean()) / (mine.std(correction=0) if scale else 1)
    return out_N


def sample(
    policy: Policy,
    hunt: Hunt,
    iteration: int,
    *,
    seed: int,
    prompts: int,
    group_size: int,
    valid_bonus: float,
    scale: bool,
) -> list[Rollout]:
    """This data-parallel rank's part of an iteration's rollouts; advantages are over the whole groups. A collective."""
    order = sorted(range(hunt.numbers), key=lambda number: uniform(seed, iteration, number))
    hidden_N = torch.tensor([order[i % hunt.numbers] for i in range(prompts)]).repeat_interleave(group_size)
    total, layout = len(hidden_N), policy.layout
    first, last = (total * rank // layout.dp_size for rank in (layout.dp_rank, layout.dp_rank + 1))
    # Expert parallelism needs equally many rows on every rank; rows beyond this rank's share are not returned.
    rows = [min(first + i, total - 1) for i in range(-(-total // layout.dp_size))]
    tokens_BL, logp_BA, state = play(
        policy, hunt, hidden_N[rows],
        lambda token: torch.tensor([uniform(seed, iteration, row, token) for row in rows], dtype=torch.float64),
    )  # fmt: skip
    reward_B = hunt.reward(state, valid_bonus=valid_bonus).double()
    reward_N = torch.zeros(total, dtype=torch.float64)
    reward_N[first:last] = reward_B[: last - first]
    if layout.dp is not None:
        reward_N = reward_N.to(layout.device)
        dist.all_reduce(reward_N, group=layout.dp)
        reward_N = reward_N.cpu()
    advantage_N = group_advantages(reward_N, hidden_N, scale=scale)
    return [
        Rollout(
            iteration=iteration, index=row, hidden=int(hidden_N[row]),
            tokens=tokens_BL[b, : 1 + 3 * int(state.turn[b])].tolist(),
            logprobs=logp_BA[b, : 2 * int(state.turn[b])].tolist(),
            reward=float(reward_B[b]), success=int(state.termination[b]) == SUCCESS, advantage=float(advantage_N[row]),
        )
        for b, row in enumerate(range(first, last))
    ]  # fmt: skip


def to_batches(rollouts: list[Rollout], hunt: Hunt, spec: pg.LossSpec) -> list[pg.TokenBatch]:
    """The rollouts as a batch of spans with authors, in a list; an empty list where there are none."""
    return [pg.TokenBatch.from_traces([_trace(rollout) for rollout in rollouts], roles=spec.roles)] if rollouts else []


def _trace(rollout: Rollout) -> pg.Trace:
    spans = [pg.Span(role="system", author="harness", tokens=rollout.tokens[:1])]
    for turn, at in enumerate(range(1, len(rollout.tokens), 3)):
        logprobs = rollout.logprobs[2 * turn : 2 * turn + 2]
        spans.append(pg.Span(role="assistant", author="policy", tokens=rollout.tokens[at : at + 2], logprobs=logprobs))
        spans.append(pg.Span(role="tool", author="environment", tokens=rollout.tokens[at + 2 : at + 3]))
    return pg.Trace(
        prompt_id=rollout.hidden, episode_id=rollout.index, sample_id=rollout.name, advantage=rollout.advantage,
        termination=pg.Termination.SUCCESS if rollout.success else pg.Termination.FAILURE, spans=spans,
    )  # fmt: skip
