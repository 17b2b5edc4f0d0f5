"""The page of the sharding report in a real browser."""

import html
import itertools
import json
import re
import shutil
import subprocess

import jax
import numpy as np
import pytest
from facts import assert_names
from jax.sharding import PartitionSpec as P
from page_checks import EVIL, assert_harmless, hash_of
from report_helpers import LONG_PATH, LONG_REASON, MESH, TRAIN_STATE, VARIABLES, texts

from spmd_trainer.sharding import make_variable_spec, plan_sharding, sharding_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1440,900",
    "--virtual-time-budget=2000",
]


needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium binary on PATH (Debian: apt-get install chromium)"
)


@pytest.fixture
def browse(tmp_path):
    """Opens the page in headless Chromium and gives the DOM after its script has run."""

    def open_page(page: str, address: str = "") -> str:
        file = tmp_path / "report.html"
        file.write_text(page, encoding="utf-8")
        command = [
            CHROMIUM,
            *FLAGS,
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            f"file://{file}{'#' + address if address else ''}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split('<script type="application/json"')[0]

    return open_page


def rows(dom: str) -> list[str]:
    return texts(dom, r'<span class="mono path"[^>]*>(.*?)</span>')


def selected(dom: str) -> list[str]:
    return texts(dom, r'role="row"[^>]*aria-selected="true"[^>]*>.*?class="mono path"[^>]*>(.*?)</span>')


def acting(page: str, *steps: str) -> str:
    """The page with a script that acts on it after its own."""
    script = ";".join(steps)
    front, body, back = page.replace("script-src ", f"script-src {hash_of(script)} ", 1).rpartition("</body>")
    return f"{front}<script>{script}</script>{body}{back}"


def test_paths_and_reasons_are_texts():
    evil = make_variable_spec(EVIL, (8,), np.float32, P(), MESH.shape, EVIL)
    page = sharding_report({"evil": evil}, MESH, format="html", about={"experiment": EVIL, EVIL: EVIL})
    assert_harmless(page, scripts=1)
    assert html.escape(EVIL) in page


@needs_chromium
def test_a_script_that_is_not_the_page_s_does_not_run(browse):
    page = sharding_report(VARIABLES, MESH, format="html")
    step = "document.title = 'strange'"
    assert "<title>strange" in browse(acting(page, step))
    front, body, back = page.rpartition("</body>")
    assert "<title>strange" not in browse(f'{front}<script>{step}</script><img src=x onerror="{step}">{body}{back}')


@needs_chromium
def test_page_shows_and_selects(browse):
    dom = browse(sharding_report(VARIABLES, MESH, format="html"), "at=emb/table")
    assert rows(dom) == [v.path for v in jax.tree.leaves(VARIABLES)]
    assert "<b>bold</b>" not in dom
    assert texts(dom, r'id="reason"[^>]*>(.*?)</div>') == ["declared"]
    assert "mesh replica=1, data=4, mdl=2 · 8 devices" in dom
    assert "(101+3, 64)" in dom
    # The mesh as a grid: 8 devices, each with its own piece of 4 x 2; the array in 8 pieces with hatched padding.
    assert sorted(re.findall(r'class="device" data-piece="(\d+)"', dom)) == [str(i) for i in range(8)]
    assert len(re.findall(r'class="piece"', dom)) == 8
    assert len(re.findall(r'class="padding"', dom)) == 1
    assert "device 3 (replica=0, data=1, mdl=1) holds [26:52, 32:64]" in dom


@pytest.mark.full
@needs_chromium
def test_page_shows_replicas(browse):
    dom = browse(sharding_report(VARIABLES, MESH, format="html"), "at=out/kernel")
    assert re.findall(r'class="device" data-piece="(\d+)"', dom) == list("00112233")
    assert_names(dom, "is on 2 devices")


@pytest.mark.full
@needs_chromium
def test_page_searches_filters_and_sorts(browse):
    page = sharding_report(VARIABLES, MESH, format="html")
    assert rows(browse(page, "q=fsdp kern")) == ["out/kernel"]
    assert rows(browse(page, "filter=padded")) == ["emb/table"]
    assert rows(browse(page, "sort=bytes&desc=1&filter=split")) == ["emb/table", "out/kernel"]
    assert rows(browse(page, "sort=bytes&filter=split")) == ["out/kernel", "emb/table"]
    assert "No variable matches." in browse(page, "q=nothing-like-this")


@pytest.mark.full
@needs_chromium
def test_page_with_ten_thousand_variables_draws_only_rows_in_sight(browse):
    mesh = jax.sharding.AbstractMesh((16, 8), ("data", "mdl"))
    state = {f"layer_{i}": {"w": jax.ShapeDtypeStruct((128 + i % 7, 64), np.float32)} for i in range(10_000)}
    plan = plan_sharding(state, [(".*", ["fsdp('data', 0, True)", "fsdp('mdl', 0)"])], mesh)
    page = sharding_report(plan, mesh, format="html")
    dom = browse(page, "sort=path&at=layer_6/w")
    assert rows(dom)[:3] == ["layer_0/w", "layer_1/w", "layer_2/w"]
    assert 20 <= len(rows(dom)) <= 80
    assert "10,000 variables" in dom
    assert texts(dom, r'class="path mono"[^>]*>(.*?)</div>') == ["layer_6/w"]
    assert len(re.findall(r'class="device"', dom)) == 128
    # The one that the address names is in sight wherever it is.
    dom = browse(page, "sort=path&at=layer_9999/w")
    assert rows(dom)[-3:] == ["layer_9997/w", "layer_9998/w", "layer_9999/w"]
    assert 20 <= len(rows(dom)) <= 80
    assert selected(dom) == texts(dom, r'class="path mono"[^>]*>(.*?)</div>') == ["layer_9999/w"]


@pytest.mark.full
@needs_chromium
def test_page_opens_on_the_largest_split_variable(browse):
    dom = browse(sharding_report(TRAIN_STATE, MESH, format="html"))
    assert selected(dom) == texts(dom, r'id="path"[^>]*>(.*?)</div>') == ["mdl_vars/params/bias"]
    assert len(re.findall(r'class="piece"', dom)) == 2
    # An address of another report names a variable that this one lacks.
    assert selected(browse(sharding_report(TRAIN_STATE, MESH, format="html"), "at=gone/w")) == ["mdl_vars/params/bias"]


@pytest.mark.full
@needs_chromium
def test_page_filters_by_kind(browse):
    page = sharding_report(TRAIN_STATE, MESH, format="html")
    assert rows(browse(page, "kind=optimizer_state")) == ["opt_states/0/m/params/bias", "opt_states/0/m/" + LONG_PATH]
    assert rows(browse(page, "kind=other&filter=replicated")) == ["step", "extra_state/0"]


MEASURE = """
const box = id => document.getElementById(id).getBoundingClientRect();
const wider = x => x.scrollWidth > x.clientWidth, higher = x => x.scrollHeight > x.clientHeight;
const cut = [...document.querySelectorAll(".why:not(.again), .path, #reason")].filter(x => wider(x) || higher(x));
const rowBoxes = [...document.querySelectorAll("#space .row")].map(row => row.getBoundingClientRect());
const gaps = rowBoxes.slice(1).map((r, i) => Math.abs(r.top - rowBoxes[i].bottom));
const inner = [...document.querySelectorAll("#space .row")].filter(row => row.scrollHeight > row.clientHeight + 1);
const found = { sideways: wider(document.documentElement), cards: document.querySelector(".cards") !== null, cut: cut.length,
  gap: Math.max(...gaps), inner: inner.length, tops: ["list", "detail"].map(id => box(id).top), bottom: box("list").bottom };
(parent === window ? document : parent.document).body.dataset.found = JSON.stringify(found);
"""


def found(dom: str) -> dict:
    return json.loads(html.unescape(re.search(r'data-found="([^"]*)"', dom)[1]))


@pytest.mark.full
@needs_chromium
def test_page_never_cuts_a_path_or_a_reason(browse):
    page = sharding_report(TRAIN_STATE, MESH, format="html")
    dom = browse(acting(page, MEASURE), "at=" + LONG_PATH)
    assert texts(dom, r'class="why[^>]*>(.*?)</span>') == [v.reason for v in TRAIN_STATE]
    # One that stands in the row above is a line.
    again = [v.reason for above, v in itertools.pairwise(TRAIN_STATE) if above.reason == v.reason]
    assert texts(dom, r'class="why again"[^>]*>(.*?)</span>') == again != []
    assert texts(dom, r'id="reason"[^>]*>(.*?)</div>') == [LONG_REASON]
    measured = found(dom)
    assert (measured["cut"], measured["inner"], measured["cards"]) == (0, 0, False)
    assert measured["gap"] < 1  # wrapped rows stand below each other


@pytest.mark.full
@needs_chromium
def test_rows_whose_paths_wrap_in_other_places_stand_below_each_other(browse):
    """A line may end behind a hyphen, so paths whose parts have equal lengths have other heights."""
    parts = ["_".join, "_".join, "-".join, "-".join, "_".join]
    paths = [f"blk_{i}/{join(['a' * 30] * 6)}" for i, join in enumerate(parts)]
    page = sharding_report(
        [make_variable_spec(path, (8,), np.float32, P(), MESH.shape, "declared") for path in paths], MESH, format="html"
    )
    measured = found(browse(acting(page, MEASURE)))
    assert (measured["cut"], measured["inner"], measured["cards"]) == (0, 0, False)
    assert measured["gap"] < 1


@needs_chromium
def test_on_a_phone_the_table_comes_first_and_nothing_is_cut(browse):
    """375 pixels wide, in a frame: headless Chromium has no window so narrow."""
    page = acting(sharding_report(TRAIN_STATE, MESH, format="html"), MEASURE)
    frame = f'<iframe style="width:375px;height:812px;border:0" srcdoc="{html.escape(page)}"></iframe>'
    measured = found(browse(f"<!doctype html><body>{frame}</body>"))
    assert not measured["sideways"]
    assert (measured["cut"], measured["inner"], measured["cards"]) == (0, 0, True)
    assert measured["gap"] < 1
    list_top, detail_top = measured["tops"]
    assert list_top < measured["bottom"] <= detail_top
    assert list_top < 300


@pytest.mark.full
@needs_chromium
def test_arrow_keys_select_and_enter_goes_to_the_picture(browse):
    page = sharding_report(TRAIN_STATE, MESH, format="html")

    def press(*keys):
        key = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true}))"
        mark = "document.body.dataset.focus = document.activeElement.id || document.activeElement.className"
        dom = browse(
            acting(page, "document.querySelector('.row[tabindex=\"0\"]').focus()", *(key % k for k in keys), mark)
        )
        return selected(dom), re.search(r'data-focus="([^"]*)"', dom)[1]

    assert press("ArrowDown") == ([LONG_PATH], "row")
    assert press("ArrowUp", "ArrowUp", "ArrowUp") == (["step"], "row")
    assert press("End", "Enter") == (["extra_state/0"], "detail")


@pytest.mark.full
@needs_chromium
def test_page_of_one_variable_on_one_device_and_of_none(browse):
    nowhere = jax.sharding.Mesh(np.array(jax.devices()[0]), ())
    one = [make_variable_spec("w&'\"", (3,), np.float32, P(), {}, "declared")]
    dom = browse(sharding_report(one, nowhere, format="html"))
    assert rows(dom) == selected(dom) == ["w&'\""]
    assert "mesh no axes · 1 device" in dom
    assert "device 0 holds [:]" in dom
    dom = browse(sharding_report([], nowhere, format="html"))
    assert "No variables." in dom
    assert rows(dom) == []
