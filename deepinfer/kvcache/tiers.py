"""Where pages of the prefix cache go when device memory has no room: host memory, then a folder.

Keys (kind and content digest) and opaque payloads come in, the same bytes or nothing come out; the
folder is shared by any number of processes, each of which may die at any moment. Must not know what
a payload holds, which request it came from or how a digest is made.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from deepinfer.errors import InternalError, UsageError

# ("entries" or "windows", digest of 32 bytes)
Key = tuple[str, bytes]

KINDS = ("entries", "windows")

_PAGE = re.compile(r"[0-9a-f]{64}\.(?:entries|windows)")
_TEMP = re.compile(r"\.[0-9a-f]{64}\.(?:entries|windows)\.[0-9]+\.[0-9a-f]+\.tmp")

# Magic, format version, kind, digest, digest of the identity, payload bytes; a checksum follows.
_HEAD = struct.Struct("<8sI8s32s16sQ")
_MAGIC = b"\x89DIPAGE\n"
_VERSION = 1
_SUM = 16

# Between two looks at the folder a process adds one page or this part of the cap: that is how far
# each further process can carry the total past it, until the next look.
_UNSEEN = 32


class HostTier:
    """At most `capacity_bytes` bytes of payloads in host memory; the least recently used goes."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.nbytes = 0
        self._pages: OrderedDict[Key, bytes] = OrderedDict()

    def contains(self, key: Key) -> bool:
        return key in self._pages

    def get(self, key: Key) -> bytes | None:
        """The payload, which becomes the most recently used, or None."""
        payload = self._pages.get(key)
        if payload is not None:
            self._pages.move_to_end(key)
        return payload

    def put(self, key: Key, payload: bytes) -> None:
        """Keep `payload`; one larger than the whole tier is not kept and displaces nothing."""
        if len(payload) > self.capacity_bytes:
            return
        self.nbytes += len(payload) - len(self._pages.pop(key, b""))
        self._pages[key] = payload
        while self.nbytes > self.capacity_bytes:
            _, dropped = self._pages.popitem(last=False)
            self.nbytes -= len(dropped)

    def drop(self, key: Key) -> None:
        """Forget a page."""
        self.nbytes -= len(self._pages.pop(key, b""))


