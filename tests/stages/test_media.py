"""Pictures on disk: whole, under names of their own, with their settings inside."""

import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from PIL import Image

from stages.errors import ArtifactError, RequestError
from stages.media import Settings, check_output_folder, read_settings
from stages.png_text import SIGNATURE, chunk, read_texts, with_texts
from tests.support.saved import write_png


def picture(color: int = 100) -> bytes:
    """A small PNG with colours that a lossy copy would change."""
    image = Image.new("RGB", (13, 7))
    image.putdata([(x * 19 % 256, x % 7, color) for x in range(13 * 7)])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


SETTINGS = Settings(
    prompt="a red fox,\nin the snow (watercolor:1.2)",
    negative_prompt="blurry",
    seed=2**64 - 1,
    num_inference_steps=10,
    steps_requested=20,
    guidance_scale=4.0,
    scheduler="FlowMatchEulerDiscreteScheduler",
    height=7,
    width=13,
    model="miniature",
    model_hashes={"vae": "ab" * 32, "transformer": "cd" * 32},
    adapters={"ink": 0.8},
    family="z-image",
    dtype="float32",
    versions={"diffusers": "0.42.1"},
    artifacts={"encode.embeds": "ef" * 32},
    row_id="37",
)


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        return image.tobytes()


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


# ---- settings ------------------------------------------------------------------------------


def test_settings_are_readable_by_other_tools_and_by_ours(tmp_path: Path) -> None:
    path = write_png(picture(), tmp_path, prompt="fox", seed=1, settings=SETTINGS)

    with Image.open(path) as image:
        image.load()
        texts = image.text  # type: ignore[attr-defined]
    first, _, last = texts["parameters"].rpartition("\n")
    assert first == "a red fox,\nin the snow (watercolor:1.2)\nNegative prompt: blurry"
    version = last.partition("Version: ")[2]
    assert last == (
        "Steps: 10, Sampler: FlowMatchEulerDiscreteScheduler, CFG scale: 4, "
        "Seed: 18446744073709551615, Size: 13x7, Model hash: cdcdcdcdcd, Model: miniature, "
        f"Version: {version}"
    )
    assert version.startswith("exeunt ")
    document = json.loads(texts["exeunt"])
    assert (document["format"], document["seed"], document["steps_requested"]) == (1, 2**64 - 1, 20)
    assert document["model_hashes"] == {"vae": "ab" * 32, "transformer": "cd" * 32}
    assert read_settings(path) == SETTINGS


def test_pixels_stay_as_they_are(tmp_path: Path) -> None:
    plain = write_png(picture(), tmp_path, name="plain")
    marked = write_png(picture(), tmp_path, name="marked", settings=SETTINGS)

    assert plain.read_bytes() == picture()
    assert pixels(marked) == pixels(plain)
    _, _, rest = picture().partition(b"IDAT")
    assert marked.read_bytes().endswith(b"IDAT" + rest)


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("caf\u00e9 " * 900, b"tEXt"),
        ("\u5bcc\u58eb\u5c71 \U0001f98a " * 600, b"iTXt"),
        ("tail \udc80", b"iTXt"),
    ],
)
def test_texts_of_any_language_come_back(tmp_path: Path, prompt: str, kind: bytes) -> None:
    settings = dataclasses.replace(SETTINGS, prompt=prompt)

    path = write_png(picture(), tmp_path, name="x", settings=settings)

    data = path.read_bytes()
    assert data[data.index(b"parameters") - 4 :].startswith(kind)
    assert read_settings(path).prompt == prompt
    if "\udc80" not in prompt:
        assert read_texts(path)["parameters"].startswith(prompt)


def test_equal_settings_give_equal_files(tmp_path: Path) -> None:
    other = dataclasses.replace(SETTINGS, model_hashes={"transformer": "cd" * 32, "vae": "ab" * 32})
    first = write_png(picture(), tmp_path, name="a", settings=SETTINGS)
    second = write_png(picture(), tmp_path, name="b", settings=other)

    assert first.read_bytes() == second.read_bytes()


def test_values_that_hold_separators_are_quoted() -> None:
    settings = dataclasses.replace(SETTINGS, model='a, "b": c', negative_prompt="")

    text = settings.as_parameters()

    assert r'Model: "a, \"b\": c", Version' in text
    assert "Negative prompt" not in text


def test_settings_take_the_place_of_older_ones(tmp_path: Path) -> None:
    png = with_texts(picture(), {"parameters": "old", "exeunt": "old", "Comment": "kept"})

    path = write_png(png, tmp_path, name="x", settings=SETTINGS)

    assert read_settings(path) == SETTINGS
    assert read_texts(path)["Comment"] == "kept"
    assert path.read_bytes().count(b"parameters\0") == 1


