"""Entries on the disk: what is read is what was written or nothing, and no fault of the disk reaches the caller."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from wideload import store
from wideload.cache import read_stored
from wideload.store import cache_folder, clear_entries, inspect_folder, max_bytes, read_entry, write_entry

A, B, C, D = (digit * 64 for digit in "abcd")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache folder of one test, as a process finds it that has not used it yet."""
    monkeypatch.delenv("WIDELOAD_CACHE", raising=False)
    monkeypatch.delenv("WIDELOAD_CACHE_MAX_BYTES", raising=False)
    monkeypatch.setenv("WIDELOAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_has_warned", False)
    store._sweep_once.cache_clear()
    store._as_first_met.cache_clear()
    return tmp_path / "cache"


def file_of(folder: Path, key: str) -> Path:
    return folder / "cubins" / f"{key}.cubin"


def parts(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.part"))


# ---- reading what was written


def test_what_was_written_is_read() -> None:
    assert read_entry(A) is None
    write_entry(A, b"first")
    write_entry(B, b"")
    assert (read_entry(A), read_entry(B), read_entry(C)) == (b"first", b"", None)
    write_entry(A, b"second")
    assert read_entry(A) == b"second"


def test_any_damage_is_a_missing_entry_and_is_mended(folder: Path) -> None:
    write_entry(A, b"some code\n{}")
    path = file_of(folder, A)
    whole = path.read_bytes()
    damaged = [whole[:end] for end in range(len(whole))]
    damaged += [whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :] for at in range(len(whole)) for bit in (0, 7)]
    damaged += [whole + b"\0", bytes(len(whole)), whole[::-1], b"not one of ours" * 10]
    for content in damaged:
        path.write_bytes(content)
        assert read_entry(A) is None, content
    write_entry(A, b"some code\n{}")
    assert read_entry(A) == b"some code\n{}"


def test_an_entry_under_another_name_is_not_that_one(folder: Path) -> None:
    write_entry(A, b"of a")
    file_of(folder, B).write_bytes(file_of(folder, A).read_bytes())
    assert read_entry(B) is None


def test_a_folder_in_the_place_of_an_entry_costs_a_warning(folder: Path) -> None:
    file_of(folder, A).mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    with pytest.warns(RuntimeWarning, match="memory only"):
        assert read_entry(A) is None
    write_entry(A, b"code")
    assert parts(folder) == []


PLACES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to(os.ttyname(os.openpty()[1])),
    "a link to nowhere": lambda path: path.symlink_to(path.parent / "nowhere"),
    "unreadable": lambda path: path.touch(mode=0o200),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.filterwarnings("ignore:wideload keeps compiled kernels in memory only")
def test_what_is_no_file_in_the_place_of_one_is_a_missing_entry_and_nothing_waits_for_it(folder: Path, place: str) -> None:
    write_entry(A, b"code")
    file_of(folder, A).unlink()
    PLACES[place](file_of(folder, A))
    PLACES[place](folder / "cubins" / "tmp" / "x.part")
    store._sweep_once.cache_clear()
    assert read_entry(A) is None
    assert [read_stored(entry) for entry in inspect_folder().entries] == ([] if place == "a folder" else [None])
    write_entry(A, b"code")
    assert read_entry(A) == (None if place == "a folder" else b"code")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["", "cubins", "cubins/tmp"])
