"""Folders of built cubins: found by text and architecture, refused where anything is not as the manifest says, whole under any builders."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import wideload
from wideload import manifest
from wideload.errors import CompileError
from wideload.manifest import MANIFEST, Recipe, describe_missing, find_built, kernel_key, read_manifest, write_built
from wideload.nvrtc import Cubin
from wideload.store import built_folders

SOURCE = 'extern "C" __global__ void scale(float* x)\n{\n    // return x * 3\n    x[threadIdx.x] *= 3;\n}\n'
RECIPE = Recipe("my.py:scale", ("f32[8, 64]",))
AGAIN = "Build it again: wideload build my.py:scale 'f32[8, 64]' --target sm_90 -o "


def cubin(code: bytes = b"the code of scale", arch: str = "sm_90") -> Cubin:
    return Cubin(code, arch, "scale", 16, 4, 8, 32, 64, log="")


def write(folder: Path, *cubins: Cubin, recipes: Sequence[Recipe] = (RECIPE,), source: str = SOURCE) -> None:
    write_built(folder, {kernel_key(source, arch=one.arch, name=one.name): (one, recipes) for one in cubins}, "NVRTC 13.0")


def find(arch: str = "sm_90", source: str = SOURCE) -> Cubin | None:
    return find_built(source, arch=arch, name="scale")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with one kernel, which is looked in."""
    path = tmp_path / "kernels"
    monkeypatch.setenv("WIDELOAD_BUILT_DIR", str(path))
    write(path, cubin())
    return path


def file_of(folder: Path) -> Path:
    (path,) = folder.glob("*.cubin")
    return path


def edit(folder: Path, **changes: object) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ---- finding


def test_what_was_built_is_found_with_every_figure(folder: Path) -> None:
    assert find() == cubin()
    assert read_manifest(folder).wideload == wideload.__version__
    (kernel,) = read_manifest(folder).kernels.values()
    assert (kernel.nvrtc, kernel.recipes, kernel.nbytes) == ("NVRTC 13.0", (RECIPE,), 17)
    assert file_of(folder).read_bytes() == b"the code of scale"


def test_without_folders_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WIDELOAD_BUILT_DIR", raising=False)
    assert (built_folders(), find()) == ((), None)


def test_another_text_name_architecture_or_option_is_another_kernel(folder: Path) -> None:
    assert find("sm_80") is None
    assert find(source=SOURCE.replace("3;", "4;")) is None
    assert find_built(SOURCE, arch="sm_90", name="scales") is None
    assert find_built(SOURCE, arch="sm_90", name="scale", fma=True) is None


def test_comments_decide_nothing(folder: Path) -> None:
    assert find(source=SOURCE.replace("    // return x * 3\n", "\n")) == cubin()
    assert find(source=SOURCE.replace("// return x * 3", "// y = x * 3")) == cubin()
    assert find(source=SOURCE.replace("*= 3;", "*= 3;  // in place")) == cubin()


def test_of_several_folders_the_first_that_has_it_answers(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "other", cubin(b"other"), cubin(b"of sm_80", "sm_80"))
    monkeypatch.setenv("WIDELOAD_BUILT_DIR", f"{folder}{os.pathsep}{os.pathsep}{tmp_path / 'other'}")
    assert [found.code for found in (find(), find("sm_80")) if found] == [b"the code of scale", b"of sm_80"]


def test_a_folder_that_nobody_may_write_to_is_read(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert find() == cubin()
    folder.chmod(0o755)


# ---- refusing


def assert_refused(*words: str) -> None:
    with pytest.raises(CompileError) as caught:
        find()
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"", "has 0 bytes, and the manifest says 17"), (b"the code of", "has 11 bytes"), (b"the code of Scale", "its SHA-256 is not that")],
)
def test_a_cubin_that_is_not_the_one_listed_is_named(folder: Path, content: bytes, word: str) -> None:
    file_of(folder).write_bytes(content)
    assert_refused(str(file_of(folder)), word, f"{AGAIN}{folder}")


def test_a_cubin_that_is_gone_is_named(folder: Path) -> None:
    path = file_of(folder)
    path.unlink()
    assert_refused(str(path), "cannot be read: No such file", f"{AGAIN}{folder}")


def test_a_cubin_listed_for_another_architecture_is_refused(folder: Path) -> None:
    (kernel,) = read_manifest(folder).kernels.values()
    wrong = dataclasses.asdict(dataclasses.replace(kernel, arch="sm_80"))
    edit(folder, kernels={kernel_key(SOURCE, arch="sm_90", name="scale"): wrong})
    assert_refused(MANIFEST, "lists scale for sm_80 under the key of scale for sm_90", AGAIN)


