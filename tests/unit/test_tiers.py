"""The host and disk tiers: the same bytes come back or nothing does, whatever happens meanwhile."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import InternalError, UsageError
from deepinfer.kvcache.tiers import DiskTier, HostTier

ROOT = Path(__file__).parents[2]
HEADER = 92


def key(n: int, kind: str = "entries"):
    return kind, sha256(b"%d" % n).digest()


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def disk(tmp_path, warnings):
    def make(cap=1 << 20, identity="a1", folder=tmp_path / "cache"):
        return DiskTier(folder, cap, identity, warnings.append)

    return make


def file_of(tier: DiskTier, k) -> Path:
    name = k[1].hex()
    return tier.folder / tier.identity / name[:2] / f"{name}.{k[0]}"


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def total(folder: Path) -> int:
    return sum(p.stat().st_size for p in files(folder))


def python(code: str, *args: object) -> dict:
    """What `code` prints, as JSON, from a process without threads, which may fork."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout)


# Host memory


def test_host_drops_the_least_recently_used():
    tier = HostTier(30)
    for n in range(3):
        tier.put(key(n), bytes([n]) * 10)
    assert tier.get(key(0)) == bytes(10)
    tier.put(key(1), b"\1" * 10)
    tier.put(key(3), b"\3" * 5)
    assert [tier.contains(key(n)) for n in range(4)] == [True, True, False, True]
    assert tier.nbytes == 25 and tier.get(key(2)) is None
    tier.put(key(4), bytes(31))
    assert not tier.contains(key(4)) and tier.nbytes == 25, (
        "too large, and nothing made room for it"
    )
    tier.put(key(5), bytes(30))
    assert tier.contains(key(5)) and tier.nbytes == 30


def test_host_looking_is_not_using():
    tier = HostTier(2)
    tier.put(key(0), b"a")
    tier.put(key(1), b"b")
    assert tier.contains(key(0))
    tier.put(key(2), b"c")
    assert not tier.contains(key(0)) and tier.get(key(1)) == b"b"


def test_host_without_capacity_and_kinds_of_one_digest():
    assert HostTier(0).get(key(0)) is None
    tier = HostTier(0)
    tier.put(key(0), b"a")
    assert (tier.contains(key(0)), tier.nbytes) == (False, 0)
    tier = HostTier(9)
    tier.put(key(0), b"a")
    tier.put(key(0, "windows"), b"")
    assert (tier.get(key(0)), tier.get(key(0, "windows"))) == (b"a", b"")


@given(st.integers(0, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60))
def test_host_is_a_dictionary_with_a_cap(capacity, moves):
    tier, order = HostTier(capacity), []
    for write, n in moves:
        held = n in order
        if write and 3 * n <= capacity:
            tier.put(key(n), bytes([n]) * 3 * n)
            order = [m for m in order if m != n] + [n]
            while 3 * sum(order) > capacity:
                order.pop(0)
        elif not write:
            assert tier.get(key(n)) == (bytes([n]) * 3 * n if held else None)
            order = [m for m in order if m != n] + [n] * held
        assert [m for m in range(7) if tier.contains(key(m))] == sorted(order)
        assert tier.nbytes == 3 * sum(order) <= capacity


# The folder


def test_a_page_comes_back_in_this_and_another_object(disk, warnings):
    one, two = disk(), disk()
    for kind in ("entries", "windows"):
        for n, size in enumerate((0, 1, 5000)):
            payload = random.Random(n).randbytes(size)
            assert one.get(key(n, kind)) is None and not one.contains(key(n, kind))
            one.put(key(n, kind), payload)
            one.put(key(n, kind), payload)
            assert two.contains(key(n, kind)) and two.get(key(n, kind)) == payload
    assert len(files(one.folder)) == 6 and warnings == []


def test_layout_and_permissions(disk):
    tier = disk()
    mask = os.umask(0)
    try:
        tier.put(key(1), b"payload")
    finally:
        os.umask(mask)
    [file] = files(tier.folder)
    assert file == file_of(tier, key(1)) and file.stat().st_size == HEADER + 7
    assert file.stat().st_mode & 0o777 == 0o600
    for folder in (tier.folder, *file.parents[:2]):
        assert folder.stat().st_mode & 0o077 == 0


def test_models_do_not_see_each_other_and_share_the_cap(disk):
    size = HEADER + 100
    one, two = disk(4 * size, "a1"), disk(4 * size, "b2")
    one.put(key(0), b"1" * 100)
    assert not two.contains(key(0)) and two.get(key(0)) is None
    for n in range(6):
        two.put(key(n), b"2" * 100)
    assert not one.contains(key(0)) and total(one.folder) <= 4 * size
    assert two.get(key(5)) == b"2" * 100


