"""The report page: what it holds, that all of it is escaped, what it refuses, and how it looks in a real browser."""

from __future__ import annotations

import base64
import dataclasses
import errno
import html
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from typer.testing import CliRunner

from tests.results import bench_result, contender, explanation, roofline, sweep
from wideload.cli import app
from wideload.errors import WideloadError
from wideload.measure.labels import Label
from wideload.pictures import DARK, LIGHT, Style, draw_samples
from wideload.report import Picture, Record, Section, build_page, build_sections, read_record, write_report

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
LONG = "a/path/to/some/folder/of/mine/and/further/down/file.py:function_with_a_long_name"


def records() -> list[tuple[str, Record]]:
    slow = contender(HOSTILE, [4.0] * 30 + [5.0] * 10, labels=(Label("UNCHECKED", "a < b & c"),))
    failed = dataclasses.replace(contender("eager", [1.0]), time_us=None, bytes_per_second=None, labels=(Label("FAILED", "out of memory"),))
    return [
        ("bench.json", bench_result(contender("<lambda>", [2.0] * 40), slow, failed)),
        ("sweep.json", sweep()),
        ("long.json", bench_result(contender(LONG, [3.0] * 20))),
        ("explain.json", explanation(measured_us=2.0)),
        ("roofline.json", roofline()),
    ]


@pytest.fixture(scope="module")
def page() -> str:
    return build_page(build_sections(records()))


# ---- what it holds


def cells(page: str, caption: str) -> list[list[str]]:
    """The rows of the first table of that caption, with the tags of its headings before their names."""
    table = page.partition(f"<caption>{caption}</caption>")[2].partition("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    return [
        [html.unescape(re.sub(r"<.*?>", " ", cell)).strip() for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.DOTALL)]
        for row in rows
    ]


def test_a_bench_is_a_table_whose_figures_have_their_tags(page: str) -> None:
    heading, fused, slow, failed = cells(page, "Times")
    assert [" ".join(name.split()) for name in heading[1:3]] == ["measured median us", "measured p5 .. p95"]
    assert [" ".join(name.split()) for name in heading[5:9]] == [
        "computed GB/s",
        "computed of nominal",
        "computed vs best",
        "measured host us",
    ]
    assert fused == ["<lambda>", "2.00", "2.00 .. 2.00", "0.4%", "40", "3,000", "75.0%", "1.00x", "12.5", ""]  # 6 MB in 2 us, of 4 TB/s
    assert slow[:2] == [HOSTILE, "4.00"]
    assert slow[-1] == "UNCHECKED"
    assert failed == ["eager", *[""] * 8, "FAILED"]
    assert ["least time", "1.50", "us", "computed", "minimal bytes / nominal bandwidth"] in cells(page, "Bounds")


def test_an_explanation_keeps_its_tags_and_verdicts(page: str) -> None:
    rows = cells(page, "Time")
    assert [row[3] for row in rows if row[0] == "measured time"] == ["measured"]
    assert [row[3] for row in rows if row[0] == "nominal bandwidth"] == ["assumed"]
    assert html.escape(explanation(measured_us=2.0).verdicts[-1].finding) in page


def test_a_sweep_has_a_row_for_each_size_and_contender(page: str) -> None:
    section = page.partition("sweep.json")[2]
    heading, *rows = cells(section, "Times")
    assert heading[:2] == ["n", ""]
    assert len(rows) == 16
    assert rows[0][:2] == ["1,048,576", "fused"]


def test_a_roofline_has_the_calls_of_its_gpu(page: str) -> None:
    assert ["swiglu", "fp32", "1", "3.15", "measured", "the same instructions / wl.bench"] in cells(
        page, "Explained calls"
    )  # 6 x 2^20 / 2 us
    assert "nobody measured this" in page
    assert page.count("Roofline of NVIDIA H200 with 2 marks") == 1