def test_another_version_is_refused(folder: Path) -> None:
    edit(folder, wideload="0.0.1")
    assert_refused(str(folder / MANIFEST), "by wideload 0.0.1", f"this is wideload {wideload.__version__}", "Build", "again")


def test_another_format_is_refused(folder: Path) -> None:
    edit(folder, format=0)
    assert_refused("in format 0", f"reads format {manifest.FORMAT}")


@pytest.mark.parametrize("content", ["", "{", "[]", "\0", "[" * 100_000])
def test_a_manifest_that_cannot_be_read_is_named(folder: Path, content: str) -> None:
    (folder / MANIFEST).write_text(content)
    assert_refused(str(folder / MANIFEST), "cannot be read", "Remove")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to(os.ttyname(os.openpty()[1])), Path.mkdir], ids=["pipe", "device", "folder"]
)
def test_what_is_no_file_in_the_place_of_one_is_named_and_nothing_waits_for_it(folder: Path, make: Callable[[Path], object]) -> None:
    built = file_of(folder)
    built.unlink()
    make(built)
    assert_refused(str(built), "cannot be read", f"{AGAIN}{folder}")
    (folder / MANIFEST).unlink()
    make(folder / MANIFEST)
    assert_refused(str(folder / MANIFEST), "cannot be read", "Remove")


@pytest.mark.usefixtures("impatient")
def test_pipes_in_the_way_of_a_build_give_way(folder: Path) -> None:
    built = file_of(folder)
    for path in (built, folder / MANIFEST, folder / ".lock"):
        path.unlink()
    for path in (built, built.with_name(f"{built.name}.part"), folder / MANIFEST, folder / f"{MANIFEST}.part", folder / ".lock"):
        os.mkfifo(path)
    write(folder, cubin())
    assert find() == cubin()


@pytest.mark.parametrize("file", ["../x.cubin", "/etc/passwd", "scale\0", "\ud800", ".", ""])
def test_a_file_that_no_build_writes_is_refused(folder: Path, file: str) -> None:
    kernels = json.loads((folder / MANIFEST).read_text())["kernels"]
    edit(folder, kernels={key: {**kernel, "file": file} for key, kernel in kernels.items()})
    assert_refused(f"lists the file {file!r}", "no build writes one of that name", "Build it again: wideload build")


def test_a_manifest_that_lacks_a_field_says_which(folder: Path) -> None:
    edit(folder, kernels={"0": {"name": "scale"}})
    assert_refused("the manifest.kernels.0 has no 'arch'")


def test_a_folder_that_is_none_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WIDELOAD_BUILT_DIR", str(tmp_path / "nowhere"))
    assert_refused(f"WIDELOAD_BUILT_DIR names {tmp_path / 'nowhere'}", "No such file", f"-o {tmp_path / 'nowhere'}")
    monkeypatch.setenv("WIDELOAD_BUILT_DIR", "~no-such-user/kernels")
    assert_refused("no-such-user/kernels, which is no folder", "No such file")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("WIDELOAD_BUILT_DIR", "kernels")
    assert_refused("WIDELOAD_BUILT_DIR names kernels", "No such file")


# ---- saying what is missing


def missing(arch: str, recipe: Recipe | None = RECIPE) -> str:
    return describe_missing(SOURCE, arch=arch, name="scale", fma=False, recipe=recipe, reason="no NVRTC")


def test_a_missing_kernel_is_named_with_what_adds_it(folder: Path) -> None:
    write(folder, cubin(arch="sm_75"))
    assert missing("sm_80") == (
        f"{folder} has no cubin of kernel scale of scale for sm_80 ({folder} has it for sm_75, sm_90). Add it on a machine that has NVRTC: "
        f"wideload build my.py:scale 'f32[8, 64]' --target sm_80 -o {folder}\nno NVRTC"
    )
    assert "Install NVRTC: no build adds it" in missing("sm_80", None)


def test_without_a_folder_a_build_is_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WIDELOAD_BUILT_DIR", raising=False)
    assert missing("sm_80").startswith("no NVRTC\nOr build kernel scale of scale for sm_80 where NVRTC is installed")
    assert missing("sm_80").endswith("in WIDELOAD_BUILT_DIR: wideload build my.py:scale 'f32[8, 64]' --target sm_80 -o FOLDER")
    assert missing("sm_80", None) == "no NVRTC"


