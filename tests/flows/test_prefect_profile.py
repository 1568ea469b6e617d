"""Our settings reach Prefect, and never over what the user has set."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flows.prefect_profile import PROFILE, apply_profile, user_settings
from flows.settings import Home

REPOSITORY = Path(__file__).parents[2]
BATCH = "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE"


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment without settings, in a folder and with a `HOME` without settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    return {"PATH": "/bin"}


def test_the_profile_is_set_where_nothing_is(env: dict[str, str], tmp_path: Path) -> None:
    apply_profile(Home(root=tmp_path / "home"), env)
    assert {name: env[name] for name in PROFILE} == PROFILE
    assert env["PREFECT_HOME"] == str(tmp_path / "home" / "prefect")
    assert "PREFECT_API_URL" not in env
    assert not (tmp_path / "home").exists()


def in_environment(folder: Path, env: dict[str, str]) -> None:
    env[BATCH] = "7"


def in_active_profile(folder: Path, env: dict[str, str]) -> None:
    profiles = folder / "user" / ".prefect" / "profiles.toml"
    profiles.parent.mkdir(parents=True)
    profiles.write_text(f'active = "mine"\n[profiles.mine]\n{BATCH} = 7\n[profiles.other]\n')


def in_named_profile(folder: Path, env: dict[str, str]) -> None:
    (folder / "p.toml").write_text(f'active = "a"\n[profiles.a]\n[profiles.b]\n{BATCH} = "7"\n')
    env |= {"PREFECT_PROFILES_PATH": str(folder / "p.toml"), "PREFECT_PROFILE": "b"}


def in_prefect_toml(folder: Path, env: dict[str, str]) -> None:
    text = "[server.services.event_persister]\nbatch_size = 7\n"
    (folder / "prefect.toml").write_text(text)


def in_pyproject(folder: Path, env: dict[str, str]) -> None:
    text = "[tool.prefect.server.services.event_persister]\nbatch_size = 7\n"
    (folder / "pyproject.toml").write_text(text)


def in_dotenv(folder: Path, env: dict[str, str]) -> None:
    (folder / ".env").write_text(f"# mine\nOTHER=1\nexport {BATCH}='7'\n")


@pytest.mark.parametrize(
    "set_it",
    [
        in_environment,
        in_active_profile,
        in_named_profile,
        in_prefect_toml,
        in_pyproject,
        in_dotenv,
    ],
)
def test_what_the_user_has_set_stays(set_it: object, env: dict[str, str], tmp_path: Path) -> None:
    assert callable(set_it)
    set_it(tmp_path, env)
    assert user_settings(env)[BATCH] == "7"
    apply_profile(Home(root=tmp_path / "home"), env)
    assert env.get(BATCH) == ("7" if set_it is in_environment else None)
    assert env["PREFECT_WORKER_QUERY_SECONDS"] == "2"


def test_applying_twice_changes_nothing(env: dict[str, str], tmp_path: Path) -> None:
    in_active_profile(tmp_path, env)
    apply_profile(Home(root=tmp_path / "home"), env)
    once = dict(env)
    apply_profile(Home(root=tmp_path / "home"), env)
    assert env == once
    assert env["PREFECT_PROFILES_PATH"] == str(tmp_path / "user" / ".prefect" / "profiles.toml")


def test_a_user_with_a_server_keeps_their_prefect_home(env: dict[str, str], tmp_path: Path) -> None:
    env["PREFECT_API_URL"] = "http://team:4200/api"
    apply_profile(Home(root=tmp_path / "home"), env)
    assert "PREFECT_HOME" not in env
    env = {"PREFECT_HOME": "/mine"}
    apply_profile(Home(root=tmp_path / "home"), env)
    assert env["PREFECT_HOME"] == "/mine"


@pytest.mark.parametrize("text", ["active = ", "[profiles", "\x00"])
def test_a_file_that_cannot_be_read_counts_as_empty(
    text: str, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "profiles.toml").write_text(text)
    env["PREFECT_PROFILES_PATH"] = str(tmp_path / "profiles.toml")
    assert set(user_settings(env)) == {"PREFECT_PROFILES_PATH"}


def test_prefect_takes_every_setting(tmp_path: Path) -> None:
    """Prefect ignores names that it does not know, so a misspelt one would do nothing."""
    code = """
import os
from pathlib import Path
from flows.prefect_profile import PROFILE, apply_profile
from flows.settings import Home
apply_profile(Home(root=Path(os.environ["HOME"]) / "home"))
from prefect.settings import get_current_settings
known = get_current_settings().to_environment_variables(exclude_unset=True)
print(sorted(name for name in PROFILE if name.startswith("PREFECT_") and name not in known))
print(known["PREFECT_HOME"] == os.environ["PREFECT_HOME"])
print(get_current_settings().server.services.db_vacuum.enabled_vacuum_types >= {"flow_runs"})
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"HOME": str(tmp_path), "PATH": "/bin"},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert run.stdout.splitlines() == ["[]", "True", "True"]


def test_the_file_for_systemd_says_the_same() -> None:
    lines = (REPOSITORY / "flows" / "prefect_profile.env").read_text().splitlines()
    pairs = [line.split("=", 1) for line in lines if line and not line.startswith("#")]
    assert dict(pairs) == PROFILE


def test_every_setting_has_its_reason_in_the_reference() -> None:
    text = (REPOSITORY / "docs" / "reference" / "settings.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for name, value in PROFILE.items():
        (row,) = [line for line in rows if f"`{name}`" in line]
        assert f"`{value}`" in row
        assert len(row.split("|")[3].split()) > 3, f"no reason given for {name}"
    for name in ("EXEUNT_HOME", "EXEUNT_STORE", "EXEUNT_LAUNCH", "EXEUNT_DEVICE"):
        assert any(f"`{name}`" in row for row in rows)