@pytest.mark.parametrize("damage", [lambda png: b"", lambda png: png[:-5], lambda png: b"GIF89a"])
def test_what_is_no_whole_picture_gets_no_settings(tmp_path: Path, damage: object) -> None:
    assert callable(damage)
    with pytest.raises(ArtifactError, match="not a whole PNG picture"):
        write_png(damage(picture()), tmp_path, settings=SETTINGS)

    assert listing(tmp_path) == []


# ---- settings are untrusted ----------------------------------------------------------------


def _with_chunk(path: Path, kind: bytes, data: bytes) -> Path:
    png = picture()
    path.write_bytes(png[:33] + chunk(kind, data) + png[33:])
    return path


def test_a_text_that_inflates_without_end_is_refused(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(50 * 2**20), 9)
    for kind, data in [
        (b"zTXt", b"exeunt\0\0" + bomb),
        (b"iTXt", b"exeunt\0\1\0\0\0" + bomb),
    ]:
        with pytest.raises(RequestError, match="inflates to more than 1048576 bytes"):
            read_settings(_with_chunk(tmp_path / "bomb.png", kind, data))


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        (b"tEXt", b"exeunt\0" + b" " * (2**20 + 1), "1048576 bytes are allowed"),
        (b"zTXt", b"exeunt\0\0not zlib", "damaged"),
        (b"tEXt", b"Comment\0hello", "carries no settings"),
        (b"tEXt", b"exeunt\0{", "malformed"),
        (b"tEXt", b"exeunt\0[]", "malformed"),
        (b"tEXt", b'exeunt\0{"prompt": "x"}', "malformed"),
        (b"tEXt", b'exeunt\0{"format": 1, "prompt": 5}', "malformed"),
        (b"tEXt", b"exeunt\0" + b"[" * 100_000, "malformed"),
        (b"tEXt", b'exeunt\0{"format": 2}', "settings have format 2, this version reads 1"),
    ],
)
def test_settings_that_are_not_ours_are_refused(
    tmp_path: Path, kind: bytes, data: bytes, expected: str
) -> None:
    with pytest.raises(RequestError, match=expected):
        read_settings(_with_chunk(tmp_path / "x.png", kind, data))


def test_compressed_texts_within_the_limits_are_read(tmp_path: Path) -> None:
    text = SETTINGS.as_json().encode()
    for kind, data in [
        (b"zTXt", b"exeunt\0\0" + zlib.compress(text)),
        (b"iTXt", b"exeunt\0\1\0en\0title\0" + zlib.compress(text)),
    ]:
        assert read_settings(_with_chunk(tmp_path / "x.png", kind, data)) == SETTINGS


def test_too_many_texts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    texts = b"".join(chunk(b"tEXt", b"k%d\0" % n + b"x" * 1_000_000) for n in range(18))
    path.write_bytes(SIGNATURE + texts + chunk(b"IEND", b""))

    with pytest.raises(RequestError, match="texts in a picture exceed 16777216 bytes"):
        read_texts(path)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "not a PNG picture"),
        (b"\xff\xd8\xff\xe0 a photograph", "not a PNG picture"),
        (SIGNATURE, "cut off"),
        (picture()[:-12], "cut off"),
        (SIGNATURE + b"\xff\xff\xff\xfftEXt", "cut off"),
        (SIGNATURE + chunk(b"abCd", b"") * 100_001, "more than 100000 chunks"),
        (SIGNATURE + chunk(b"tEXt", b"k\0v")[:-1] + b"\0", "damaged"),
    ],
)
def test_what_is_no_picture_is_refused(tmp_path: Path, data: bytes, expected: str) -> None:
    (tmp_path / "x.png").write_bytes(data)

    with pytest.raises(RequestError, match=expected):
        read_texts(tmp_path / "x.png")


# ---- names ---------------------------------------------------------------------------------


def test_a_taken_name_gets_a_counter(tmp_path: Path) -> None:
    paths = [write_png(picture(n), tmp_path, prompt="a fox", seed=1) for n in range(3)]

    assert [path.name for path in paths] == ["a-fox-1.png", "a-fox-1-2.png", "a-fox-1-3.png"]
    assert [path.read_bytes() for path in paths] == [picture(n) for n in range(3)]
    assert listing(tmp_path) == sorted(path.name for path in paths)


def test_overwriting_is_asked_for(tmp_path: Path) -> None:
    write_png(picture(1), tmp_path, name="fox")

    path = write_png(picture(2), tmp_path, name="fox", overwrite=True)

    assert path.read_bytes() == picture(2)
    assert listing(tmp_path) == ["fox.png"]


def test_names_may_have_subfolders(tmp_path: Path) -> None:
    path = write_png(picture(), tmp_path / "out", name="a/b/x.png")

    assert path == tmp_path / "out" / "a" / "b" / "x.png"
    assert path.read_bytes() == picture()


