"""The oracle as a whole: its inputs, what it refuses, what must not matter, its independence."""

from __future__ import annotations

import ast
import math
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_pgloss.errors import DataError, SpecError
from megatron_pgloss.verify.oracle import oracle_logprobs, oracle_loss, oracle_step
from support.data import attach_streams, make_rows
from support.oracle_cases import CE, CLIP, NAN, REINFORCE, leaf, leaves, near, row, run, weights


def test_values_outside_the_members_change_nothing_by_a_bit():
    spec = {
        "components": [
            CLIP | {"normalizer": "mean(prompt) > mean(episode) > mean(token)"},
            {"kind": "kl", "estimator": "k3", "coef": 0.1},
            {"kind": "entropy", "coef": 0.01},
            CE | {"coef": 0.1},
            {"kind": "term", "name": "t", "fn": lambda x: x.logp.square() * x.advantage},
        ],
        "corrections": [{"kind": "truncated_is", "of": "old", "high": 2.0}],
        "masks": [{"kind": "user_mask", "name": "keep"}, {"kind": "drop_truncated"}],
    }
    answers = []
    for poison in (None, NAN, math.inf, 1e4):
        rows = make_rows(3)
        logp = [torch.tensor(r["old"], dtype=torch.float64) * 0.9 for r in rows]
        entropy = [x.square() for x in logp]
        for r, x, h in zip(rows, logp, entropy, strict=True):
            act = [a and k for a, k in zip(r["action"], r["masks"]["keep"], strict=True)]
            obs = [o and k for o, k in zip(r["observation"], r["masks"]["keep"], strict=True)]
            act = [a and r["termination"] != "truncated" for a in act]
            for t in range(len(act) if poison is not None else 0):
                if not act[t]:
                    h[t] = r["old"][t] = r["rollout"][t] = r["ref"][t] = poison
                    r["advantages"][t] = r["weights"]["rl"][t] = poison
                if not act[t] and not obs[t]:
                    x[t] = poison
                if not obs[t]:
                    r["weights"]["ce"][t] = poison
        for x in (*logp, *entropy):
            x.requires_grad_()
        result = oracle_loss(logp, entropy, rows, spec)
        result["loss"].backward()
        answers.append([result["loss"].detach(), *[x.grad for x in (*logp, *entropy)]])
    for other in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answers[0], other, strict=True))
    assert all(bool(torch.isfinite(a).all()) for a in answers[0])


@pytest.mark.parametrize("stream", ["old", "ref", "advantages"])
def test_a_missing_or_bad_value_inside_is_named(stream):
    good = {"old": [0, -1, -1], "ref": [0, -1, -1], "advantages": [0, 1, 1]}
    for bad in (None, [0, -1, NAN]):
        rows = [row(".AA", **good), row(".AA", **(good | {stream: bad}))]
        with pytest.raises(DataError, match=f"{stream} is missing or not finite.*row 1, token"):
            run(rows, CLIP, {"kind": "kl"})


UNKNOWN = [
    {"components": [{"kind": "values"}]},
    {"components": [CLIP | {"surrogate": {"kind": "cispo2"}}]},
    {"components": [CLIP | {"ratio": "episode"}]},
    {"components": [CLIP | {"ratio": {"kind": "ratio", "level": "rollout"}}]},
    {"components": [CLIP | {"ratio": {"kind": "ratio", "statistic": "median"}}]},
    {"components": [CLIP | {"ratio": {"kind": "other"}}]},
    {"components": [CLIP | {"surrogate": {"kind": "gmpo"}, "ratio": "sequence"}]},
    {"components": [CLIP | {"surrogate": CLIP["surrogate"] | {"delta": 4.0, "dual": 3.0}}]},
    {"components": [CLIP | {"units": "some"}]},
    {"components": [CLIP | {"count_rejected": "some"}]},
    {"components": [CLIP | {"gates": [{"kind": "opsm"}]}]},
    {"components": [CLIP, CLIP]},
    {"components": [CLIP], "gates": [{"kind": "dice"}]},
    {"components": [CLIP], "gates": [{"kind": "covariance", "select": "middle"}]},
    {"components": [CLIP], "old": "recorded"},
    {"components": [{"kind": "kl", "estimator": "k4"}]},
    {"components": [{"kind": "kl", "gradient": "heavy"}]},
    {"components": [{"kind": "kl", "estimator": "exact", "gradient": "k2"}]},
    {"components": [{"kind": "term", "fn": torch.sum}]},
    {"components": [CLIP], "masks": [{"kind": "drop_all"}]},
    {"components": [CLIP], "corrections": [{"kind": "ice"}]},
    {"components": [CLIP], "corrections": [{"kind": "truncated_is", "level": "rollout"}]},
    {"components": [CLIP], "corrections": [{"kind": "reject", "high": 1.0, "statistic": "median"}]},
    {"components": [CLIP], "corrections": [{"kind": "reject", "high": 1.0, "estimator": "k4"}]},
    *[
        {"components": [CLIP | {"normalizer": text}]}
        for text in (
            "mean(sequence)",
            "mean(token) > mean(sequence)",
            "mean(turn) > mean(turn) > mean(token)",
            "mean(token)/2",
            "sum(token)/0",
            "sum(token)/-1",
            "sum(token)/width",
            "sum(token)/pow(x)",
            "sum(token)/nan",
            "median(token)",
            "",
        )
    ],
]