def test_calls_without_a_measured_roofline_share_one_that_is_assumed() -> None:
    both = build_sections([("a.json", explanation()), ("b.json", dataclasses.replace(explanation(), function="other"))])
    assert [section.title for section in both] == [
        "swiglu on H200 SXM (sm_90), explained",
        "other on H200 SXM (sm_90), explained",
        "Roofline of H200 SXM",
    ]
    assert both[-1].source == "a.json, b.json"
    alone = dataclasses.replace(explanation(), gpu=None, nominal_bandwidth=None, achievable_bandwidth=None)
    assert [section.title for section in build_sections([("c.json", alone)])] == ["swiglu on sm_90, explained"]


def test_columns_without_figures_are_left_out() -> None:
    quiet = dataclasses.replace(contender("f", [1.0, 2.0]), host_us=None)
    (section,) = build_sections([("cpu.json", bench_result(quiet, is_gpu=False))])
    assert [column.name for column in section.tables[0].columns] == ["", "median us", "p5 .. p95", "+-", "samples", "GB/s", "vs best"]


def test_everything_is_inside_and_escaped(page: str) -> None:
    assert HOSTILE not in page
    assert html.escape(HOSTILE) in page
    assert "<script" not in page
    assert set(re.findall(r"\b(?:src|srcset|href)=\"([a-z]*[:#]?)", page)) == {"data:", "#"}
    assert "@import" not in page
    assert "url(" not in page


def test_nothing_to_report_is_an_error() -> None:
    with pytest.raises(WideloadError, match="name at least one file"):
        build_page(())


def test_without_jinja_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(WideloadError, match=r"pip install 'wideload\[plots\]'"):
        build_page(build_sections(records()))


# ---- files


def written(folder: Path) -> list[Path]:
    paths = []
    for name, record in records():
        path = folder / name
        path.write_text(json.dumps(record.to_dict()))
        paths.append(path)
    return paths


def test_every_kind_of_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert [read_record(path) for path in written(tmp_path)] == [record for _, record in records()]


