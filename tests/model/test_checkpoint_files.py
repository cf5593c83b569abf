"""Damaged files and folders: DI-13, DI-14, DI-17 of the hard inputs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.checkpoint.header import encode_header, read_header
from deepinfer.checkpoint.layout import open_checkpoint
from deepinfer.checkpoint.load import load_weights
from deepinfer.errors import CheckpointError, UsageError
from deepinfer.quant.formats import Packed
from tests import t6

ROOT = Path(__file__).parents[2]
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return t6.write(tmp_path_factory.mktemp("files") / "t6", draft=False)


@pytest.fixture
def folder(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "t6"))


def refused(folder) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert caught.value.exit_status == 4
    return caught.value


def weight_hash(path) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(load_weights(open_checkpoint(path)).items()):
        parts = (value.codes, value.scales) if isinstance(value, Packed) else (value,)
        for part in parts:
            digest.update(name.encode())
            digest.update(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


# -- DI-13: index, shards and tensors disagree -----------------------------------------------------


def test_di13a_deleted_shard(folder):
    (folder / TWO).unlink()
    error = refused(folder)
    assert error.code == "checkpoint-incomplete" and error.message == "checkpoint is incomplete"
    assert error.facts[0] == f"the index names 2 shards, 1 are here; first missing: {TWO}"
    assert "finish the download" in error.hint


def test_di13a_all_missing_names_are_listed(folder):
    (folder / ONE).unlink()
    (folder / TWO).unlink()
    assert ONE in str(refused(folder)) and TWO in str(refused(folder))


def test_di13b_index_points_into_the_wrong_shard(folder):
    edit_index(folder, lambda m: m.update({"norm.weight": ONE if m["norm.weight"] == TWO else TWO}))
    error = refused(folder)
    assert error.code == "checkpoint-index-invalid"
    assert re.match(r"norm\.weight is not in model-0000[12]-of-00002\.safetensors", error.message)


def test_di13c_stray_file_is_ignored_with_one_warning(folder, original):
    values = load_file(folder / ONE)
    save_file({"norm.weight": torch.zeros(64), **values}, folder / "extra.safetensors")
    checkpoint = open_checkpoint(folder)
    assert len(checkpoint.warnings) == 1 and "extra.safetensors" in checkpoint.warnings[0]
    assert weight_hash(folder) == weight_hash(original)


def test_di13d_second_copy_in_a_listed_shard_is_ignored_with_one_warning(folder, original):
    owner = json.loads((folder / INDEX).read_text())["weight_map"]["norm.weight"]
    other = ONE if owner == TWO else TWO
    values = load_file(folder / other)
    save_file({**values, "norm.weight": torch.full((64,), 7.0)}, folder / other)
    checkpoint = open_checkpoint(folder)
    assert len(checkpoint.warnings) == 1 and f"norm.weight in {other}" in checkpoint.warnings[0]
    assert weight_hash(folder) == weight_hash(original)


def test_di13e_single_file_without_index_loads(folder, original):
    values = load_file(folder / ONE) | load_file(folder / TWO)
    for name in (ONE, TWO, INDEX):
        (folder / name).unlink()
    save_file(values, folder / "model.safetensors")
    assert open_checkpoint(folder).warnings == ()
    assert weight_hash(folder) == weight_hash(original)


def test_shards_without_their_index_are_not_guessed(folder):
    (folder / INDEX).unlink()
    assert INDEX in str(refused(folder))
    (folder / TWO).unlink()
    assert refused(folder).code == "checkpoint-incomplete"  # "1 of 2" is not a whole model
    (folder / ONE).unlink()
    assert "no .safetensors file" in str(refused(folder))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "", 3])
def test_index_cannot_reach_outside_of_its_folder(folder, name):
    edit_index(folder, lambda m: m.update({"norm.weight": name}))
    error = refused(folder)
    assert error.code == "checkpoint-index-invalid" and "norm.weight" in error.message


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', "[" * 100_000])
def test_malformed_index(folder, text):
    (folder / INDEX).write_text(text)
    assert refused(folder).code == "checkpoint-index-invalid"


# -- DI-14: truncated or malformed safetensors -----------------------------------------------------


def header_of(raw: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def with_header(text: str, data: bytes) -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode() + data


def changed(raw: bytes, **entry) -> bytes:
    header, data = header_of(raw)
    name = next(n for n in header if n != "__metadata__")
    header[name].update(entry)
    return with_header(json.dumps(header), data)


def duplicate_key(raw: bytes) -> bytes:
    header, data = header_of(raw)
    name = next(n for n in header if n != "__metadata__")
    text = json.dumps(header)
    return with_header(f'{{"{name}": {json.dumps(header[name])}, {text[1:]}', data)


def reordered(raw: bytes, shift: int) -> bytes:
    """Moves the second tensor by `shift` bytes, keeping its length."""
    header, data = header_of(raw)
    names = sorted((n for n in header if n != "__metadata__"),
                   key=lambda n: header[n]["data_offsets"])  # fmt: skip
    begin, end = header[names[1]]["data_offsets"]
    header[names[1]]["data_offsets"] = [begin + shift, end + shift]
    return with_header(json.dumps(header), data)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1335032\n"
BROKEN = {
    "cut by one byte": (lambda raw: raw[:-1], r"cut short: (\d+) bytes declared, the file has"),
    "cut inside the header": (lambda raw: raw[:200], r"the header declares \d+ bytes, the file"),
    "header length 2^40": (
        lambda raw: (2**40).to_bytes(8, "little") + raw[8:],
        "the header declares 1099511627776 bytes",
    ),
    "header length 2^64 - 1": (lambda raw: b"\xff" * 8 + raw[8:], "the header declares"),
    "16 trailing bytes": (lambda raw: raw + b"\0" * 16, "16 bytes too many"),
    "duplicate key": (duplicate_key, r"the header has the key '.*' twice"),
    "text pointer": (lambda raw: POINTER, "a text pointer of 72 bytes"),
    "other text": (lambda raw: b"<html>not found</html>", "a text file?"),
    "empty": (lambda raw: b"", "0 bytes are too few"),
    "not JSON": (lambda raw: with_header("{" * 64, b""), "the header is not JSON"),
    "deep JSON": (lambda raw: with_header("[" * 100_000, b""), "the header is not JSON"),
    "not UTF-8": (lambda raw: (4).to_bytes(8, "little") + b"\xff\xfe{}", "the header is not JSON"),
    "not an object": (lambda raw: with_header("[1]", b""), "not a JSON object"),
    "unknown type": (lambda raw: changed(raw, dtype="F7"), "the unknown type 'F7'"),
    "type as list": (lambda raw: changed(raw, dtype=["F32"]), "the unknown type"),
    "negative size": (lambda raw: changed(raw, shape=[-1]), "malformed shape"),
    "wrong size": (lambda raw: changed(raw, shape=[2**40, 2**40]), "spans"),
    "one offset": (lambda raw: changed(raw, data_offsets=[0]), "malformed shape or data_offsets"),
    "hole": (lambda raw: reordered(raw, 4), "leaves a hole"),
    "overlap": (lambda raw: reordered(raw, -4), "overlaps the tensor before it"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_di14_damaged_file_is_one_line_with_name_and_fault(folder, case):
    damage, expected = BROKEN[case]
    (folder / TWO).write_bytes(damage((folder / TWO).read_bytes()))
    tracemalloc.start()
    started = time.monotonic()
    error = refused(folder)
    seconds, (_, peak) = time.monotonic() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert error.code == "checkpoint-file-invalid"
    assert str(error).startswith(f"{TWO}: ") and "\n" not in str(error)
    assert re.search(expected, str(error)), str(error)
    assert seconds < 5 and peak < 16 << 20


def test_di14_empty_metadata_loads(folder, original):
    header, data = header_of((folder / TWO).read_bytes())
    header["__metadata__"] = {}
    (folder / TWO).write_bytes(with_header(json.dumps(header), data))
    assert weight_hash(folder) == weight_hash(original)


def test_file_that_shrinks_between_check_and_load_is_an_error(folder):
    checkpoint = open_checkpoint(folder)
    raw = (folder / TWO).read_bytes()
    (folder / TWO).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError, match=f"{TWO}: ended inside"):
        load_weights(checkpoint)


def test_header_round_trip(tmp_path):
    tensors = {"a": ("F32", (2, 3)), "b": ("F8_E8M0", (5,)), "c": ("BF16", ())}
    raw = encode_header(tensors)
    assert len(raw) % 8 == 0
    (tmp_path / "x.safetensors").write_bytes(raw + bytes(24 + 5 + 2))
    got = read_header(tmp_path / "x.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in got.items()} == tensors
    assert got["b"].begin == len(raw) + 24 and got["c"].nbytes == 2


# -- DI-17: paths ----------------------------------------------------------------------------------


def test_di17_non_ascii_spaces_relative_and_trailing_slash(original, tmp_path, monkeypatch):
    strange = Path(shutil.copytree(original, tmp_path / "模型 é 🚀 x"))
    expected = weight_hash(original)
    assert weight_hash(strange) == expected
    assert weight_hash(f"{strange}/") == expected
    monkeypatch.chdir(tmp_path)
    assert weight_hash("模型 é 🚀 x") == expected
    assert weight_hash("./模型 é 🚀 x/") == expected


def linked(original: Path, tmp_path: Path) -> Path:
    """The layout of a download cache: shards are links to blobs without an extension."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    for i, file in enumerate(sorted(original.iterdir())):
        shutil.copy(file, blobs / f"blob{i}")
        (folder / file.name).symlink_to(Path("..") / "blobs" / f"blob{i}")
    return folder


