"""A policy gradient on a small torch model, in one process: a GRU learns to count by trial and error.

    python examples/quickstart.py

The model reads a digit n and writes ticks until it writes the end token. The reward is highest for exactly n ticks.
No answer is ever shown to it. The run takes seconds on one CPU core. Token ids: 0 is the end, 1 to 6 are the digits,
7 is the tick.
"""

import torch

import megatron_pgloss as pg
from megatron_pgloss.metrics import merge_all

END, DIGITS, TICK, VOCAB = 0, 6, 7, 8
WIDTH = 1 + 2 * DIGITS  # the digit, then at most 12 sampled tokens
PROMPTS, GROUP, STEPS = 16, 8, 40  # 16 prompts per step, 8 answers to each


class Model(torch.nn.Module):
    """Token ids [b, L] to logits [b, L, V]."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, hidden)
        self.gru = torch.nn.GRU(hidden, hidden, batch_first=True)
        self.head = torch.nn.Linear(hidden, VOCAB)

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        # Rows are padded on the right and a GRU reads from the left: padding cannot reach a real token.
        return self.head(self.gru(self.embedding(tokens))[0])


@torch.no_grad()
def sample(model: Model, digits: torch.Tensor, greedy: bool = False) -> dict[str, torch.Tensor]:
    """Let the model answer. Everything is [B, L] in token order: column i is about the token in column i."""
    rows = digits.numel()
    tokens = torch.full((rows, WIDTH), END)
    tokens[:, 0] = digits
    action = torch.zeros(rows, WIDTH, dtype=torch.bool)  # which tokens the policy sampled
    logprobs = torch.zeros(rows, WIDTH)  # their log-probs when they were sampled
    running = torch.ones(rows, dtype=torch.bool)
    for i in range(1, WIDTH):
        log_p = model(tokens[:, :i])[:, -1].log_softmax(-1)
        drawn = log_p.argmax(-1) if greedy else torch.multinomial(log_p.exp(), 1)[:, 0]
        tokens[:, i] = torch.where(running, drawn, END)
        action[:, i] = running
        logprobs[:, i] = log_p.gather(1, tokens[:, i, None])[:, 0]
        running = running & (tokens[:, i] != END)
    ticks = ((tokens == TICK) & action).sum(1)
    others = (action & (tokens != TICK) & (tokens != END)).sum(1)
    reward = 1 - ((ticks - digits).abs() + others) / DIGITS - running.float()  # 1 at best; still running: never ended
    return {"tokens": tokens, "action": action, "logprobs": logprobs, "reward": reward, "lengths": 1 + action.sum(1)}


def group_advantages(reward: torch.Tensor) -> torch.Tensor:
    """The reward minus the mean reward of the answers to the same prompt: [B] to [B]."""
    groups = reward.view(PROMPTS, GROUP)
    return (groups - groups.mean(1, keepdim=True)).view(-1)


def greedy_score(model: Model) -> tuple[float, list[int]]:
    """Mean reward of greedy answers to all digits, and how many ticks each of them has."""
    out = sample(model, torch.arange(1, DIGITS + 1), greedy=True)
    return float(out["reward"].mean()), (out["tokens"] == TICK).sum(1).tolist()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    spec = pg.presets.dapo(entropy=3e-3)
    print(spec, end="\n\n")
    first = greedy_score(model)

    for step in range(1, STEPS + 1):
        digits = torch.randint(1, DIGITS + 1, (PROMPTS,)).repeat_interleave(GROUP)
        rollouts = sample(model, digits)
        batch = pg.TokenBatch.from_padded(
            tokens=rollouts["tokens"],
            lengths=rollouts["lengths"],
            action_mask=rollouts["action"],
            advantages=group_advantages(rollouts["reward"]),
            old_logprobs=rollouts["logprobs"],
            prompt_ids=torch.arange(PROMPTS).repeat_interleave(GROUP),
        )
        # Two optimizer updates per batch, each on half of the prompts. In the second the ratio pi/old is no longer 1.
        for update, mini in enumerate(pg.minibatches([batch], 2, by="prompt", seed=step)):
            plan = pg.plan(mini, spec, split=pg.Split(sequences=16))
            if (step, update) == (1, 0):
                print(plan.report(), end="\n\n")
            optimizer.zero_grad()
            seen = []
            for micro in plan.microbatches():
                logits = model(micro.input_ids, attention_mask=micro.attention_mask)
                lp = pg.token_logprobs(logits, micro.targets, entropy=spec.needs_entropy)
                out = pg.policy_loss(lp, micro)
                out.loss.backward()  # a plain sum: nothing is divided by the number of micro-batches
                seen.append(out.metrics)
            optimizer.step()
        if step == 1 or step % 5 == 0:
            figures = {name: metric.result() for name, metric in merge_all(seen).items()}
            print(
                f"step {step:2d}  mean reward {float(rollouts['reward'].mean()):6.3f}"
                f"  ratio {figures['rl/ratio']:.3f} (max {figures['rl/ratio_max']:.2f})"
                f"  clipped {figures['rl/clip_low'] + figures['rl/clip_high']:6.1%}"
                f"  entropy {figures['entropy/entropy']:.2f}"
            )

    last = greedy_score(model)
    print(f"\nticks for 1 to {DIGITS}: before {first[1]}, after {last[1]}")
    print(f"mean reward of the greedy answers: before {first[0]:.3f}, after {last[0]:.3f} (best possible 1.000)")


if __name__ == "__main__":
    main()
