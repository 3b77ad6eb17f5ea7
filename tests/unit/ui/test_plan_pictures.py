"""Pictures of a plan: well-formed, complete, with nothing from elsewhere; every figure that is drawn can be read as text."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from framed_page import CHROMIUM, framed
from presets import preset_job
from seatrial.base.errors import InputError, printable
from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.networks import find_network
from seatrial.job.job import Job
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.hardware import hardware_of
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.report.answer import Answer, PlanOptions, answer
from seatrial.plan.report.waterfall import Waterfall, waterfall_of
from seatrial.plan.search.fit import account, smallest
from seatrial.plan.search.scaling import scaling
from seatrial.ui.account_svg import account_svg
from seatrial.ui.plan_html import fit_page, page
from seatrial.ui.plan_words import cluster
from seatrial.ui.png import png
from seatrial.ui.scaling_svg import scaling_svg
from seatrial.ui.svg import COLOURS, NARROW, PAGE, WIDTH, svg_text
from seatrial.ui.waterfall import seconds, waterfall_lines
from seatrial.ui.waterfall_svg import waterfall_svg

SVG = "{http://www.w3.org/2000/svg}"
NETWORK = "InfiniBand NDR 8x400"


@cache
def job(name: str = "qwen2.5-7b-h200", *overrides: str) -> Job:
    return preset_job(name, *overrides)


@cache
def told(name: str = "qwen2.5-7b-h200", *overrides: str, price: float | None = 3.5) -> Answer:
    return answer(
        job(name, *overrides), hardware_of(job(name, *overrides), NETWORK), PlanOptions(price=price)
    )


@cache
def reference() -> Waterfall:
    ending = told().forecast
    assert ending is not None
    return waterfall_of(ending.finish.waterfall)


def texts(svg: Element) -> list[str]:
    return [e.text or "" for e in svg.iter("text")]


def pictures(width: float = WIDTH) -> dict[str, Element]:
    a = told()
    assert a.weak is not None
    assert a.strong is not None
    return {
        "waterfall": waterfall_svg(
            reference(), title="Where <the> FLOPs & go", subtitle="a < b", width=width
        ),
        "scaling": scaling_svg([a.weak, a.strong], title="Scaling <of> & more", width=width),
        "memory": account_svg(
            account(a.job.architecture, a.own.recipe, stack=a.stack),
            a.own.available,
            title="Memory <on> & off",
            width=width,
        ),
    }


@pytest.mark.cluster  # slow
@pytest.mark.parametrize("name", ["waterfall", "scaling", "memory"])
def test_a_picture_is_a_document_of_its_own(name: str) -> None:
    picture = pictures()[name]
    svg = svg_text(picture)
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None
    assert desc is not None
    assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert title.text is not None
    assert "&" in title.text
    assert len(desc.text or "") > 20
    assert title.text in texts(picture)
    # Nothing from elsewhere, nothing that runs.
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|url\(|@import|href=", svg)


@pytest.mark.parametrize("of", [WIDTH, NARROW])
@pytest.mark.parametrize("name", ["waterfall", "scaling", "memory"])
def test_nothing_stands_outside_the_picture(name: str, of: float) -> None:
    root = ElementTree.fromstring(svg_text(pictures(of)[name]))
    _, _, width, height = map(float, (root.get("viewBox") or "").split())
    for e in root.iter(f"{SVG}rect"):
        assert float(e.get("x", 0)) + float(e.get("width", 0)) <= width + 0.01
        assert float(e.get("y", 0)) + float(e.get("height", 0)) <= height + 0.01
        assert float(e.get("width", 0)) > 0
    for e in root.iter(f"{SVG}text"):
        # A letter of 13 px is 7.5 px wide on average in the widest of the usual fonts.
        wide = 7.5 * len(e.text or "")
        x, anchor = float(e.get("x", 0)), e.get("text-anchor", "start")
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
        title = e.get("class") == "st-title"
        assert title or left > -2, e.text
        assert title or left + wide < width + 30, e.text
        assert 0 < float(e.get("y", 0)) <= height


def test_long_title_is_elided_when_drawn_but_whole_in_svg_title() -> None:
    name = "a" * 60 + "b" * 60
    svg = waterfall_svg(reference(), title=name)
    title = svg.find("title")
    assert title is not None
    assert title.text == name
    drawn = texts(svg)[0]
    assert len(drawn) == 84
    assert drawn.startswith("aaa")
    assert drawn.endswith("bbb")


def test_every_bar_has_its_name_share_and_time() -> None:
    shown = texts(waterfall_svg(reference(), title="t"))
    for bar in reference().bars:
        assert bar.name in shown
        assert bar.words.replace("-", "\N{MINUS SIGN}") in shown
        assert seconds(bar.seconds) in shown
    assert reference().too_small in " ".join(shown)


def test_bars_stand_one_below_the_other_on_a_terminal() -> None:
    wide, narrow = waterfall_lines(reference(), 110), waterfall_lines(reference(), 60)
    assert all(len(line) <= 110 for line in wide)
    assert len(wide) == len(narrow) == len(reference().bars)
    assert not any("█" in line for line in narrow)
    assert all("█" in line or "▐" in line for line in wide)
    ends = [len(line) for line in wide[:-1]]
    assert ends == sorted(ends, reverse=True)


def test_colours_can_be_seen_on_their_page() -> None:
    """3 to 1 for what is no text, WCAG 2.2, 1.4.11."""
    for kind, colours in COLOURS.items():
        for mode, colour in enumerate(colours):
            assert contrast(colour, PAGE[mode]) >= 3, (kind, mode)


def contrast(a: str, b: str) -> float:
    high, low = sorted(map(luminance, (a, b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.cluster  # slow
@pytest.mark.parametrize("name", ["waterfall", "scaling", "memory"])
def test_a_png_of_the_right_size_and_the_same_each_time(name: str) -> None:
    pytest.importorskip("matplotlib")
    picture = pictures()[name]
    first = png(picture)
    assert first[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(first[16:20], "big") == 9.6 * 160
    assert first == png(picture)
    assert b"matplotlib" not in first.lower()
    assert (picture.findtext("desc") or "").encode() in first


def test_a_png_shows_the_text_of_a_title_and_no_formula() -> None:
    pytest.importorskip("matplotlib")
    plain, dollars = (png(waterfall_svg(reference(), title=title)) for title in ("x", r"$\nothing$"))
    assert plain != dollars  # as a formula it would be an error


def test_a_png_draws_bars_above_the_lines_of_the_axis() -> None:
    image = pytest.importorskip("matplotlib.image")
    picture = waterfall_svg(reference(), title="t")
    bar = next(e for e in picture.iter("rect") if e.get("class") == "st-peak")
    x, y, width, height = (float(bar.get(k, 0)) for k in ("x", "y", "width", "height"))
    pixels = image.imread(io.BytesIO(png(picture)))
    row = pixels[round((y + height / 2) * 1.6), round(x * 1.6) + 2 : round((x + width) * 1.6) - 2, :3]
    wanted = [int(COLOURS["peak"][0][i : i + 2], 16) / 255 for i in (1, 3, 5)]
    assert abs(row - wanted).max() < 0.01


def test_without_matplotlib_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError) as caught:
        png(waterfall_svg(reference(), title="t"))
    assert caught.value.exit_code == 2
    assert "seatrial[plots]" in caught.value.render()


def test_sizes_that_cannot_be_are_crosses_with_their_reason() -> None:
    gpu = find_gpu("B300 SXM")
    assert gpu is not None
    big = job("qwen2.5-72b-b300")
    cluster = Cluster(gpu, 16, 8, find_network(NETWORK))
    found = scaling(big, Recipe.of(big), cluster, mode="weak", nodes=(1, 2, 4))
    svg = scaling_svg([found], title="t")
    crosses = [hint for e in svg.iter("polyline") if (hint := e.find("title")) is not None]
    assert len(crosses) == 1
    assert crosses[0].text == "weak scaling, 8 GPUs: a replica needs TP8 x PP2 = 16 GPUs, only 8 available"
    none = scaling(big, Recipe.of(big), cluster, mode="weak", nodes=(1,))
    assert "unknown at any size" in (scaling_svg([none], title="t").findtext("desc") or "")
    with pytest.raises(ValueError, match="no points"):
        scaling_svg([], title="t")


def test_an_account_without_a_layout_is_no_picture() -> None:
    with pytest.raises(ValueError, match="no layout"):
        account_svg(account(job().architecture), None, title="t")


# -- the page


def test_the_page_is_self_contained_and_complete() -> None:
    html = page(told(), smallest(job()), verdict="fits <here> & there", tone="good")
    assert html.startswith("<!doctype html>")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|src=|url\(|@import|href=", html)
    assert "fits &lt;here&gt; &amp; there" in html
    for heading in (
        "Layouts",
        "Where the FLOPs go",
        "Memory",
        "Scaling",
        "The smallest clusters",
        "Sources",
    ):
        assert f"<h2>{heading}" in html
    assert html.count("<svg") == 6  # for wide pages and for narrow ones
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids)) == 12
    assert "prefers-color-scheme:dark" in html


@pytest.mark.ci
@pytest.mark.cluster
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_without_scrolling_sideways(tmp_path: Path, width: int) -> None:
    """Sources are paths, which have no spaces; a name may have none either."""
    a = told("qwen2.5-72b-b300")
    named = replace(a.job, file=a.job.file.model_copy(update={"name": "n" * 60}))
    file = tmp_path / "plan.html"
    file.write_text(page(replace(a, job=named), smallest(job()), verdict="v"))
    assert framed(file, width, tmp_path)[0] <= width


def test_no_title_of_a_narrow_picture_is_cut() -> None:
    assert "…" not in page(told())


def test_page_and_terminal_name_the_same_cluster() -> None:
    """One node uses no network, so none is named."""
    for case in (told(), told("qwen2.5-72b-b300")):
        where = f'<div class="soft">{cluster(case.place)} · '
        assert where in page(case)
        assert (NETWORK in where) == (case.place.nodes > 1)


@pytest.mark.cluster  # slow
def test_the_page_shows_how_the_batch_is_divided() -> None:
    html = page(told("qwen2.5-72b-b300"), verdict="v")
    assert "tensor 8 x pipeline 2 x shard 8, 1f1b; 32 microbatches of 8, async_tensor</div>" in html


@pytest.mark.parametrize("which", ["plan", "fit"])
def test_the_page_is_well_formed(which: str) -> None:
    a = told()
    needs = account(a.job.architecture, a.own.recipe, stack=a.stack)
    html = (
        page(a, verdict="v") if which == "plan" else fit_page(a.job, needs, a.own.available, smallest(a.job))
    )
    body = html.partition("<body>")[2].partition("</body>")[0]
    ElementTree.fromstring(f"<body>{body}</body>")


@pytest.mark.parametrize("which", ["plan", "fit"])
@pytest.mark.parametrize(
    "evil",
    [
        "<b>&",
        "<script>alert(1)</script>",
        "' onload=\"x\" '",
        "a\0b\x1b[31m\u202ec",
        "\udcff",
        "{{ 7 * 7 }}{% x %}",
    ],
)
def test_what_came_out_of_a_file_is_escaped(which: str, evil: str) -> None:
    a = told()
    named = replace(a.job, file=job().file.model_copy(update={"name": evil}))
    if which == "plan":
        html = page(
            replace(a, job=named, provenance=(evil,)), smallest(job()), verdict=evil, tone=evil, wishes=[evil]
        )
    else:
        html = fit_page(named, account(a.job.architecture), None, [])
    assert html.encode()
    shown = printable(evil)
    title = html[html.index("<title>") : html.index("<meta name")]
    assert ElementTree.fromstring(title).text == (
        f"Plan of {shown}" if which == "plan" else f"Requirements of {shown}"
    )
    body = html.partition("<body>")[2].partition("</body>")[0]
    root = ElementTree.fromstring(f"<body>{body}</body>")
    assert " ".join(root.itertext()).count(shown) == (4 if which == "plan" else 1)
    assert not any(e.tag == "script" or "onload" in e.attrib for e in root.iter())


@pytest.mark.parametrize(
    "changes",
    [("cluster.gpu=none such",), ("train.precision=fp32",), ("cluster.device=cpu",)],
)
def test_what_is_unknown_is_unknown_on_the_page(changes: tuple[str, ...]) -> None:
    html = page(told("qwen2.5-7b-h200", *changes, price=None))
    assert "unknown" in html
    assert "nan" not in html.lower().replace("nano", "")
    assert "<h2>Memory</h2>" in html
    body = html.partition("<body>")[2].partition("</body>")[0]
    ElementTree.fromstring(f"<body>{body}</body>")


def test_libraries_are_loaded_for_a_page_or_png_only() -> None:
    modules = "sys, seatrial.ui.plan_html, seatrial.ui.png, seatrial.check.reports.report_html"
    code = f"import {modules}; sys.exit(bool({{'matplotlib', 'jinja2'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tight_is_a_badge_and_speed_has_its_interval() -> None:
    html = page(told(), verdict="v")
    badge = '<span class="badge" title="may run out of memory">tight</span>'
    assert badge in html
    assert " !<" not in html
    p = told().own.prediction
    assert p is not None
    rate, interval = re.search(r"<b>([\d,]+)</b><span>(tokens/s/GPU[^<]*)</span>", html).groups()  # type: ignore[union-attr]
    assert rate == f"{p.tokens_per_s_per_gpu:,.0f}"
    assert interval.startswith("tokens/s/GPU; 85 % interval ")
