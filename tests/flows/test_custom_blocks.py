"""Custom blocks at the level of flows: only what was reviewed here can be named and run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flows.table import Table
from flows.table_columns import Columns
from stages.block_locks import write_lock
from stages.block_sources import read_block_sources
from stages.errors import ModelError, RequestError
from tests.support.chain import context
from tests.support.custom_blocks import DAMPED, marker_line, write_blocks
from tests.support.tiny_families import CASES, PROMPT

CASE = CASES["z-image"]


@pytest.fixture
def arguments(tiny: Any, home: Path, tmp_path: Path) -> dict[str, Any]:
    every = {name: value for options in CASE.options.values() for name, value in options.items()}
    own = {"prompt": PROMPT, "model": str(tiny(CASE)), "seed": 7, "guidance_scale": CASE.scale}
    return every | own | {"device": "cpu", "output": str(tmp_path / "pictures")}


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    marked = DAMPED["block.py"] + marker_line(tmp_path / "marker")
    return write_blocks(tmp_path / "blocks", DAMPED | {"block.py": marked})


@pytest.fixture
def launcher() -> Iterator[Any]:
    from flows.launch import shared_launcher

    shared_launcher.cache_clear()
    made = shared_launcher("forkserver")
    made.expect(CASE.name)
    made.start("inspect", logging.getLogger("test"), lambda: False).release()
    yield made
    made.close()
    shared_launcher.cache_clear()


@pytest.mark.usefixtures("prefect_server")
def test_reviewed_blocks_run_in_stage_processes_and_stand_in_the_picture(
    arguments: dict[str, Any], home: Path, tmp_path: Path, launcher: Any
) -> None:
    from flows.z_image import z_image
    from tests.stages.test_custom_blocks import picture

    folder = write_blocks(tmp_path / "blocks")
    sources = read_block_sources(folder)
    write_lock(home, folder, sources)
    given = {"blocks": f"denoise.denoise={folder}", "block_input": "damping=0.5"}
    (made,) = z_image(**arguments, **given)
    with Image.open(made.path) as opened:
        pixels, texts = np.asarray(opened), opened.info
    where = context(Path(arguments["model"]), home.parent)
    where = where.model_copy(update={"home_dir": str(home)})
    assert np.array_equal(
        pixels, picture(where, {"denoise.denoise": sources.digest}, {"damping": 0.5})
    )
    assert sources.digest in json.dumps(texts)

    with pytest.raises(RequestError, match="no block takes an input 'dampening'; the blocks take"):
        z_image(**arguments, **given | {"block_input": "dampening=0.5"})

    (folder / "block.py").write_text(DAMPED["block.py"] + "\n")
    before = dict(launcher.num_processes_started)
    with pytest.raises(ModelError, match=r"block\.py was changed; nothing of it was run"):
        z_image(**arguments, **given)
    assert launcher.num_processes_started == before


@pytest.mark.parametrize(
    "named",
    [
        "{folder}",
        "denoise.denoise={folder}",
        "{folder}/block.py",
        "block:Damped",
        "someone/repository",
        "denoise.denoise=someone/repository",
        "",
        "denoise.denoise=",
    ],
)
def test_code_that_was_not_reviewed_cannot_be_named_by_an_argument(
    arguments: dict[str, Any], blocks: Path, tmp_path: Path, named: str
) -> None:
    from flows.z_image import check

    given = {name: value for name, value in arguments.items() if name != "num_images"}
    refusal = r"never reviewed|cannot read blocks|blocks are no folder|expected a folder"
    with pytest.raises((ModelError, RequestError), match=refusal):
        check(**given, blocks=named.format(folder=blocks))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("column", ["blocks", "model", "components"])
def test_a_table_cannot_name_code(column: str, tmp_path: Path) -> None:
    from flows.z_image import z_image

    table = tmp_path / "table.csv"
    table.write_text(f"prompt,{column}\na fox,denoise.denoise=/anywhere\n")
    columns = Columns(z_image.fn, "z-image")
    (row,) = Table(table).rows()
    with pytest.raises(RequestError, match=column):
        columns.check_names(row)
