"""Do the tests notice mistakes? Put small mistakes into a file of the package, one at a time, and run quick tests on
each.

    python tools/mutate.py --file planning/token_weights.py
    python tools/mutate.py --file megatron/step.py --jobs 2 --limit 40 --json found.json
    python tools/mutate.py --file maths/segments.py --judge "tests/test_streams.py"
    python tools/mutate.py --file maths/segments.py --file megatron/step.py --judge suite --map lines.json

The tool works on a temporary copy of package and tests. It imports heavy libraries once; each mutant runs in a fork of
that process, in which functions have the mutant's code, and worlds of processes are forks of the fork. A mutant is
killed by the first stage of tests that fails or does not end in time. Survivors are listed, and make the exit code 1.
Without ``--judge``, `JUDGES` names the stages of the file. The stage ``layouts`` does not use pytest: it takes one step
on each layout of ``verify --self-test`` and compares it with the oracle.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from mutants import Mutant, mutants, put_into

ROOT = Path(__file__).resolve().parent.parent
JUDGES = {
    "planning/token_weights.py": (
        "tests/test_normalizers.py tests/test_normalizer_paths.py", "tests/test_plan.py tests/test_invariance.py",
        "tests/test_plan_ranks.py",
    ),
    "spec/divisors.py": ("tests/test_normalizers.py tests/test_levels.py", "tests/test_invariance.py"),
    "megatron/context_parallel.py": ("tests/test_context_parallel.py -m 'not multiproc'", "layouts"),
    "megatron/factors.py": ("layouts", "tests/test_refusals.py", "tests/test_moe.py"),
    "megatron/step.py": (
        "tests/test_step_options.py", "layouts", "tests/test_step.py", "tests/test_refusals.py", "tests/test_moe.py",
    ),
    "megatron/runtime.py": ("tests/test_step_options.py", "layouts", "tests/test_step.py", "tests/test_refusals.py"),
    "objective/surrogates.py": (
        "tests/test_surrogates.py tests/test_preset_values.py tests/test_preset_values_weighted.py",
        "tests/test_objectives_oracle.py tests/test_statistics.py",
    ),
    "objective/ratios.py": ("tests/test_surrogates.py", "tests/test_objectives_oracle.py"),
    "objective/late.py": ("tests/test_corrections.py tests/test_gates.py", "tests/test_objectives_oracle.py"),
    "objective/auxiliary.py": (
        "tests/test_objective.py tests/test_topk_distill.py tests/test_gates.py tests/test_kl_enumeration.py",
        "tests/test_objectives_oracle.py",
    ),
    "objective/grouped.py": ("tests/test_statistics.py", "tests/test_objectives_oracle.py"),
    "rules/corrections.py": ("tests/test_corrections.py", "tests/test_objectives_oracle.py tests/test_old_sources.py"),
    "rules/gates.py": ("tests/test_gates.py", "tests/test_objectives_oracle.py"),
    "maths/estimators.py": ("tests/test_objective.py tests/test_kl_enumeration.py", "tests/test_objectives_oracle.py"),
    "maths/running.py": ("tests/test_running.py", "tests/test_axes.py tests/test_context_parallel.py"),
    "maths/topk.py": ("tests/test_topk_distill.py",),
    "logprobs/logits/chosen.py": ("tests/test_chosen.py", "tests/test_logprobs_parallel.py"),
}  # fmt: skip
"""File to stages of tests, the quickest first."""


@dataclass
class Running:
    """A mutant under trial."""

    number: int
    mutant: Mutant
    started: float


def main(argv: list[str] | None = None) -> int:
    """Run the tool; return 1 if a mutant survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", action="append", required=True, help="below megatron_pgloss/; several for the suite")
    parser.add_argument(
        "--judge", action="append", help="arguments for pytest, or 'layouts'; may be repeated. 'suite': see judge.py"
    )
    parser.add_argument("--map", type=Path, help="for the suite: which tests execute a line (pytest --lines FILE)")
    parser.add_argument("--again", type=Path, help="for the suite: what an earlier run's JSON does not call killed")
    parser.add_argument("--budget", type=float, default=60, help="for the suite: seconds of tests for a mutant")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N mutants")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N mutants")
    parser.add_argument("--lines", metavar="A-B", help="mutants of these lines alone")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a mutant, all stages together")
    parser.add_argument("--list", action="store_true", help="name the mutants and run nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.judge == ["suite"]:
        return by_suite(parser, args)
    (args.file,) = args.file
    source = (ROOT / "megatron_pgloss" / args.file).read_text(encoding="utf-8")
    found = mutants(source)
    if args.lines:
        first, last = map(int, args.lines.split("-"))
        found = [one for one in found if first <= one.line <= last]
    chosen = found[args.skip :][: args.limit]
    if args.list:
        print(*(f"{number} {one}" for number, one in enumerate(chosen, args.skip)), sep="\n")
        return 0
    stages = args.judge or JUDGES.get(args.file)
    if not stages:
        parser.error(f"no tests are known for {args.file}: name them by --judge")
    with tempfile.TemporaryDirectory() as folder:
        module = warm(Path(folder), args.file)
        fates = trial(module, chosen, list(stages), args)
    survivors = [one for number, one in enumerate(chosen) if fates[number] == "survived"]
    for one in survivors:
        print(f"SURVIVED {args.file} {one}")
    print(f"{args.file}: {len(chosen)} mutants of {len(found)}, {len(survivors)} survived")
    if args.json:
        rows = [{"line": one.line, "change": one.change, "fate": fates[i]} for i, one in enumerate(chosen)]
        args.json.write_text(json.dumps({"file": args.file, "stages": stages, "mutants": rows}, indent=1) + "\n")
    return int(bool(survivors))


def by_suite(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Judge the mutants of several files by the tests of the default suite; return 1 if one survives."""
    if args.map is None:
        parser.error("--judge suite needs --map")
    import judge

    lines, cases, again = judge.LineMap(args.map.resolve()), [], None
    if args.again:
        rows = json.loads(args.again.read_text())
        again = {(row["file"], row["line"], row["change"]) for row in rows if not row["fate"].startswith("killed")}
    with tempfile.TemporaryDirectory() as folder:
        for file in args.file:
            module = warm(Path(folder), file)
            found = mutants((ROOT / "megatron_pgloss" / file).read_text(encoding="utf-8"))
            for one in found[args.skip :][: args.limit]:
                first = " ".join(JUDGES.get(file, ()))
                if again is None or (file, one.line, one.change) in again:
                    tests = lines.tests(file, one, first)
                    cases.append(judge.Case(file=file, module=module, mutant=one, tests=tests))
        _fork_worlds()
        trial = judge.Trial(cases, args.jobs, args.timeout, args.budget)
        import pytest

        pytest.main(["-q", "-p", "no:cacheprovider"], plugins=[trial])
    survivors = [case for number, case in enumerate(cases) if trial.fates[number].startswith("survived")]
    for case in survivors:
        print(f"SURVIVED {case.file} {case.mutant}")
    for file in args.file:
        of, left = (sum(case.file == file for case in some) for some in (cases, survivors))
        print(f"{file}: {of} mutants, {left} survived")
    if args.json:
        rows = [
            {"file": case.file, "line": case.mutant.line, "text": case.mutant.text, "change": case.mutant.change,
             "fate": trial.fates[number]}
            for number, case in enumerate(cases)
        ]  # fmt: skip
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(bool(survivors))


def warm(folder: Path, file: str) -> ModuleType:
    """Copy package and tests into ``folder``, import heavy modules, and return the module of ``file``."""
    if folder.resolve() == Path.cwd().resolve():
        return importlib.import_module("megatron_pgloss." + file.removesuffix(".py").replace("/", "."))
    left = shutil.ignore_patterns("__pycache__", ".git", ".venv*", ".gpu", ".*_cache", "runs", "out")
    shutil.copytree(ROOT, folder, ignore=left, dirs_exist_ok=True)  # tests read docs, examples and tools too
    os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.dont_write_bytecode = True
    sys.path[:] = [str(folder), str(folder / "tests"), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pytest  # noqa: F401
        import torch

        torch.set_num_threads(1)
        for name in ("verify.faults.self_test", "adapters", "presets"):
            if (folder / "megatron_pgloss" / f"{name.replace('.', '/')}.py").exists():
                importlib.import_module(f"megatron_pgloss.{name}")
        for name in ("distributed", "models.gpt.gpt_layer_specs", "pipeline_parallel", "optimizer"):
            importlib.import_module(f"megatron.core.{name}")
        module = importlib.import_module("megatron_pgloss." + file.removesuffix(".py").replace("/", "."))
    assert Path(str(module.__file__)).is_relative_to(folder), module.__file__
    return module


def trial(module: ModuleType, chosen: list[Mutant], stages: list[str], args: argparse.Namespace) -> dict[int, str]:
    """Number of each mutant to its fate. The unchanged file is tried first, put in like a mutant, and must survive."""
    same = Mutant(0, "unchanged", ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")))
    waiting = [(-1, same), *enumerate(chosen)]
    running: dict[int, Running] = {}
    fates: dict[int, str] = {}
    while waiting or running:
        while waiting and len(running) < (args.jobs if -1 in fates else 1) and (-1 in fates or not running):
            number, mutant = waiting.pop(0)
            running[_fork(module, mutant, stages)] = Running(number, mutant, time.monotonic())
        for pid, one in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            took = time.monotonic() - one.started
            if not done and took > args.timeout:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            elif not done:
                continue
            del running[pid]
            fates[one.number] = _fate(os.waitstatus_to_exitcode(status) if done else None, stages)
            print(f"[{len(fates) - 1}/{len(chosen)}] {fates[one.number]}, {took:.1f} s: {one.mutant}", flush=True)
            if one.number == -1 and fates[-1] != "survived":
                raise SystemExit("the tests do not pass on the unchanged file")
        time.sleep(0.02)
    return fates


def _fate(code: int | None, stages: list[str]) -> str:
    if code is None:
        return "killed by time"
    if code == 0:
        return "survived"
    return f"killed by {stages[code - 1]}" if 0 < code <= len(stages) else f"killed: exit code {code}"


def _fork(module: ModuleType, mutant: Mutant, stages: list[str]) -> int:
    """Fork a process that tries the mutant; its exit code is the number of the stage that failed, or 0."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()  # so that its worlds can be ended with it
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    code = len(stages) + 1
    try:
        _fork_worlds()
        put_into(module, mutant)
        code = next((number for number, stage in enumerate(stages, 1) if not _passes(stage)), 0)
    finally:
        os._exit(code)


def _fork_worlds() -> None:
    """Make worlds fork from the mutant's process, not from the warm process, which has the unchanged file."""
    from support.worlds import RUN

    RUN.method = "fork"


def _passes(stage: str) -> bool:
    if stage != "layouts":
        import pytest

        return pytest.main([*shlex.split(stage), "-x", "-q", "-p", "no:cacheprovider"]) == 0
    from support.worlds import run_world

    try:
        return all(run_world(_clean, 4, timeout=100))
    except AssertionError:
        return False


def _clean(rank: int, world: int) -> bool:
    from megatron_pgloss.verify.faults import put_in

    warnings.simplefilter("ignore")
    return put_in([]).ok


if __name__ == "__main__":
    sys.exit(main())