def test_the_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert write_png(picture(), "out", name="x") == tmp_path / "out" / "x.png"


@pytest.mark.parametrize(
    "name", ["../x", "/tmp/x", "a/../../x", "..\\x", "~/x", "C:\\x", "x\0.png", "..", "", "-rf"]
)
def test_nothing_is_written_outside_of_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    before = listing(tmp_path)

    with pytest.raises(RequestError):
        write_png(picture(), tmp_path / "out", name=name)

    assert listing(tmp_path) == before


@pytest.mark.parametrize("name", ["link/x", "sub/link/x"])
def test_a_linked_subfolder_is_refused(tmp_path: Path, name: str) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    (out / "sub").mkdir(parents=True)
    other.mkdir()
    (out / "link").symlink_to(other)
    (out / "sub" / "link").symlink_to(other, target_is_directory=True)

    with pytest.raises(RequestError, match=r"subfolder is a link or a file: .*link"):
        write_png(picture(), out, name=name)

    assert listing(other) == []


def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture goes into the folder that was opened, whatever bears its name by then."""
    out, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()
    link = os.link

    def swap_then_link(*args: object, **kwargs: object) -> None:
        (out / "sub").rename(out / "moved")
        (out / "sub").symlink_to(other)
        link(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", swap_then_link)
    write_png(picture(), out, name="sub/x")

    assert listing(other) == []
    assert (out / "moved" / "x.png").read_bytes() == picture()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_in_place_of_a_file_is_not_written_through(tmp_path: Path, overwrite: bool) -> None:
    out, secret = tmp_path / "out", tmp_path / "secret"
    out.mkdir()
    secret.write_text("secret")
    (out / "x.png").symlink_to(secret)

    path = write_png(picture(), out, name="x", overwrite=overwrite)

    assert secret.read_text() == "secret"
    assert path.name == ("x.png" if overwrite else "x-2.png")
    assert not path.is_symlink()


def test_a_disk_without_hard_links_keeps_the_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)

    paths = [write_png(picture(n), tmp_path, name="x") for n in range(3)]

    assert [path.name for path in paths] == ["x.png", "x-2.png", "x-3.png"]
    assert [path.read_bytes() for path in paths] == [picture(n) for n in range(3)]
    assert len(listing(tmp_path)) == 3


RACE = """
import os, sys
from tests.support.saved import write_png
from pathlib import Path
png = Path(sys.argv[1]).read_bytes()
start, end = os.pipe()
pids = []
for number in range(20):
    if (pid := os.fork()) == 0:
        os.close(end)
        os.read(start, 1)  # all start together, when the pipe is closed
        try:
            for _ in range(3):
                write_png(png + b"%d" % number, sys.argv[2], prompt="a fox", seed=1)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\\n".encode())
        finally:
            os._exit(0)
    pids.append(pid)
os.close(end)
for pid in pids:
    os.waitpid(pid, 0)
"""


def test_twenty_processes_that_want_one_name_lose_no_picture(tmp_path: Path) -> None:
    (tmp_path / "in.png").write_bytes(picture())
    out = tmp_path / "out"

    run = subprocess.run(
        [sys.executable, "-c", RACE, str(tmp_path / "in.png"), str(out)],
        capture_output=True,
        text=True,
        check=True,
    )

    assert run.stderr == ""
    expected = {f"a-fox-1-{n}.png" for n in range(2, 61)} | {"a-fox-1.png"}
    assert set(listing(out)) == expected
    made = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir())
    wanted = [hashlib.sha256(picture() + b"%d" % n).hexdigest() for n in range(20)] * 3
    assert made == sorted(wanted)


# ---- folders -------------------------------------------------------------------------------


def test_an_output_folder_is_made_and_found_writable(tmp_path: Path) -> None:
    assert check_output_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert listing(tmp_path) == ["a", "a/b"]


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(RequestError, match="output folder is not a folder"):
        check_output_folder(tmp_path / "file")
    with pytest.raises(ArtifactError, match="output folder is a file"):
        write_png(picture(), tmp_path / "file", name="x")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_an_output_folder_of_another_user_is_refused_with_its_owner(tmp_path: Path) -> None:
    from tests.support.users import NOBODY, nobody, open_to_others

    out = open_to_others(tmp_path) / "out"
    out.mkdir(mode=0o755)

    with nobody():
        with pytest.raises(RequestError, match=rf"output folder is not writable for uid {NOBODY}"):
            check_output_folder(out)
        with pytest.raises(ArtifactError, match=rf"{out} \(owner uid 0, mode 0755\)"):
            write_png(picture(), out, name="x")

    assert listing(out) == []


def test_writing_pictures_loads_no_torch_and_no_imaging_library() -> None:
    code = "import sys, stages.media; print({'torch', 'numpy', 'PIL'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert run.stdout.strip() == "set()"