def test_di17_shards_as_links_to_blobs(original, tmp_path):
    folder = linked(original, tmp_path)
    assert weight_hash(folder) == weight_hash(original)
    (tmp_path / "again").symlink_to(folder)
    assert weight_hash(tmp_path / "again") == weight_hash(original)


def test_di17_dangling_links_name_link_and_target(original, tmp_path):
    folder = linked(original, tmp_path)
    target = os.readlink(folder / TWO)
    (folder / target).unlink()
    assert f"{TWO} is a dangling link to {target}" in str(refused(folder))
    (tmp_path / "gone").symlink_to("nowhere")
    assert "a dangling link to nowhere, expected a directory" in str(refused(tmp_path / "gone"))


def test_di17_a_file_instead_of_a_directory(folder):
    error = refused(folder / TWO)
    assert error.code == "model-dir-not-a-checkpoint"
    assert "expected a directory" in error.message


LOCALE_CODE = """
import sys
from pathlib import Path
from deepinfer.checkpoint.layout import open_checkpoint
for name in sys.argv[1:]:
    try:
        print(len(open_checkpoint(name).tensors))
    except Exception as error:
        print(type(error).__name__, error, file=sys.stderr)
"""


@pytest.mark.parametrize("utf8", ["0", "1"])
def test_di17_everything_again_under_lang_c(original, tmp_path, utf8):
    strange = Path(shutil.copytree(original, tmp_path / "模型 é 🚀 x"))
    missing = tmp_path / "не здесь"
    broken = Path(shutil.copytree(original, tmp_path / "kaputt 🚀"))
    (broken / TWO).unlink()
    env = {**os.environ, "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": utf8}
    env |= {"PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONIOENCODING", None)
    run = subprocess.run(
        [sys.executable, "-c", LOCALE_CODE, strange, missing, broken], env=env, capture_output=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(len(open_checkpoint(original).tensors)).encode()]
    assert b"does not exist" in run.stderr and b"UsageError" in run.stderr
    assert b"checkpoint is incomplete" in run.stderr


