"""A batch that was killed with SIGKILL and is given again: nothing finished is done anew."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.batch import results
from tests.support.kills import Victim
from tests.support.stage_processes import eventually

NUM_ROWS = 6


class Command:
    """Gives the same batch again and again, in one home."""

    def __init__(self, victim: Victim, table: Path, output: Path) -> None:
        self.victim, self.output = victim, output
        self._line = [sys.executable, "-m", "flows", "batch", str(table), "--family", "z-image"]
        self._line += ["--json", "--model", str(victim.model), "--output", str(output)]

    def run(self, kill_after: tuple[str, str, int] | None = None) -> tuple[int, list[Any]]:
        """Its exit code and its events.

        Args:
            kill_after: An event, its stage or the empty text, and how often it has to come
                before the whole flow process is killed.
        """
        process = subprocess.Popen(
            self._line,
            env=self.victim.environ,
            cwd=Path(__file__).resolve().parents[3],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None and process.stderr is not None
        events, seen = [], 0
        for line in process.stdout:
            events.append(json.loads(line))
            if kill_after is not None:
                event, stage, times = kill_after
                last = events[-1]
                seen += last["event"] == event and last.get("stage", "") == (stage or last["stage"])
                if seen == times:
                    os.kill(process.pid, signal.SIGKILL)
                    break
        _, err = process.communicate(timeout=180)
        assert kill_after is not None or process.returncode == 0, err
        assert eventually(self._is_quiet)  # from here on nothing is recorded any more
        return process.returncode, events

    def _is_quiet(self) -> bool:
        lines = self.victim.processes().values()
        return not any(part.startswith("stages.") for line in lines for part in line)

    def made(self) -> Counter[str]:
        """Results that the store has, by stage."""
        return Counter({stage: len(found) for stage, found in self.victim.recorded().items()})


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    from tests.support import tiny_models

    folder = tmp_path_factory.mktemp("killed-batch")
    victim = Victim(folder / "home", tiny_models.z_image(folder / "model"))
    table = folder / "rows.jsonl"
    rows = [{"prompt": f"a fox, number {n}"} for n in range(NUM_ROWS)]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield Command(victim, table, folder / "out")
    victim.stop_server()


def test_a_killed_batch_goes_on_where_it_was(command: Command) -> None:
    code, _ = command.run(kill_after=("request_ends", "denoise", 2))
    assert code == -signal.SIGKILL
    assert not list(command.output.glob("*.png"))
    denoised = command.made()["denoise"]
    assert denoised >= 2

    code, events = command.run(kill_after=("row_ends", "", 2))
    assert code == -signal.SIGKILL
    assert _worked(events) == {"denoise": NUM_ROWS - denoised, "decode": _num(events, "decode")}
    pictures = _pictures(command.output)
    decoded = command.made()["decode"]

    code, events = command.run()
    done_before = NUM_ROWS - events[-1]["num_run"]
    assert 2 <= done_before <= len(pictures) <= decoded
    assert _worked(events) == ({"decode": NUM_ROWS - decoded} if decoded < NUM_ROWS else {})
    assert command.made() == {"inspect": 1} | dict.fromkeys(
        ("encode", "denoise", "decode"), NUM_ROWS
    )
    kept = _pictures(command.output)
    assert pictures.items() <= kept.items() and len(kept) == NUM_ROWS
    table = results.read(command.output / results.NAME)
    assert [row.status for row in table] == ["done"] * NUM_ROWS
    assert {str(row.file): row.file_sha256 for row in table} == kept


def _worked(events: list[Any]) -> Counter[str]:
    return Counter(each["stage"] for each in events if _is_made(each))


def _num(events: list[Any], stage: str) -> int:
    return sum(_is_made(each) and each["stage"] == stage for each in events)


def _is_made(event: Any) -> bool:
    return event["event"] == "request_ends" and not event["cached"]


def _pictures(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.png")
    }