@pytest.mark.parametrize(
    ("recipe", "command"),
    [
        (Recipe("add", ("f32[8]", "-1")), "wideload build add 'f32[8]' -1 --target sm_90 -o k"),
        (Recipe("add", ("f32[8]",), in_place="x"), "wideload build add 'f32[8]' --in-place x --target sm_90 -o k"),
        (Recipe("add", ("f32[8]",), backward=True), "wideload build add 'f32[8]' --backward --target sm_90 -o k"),
        (Recipe("add", ("f32[8]",), backward=True, wanted=("y",)), "wideload build add 'f32[8]' --grad y --target sm_90 -o k"),
        (Recipe("f", ("f32[8]",), False, backward=True), "f.build([signature], ['sm_90'], 'k', backward=True), of the signature (f32[8])"),
        (Recipe("f", ("f32[8]", "2"), False, "x"), "f.build([signature], ['sm_90'], 'k'), of the signature (f32[8], 2, out=x)"),
    ],
)
def test_a_recipe_says_how(recipe: Recipe, command: str) -> None:
    assert recipe.command("sm_90", "k") == command


# ---- building


def test_a_folder_is_added_to(folder: Path) -> None:
    write(folder, cubin(b"of sm_80", "sm_80"))
    assert [found.code for found in (find(), find("sm_80")) if found] == [b"the code of scale", b"of sm_80"]


def test_the_same_kernel_of_other_calls_is_one_file_with_all_recipes(folder: Path) -> None:
    other = Recipe("my.py:scale", ("f32[9]",))
    write(folder, cubin(), recipes=[other, RECIPE])
    (kernel,) = read_manifest(folder).kernels.values()
    assert kernel.recipes == (RECIPE, other)
    assert len(list(folder.glob("*.cubin"))) == 1


def test_a_kernel_built_again_takes_the_old_ones_place(folder: Path) -> None:
    assert find() == cubin()
    write(folder, cubin(b"by a newer NVRTC"))
    assert find() == cubin(b"by a newer NVRTC")
    assert file_of(folder).read_bytes() == b"by a newer NVRTC"


@pytest.mark.parametrize("change", [{"wideload": "0.0.1"}, {"format": 0}, {"kernels": 5}])
def test_what_this_version_would_refuse_gives_way(folder: Path, change: dict[str, object]) -> None:
    (folder / "mine.cubin").write_bytes(b"not of our making")
    edit(folder, **change)
    write(folder, cubin(b"of sm_80", "sm_80"))
    assert find() is None
    assert sorted(path.name.partition(".sm_")[0] for path in folder.glob("*.cubin")) == ["mine.cubin", "scale"]


def test_what_a_killed_builder_leaves_is_removed(folder: Path) -> None:
    left = [folder / f"scale.sm_90.{'0' * 16}.cubin{suffix}" for suffix in ("", ".part")]
    for path in left:
        path.write_bytes(b"half")
    assert find() == cubin()
    write(folder, cubin())
    assert not any(path.exists() for path in left)
    assert find() == cubin()


def test_nothing_is_listed_before_it_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at any rename, a builder leaves a folder in which all that is listed is whole."""
    replace = os.replace
    for num_renames in range(3):
        left = num_renames

        def die(*names: str) -> None:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            replace(*names)

        with monkeypatch.context() as patch:
            patch.setattr(manifest.os, "replace", die)
            with pytest.raises(KeyboardInterrupt):
                write(folder, cubin(b"of sm_80", "sm_80"), cubin(b"of sm_75", "sm_75"))
        assert (find(), find("sm_80"), find("sm_75")) == (cubin(), None, None)


def test_files_are_as_readable_as_others_of_the_user(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    usual = (tmp_path / "usual").stat().st_mode
    assert {path.stat().st_mode for path in folder.iterdir()} == {usual}


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CompileError, match=re.escape(f"{tmp_path / 'file'} cannot be written")):
        write(tmp_path / "file", cubin())


BUILDER = """
import sys
from pathlib import Path
from wideload.manifest import kernel_key, write_built
from wideload.nvrtc import Cubin
for number in range(25):
    cubin = Cubin(f"{sys.argv[2]} {number}".encode(), "sm_90", "k", 1, 0, 0, 0, 0, log="")
    for key in (f"{sys.argv[2]} {number}", f"both {number}"):
        write_built(Path(sys.argv[1]), {key: (cubin, ())}, "NVRTC")
"""


def test_builders_at_once_lose_nothing(tmp_path: Path) -> None:
    builders = [subprocess.Popen([sys.executable, "-c", BUILDER, str(tmp_path), name]) for name in "ab"]
    assert [builder.wait() for builder in builders] == [0, 0]
    kernels = read_manifest(tmp_path).kernels
    assert set(kernels) == {f"{name} {number}" for name in ("a", "b", "both") for number in range(25)}
    for key, kernel in kernels.items():
        found = manifest._read_cubin(tmp_path, kernel, "sm_90", "k").code.decode()
        assert found == key or (key.startswith("both ") and found[2:] == key[5:])
    assert len(list(tmp_path.glob("*.cubin"))) == len({kernel.file for kernel in kernels.values()}) == 50