class DiskTier:
    """Pages as files `<folder>/<identity>/<first two hex>/<hex>.<kind>`, readable by the user only.

    `identity` stands for everything a payload depends on beside its key (checkpoint and numerics),
    so models share one folder and one cap of `capacity_bytes` over all files. A page exists whole
    or not at all; what a disk did to it later is found by its checksum. After the constructor no
    method raises for what the folder does: `on_warning` gets a line and the page is a miss.
    """

    def __init__(
        self, folder: Path, capacity_bytes: int, identity: str, on_warning: Callable[[str], object]
    ) -> None:
        """Makes the folder and removes what dead writers left half-written.

        Raises UsageError if there is no such folder and none can be made, or it cannot be listed.
        """
        if not identity.isalnum():
            raise InternalError("page-identity", f"{identity!r} cannot name a folder")
        self.folder = Path(folder)
        self.capacity_bytes = capacity_bytes
        self.identity = identity
        self._on_warning = on_warning
        self._mark = blake2b(identity.encode(), digest_size=16).digest()
        self._read_only = False  # a write has failed: no other is tried
        self._skipped: set[str] = set()  # pages that could be neither read nor removed
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.listdir(self.folder)
        except OSError as error:
            raise UsageError(
                "prefix-cache-dir",
                "the folder given by --prefix-cache-dir cannot be used",
                (f"folder: {self.folder}", f"reason: {error.strerror}"),
            ) from error
        self._sweep()
        self._look()
        with self._writing():
            self._make_room(0)

    def contains(self, key: Key) -> bool:
        """Whether a file is there; `get` may still find it damaged, or evicted by then."""
        path = self._path(key)
        return path not in self._skipped and os.path.exists(path)

    def get(self, key: Key) -> bytes | None:
        """The payload that was put under `key`, byte for byte, or None."""
        path = self._path(key)
        if path in self._skipped:
            return None
        try:
            with open(path, "rb") as file:
                length = os.fstat(file.fileno()).st_size - _HEAD.size - _SUM
                # Nothing in the header is believed: all of it is known beforehand.
                if length >= 0 and file.read(_HEAD.size) == (head := self._head(key, length)):
                    checksum = file.read(_SUM)
                    payload = file.read(length)
                    if checksum == _checksum(head, payload):
                        _touch(file.fileno())
                        return payload
            self._warn(f"{self._name(path)} is damaged; it is computed again")
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._skipped.add(path)
            self._warn(f"{self._name(path)}: {error.strerror}; the page is not used")
        return None

    def put(self, key: Key, payload: bytes) -> None:
        """Write a page, first removing the least recently used ones (of any model) at the cap.

        Does nothing if the page is there or is larger than the cap.
        """
        path = self._path(key)
        size = _HEAD.size + _SUM + len(payload)
        if self._read_only or size > self.capacity_bytes:
            return
        with self._writing():
            with suppress(FileNotFoundError):
                if os.stat(path).st_size == size:
                    _touch(path)
                    return
            self._make_room(size)
            self._write(path, self._head(key, len(payload)), payload)
            self._used += size
            self._unseen += size

    def drop(self, key: Key) -> None:
        """Remove a page."""
        with self._writing(), suppress(FileNotFoundError):
            os.unlink(self._path(key))

    def _path(self, key: Key) -> str:
        kind, digest = key
        if kind not in KINDS or len(digest) != 32:
            raise InternalError("page-key", f"{kind!r} with {len(digest)} bytes is no page's key")
        name = digest.hex()
        return f"{self.folder}/{self.identity}/{name[:2]}/{name}.{kind}"

    def _name(self, path: str) -> str:
        return os.path.relpath(path, self.folder)

    def _head(self, key: Key, length: int) -> bytes:
        kind, digest = key
        return _HEAD.pack(_MAGIC, _VERSION, kind.encode(), digest, self._mark, length)

    def _warn(self, line: str) -> None:
        self._on_warning(f"prefix cache: {line}")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            pass  # somebody removed the folder or the temporary file: one page is not kept
        except OSError as error:
            self._read_only = True
            self._warn(f"{self.folder}: {error.strerror}; no more pages are written there")

    def _write(self, path: str, head: bytes, payload: bytes) -> None:
        folder, name = os.path.split(path)
        # The random part, not a count: process numbers repeat in containers and after a crash.
        temp = f"{folder}/.{name}.{os.getpid()}.{os.urandom(6).hex()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(temp, flags, 0o600)
        except FileNotFoundError:
            for level in (self.folder, os.path.dirname(folder), folder):
                with suppress(FileExistsError):
                    os.mkdir(level, 0o700)
            fd = os.open(temp, flags, 0o600)
        try:
            with open(fd, "wb") as file:
                # Dies with the process: see `_sweep`. Some file systems have no locks.
                with suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_EX)
                file.write(head + _checksum(head, payload))
                file.write(payload)
                file.flush()
                _touch(fd)
                # No fsync: after a power cut the checksum finds what the disk did not get.
                os.replace(temp, path)
        finally:
            with suppress(OSError):
                os.unlink(temp)

    def _files(self, wanted: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
        """Our files of all models, and no others: the user may keep something near them."""
        for identity in _listed(self.folder):
            for shard in _listed(identity.path):
                # No look into longer names: those are no folders of pages.
                for entry in _listed(shard.path) if len(shard.name) == 2 else ():
                    if wanted.fullmatch(entry.name):
                        yield entry

    def _sweep(self) -> None:
        """Remove temporary files that no living process holds."""
        for entry in self._files(_TEMP):
            with suppress(OSError), open(entry, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry)

    def _look(self) -> list[tuple[int, str, int]]:
        """Pages of all models as (time of use, path, bytes); counts them anew."""
        pages = []
        for entry in self._files(_PAGE):
            with suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                pages.append((stat.st_mtime_ns, entry.path, stat.st_size))
        self._used = sum(size for _, _, size in pages)
        self._unseen = 0
        return pages

    def _make_room(self, size: int) -> None:
        cap = self.capacity_bytes
        if self._used + size <= cap and self._unseen + size <= cap // _UNSEEN:
            return
        pages = self._look()
        if self._used + size <= cap:
            return
        # Lower than it must be, so that the next pages do not each have to look at the folder.
        goal = min(cap * 9 // 10, cap - size)
        for _, path, nbytes in sorted(pages):
            if self._used <= goal:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            self._used -= nbytes


def _checksum(head: bytes, payload: bytes) -> bytes:
    checksum = blake2b(head, digest_size=_SUM)
    checksum.update(payload)
    return checksum.digest()


def _touch(file: str | int) -> None:
    # Explicit: the file system's own clock is too coarse to order pages of one step.
    now = time.time_ns()
    with suppress(OSError):  # pages on a read-only disk are as good
        os.utime(file, ns=(now, now))


def _listed(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