def test_the_least_recently_used_file_goes_first(disk, warnings):
    size = HEADER + 908
    tier = disk(20 * size)
    for n in range(20):
        tier.put(key(n), b"%908d" % n)
    assert total(tier.folder) == 20 * size, "the cap itself is allowed"
    assert tier.get(key(0)) == b"%908d" % 0
    tier.put(key(1), b"%908d" % 1)
    tier.put(key(20), b"%908d" % 20)
    kept = [n for n in range(21) if tier.contains(key(n))]
    assert kept == [0, 1, *range(4, 21)], "down to 90 % of the cap, and the new one"
    tier.put(key(21), bytes(15 * size))
    assert tier.contains(key(21)) and total(tier.folder) <= 20 * size
    assert tier.contains(key(20)) and not tier.contains(key(4))
    tier.put(key(22), bytes(20 * size - HEADER + 1))
    assert not tier.contains(key(22)) and tier.contains(key(21)), "larger than the cap"
    tier.put(key(23), bytes(20 * size - HEADER))
    assert [p.stat().st_size for p in files(tier.folder)] == [20 * size]
    assert warnings == []


def test_a_smaller_cap_holds_from_the_start(disk):
    tier = disk()
    for n in range(10):
        tier.put(key(n), bytes(1000))
    disk(5000)
    assert 3000 < total(tier.folder) <= 4500 and tier.contains(key(9))
    disk(0)
    assert files(tier.folder) == []


def test_files_of_the_user_are_neither_counted_nor_removed(disk, warnings):
    tier = disk(2000)
    mine = tier.folder / "a1" / "ab"
    mine.mkdir(parents=True)
    other = [tier.folder / "notes.txt", mine.parent / "x", mine / "big.entries", mine / ".v.1.tmp"]
    for path in other:
        path.write_bytes(bytes(5000))
    tier = disk(2000)
    for n in range(9):
        tier.put(key(n), bytes(800))
    assert tier.contains(key(8)) and all(p.stat().st_size == 5000 for p in other)
    assert warnings == []


def test_what_another_process_wrote_is_counted(disk):
    """Neither object alone ever writes as much as the cap."""
    cap = 96_000
    one, two = disk(cap), disk(cap)
    for n in range(0, 240, 2):
        one.put(key(n), bytes(908))
        two.put(key(n + 1), bytes(908))
        assert n % 20 or total(one.folder) <= cap + cap // 32
    assert total(one.folder) > cap * 8 // 10


@pytest.mark.parametrize("flip", [0xFF, 0x01])
def test_every_byte_of_a_page_matters(disk, warnings, flip):
    tier, payload = disk(), b"the payload of a page"
    tier.put(key(1), payload)
    file = file_of(tier, key(1))
    good = file.read_bytes()
    assert len(good) == HEADER + len(payload)
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= flip
        file.write_bytes(bad)
        assert tier.get(key(1)) is None, place
        name = file.relative_to(tier.folder)
        assert warnings == [f"prefix cache: {name} is damaged; it is computed again"], place
        warnings.clear()
        assert not file.exists() and tier.get(key(1)) is None and warnings == []
        tier.put(key(1), payload)
        assert tier.get(key(1)) == payload


def test_short_long_and_foreign_files_are_damage(disk, warnings):
    tier, other = disk(), disk(identity="b2")
    tier.put(key(1), bytes(50))
    file = file_of(tier, key(1))
    good = file.read_bytes()
    contents = [good[:n] for n in range(len(good))] + [good + b"\0", b"text", os.urandom(4000)]
    for k in (key(2), key(1, "windows")):
        tier.put(k, bytes(50))
        contents.append(file_of(tier, k).read_bytes())
    other.put(key(1), bytes(50))
    contents.append(file_of(other, key(1)).read_bytes())
    for n, content in enumerate(contents):
        file.write_bytes(content)
        assert tier.get(key(1)) is None and not file.exists(), n
        assert len(warnings) == n + 1
    assert all("is damaged" in line and "\n" not in line for line in warnings)


def test_a_damaged_page_of_other_length_is_written_anew(disk, warnings):
    tier = disk()
    tier.put(key(1), bytes(50))
    file_of(tier, key(1)).write_bytes(b"")
    tier.put(key(1), bytes(50))
    assert tier.get(key(1)) == bytes(50) and warnings == []


def test_wrong_keys_are_bugs(disk):
    tier = disk()
    for wrong in (("entry", bytes(32)), ("entries", bytes(31)), ("../entries", bytes(32))):
        for call in (tier.contains, tier.get, lambda k: tier.put(k, b"")):
            with pytest.raises(InternalError):
                call(wrong)
    for wrong in ("", "a/b", "..", ".a"):
        with pytest.raises(InternalError):
            disk(identity=wrong)


