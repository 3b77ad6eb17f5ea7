"""Pictures of a plan: well-formed, complete, with nothing from elsewhere; every figure that is drawn can be read as text."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import pytest

from seatrial.base.errors import InputError
from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.networks import find_network
from seatrial.job.job import Job
from seatrial.job.loading import load_job
from seatrial.plan.answer import Answer, Wishes, answer
from seatrial.plan.cluster import Cluster
from seatrial.plan.fit import account, smallest
from seatrial.plan.place import place_of
from seatrial.plan.recipe import Recipe
from seatrial.plan.scaling import scaling
from seatrial.plan.waterfall import Waterfall, waterfall_of
from seatrial.ui.account_svg import account_svg
from seatrial.ui.plan_html import fit_page, page
from seatrial.ui.scaling_svg import scaling_svg
from seatrial.ui.svg import COLOURS, PAGE
from seatrial.ui.waterfall import seconds, waterfall_lines
from seatrial.ui.waterfall_png import waterfall_png
from seatrial.ui.waterfall_svg import waterfall_svg

SVG = "{http://www.w3.org/2000/svg}"
NETWORK = "InfiniBand NDR 8x400"


@cache
def job(name: str = "qwen2.5-7b-h200", *overrides: str) -> Job:
    return load_job(Path(str(files("seatrial.job") / "presets" / f"{name}.toml")), overrides)


@cache
def told(name: str = "qwen2.5-7b-h200", *overrides: str, price: float | None = 3.5) -> Answer:
    return answer(job(name, *overrides), place_of(job(name, *overrides), NETWORK), Wishes(price=price))


@cache
def voyage() -> Waterfall:
    ending = told().ending
    assert ending is not None
    return waterfall_of(ending.finish.waterfall)


def texts(svg: str) -> list[str]:
    return [e.text or "" for e in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def pictures() -> dict[str, str]:
    a = told()
    assert a.weak is not None
    assert a.strong is not None
    return {
        "waterfall": waterfall_svg(voyage(), title="Where <the> FLOPs & go", subtitle="a < b"),
        "scaling": scaling_svg([a.weak, a.strong], title="Scaling <of> & more"),
        "memory": account_svg(
            account(a.job.architecture, a.own.recipe, stack=a.stack), a.own.room, title="Memory <on> & off"
        ),
    }


@pytest.mark.parametrize("name", ["waterfall", "scaling", "memory"])
def test_a_picture_is_a_document_of_its_own(name: str) -> None:
    svg = pictures()[name]
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
    assert title.text in texts(svg)
    # Nothing from elsewhere, nothing that runs.
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|url\(|@import|href=", svg)


@pytest.mark.parametrize("name", ["waterfall", "scaling", "memory"])
def test_nothing_stands_outside_the_picture(name: str) -> None:
    root = ElementTree.fromstring(pictures()[name])
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


def test_a_long_title_is_cut_in_its_middle_and_whole_for_those_who_hear_it() -> None:
    name = "a" * 60 + "b" * 60
    svg = waterfall_svg(voyage(), title=name)
    title = ElementTree.fromstring(svg).find(f"{SVG}title")
    assert title is not None
    assert title.text == name
    drawn = texts(svg)[0]
    assert len(drawn) == 84
    assert drawn.startswith("aaa")
    assert drawn.endswith("bbb")


def test_every_bar_says_its_name_share_and_time() -> None:
    shown = texts(waterfall_svg(voyage(), title="t"))
    for bar in voyage().bars:
        assert bar.name in shown
        assert bar.words.replace("-", "\N{MINUS SIGN}") in shown
        assert seconds(bar.seconds) in shown
    assert voyage().too_small in " ".join(shown)


def test_bars_stand_one_below_the_other_on_a_terminal() -> None:
    wide, narrow = waterfall_lines(voyage(), 110), waterfall_lines(voyage(), 60)
    assert all(len(line) <= 110 for line in wide)
    assert len(wide) == len(narrow) == len(voyage().bars)
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


def test_a_png_of_the_right_size_and_the_same_each_time() -> None:
    pytest.importorskip("matplotlib")
    first = waterfall_png(voyage(), title="Where the FLOPs go", subtitle="of a run")
    assert first[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(first[16:20], "big") == 9.6 * 160
    assert first == waterfall_png(voyage(), title="Where the FLOPs go", subtitle="of a run")
    assert b"matplotlib" not in first.lower()


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError) as caught:
        waterfall_png(voyage(), title="t")
    assert caught.value.exit_code == 2
    assert "seatrial[plots]" in caught.value.render()


def test_sizes_that_cannot_be_are_crosses_with_their_reason() -> None:
    gpu = find_gpu("B300 SXM")
    assert gpu is not None
    big = job("qwen2.5-72b-b300")
    cluster = Cluster(gpu, 16, 8, find_network(NETWORK))
    found = scaling(big, Recipe.of(big), cluster, mode="weak", nodes=(1, 2, 4))
    svg = scaling_svg([found], title="t")
    root = ElementTree.fromstring(svg)
    crosses = list(root.iter(f"{SVG}path"))
    assert len(crosses) == 1
    hint = crosses[0].find(f"{SVG}title")
    assert hint is not None
    assert hint.text == "weak scaling, 8 GPUs: a replica takes TP8 x PP2 = 16 GPUs, here are 8"
    none = scaling(big, Recipe.of(big), cluster, mode="weak", nodes=(1,))
    assert "not known at any size" in scaling_svg([none], title="t")
    with pytest.raises(ValueError, match="no points"):
        scaling_svg([], title="t")


def test_an_account_without_a_layout_is_no_picture() -> None:
    with pytest.raises(ValueError, match="no layout"):
        account_svg(account(job().architecture), None, title="t")


# -- the page


def test_the_page_needs_nothing_else_and_says_everything() -> None:
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
        "Where this is from",
    ):
        assert f"<h2>{heading}" in html
    assert html.count("<svg") == 3
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids)) == 6
    assert "prefers-color-scheme:dark" in html


def test_the_page_says_how_the_batch_goes_through() -> None:
    html = page(told("qwen2.5-72b-b300"), verdict="v")
    assert "tensor 8 x pipeline 2 x shard 8, 1f1b; 32 microbatches of 8, async_tensor</div>" in html


@pytest.mark.parametrize("which", ["plan", "fit"])
def test_the_page_is_well_formed(which: str) -> None:
    a = told()
    needs = account(a.job.architecture, a.own.recipe, stack=a.stack)
    html = page(a, verdict="v") if which == "plan" else fit_page(a.job, needs, a.own.room, smallest(a.job))
    body = html.partition("<body>")[2].partition("</body>")[0]
    ElementTree.fromstring(f"<body>{body}</body>")


def test_what_came_out_of_a_file_is_escaped() -> None:
    evil = job().file.model_copy(update={"name": "<b>&"})
    a = told()
    html = page(replace(a, job=replace(a.job, file=evil)))
    assert "<b>&" not in html.replace("<b>Weak", "").replace("<b>Strong", "")
    assert "&lt;b&gt;&amp;" in html


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


def test_matplotlib_is_loaded_for_a_png_only() -> None:
    code = (
        "import sys, seatrial.ui.plan_html, seatrial.ui.waterfall_png; sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