# -- the folder itself -----------------------------------------------------------------------------


def test_missing_folder_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError) as caught:
        open_checkpoint(tmp_path / "V41", origin="DEEPINFER_HF_MODEL_DIR")
    assert caught.value.code == "model-dir-missing" and caught.value.exit_status == 2
    assert caught.value.facts == ("from DEEPINFER_HF_MODEL_DIR",)


def test_parent_folder_names_the_checkpoint_below(folder):
    error = refused(folder.parent)
    assert error.code == "model-dir-not-a-checkpoint"
    assert error.facts == (f"no config.json here; found one in {folder}",)
    assert error.hint == f"-m {folder}"


@pytest.mark.parametrize("text", ["", "{", "[1]", "\udcff", "[" * 100_000])
def test_malformed_config(folder, text):
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert refused(folder).code == "config-invalid"


def test_token_map_is_checked(folder):
    path = folder / "engram_token_map.json"
    good = json.loads(path.read_text())
    for change, expected in (
        ({"token_map": good["token_map"][:-1]}, "266 entries, expected vocab_size 267"),
        ({"token_map": [*good["token_map"][:-1], 238]}, "token 266 maps to 238"),
        ({"token_map": [True, *good["token_map"][1:]]}, "token 0 maps to True"),
        ({"token_map": None}, "no list entries"),
        ({"compressed_vocab_size": 7}, "compressed_vocab_size is 7, config.json says 238"),
    ):
        path.write_text(json.dumps({**good, **change}))
        error = refused(folder)
        assert error.code == "token-map-invalid" and expected in str(error)