@pytest.mark.parametrize("spec", UNKNOWN, ids=str)
def test_what_the_oracle_does_not_know_is_refused(spec):
    rows = [row(".AA", old=[0, -1, -1], ref=[0, -1, -1], rollout=[0, -1, -1])]
    with pytest.raises(SpecError):
        oracle_loss(leaves(rows), None, rows, spec)


def test_none_and_extra_keys_mean_the_defaults():
    rows = [row(".AA", old=[0, -1, -1])]
    extra = dict.fromkeys(("name", "coef", "normalizer", "count", "units", "divide_by", "gates"))
    spec = {"masks": None, "corrections": None, "log_ratio_bound": None, "roles": {"ce": {}}}
    near(run(rows, CLIP | extra | {"remark": 1}, **spec)["loss"], -1.0)


def test_a_level_without_ids_is_refused():
    with pytest.raises(DataError, match="episode"):
        weights([row(".A", prompt=1)], "mean(episode) > mean(token)")


def test_misaligned_streams_are_refused():
    rows = [row(".AA", old=[-1.0, -1.0])]
    with pytest.raises(DataError, match="old is not aligned"):
        run(rows, CLIP)
    with pytest.raises(DataError, match="log-probs are not aligned"):
        run([row(".AA")], REINFORCE, logp=leaf(0.0, 0.0))


def test_logprobs_and_entropy_by_hand():
    # softmax of (0, log 3) is (1/4, 3/4); at temperature 1/2 it is (1/10, 9/10).
    logits = torch.tensor([[0.0, math.log(3), -math.inf]] * 3, dtype=torch.float64).requires_grad_()
    logp, entropy = oracle_logprobs(logits, [0, 1, 0])
    near(logp, [0, math.log(3 / 4), math.log(1 / 4)])
    h = -(1 / 4 * math.log(1 / 4) + 3 / 4 * math.log(3 / 4))
    near(entropy, [0, h, h])
    (logp[1] + entropy[2]).backward()
    # d logp / dz = onehot - p; d H / dz_v = -p_v (log p_v + H); a column of -inf has none.
    near(logits.grad[0], [-1 / 4, 1 / 4, 0])
    near(logits.grad[1], [-1 / 4 * (math.log(1 / 4) + h), -3 / 4 * (math.log(3 / 4) + h), 0])
    near(logits.grad[2], [0, 0, 0])
    logp, _ = oracle_logprobs(logits, [0, 1, 0], [NAN, 0.5, 1.0])
    near(logp, [0, math.log(9 / 10), math.log(1 / 4)])
    with pytest.raises(DataError, match="temperature"):
        oracle_logprobs(logits, [0, 1, 0], 0.0)


def test_step_runs_a_model_row_by_row_and_reaches_its_parameters():
    table = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
    rows = [row(".AA", temperature=0.5) | {"tokens": [1, 2, 3]}, row("."), row("")]
    spec = {"components": [CLIP, {"kind": "entropy", "coef": 0.5}], "old": "policy"}
    result = oracle_step(lambda tokens: table[tokens], rows, spec)
    near(result["loss"], -1 - 0.5 * math.log(4))
    near(result["logprobs"][0], [0, -math.log(4), -math.log(4)])
    assert not result["logprobs"][0].requires_grad
    result["loss"].backward()
    # -A (onehot - p) / (2 tokens * tau); a uniform distribution has no entropy gradient.
    near(table.grad[1], [0.25, 0.25, -0.75, 0.25])
    near(table.grad[2], [0.25, 0.25, 0.25, -0.75])
    near(table.grad[0], [0, 0, 0, 0])


