"""Kill 200 runs at random instants and print what became of them, as JSON.

usage: python -m tests.benchmarks.kill_rounds [--rounds 200] [--seed 1] [--model DIR]
           [--checkpoint-every-steps N]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from stages.models import resolve_model
from tests.support.kills import Victim, play, schedule, undisturbed


def main() -> int:
    """Play the rounds; exit code 1 if any had a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="miniature")
    parser.add_argument("--checkpoint-every-steps", type=int)
    options = parser.parse_args()
    environ = {}
    if options.checkpoint_every_steps:
        environ["EXEUNT_CHECKPOINT_EVERY_STEPS"] = str(options.checkpoint_every_steps)
    with tempfile.TemporaryDirectory(prefix="exeunt-kills-") as folder:
        victim = Victim(Path(folder) / "home", resolve_model(options.model), environ)
        seeds = list(range(1000, 1000 + options.rounds))
        expected = undisturbed(victim, seeds)
        code, _, err = victim.finish(victim.start(999))
        assert code == 0, err
        start = time.monotonic()
        process = victim.start(998)
        victim.wait_for_stage_process(process)
        first_child_s = time.monotonic() - start
        code, _, err = victim.finish(process)
        assert code == 0, err
        command_s = time.monotonic() - start
        planned = schedule(options.rounds, command_s, command_s - first_child_s, options.seed)
        counts: Counter[str] = Counter()
        faults = []
        for seed, (target, delay_s) in zip(seeds, planned, strict=True):
            played = play(victim, seed, target, delay_s, expected[seed])
            counts[target] += played.was_hit
            counts["resumed"] += bool(played.finished_before) and played.num_tries > 1
            if played.faults:
                faults.append(asdict(played))
            print(json.dumps(asdict(played)), flush=True)
        victim.stop_server()
    print(json.dumps({"rounds": options.rounds, "hits": counts, "faults": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
