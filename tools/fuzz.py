"""Random specs, rows and cuts against the oracle: how many were equal, what was refused and why, what was wrong.

    python tools/fuzz.py --cases 20000 --seed 1 [--jobs 2] [--one 1/345]

Exit code 1 where a case was off or raised anything but an error of the package. ``--one SEED/NUMBER`` shows one case
again, with its traceback.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import re
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
SHOWN = 12


def main() -> int:
    """Run the cases, print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--one", metavar="SEED/NUMBER")
    args = parser.parse_args()
    import torch

    from support.fuzz import outcome

    torch.set_num_threads(1)
    if args.one:
        seed, number = map(int, args.one.split("/"))
        print(outcome(seed, number))
        return 0
    started = time.monotonic()
    with mp.get_context("fork").Pool(args.jobs) as pool:
        found = list(pool.imap_unordered(partial(outcome, args.seed), range(args.cases), chunksize=50))
    kinds = Counter(one.kind for one in found)
    print(f"{args.cases} cases of seed {args.seed} in {time.monotonic() - started:.0f} s: {dict(kinds.most_common())}")
    print(f"  {sum(one.kind == 'equal' and float(one.what) == 0 for one in found)} of the equal ones have no gradient")
    reasons = Counter(re.sub(r"\d[\d.e+-]*", "#", one.what)[:120] for one in found if one.kind == "refused")
    for reason, count in reasons.most_common(SHOWN):
        print(f"  refused {count:6}  {reason}")
    wrong = [one for one in found if one.kind not in ("equal", "refused")]
    for one in wrong[:SHOWN]:
        print(f"WRONG {one.kind} {one.what}\n  {one.case}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