def test_relabelled_ids_and_permuted_rows_do_not_matter():
    rows = make_rows(5, 4, 3)
    logp = [torch.tensor(r["old"], dtype=torch.float64) * 0.95 for r in rows]
    path = "mean(prompt) > sum(episode)/sqrt > mean(sequence) > mean(turn) > mean(token)"
    spec = {"components": [CLIP | {"normalizer": path}]}
    loss = oracle_loss(logp, None, rows, spec)["loss"]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    moved = [rows[i] | {"prompt": int(rows[i]["prompt"][1:]), "episode": f"e{rows[i]['episode']}"} for i in order]
    again = oracle_loss([logp[i] for i in order], None, moved, spec)["loss"]
    torch.testing.assert_close(again, loss, rtol=1e-14, atol=0)


def test_loss_is_the_weights_times_the_token_losses_and_gradcheck_agrees():
    rows = make_rows(1, 2, 2, max_length=12)
    logp = [torch.tensor(r["old"], dtype=torch.float64) * 0.9 for r in rows]
    path = "mean(prompt) > mean(episode) > sum(token)/avg"
    spec = {"components": [CLIP | {"normalizer": path}, {"kind": "kl", "estimator": "k3"}]}
    result = oracle_loss(logp, None, rows, spec)
    weighted = sum(
        float((w * u * x)[1:].sum())
        for w, x, u in zip(
            result["weights"]["rl"],
            result["token_losses"]["rl"],
            [torch.tensor(r["weights"]["rl"], dtype=torch.float64) for r in rows],
            strict=True,
        )
    )
    assert math.isclose(weighted, float(result["components"]["rl"]), rel_tol=1e-13)
    for x in logp:
        x.requires_grad_()
    assert torch.autograd.gradcheck(lambda *z: oracle_loss(z, None, rows, spec)["loss"], logp)


def test_two_hundred_rows_take_seconds():
    rows = make_rows(11, 25, 7, vocab=64, min_length=20, max_length=60)
    table = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    parts = [
        CLIP | {"normalizer": "mean(prompt) > mean(episode) > mean(turn) > mean(token)"},
        {"kind": "kl", "coef": 0.04},
        CE | {"normalizer": "mean(sequence) > mean(token)"},
    ]
    start = time.process_time()
    oracle_step(lambda tokens: table[tokens], rows, {"components": parts})["loss"].backward()
    assert time.process_time() - start < 10 and len(rows) > 170


def test_rows_are_a_function_of_the_seed_and_can_tell():
    rows = make_rows(0, 8, 4)
    assert rows == make_rows(0, 8, 4) and rows != make_rows(1, 8, 4)
    lengths = [len(r["tokens"]) for r in rows]
    assert (min(lengths), max(lengths)) == (8, 40)
    advantages = [a for r in rows for a in r["advantages"]]
    assert min(advantages) < 0 < max(advantages) and 0.0 in advantages
    assert all(any(r["action"][1:]) and any(r["observation"][1:]) for r in rows)
    units = [(r["prompt"], r["episode"]) for r in rows]
    assert len(set(units)) < len(units)
    # Log-probs of a policy: of the tokens with A > 0 and with A < 0, 5 to 40 % are clipped each.
    logp = [torch.full((n,), -2.0, dtype=torch.float64) for n in lengths]
    attach_streams(rows, logp, seed=0)
    result = oracle_loss(logp, None, rows, {"components": [CLIP]})
    stats = result["ratio_stats"]["rl"]
    acting = [a for r in rows for a, on in zip(r["advantages"], r["action"], strict=True) if on]
    assert 0.05 < stats["high"] / sum(a > 0 for a in acting) < 0.4
    assert 0.05 < stats["low"] / sum(a < 0 for a in acting) < 0.4


def test_oracle_imports_nothing_of_the_package_but_errors():
    folder = Path(__file__).resolve().parent.parent / "megatron_pgloss" / "verify" / "oracle"
    files = sorted(folder.rglob("*.py"))
    own = {f"megatron_pgloss.verify.oracle.{file.stem}" for file in files}
    outside = {"torch", *sys.stdlib_module_names}
    assert len(files) >= 2
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file.name} imports relatively"
                names = [str(node.module)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                allowed = name in own | {"megatron_pgloss.errors"} or name.split(".")[0] in outside
                assert allowed, f"{file.name} imports {name}"