def test_a_folder_that_cannot_be(disk, tmp_path):
    (tmp_path / "file").write_text("x")
    for bad in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("n" * 300)):
        with pytest.raises(UsageError) as caught:
            disk(folder=bad)
        assert caught.value.code == "prefix-cache-dir"
        assert "--prefix-cache-dir" in str(caught.value) and str(bad) in str(caught.value)
    disk(folder=tmp_path / "x" / "y" / "z").put(key(1), b"a")
    assert len(files(tmp_path / "x")) == 1


# What a disk and other processes do


def test_a_full_disk_is_one_warning(disk, warnings):
    """A limit on file sizes stops a write in its midst, as a full disk does."""
    tier = disk()
    tier.put(key(1), bytes(500))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        tier.put(key(2), bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    tier.put(key(3), bytes(500))
    assert [p.name for p in files(tier.folder)] == [file_of(tier, key(1)).name]
    assert tier.get(key(1)) == bytes(500)
    [line] = warnings
    assert str(tier.folder) in line and "no more pages are written" in line and "\n" not in line


@pytest.mark.parametrize("call", ["open", "replace", "mkdir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_no_failed_write_is_an_exception(disk, warnings, monkeypatch, call, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    tier = disk()
    monkeypatch.setattr(os, call, fail)
    tier.put(key(1), bytes(500))
    tier.put(key(2), bytes(500))
    monkeypatch.undo()
    assert files(tier.folder) == [] and len(warnings) == 1 and os.strerror(number) in warnings[0]
    assert tier.get(key(1)) is None


def test_a_folder_removed_meanwhile(disk, warnings, monkeypatch):
    tier = disk()
    tier.put(key(1), b"a")
    shutil.rmtree(tier.folder)
    assert tier.get(key(1)) is None and not tier.contains(key(1))
    tier.put(key(1), b"a")
    assert tier.get(key(1)) == b"a", "it was made again"
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (os.unlink(a), real(a, b)))
    tier.put(key(2), b"b")
    assert tier.get(key(2)) is None and warnings == []
    monkeypatch.undo()
    tier.put(key(2), b"b")
    assert tier.get(key(2)) == b"b", "a lost race does not end writing"


READ_ONLY = """
import json, os, sys
from pathlib import Path
from deepinfer.kvcache.tiers import DiskTier

folder, said = Path(sys.argv[1]), []
os.chdir(folder)
keys = [("entries", bytes([n]) * 32) for n in range(4)]
tier = DiskTier(Path("."), 10**6, "a1", said.append)
for k in keys[:3]:
    tier.put(k, k[1])
(folder / "a1/01" / f"{keys[1][1].hex()}.entries").write_bytes(b"damaged")
(folder / "a1/02" / f"{keys[2][1].hex()}.entries").chmod(0)
for path in (*folder.rglob("*"), folder):
    if path.is_dir():
        path.chmod(0o555)
    elif os.geteuid() == 0:
        os.chown(path, 65534, 65534)
if os.geteuid() == 0:
    os.setuid(65534)
tier = DiskTier(Path("."), 10**6, "a1", said.append)
got = []
for _ in range(2):
    for k in keys:
        got.append(tier.get(k) == k[1])
        tier.put(k, k[1])
has = [tier.contains(k) for k in keys]
small = []
DiskTier(Path("."), 100, "a1", small.append)
print(json.dumps({"said": said, "got": got, "has": has, "small": small}))
"""


def test_a_read_only_folder_still_serves(tmp_path):
    result = python(READ_ONLY, tmp_path)
    for path in (tmp_path, *tmp_path.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    assert result["got"] == [True, False, False, False] * 2
    assert result["has"] == [True, False, False, False]
    said = result["said"]
    assert sum("no more pages are written" in line for line in said) == 1
    assert sum("is damaged" in line for line in said) == 1
    assert sum("02" * 32 in line for line in said) == 1 and len(said) == 4
    assert len(result["small"]) == 1, "a cap that cannot be kept"


def test_temporary_files_of_the_dead_only(disk):
    """A living writer holds a lock on its file; the process number in the name proves nothing."""
    tier = disk()
    tier.put(key(1), b"a")
    page = file_of(tier, key(1))
    dead = page.with_name(f".{page.name}.{os.getpid()}.00ff.tmp")
    dead.write_bytes(b"half")
    child = subprocess.Popen(
        [
            sys.executable, "-c",
            "import fcntl, sys\nf = open(sys.argv[1], 'wb')\nfcntl.flock(f, fcntl.LOCK_EX)\n"
            "print(flush=True)\nsys.stdin.read()",
            page.with_name(f".{page.name}.4000000.00ff.tmp"),
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    child.stdout.readline()
    disk(identity="b2")
    assert not dead.exists() and len(files(tier.folder)) == 2 and page.exists()
    child.kill()
    child.communicate()
    disk()
    assert files(tier.folder) == [page]


def test_opening_does_not_disturb_a_living_writer(disk, monkeypatch):
    tier, real = disk(), os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (disk(), real(a, b)))
    tier.put(key(1), bytes(500))
    assert tier.get(key(1)) == bytes(500)


def test_a_file_that_another_process_evicts_first(disk, warnings, monkeypatch):
    cap, real = 10 * (HEADER + 100), os.unlink
    tier = disk(cap)
    for n in range(10):
        tier.put(key(n), bytes(100))
    monkeypatch.setattr(os, "unlink", lambda path: (real(path), real(path)))
    tier.put(key(10), bytes(100))
    monkeypatch.undo()
    assert [n for n in range(11) if tier.contains(key(n))] == [*range(1, 11)] and warnings == []


WORK = """
import json, os, random, signal, sys, time
from hashlib import sha256
from pathlib import Path
from deepinfer.kvcache.tiers import DiskTier

folder, cap = Path(sys.argv[1]), int(sys.argv[2])
digests = [sha256(b"%d" % n).digest() for n in range(96)]
sizes = [random.Random(n).choice([100, 60_000, 400_000]) for n in range(96)]

def payload(n):
    return (digests[n] * (sizes[n] // 32 + 1))[: sizes[n]]

def work(seed, until):
    rng, said = random.Random(seed), []
    tier = DiskTier(folder, cap, "a1", said.append)
    counts = {"hits": 0, "misses": 0, "wrong": 0, "said": said}
    while not until():
        n = rng.randrange(96)
        if rng.random() < 0.5:
            tier.put(("windows", digests[n]), payload(n))
        else:
            got = tier.get(("windows", digests[n]))
            counts["misses" if got is None else "hits"] += 1
            counts["wrong"] += got is not None and got != payload(n)
    return counts

def child(seed, until):
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.write(write, json.dumps(work(seed, until)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    return pid, read

def result(pid, read):
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(os.read(read, 1 << 16))
"""

KILLS = (
    WORK
    + """
stop = folder.parent / "stop"
other = child(1, stop.exists)
rng, left = random.Random(2), 0
own = DiskTier(folder, cap, "b2", print)
for kill in range(40):
    victim, pipe = child(100 + kill, lambda: False)
    time.sleep(rng.uniform(0.004, 0.04))
    os.kill(victim, signal.SIGKILL)
    assert os.waitpid(victim, 0)[1] == signal.SIGKILL
    os.close(pipe)
    left += len(list(folder.rglob(f".*.{victim}.*.tmp")))
stop.touch()
print(json.dumps({"left": left, **result(*other)}))
"""
)

TOGETHER = (
    WORK
    + """
end = time.monotonic() + 1.5
both = [child(seed, lambda: time.monotonic() > end) for seed in (1, 2, 3)]
print(json.dumps([result(*c) for c in both]))
"""
)


def whole(folder: Path, cap: int) -> int:
    """How many pages are there; a fresh tier must find every one of them undamaged."""
    said: list[str] = []
    tier = DiskTier(folder, cap, "a1", said.append)
    there = files(folder)
    assert all(p.name.endswith(".windows") for p in there), "temporary files stayed"
    for path in there:
        digest = bytes.fromhex(path.stem)
        assert (tier.get(("windows", digest)) or b"").startswith(digest)
    assert said == []
    return len(there)


def test_killed_at_any_moment(tmp_path):
    folder, cap = tmp_path / "cache", 6_000_000
    result = python(KILLS, folder, cap)
    assert (result["wrong"], result["said"]) == (0, [])
    assert result["hits"] > 20 and result["misses"] > 20, "there were both hits and evictions"
    assert result["left"] > 0, "no kill hit a write in its midst"
    assert whole(folder, cap) > 5


def test_processes_that_evict_together(tmp_path):
    folder, cap = tmp_path / "cache", 4_000_000
    results = python(TOGETHER, folder, cap)
    for result in results:
        assert (result["wrong"], result["said"]) == (0, [])
        assert result["hits"] > 20 and result["misses"] > 20
    assert cap // 2 < total(folder) <= cap + 3 * (400_000 + HEADER), "a page of each on its way"
    assert whole(folder, cap) > 5
    assert total(folder) <= cap