@pytest.mark.filterwarnings("ignore:wideload keeps compiled kernels in memory only")
def test_what_is_no_folder_in_the_place_of_one_keeps_nothing_and_nothing_waits_for_it(folder: Path, name: str, place: str) -> None:
    if place == "a folder":
        return
    (folder / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    PLACES[place](folder / name)
    store._sweep_once.cache_clear()
    assert read_entry(A) is None
    write_entry(A, b"code")
    assert read_entry(A) is None
    assert inspect_folder().entries == ()


def test_a_folder_that_is_called_like_an_entry_is_nobodys_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_entry(A, b"code")
    file_of(folder, C).mkdir()
    os.utime(file_of(folder, C), (1, 1))
    assert [entry.key for entry in inspect_folder().entries] == [A]
    monkeypatch.setenv("WIDELOAD_CACHE_MAX_BYTES", str(entry_bytes(b"code") + 1))
    store._headroom.clear()
    write_entry(B, b"code")
    assert (read_entry(A), read_entry(B)) == (None, b"code")
    assert [entry.key for entry in clear_entries()] == [B]
    assert file_of(folder, C).is_dir()


def test_what_cannot_be_swept_costs_no_entry(folder: Path) -> None:
    write_entry(A, b"code")
    (folder / "cubins" / "tmp" / "x.part").mkdir()
    store._sweep_once.cache_clear()
    assert read_entry(A) == b"code"
    write_entry(B, b"more")
    assert read_entry(B) == b"more"


def test_files_are_the_users_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        write_entry(A, b"code")
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in (folder, folder / "cubins", folder / "cubins" / "tmp", file_of(folder, A))}
    assert list(modes.values()) == [0o700, 0o700, 0o700, 0o600]


# ---- whose folder


@pytest.mark.parametrize(("mode", "said"), [(0o777, "mode is 777"), (0o770, "mode is 770"), (0o702, "mode is 702")])
def test_a_folder_that_others_can_write_is_refused(folder: Path, mode: int, said: str) -> None:
    write_entry(A, b"code")
    folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match=said):
        assert read_entry(A) is None
    write_entry(B, b"code")
    assert said in str(inspect_folder().fault)
    folder.chmod(0o755)
    assert (read_entry(A), read_entry(B)) == (b"code", None)


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_entry(A, b"code")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.warns(RuntimeWarning, match=f"belongs to user {me}"):
        assert read_entry(A) is None
    write_entry(B, b"code")
    assert not file_of(folder, B).exists()
    assert f"belongs to user {me}" in str(inspect_folder().fault)


def test_a_file_that_others_could_write_is_replaced(folder: Path) -> None:
    write_entry(A, b"code")
    file_of(folder, A).chmod(0o666)
    assert read_entry(A) is None
    write_entry(A, b"mine")
    assert read_entry(A) == b"mine"


# ---- which folder


def test_the_environment_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("WIDELOAD_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WIDELOAD_CACHE_DIR", "own")
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("WIDELOAD_CACHE_DIR")
    assert cache_folder() == tmp_path / "xdg" / "wideload"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / "home" / ".cache" / "wideload"
    monkeypatch.setenv("WIDELOAD_CACHE", "0")
    assert cache_folder() is None


def test_a_folder_that_has_no_absolute_path_fails_no_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("WIDELOAD_CACHE_DIR", "own")
    write_entry(A, b"code")
    assert (read_entry(A), clear_entries(), inspect_folder().entries) == (None, (), ())


def test_a_relative_name_keeps_its_meaning_when_the_process_moves(tmp_path: Path) -> None:
    """Named before the process began, or by itself; an unchanged name is not asked anew where it is later."""
    program = """
import os
import wideload
from wideload import store, tuned
os.chdir("elsewhere")
print(store.cache_folder(), *store.built_folders(), tuned.tuned_path())
os.environ["WIDELOAD_CACHE_DIR"] = "own"
print(store.cache_folder())
os.chdir("..")
print(store.cache_folder(), *(store.own_environment()[f"WIDELOAD_{name}"] for name in ("CACHE_DIR", "BUILT_DIR", "TUNING")))
"""
    (tmp_path / "elsewhere").mkdir()
    named = {"WIDELOAD_CACHE_DIR": "cache", "WIDELOAD_BUILT_DIR": "a:b/../c:/d", "WIDELOAD_TUNING": "~none/t.json"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=os.environ | named, capture_output=True, text=True, check=True)
    cache, built, tuning = tmp_path / "cache", [str(tmp_path / "a"), str(tmp_path / "b/../c"), "/d"], tmp_path / "~none/t.json"
    own = tmp_path / "elsewhere" / "own"
    assert done.stdout.splitlines() == [f"{cache} {' '.join(built)} {tuning}", str(own), f"{own} {own} {':'.join(built)} {tuning}"]


