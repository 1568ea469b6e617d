"""The flows as Prefect deployments: what `prefect.yaml` says, for an installed package.

The command line imports this module late: it loads Prefect and the flows.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.schedules import Cron, Schedule
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.types.entrypoint import EntrypointType
from prefect.workers.process import ProcessWorker

from flows.cli import FAMILIES
from flows.settings import Home

POOL = "exeunt"
NIGHTLY_CRON = "0 3 * * *"
"""Three in the morning: no clock in Europe or America skips or repeats that hour."""

BATCH = "flows.batch.flow:batch"

FLOWS = (
    *(f"{module}:{module.rpartition('.')[2]}" for module, _ in FAMILIES.values()),
    BATCH,
)
"""What is deployed, as `module:name`: the flow of each family, and the batch."""

FOLDERS = {"videos": "videos", "batch": "batch"}
"""Where a flow's files go below the home, by its own default for `output`; else `pictures`."""

Policy = Literal["ENQUEUE", "CANCEL_NEW", "CANCEL_RUNNING"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """One deployment of a flow.

    Attributes:
        limit: Runs of this deployment at a time; a GPU is guarded by its own lock besides.
        policy: What happens to a run that is one too many: it waits, is cancelled, or cancels
            the one that runs.
        cron: When it runs by itself; None is never.
        active: Whether the schedule is on.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    limit: int = 1
    policy: Policy = "ENQUEUE"
    cron: str | None = None
    timezone: str = "UTC"
    active: bool = False


def shipped(home: Home, flow: Flow[..., Any]) -> list[Deployment]:
    """The deployments of a flow; its files go into the home, wherever a worker runs.

    Every flow is there on demand. A nightly one takes a flow that needs no further argument, such
    as a model's folder.
    """
    arguments = inspect.signature(flow.fn).parameters
    output = FOLDERS.get(str(arguments["output"].default), "pictures")
    given = {"prompt": "a red fox in the snow", "output": str(home.root / output)}
    parameters = {name: value for name, value in given.items() if name in arguments}
    on_demand = Deployment(name="on-demand", parameters=parameters, limit=2)
    required = {name for name, each in arguments.items() if each.default is each.empty}
    if required - parameters.keys():
        return [on_demand]
    return [
        on_demand,
        Deployment(
            name="nightly",
            parameters=parameters,
            policy="CANCEL_NEW",
            cron=NIGHTLY_CRON,
            timezone=local_timezone(),
        ),
    ]


def deploy_shipped(api_url: str, home: Home) -> list[str]:
    """Deploy all flows that the package ships; returns the names, such as `wan/on-demand`."""
    flows = [_load(entrypoint) for entrypoint in FLOWS]
    return [name for flow in flows for name in deploy(api_url, shipped(home, flow), [flow])]


def deploy(
    api_url: str,
    deployments: Sequence[Deployment],
    flows: Sequence[Flow[..., Any]],
) -> list[str]:
    """Create the work pool and the deployments, or bring them up to date.

    A schedule that was changed or switched on the server stays so.

    Args:
        api_url: The server.
        deployments: Made of each flow.

    Returns:
        The names, such as `z-image/on-demand`.
    """
    with temporary_settings({PREFECT_API_URL: api_url}):
        _create_pool()
        names = []
        for flow in flows:
            for each in deployments:
                _runner_deployment(flow, each).apply()
                names.append(f"{flow.name}/{each.name}")
    return names


def local_timezone() -> str:
    """This machine's timezone by IANA name; UTC if it has none."""
    try:
        path = Path("/etc/localtime").resolve()
    except OSError:
        return "UTC"
    _, found, name = str(path).partition("/zoneinfo/")
    return name if found and name and not name.startswith("Etc/") else "UTC"


def _load(entrypoint: str) -> Flow[..., Any]:
    module, _, name = entrypoint.partition(":")
    return cast("Flow[..., Any]", getattr(importlib.import_module(module), name))


def _create_pool() -> None:
    template = ProcessWorker.get_default_base_job_template()
    pool = WorkPoolCreate(name=POOL, type="process", base_job_template=template)
    with get_client(sync_client=True) as client:
        try:
            client.create_work_pool(pool)
        except ObjectAlreadyExists:
            return


def _schedule(flow: Flow[..., Any], deployment: Deployment) -> Schedule | None:
    """The server's own schedule if somebody has changed it there, else the deployment's."""
    if deployment.cron is None:
        return None
    cron, timezone, active = deployment.cron, deployment.timezone, deployment.active
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        for found in client.read_deployment_by_name(f"{flow.name}/{deployment.name}").schedules:
            if isinstance(found.schedule, CronSchedule):
                cron, active = found.schedule.cron, found.active
                timezone = found.schedule.timezone or timezone
    return Cron(cron, timezone=timezone, active=active, slug=deployment.name)


def _runner_deployment(flow: Flow[..., Any], deployment: Deployment) -> RunnerDeployment:
    schedule = _schedule(flow, deployment)
    made = flow.to_deployment(
        deployment.name,
        parameters=deployment.parameters,
        schedules=[] if schedule is None else [schedule],
        concurrency_limit=ConcurrencyLimitConfig(
            limit=deployment.limit,
            collision_strategy=ConcurrencyLimitStrategy(deployment.policy),
        ),
        work_pool_name=POOL,
        # By module, so that a worker needs the package installed and no folder of ours.
        entrypoint_type=EntrypointType.MODULE_PATH,
        description=flow.description,
    )
    return cast(RunnerDeployment, made)