def change(*keys: str | int, to: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changed(values: dict[str, Any]) -> dict[str, Any]:
        inner: Any = values
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to
        return values

    return changed


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (
            "bench.json",
            change("schema", to="wideload.bench/1"),
            "holds schema 'wideload.bench/1'; allowed: wideload.bench/2 (wideload bench --json), ",
        ),
        ("bench.json", change("schema", to=None), "holds no schema; allowed: "),
        (
            "bench.json",
            change("subject", "time_us", "samples", to=["fast"]),
            "is damaged: BenchResult.subject.time_us.samples[0] is 'fast', and should be float",
        ),
        ("bench.json", change("environment", to=None), "is damaged: BenchResult.environment is None"),
        ("sweep.json", change("points", to=[{}]), "is damaged (KeyError: 'sizes')"),
        ("sweep.json", change("points", to=[]), "is damaged: a sweep has at least one point"),
        (
            "explain.json",
            change("operands", 0, "minimal", "kind", to="guessed"),
            "is damaged: Explanation.operands[0].minimal.kind is 'guessed'",
        ),
        ("roofline.json", change("nominal", to={}), "is damaged: Roofline.nominal has no 'value'"),
        ("roofline.json", lambda values: [values], "holds no schema"),
    ],
)
def test_what_is_damaged_is_named(name: str, damage: Callable[[Any], Any], said: str, tmp_path: Path) -> None:
    (path,) = (path for path in written(tmp_path) if path.name == name)
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(WideloadError) as caught:
        read_record(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("explain.json", change("operands", 0, "strides", to=[]), "explain.json cannot be shown: it is damaged ("),
        ("explain.json", change("operands", 0, "itemsize", to=-1), "explain.json cannot be shown: itemsize is "),
        ("explain.json", change("measured_time", "value", to=0), "explain.json cannot be shown: it is damaged (ZeroDivisionError: "),
        ("explain.json", change("gpu", to="abacus"), "explain.json cannot be shown: "),
        ("bench.json", change("subject", "time_us", "median", to=0), "bench.json cannot be shown: it is damaged (ZeroDivisionError: "),
        ("bench.json", change("subject", "time_us", "samples", to=[]), "bench.json cannot be shown: it is damaged (ValueError: "),
        ("sweep.json", change("points", 0, "result", "subject", "time_us", "p80", to=0), "sweep.json cannot be shown: it is damaged ("),
    ],
)
def test_what_cannot_be_shown_is_named(name: str, damage: Callable[[Any], Any], said: str, tmp_path: Path) -> None:
    paths = written(tmp_path)
    damaged = tmp_path / name
    damaged.write_text(json.dumps(damage(json.loads(damaged.read_text()))))
    others = ("roofline.json", "long.json")
    with pytest.raises(WideloadError) as caught:
        build_page(build_sections((path.name, read_record(path)) for path in paths if path.name in (name, *others)))
    assert str(caught.value).startswith(said)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(WideloadError, match=r"none\.json cannot be read: No such file"):
        read_record(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"schema": ')
    with pytest.raises(WideloadError, match=r"half\.json is no JSON: "):
        read_record(tmp_path / "half.json")


def report(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["report", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_the_command_writes_a_page_and_pictures(tmp_path: Path) -> None:
    paths = written(tmp_path)
    page, pictures = tmp_path / "page.html", tmp_path / "pictures"
    result = report(str(paths[0]), "--output", str(page), "--pictures", str(pictures))
    assert result.exit_code == 0, result.output
    assert page.read_text().startswith("<!doctype html>")
    assert [path.name for path in pictures.iterdir()] == ["s1-samples.svg"]
    assert base64.b64encode((pictures / "s1-samples.svg").read_bytes()).decode() in page.read_text()
    assert result.stdout.splitlines()[0] == f"{page}: {page.stat().st_size / 1e3:.0f} kB"
    assert report(str(paths[0]), "--output", str(page), "--pictures", str(pictures), "--png").exit_code == 0
    assert sorted(path.name for path in pictures.iterdir()) == ["s1-samples.png", "s1-samples.svg"]
    assert (pictures / "s1-samples.png").read_bytes().startswith(b"\x89PNG")
    assert report(str(paths[0]), "--output", str(page), "--png").exit_code == 2


def test_a_picture_is_drawn_once_for_light_and_once_for_dark(tmp_path: Path) -> None:
    drawn = []

    def draw(style: Style) -> Any:
        drawn.append(style)
        return draw_samples(bench_result(contender("f", [1.0, 2.0])), style=style)

    section = Section("s1", "f", "f.json", pictures=(Picture("samples", "samples", draw),))
    write_report([section], tmp_path / "page.html", tmp_path, with_png=True)
    assert drawn == [LIGHT, DARK]


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "bench.json"], "bench.json cannot be written: it is one of the files to read"),
        (["-o", "sub/../bench.json"], "it is one of the files to read"),
        (["-o", "link.html"], "link.html cannot be written: it is one of the files to read"),
        (["-o", "sub"], "sub cannot be written: it is a folder"),
        (["-o", "page.html", "--pictures", "other"], "other cannot be a folder of pictures: other is a file"),
        (["-o", "page.html", "--pictures", "other/further/down"], "/other is a file. Name another"),
        (["-o", "page.html", "--pictures", "page.html"], "page.html cannot be both the page and where pictures go"),
        (["-o", "page.html", "--pictures", "page.html/pictures"], "page.html cannot be both"),
        (["-o", "new/../sub/s1-samples.svg", "--pictures", "sub"], "cannot be both"),
        (["-o", "page.html", "--pictures", "linked"], "linked/s1-samples.svg cannot be written: it is one of the files to read"),
        (["-o", "page.html", "--pictures", "taken"], "taken/s1-samples.svg cannot be written: it is a folder"),
    ],
)
def test_what_may_not_be_written_is_refused_and_nothing_written(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    for folder in ("sub", "new", "linked", "taken/s1-samples.svg"):
        Path(folder).mkdir(parents=True)
    Path("other").write_text("mine")
    Path("link.html").symlink_to("bench.json")
    Path("linked/s1-samples.svg").hardlink_to("bench.json")
    before = snapshot(tmp_path)
    result = report("bench.json", *options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("WideloadError: ")
    assert said in result.stderr
    assert snapshot(tmp_path) == before


def test_a_disk_that_refuses_is_an_error_of_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    written(tmp_path)
    monkeypatch.setattr(Path, "write_text", refuse)
    result = report(str(tmp_path / "bench.json"), "--output", str(tmp_path / "page.html"))
    assert (result.exit_code, result.stderr) == (1, f"WideloadError: {tmp_path}/page.html cannot be written: Permission denied\n")


def test_the_command_refuses_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    result = report(str(tmp_path / "other.json"), "--output", str(tmp_path / "page.html"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"WideloadError: {tmp_path}/other.json holds no schema; allowed: ")
    assert not (tmp_path / "page.html").exists()
    assert report(str(tmp_path / "other.json"), "--output", str(tmp_path / "no" / "page.html")).exit_code == 2


# ---- in a browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

PROBE = """<script nonce="probe">
window.addEventListener("load", () => {
  const box = (element) => { const r = element.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; };
  const all = (selector) => [...document.querySelectorAll(selector)];
  const found = {
    images: all("img").map((image) => ({ box: box(image), natural: image.naturalWidth, alt: image.alt, source: image.currentSrc })),
    tables: all("table").map((table) => ({ box: box(table.parentElement), rows: table.rows.length, text: table.innerText })),
    headings: all("h2").map((heading) => ({ box: box(heading), text: heading.innerText })),
    scripts: all("script").length,
    widths: [document.documentElement.scrollWidth, window.innerWidth],
    colours: [getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor],
  };
  const pre = document.createElement("pre");
  pre.id = "probe";
  pre.textContent = JSON.stringify(found);
  document.body.append(pre);
});
</script>"""
"""Only the copy of the page that the test looks at has a script, and the permission to run one."""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        message = f"no browser is installed (looked for {', '.join(BROWSERS)}): `make browser` gets one where apt can"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


@dataclasses.dataclass(frozen=True)
class Look:
    """What a browser made of a page: what the probe found, and what its console said."""

    found: dict[str, Any]
    console: list[str]


def run_browser(browser: str, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    profile = f"--user-data-dir={page.parent / 'profile'}"
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run", profile)
    command = [browser, *quiet, "--enable-logging=stderr", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def look_at(browser: str, text: str, folder: Path, *, width: int = 1100, is_dark: bool = False) -> Look:
    page = folder / "probed.html"
    page.write_text(
        text.replace("default-src 'none'", "default-src 'none'; script-src 'nonce-probe'").replace("</body>", f"{PROBE}</body>")
    )
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    done = run_browser(browser, page, f"--window-size={width},1000", scheme, "--virtual-time-budget=3000", "--dump-dom")
    probed = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert probed, done.stderr
    return Look(json.loads(html.unescape(probed[1])), [line for line in done.stderr.splitlines() if "CONSOLE" in line])


def assert_is_whole(look: Look, num_images: int, num_tables: int) -> None:
    """Plots and tables are there and take room, nothing covers anything, nothing leaves the page, and the console is silent."""
    found = look.found
    assert look.console == [], f"the console says {look.console}"
    assert (len(found["images"]), len(found["tables"]), found["scripts"]) == (num_images, num_tables, 1)
    unseen = [image["alt"] for image in found["images"] if image["natural"] < 300 or image["box"][2] < 300 or image["box"][3] < 60]
    assert unseen == [], f"not shown: {unseen}"
    assert [table["text"] for table in found["tables"] if table["rows"] < 2 or min(table["box"][2:]) < 40] == []
    assert found["widths"][0] <= found["widths"][1], "the page scrolls sideways"
    boxes = [item["box"] for name in ("images", "tables", "headings") for item in found[name]]
    for (x, y, width, height), (other_x, other_y, other_width, other_height) in itertools.combinations(boxes, 2):
        apart = x + width <= other_x or other_x + other_width <= x or y + height <= other_y + 1 or other_y + other_height <= y + 1
        assert apart, "two parts of the page overlap"


@pytest.fixture(scope="module")
def look(browser: str, page: str, tmp_path_factory: pytest.TempPathFactory) -> Look:
    return look_at(browser, page, tmp_path_factory.mktemp("look"))


def test_a_browser_shows_plots_and_tables(browser: str, page: str, look: Look, tmp_path: Path) -> None:
    sections = build_sections(records())
    num_images, num_tables = (sum(len(getattr(section, part)) for section in sections) for part in ("pictures", "tables"))
    assert (num_images, num_tables) == (5, 16)
    assert_is_whole(look, num_images, num_tables)
    assert [heading["text"] for heading in look.found["headings"]] == [section.title for section in sections]
    assert HOSTILE in look.found["tables"][0]["text"]

    page_path = tmp_path / "page.html"
    page_path.write_text(page)
    height = int(max(y + height for _, y, _, height in (table["box"] for table in look.found["tables"]))) + 100
    run_browser(
        browser,
        page_path,
        f"--window-size=1100,{height}",
        f"--screenshot={tmp_path / 'page.png'}",
        "--blink-settings=preferredColorScheme=1",
    )
    screen = (matplotlib.image.imread(tmp_path / "page.png")[..., :3] * 255).astype(np.uint8)
    for image in look.found["images"]:
        x, y, width, height = map(int, image["box"])
        colours = np.unique(screen[y : y + height, x : x + width].reshape(-1, 3), axis=0)
        assert len(colours) > 50, f"nothing is drawn where {image['alt']} should be"


def test_a_small_dark_screen_shows_the_same(browser: str, page: str, look: Look, tmp_path: Path) -> None:
    dark = look_at(browser, page, tmp_path, width=500, is_dark=True)  # as narrow as Chromium's window can be
    assert_is_whole(dark, 5, 16)
    assert dark.found["colours"] == ["rgb(230, 232, 236)", "rgb(21, 24, 29)"]
    assert look.found["colours"] == ["rgb(32, 36, 44)", "rgb(255, 255, 255)"]
    assert all(one["source"] != other["source"] for one, other in zip(look.found["images"], dark.found["images"], strict=True))


@pytest.fixture(scope="module")
def small_page() -> str:
    return build_page(build_sections(records()[:1]))


@pytest.mark.parametrize(
    ("text", "by", "said"),
    [
        ("</main>", "<script>alert(1)</script></main>", "CONSOLE"),  # the page's own policy refuses it
        ("</main>", "<img src=x onerror=alert(2)></main>", "CONSOLE"),
        ("data:image/svg+xml;base64,", "data:image/svg+xml;base64,AAAA", "not shown: ['Histogram"),
        ("figure { margin: 1.5rem 0;", "figure { margin: -9rem 0;", "overlap"),
        ("max-width: 66rem;", "width: 150rem;", "sideways"),
    ],
)
def test_a_broken_page_is_noticed(text: str, by: str, said: str, browser: str, small_page: str, tmp_path: Path) -> None:
    assert text in small_page
    broken = look_at(browser, small_page.replace(text, by), tmp_path)
    with pytest.raises(AssertionError) as caught:
        assert_is_whole(broken, 1, 3)
    assert said in str(caught.value)


def test_the_small_page_is_whole(browser: str, small_page: str, tmp_path: Path) -> None:
    assert_is_whole(look_at(browser, small_page, tmp_path), 1, 3)