def test_a_user_who_is_not_there_has_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WIDELOAD_CACHE_DIR", "~no-such-user/own")
    assert cache_folder() == tmp_path / "~no-such-user" / "own"
    write_entry(A, b"code")
    assert read_entry(A) == b"code"


def test_a_link_to_nowhere_is_said(folder: Path) -> None:
    folder.symlink_to(folder.parent / "nowhere")
    assert "No such file" in str(inspect_folder().fault)


def test_a_name_that_no_disk_takes_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WIDELOAD_CACHE_DIR", str(tmp_path / ("x" * 300)))
    assert "File name too long" in str(inspect_folder().fault)
    with pytest.warns(RuntimeWarning, match="File name too long"):
        assert read_entry(A) is None


def test_turned_off_nothing_is_read_or_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_entry(A, b"code")
    monkeypatch.setenv("WIDELOAD_CACHE", "0")
    write_entry(B, b"code")
    assert read_entry(A) is None
    assert not file_of(folder, B).exists()
    assert "WIDELOAD_CACHE=0" in str(inspect_folder().fault)
    assert clear_entries() == ()


# ---- disks that fail


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["mkstemp", "flock", "replace"])
def test_a_disk_that_fails_costs_one_warning(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    write_entry(A, b"code")

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr({"mkstemp": tempfile, "flock": fcntl, "replace": os}[call], call, fail)
    with pytest.warns(RuntimeWarning, match=os.strerror(code)) as caught:
        write_entry(B, b"code")
    assert "WIDELOAD_CACHE_DIR" in str(caught[0].message)
    warn = Mock()
    monkeypatch.setattr(warnings, "warn", warn)
    write_entry(C, b"code")
    warn.assert_not_called()
    assert (read_entry(A), read_entry(B), parts(folder)) == (b"code", None, [])


def test_a_write_that_stops_half_way_leaves_nothing(folder: Path) -> None:
    program = f"""
import resource
from wideload import store
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
store.write_entry({A!r}, bytes(5000))
assert store.read_entry({A!r}) is None
store.write_entry({B!r}, bytes(500))
assert store.read_entry({B!r}) == bytes(500)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning: wideload keeps compiled kernels in memory only") == 1
    assert [path.name for path in folder.rglob("*") if path.is_file()] == [f"{B}.cubin"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_still_read(folder: Path) -> None:
    write_entry(A, b"code")
    for path in (folder / "cubins" / "tmp", folder / "cubins", folder):
        path.chmod(0o500)
    assert "cannot be written" in str(inspect_folder().fault)
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        write_entry(B, b"code")
    assert read_entry(A) == b"code"
    for path in (folder, folder / "cubins", folder / "cubins" / "tmp"):
        path.chmod(0o700)


def test_a_file_in_the_place_of_the_folder_costs_a_warning(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.warns(RuntimeWarning, match="memory only"):
        assert read_entry(A) is None
    write_entry(A, b"code")
    assert "not a folder" in str(inspect_folder().fault)


def test_warnings_that_are_errors_fail_no_call(folder: Path) -> None:
    folder.write_text("a file")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_entry(A) is None
        write_entry(A, b"code")


def test_a_folder_removed_meanwhile_is_made_again(folder: Path) -> None:
    write_entry(A, b"code")
    os.rename(folder, folder.with_name("gone"))
    assert read_entry(A) is None
    write_entry(B, b"code")
    assert read_entry(B) == b"code"


# ---- killed writers


def test_what_a_killed_writer_left_is_removed_and_a_living_ones_is_not(folder: Path) -> None:
    write_entry(A, b"code")
    tmp = folder / "cubins" / "tmp"
    dead, living, other = tmp / "dead.part", tmp / "living.part", tmp / "notes.txt"
    for path in (dead, living, other):
        path.write_bytes(b"half")
    with living.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store._sweep_once.cache_clear()
        assert read_entry(A) == b"code"
    assert [path.name for path in sorted(tmp.iterdir())] == ["living.part", "notes.txt"]
    clear_entries()
    assert [path.name for path in sorted(tmp.iterdir())] == ["notes.txt"]


def test_a_writer_swept_before_its_lock_loses_the_entry_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock

    def sweep_first(file: object, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        store._sweep(folder / "cubins" / "tmp")
        lock(file, operation)  # type: ignore[call-overload]

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    write_entry(A, b"code")  # warnings are errors here
    assert (read_entry(A), parts(folder)) == (None, [])
    write_entry(A, b"code")
    assert read_entry(A) == b"code"


# ---- size


def entry_bytes(payload: bytes) -> int:
    return len(payload) + 32  # a SHA-256


def use(folder: Path, key: str, seconds_ago: float) -> None:
    used_at = time.time() - seconds_ago
    os.utime(file_of(folder, key), (used_at, used_at))


def test_entries_used_longest_ago_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = bytes(1000)
    monkeypatch.setenv("WIDELOAD_CACHE_MAX_BYTES", str(int(3.5 * entry_bytes(payload))))
    for key, seconds_ago in ((A, 300), (B, 200), (C, 100)):
        write_entry(key, payload)
        use(folder, key, seconds_ago)
    assert read_entry(A) == payload  # used last, now
    write_entry(D, payload)
    assert [read_entry(key) for key in (A, B, C, D)] == [payload, None, payload, payload]
    assert inspect_folder().nbytes <= max_bytes()


def test_the_limit_holds_over_many_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDELOAD_CACHE_MAX_BYTES", "40000")
    for number in range(200):
        write_entry(f"{number:064x}", bytes(1000))
        assert inspect_folder().nbytes <= 40000
    assert inspect_folder().nbytes > 30000


def test_an_entry_beyond_the_limit_is_not_kept_and_removes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    write_entry(A, bytes(100))
    monkeypatch.setenv("WIDELOAD_CACHE_MAX_BYTES", "1000")
    write_entry(B, bytes(1000))
    assert (read_entry(A), read_entry(B)) == (bytes(100), None)


def test_files_of_others_are_neither_counted_nor_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDELOAD_CACHE_MAX_BYTES", "400")
    write_entry(A, bytes(100))
    strangers = [folder / "notes.txt", folder / "cubins" / "notes.cubin", folder / "cubins" / A, folder / "cubins" / f"{A}.cubin.bak"]
    for path in strangers:
        path.write_bytes(bytes(5000))
    for key in (B, C, D):
        write_entry(key, bytes(100))
    assert inspect_folder().nbytes <= 400
    assert len(clear_entries()) in (2, 3)
    assert all(path.exists() for path in strangers)
    assert inspect_folder().entries == ()


@pytest.mark.parametrize("text", ["", "many", "1e9"])
def test_a_limit_that_is_no_number_is_the_default(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDELOAD_CACHE_MAX_BYTES", text)
    assert max_bytes() == 1 << 30


# ---- looking


def test_inspecting_makes_no_folder(folder: Path) -> None:
    state = inspect_folder()
    assert (state.path, state.owner, state.fault, state.entries, state.nbytes) == (folder, os.geteuid(), None, (), 0)
    assert not folder.exists()


def test_inspecting_lists_the_entry_used_last_first(folder: Path) -> None:
    for key, seconds_ago in ((A, 10), (B, 5), (C, 20)):
        write_entry(key, key.encode())
        use(folder, key, seconds_ago)
    state = inspect_folder()
    assert [entry.key for entry in state.entries] == [B, A, C]
    assert state.nbytes == 3 * entry_bytes(bytes(64))
    assert {entry.key for entry in clear_entries()} == {A, B, C}
    assert read_entry(A) is None
