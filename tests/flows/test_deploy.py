"""Deployments hold their limit, and a nightly schedule fires once a night, clock change or not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml  # type: ignore[import-untyped]
from prefect.client.orchestration import get_client
from prefect.client.schemas.schedules import CronSchedule
from prefect.states import Pending, Scheduled

from flows import deploy
from flows.cli import FAMILIES
from flows.deploy import Deployment
from flows.settings import Home
from tests.flows.stub_flow import stub

REPOSITORY = Path(__file__).parents[2]


def read(name: str) -> Any:
    with get_client(sync_client=True) as client:
        return client.read_deployment_by_name(name)


def test_the_shipped_deployments_are_made_of_each_flow(prefect_server: str, tmp_path: Path) -> None:
    home = Home(root=tmp_path)
    names = deploy.deploy(prefect_server, deploy.shipped(home, stub), [stub])
    assert names == ["stub/on-demand", "stub/nightly"]
    nightly = read("stub/nightly")
    assert nightly.work_pool_name == "exeunt"
    assert nightly.entrypoint == "tests.flows.stub_flow.stub"
    assert nightly.concurrency_options.collision_strategy == "CANCEL_NEW"
    assert nightly.global_concurrency_limit.limit == 1
    assert nightly.parameters["output"] == str(tmp_path / "pictures")
    (schedule,) = nightly.schedules
    assert not schedule.active, "nothing runs at night before somebody asks for it"
    assert schedule.schedule.cron == "0 3 * * *"
    assert schedule.schedule.timezone == deploy.local_timezone()
    assert read("stub/on-demand").schedules == []


def test_deploying_again_keeps_a_schedule_as_it_was_set_on_the_server(
    prefect_server: str, tmp_path: Path
) -> None:
    nightly = Deployment(name="again", cron="0 3 * * *")
    deploy.deploy(prefect_server, [nightly], [stub])
    with get_client(sync_client=True) as client:
        found = read("stub/again")
        client.update_deployment_schedule(
            found.id,
            found.schedules[0].id,
            active=True,
            schedule=CronSchedule(cron="30 4 * * *", timezone="Asia/Tokyo"),
        )
    deploy.deploy(prefect_server, [nightly], [stub])
    (schedule,) = read("stub/again").schedules
    assert schedule.active
    assert (schedule.schedule.cron, schedule.schedule.timezone) == ("30 4 * * *", "Asia/Tokyo")


@pytest.mark.parametrize(
    ("policy", "first", "second"),
    [("CANCEL_NEW", "Pending", "Cancelled"), ("ENQUEUE", "Pending", "AwaitingConcurrencySlot")],
)
def test_a_run_too_many_is_cancelled_or_waits(
    prefect_server: str, policy: deploy.Policy, first: str, second: str
) -> None:
    name = f"limited-{policy.lower()}"
    deploy.deploy(prefect_server, [Deployment(name=name, policy=policy)], [stub])
    with get_client(sync_client=True) as client:
        deployment = read(f"stub/{name}")
        runs = [
            client.create_flow_run_from_deployment(
                deployment.id, parameters={"prompt": "x", "output": "y"}, state=Scheduled()
            )
            for _ in range(2)
        ]
        for run in runs:
            client.set_flow_run_state(run.id, Pending())
        states = [client.read_flow_run(run.id).state for run in runs]
    assert [state.name for state in states if state is not None] == [first, second]


def runs_per_day(cron: str, timezone: str, start: date, num_days: int) -> Counter[date]:
    """How often Prefect's own schedule fires on each local day."""
    zone = ZoneInfo(timezone)
    begin = datetime(start.year, start.month, start.day, tzinfo=zone)
    schedule = CronSchedule(cron=cron, timezone=timezone)
    from prefect.server.schemas.schedules import CronSchedule as ServerSchedule

    on_server = ServerSchedule.model_validate(schedule.model_dump())
    dates = asyncio.run(on_server.get_dates(n=200, start=begin, end=begin + timedelta(num_days)))
    return Counter(each.astimezone(zone).date() for each in dates)


@pytest.mark.parametrize(
    ("cron", "timezone", "day"),
    [
        (deploy.NIGHTLY_CRON, "Europe/London", date(2026, 10, 25)),
        (deploy.NIGHTLY_CRON, "Europe/London", date(2027, 3, 28)),
        (deploy.NIGHTLY_CRON, "America/New_York", date(2027, 3, 14)),
        ("30 1 * * *", "Europe/London", date(2026, 10, 25)),  # 01:30 is there twice
        ("30 1 * * *", "Europe/London", date(2027, 3, 28)),  # 01:30 is not there
        ("30 2 * * *", "America/New_York", date(2027, 3, 14)),  # 02:30 is not there
    ],
)
def test_the_night_of_a_clock_change_has_one_run(cron: str, timezone: str, day: date) -> None:
    counts = runs_per_day(cron, timezone, day - timedelta(2), 6)
    assert [counts[day + timedelta(offset)] for offset in range(-2, 3)] == [1] * 5


def test_every_family_and_the_batch_are_deployed_by_their_commands_name(
    prefect_server: str, tmp_path: Path
) -> None:
    names = deploy.deploy_shipped(prefect_server, Home(root=tmp_path))
    wanted = [f"{name}/on-demand" for name in (*FAMILIES, "batch")]
    assert sorted(names) == sorted([*wanted, "z-image/nightly"])
    wan = read("wan/on-demand")
    assert wan.entrypoint == "flows.wan.wan"
    assert wan.parameters["output"] == str(tmp_path / "videos")
    assert "model" in wan.parameter_openapi_schema["required"], "a form asks for the model"
    assert wan.parameter_openapi_schema["properties"]["num_frames"]["description"]


def test_the_yaml_says_what_the_package_deploys(tmp_path: Path) -> None:
    document = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())
    found = {(each["entrypoint"], each["name"]): each for each in document["deployments"]}
    shipped = {
        (f"{module.replace('.', '/')}.py:{name}", each.name): each
        for module, name in (entrypoint.split(":") for entrypoint in deploy.FLOWS)
        for each in deploy.shipped(Home(root=tmp_path), deploy._load(f"{module}:{name}"))
    }
    assert found.keys() == shipped.keys()
    for key, each in found.items():
        limit = each["concurrency_limit"]
        assert (limit["limit"], limit["collision_strategy"]) == (
            shipped[key].limit,
            shipped[key].policy,
        )
        assert each["work_pool"]["name"] == deploy.POOL
        assert each["parameters"].keys() == shipped[key].parameters.keys()
        assert (
            Path(each["parameters"]["output"]).name == Path(shipped[key].parameters["output"]).name
        )
        schedules = each.get("schedules", [])
        assert [(s["cron"], s["active"]) for s in schedules] == (
            [] if shipped[key].cron is None else [(shipped[key].cron, shipped[key].active)]
        )
        assert all(ZoneInfo(s["timezone"]) for s in schedules)


def test_deploying_loads_no_torch() -> None:
    code = (
        "import flows.deploy as d, sys; [d._load(each) for each in d.FLOWS]; "
        "print('torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    assert run.stdout == "False\n"
