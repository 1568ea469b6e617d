"""A batch through a worker, as one command that ends when the flow run has ended or is dead.

usage: python -m tests.support.deployed_batch PARAMETERS.json

Ends with the command's own codes: 0 or 3 if the batch is over, 1 if it failed or its process died.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from flows.batch import results
from flows.prefect_api import PrefectApi, ServerError
from flows.services import up
from flows.settings import RunSettings
from tests.support.kills import Victim

OVER = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
DEAD_AFTER_S = 5.0
START_WITHIN_S = 120.0


def main() -> int:
    """Run the batch of a file of parameters."""
    parameters = json.loads(Path(sys.argv[1]).read_text())
    home = RunSettings.from_env().home
    mark = home.root / "deployed"
    try:
        api = PrefectApi(up(home, deploy=not mark.exists()).api_url or "", os.environ)
        mark.touch()
        run_id = _create(api, parameters)
        how = _wait(api, run_id, Victim(home.root, Path()))
    except ServerError as error:
        print(f"deployed batch: {error}")
        return 1
    print(f"deployed batch: {how}")
    if how != "COMPLETED":
        return 1
    rows = results.read(Path(parameters["output"]) / results.NAME)
    return 0 if all(row.status == "done" for row in rows) else 3


def _create(api: PrefectApi, parameters: dict[str, Any]) -> str:
    deployment = api.call("GET", "/deployments/name/batch/on-demand")
    body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
    made = api.call("POST", f"/deployments/{deployment['id']}/create_flow_run", body)
    return str(made["id"])


def _wait(api: PrefectApi, run_id: str, victim: Victim) -> str:
    """The state in which the flow run has ended; one whose process is gone is cancelled."""
    started, seen_at = time.monotonic(), 0.0
    while True:
        time.sleep(0.5)
        with suppress(ServerError):  # the server is being killed, too
            found = api.call("GET", f"/flow_runs/{run_id}")["state_type"]
            if found in OVER:
                return str(found)
        now = time.monotonic()
        if flow_processes(victim):
            seen_at = now
        is_dead = seen_at and now - seen_at > DEAD_AFTER_S
        is_stuck = not seen_at and now - started > START_WITHIN_S
        if is_dead or is_stuck:
            state = {"state": {"type": "CANCELLED"}, "force": True}
            with suppress(ServerError):
                api.call("POST", f"/flow_runs/{run_id}/set_state", state)
            return "DIED" if is_dead else "NEVER STARTED"


def flow_processes(victim: Victim) -> list[int]:
    """Processes that run a flow for a worker."""
    return [
        pid
        for pid, line in victim.processes().items()
        if any("flow_engine" in part or "prefect.engine" in part for part in line)
        or ("flow-run" in line and "execute" in line)
    ]


def worker_processes(victim: Victim) -> list[int]:
    """Processes of a worker itself."""
    return [
        pid
        for pid, line in victim.processes().items()
        if "worker" in line and any("prefect" in part for part in line)
    ]


if __name__ == "__main__":
    raise SystemExit(main())
