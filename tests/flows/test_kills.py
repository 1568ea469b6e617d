"""A short version of the two hundred kills: one of each kind, at instants that hurt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from flows.prefect_api import PrefectApi
from flows.server_state import read_state
from flows.settings import Home
from tests.support.kills import Victim, picture_ref, play, undisturbed

SEEDS = {"child": 11, "flow": 12, "server": 13}


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    from tests.support import tiny_models

    folder = tmp_path_factory.mktemp("kills")
    model = tiny_models.z_image(folder / "model")
    made = Victim(folder / "home", model)
    code, _, err = made.finish(made.start(1))  # starts the server, inspects and encodes
    assert code == 0, err
    yield made
    made.stop_server()


@pytest.fixture(scope="module")
def expected(victim: Victim) -> dict[int, bytes]:
    return undisturbed(victim, list(SEEDS.values()))


@pytest.mark.parametrize(("target", "delay_s"), [("child", 0.1), ("flow", 3.0), ("server", 2.0)])
def test_a_killed_run_is_finished_by_the_same_command(
    victim: Victim, expected: dict[int, bytes], target: str, delay_s: float
) -> None:
    seed = SEEDS[target]
    played = play(victim, seed, target, delay_s, expected[seed])
    assert played.was_hit
    assert played.faults == []


def test_an_interrupted_command_ends_with_its_own_code_and_leaves_no_process(
    victim: Victim, tmp_path: Path
) -> None:
    import signal
    import time

    process = victim.start(21, "--num-images", "3")
    victim.wait_for_stage_process(process)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    code, _, err = victim.finish(process)
    assert code == 130, err
    assert err.count("exeunt: interrupted; what is finished is kept") == 1
    assert victim.leftovers(within_s=max(0.0, 2.0 - (time.monotonic() - start))) == []


def test_a_run_that_finds_everything_starts_no_process_and_imports_no_torch(
    victim: Victim,
) -> None:
    """The second run of a command line: the flow process alone, and it stays light."""
    for _ in range(2):
        code, last, err = victim.finish(victim.start(1))
        assert code == 0, err
    seen: set[str] = set()
    process = victim.start(1)
    while process.poll() is None:
        for line in victim.processes().values():
            seen.update(part for part in line if part.startswith("stages."))
        maps = Path(f"/proc/{process.pid}/maps")
        try:
            assert "libtorch" not in maps.read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            break
    code, last, err = victim.finish(process)
    assert code == 0, err
    assert last["made"] == {} and seen == set()


def test_the_run_s_page_shows_its_picture(victim: Victim) -> None:
    """Of the embedded server, with nothing set: the links lead to the very picture."""
    code, last, err = victim.finish(victim.start(1))
    assert code == 0, err
    state = read_state(Home(root=victim.home))
    assert state is not None
    wanted = {"artifacts": {"key": {"any_": ["gallery"]}}, "sort": "CREATED_DESC", "limit": 1}
    (gallery,) = PrefectApi(state.api_url, {}).call("POST", "/artifacts/filter", wanted)
    small, whole = re.findall(r"\((http://127\.0\.0\.1:43[^)]*)\)", gallery["data"])
    digest = last["pictures"][0]["digest"]
    assert whole.endswith(f"/media/{digest}") and small.endswith(f"/thumbnail/{digest}")
    with urlopen(whole) as answer:
        assert answer.read() == victim.store.read(picture_ref(last, victim))
    with urlopen(small) as answer:
        assert answer.headers["Content-Type"] == "image/webp"
