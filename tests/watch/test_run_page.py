"""The page of runs in a real browser."""

import json

import pytest
from browser_helpers import chromium, needs_chromium
from etils import epath
from facts import assert_names
from made_up_run import make_run, report, train_line, write_lines
from page_checks import EVIL

from spmd_trainer.watch.pages.run_page import write_page

pytestmark = needs_chromium
NEXT_FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


@pytest.fixture
def opened(browser, tmp_path):
    """Writes and opens the page of some runs; afterwards checks that it raised no error and asked for nothing but itself."""
    pages = []

    def open_page(*directories, **settings):
        file = epath.Path(tmp_path) / f"page{len(pages)}.html"
        write_page([epath.Path(directory) for directory in directories], file)
        pages.append((browser.open(file, **settings), file))
        return pages[-1][0]

    yield open_page
    for page, file in pages:
        assert page.errors == []
        assert page.requests == [file.as_uri()]
        assert page.evaluate("window.alerted") is None


@pytest.fixture
def mine(tmp_path):
    return make_run(tmp_path / "mine")


def ends_of_curves(page) -> dict:
    """{key: (last step, last value of each line)}, from the plots themselves."""
    last = "p => [p.data[0].at(-1), ...p.data.slice(1).map(line => line.at(-1))]"
    return dict(page.evaluate(f"[...plots].map(([key, plot]) => [key, ({last})(plot)])"))


def set_value(page, element_id: str, value: str, event: str = "change") -> None:
    found = f"document.getElementById('{element_id}')"
    page.evaluate(f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('{event}')); }})({found})")


def is_shown(page, element_id: str) -> bool:
    return page.evaluate(f"document.getElementById('{element_id}').checkVisibility()")


def test_curves_end_with_the_last_values_of_the_run(opened, mine):
    page = opened(mine)
    assert ends_of_curves(page) == {
        "train/loss": [100, 2.5],
        "eval_heldout/log_pplx": [100, 3.0],
        "eval_heldout/accuracy": [100, 0.5],
        "train/learning/lr": [100, 1e-3],
        "train/learning/raw_grad_norm": [100, 0.5],
        "train/tokens_per_sec": [100, 2560],
        "train/mfu": [100, 0.41],
        "train/device_peak_bytes": [100, 3 * 2**30],
    }
    assert page.texts("#main-charts figcaption > span")[:2] == ["Training loss", "heldout: log_pplx"]
    values = page.texts("#main-charts .values")
    assert values[0] == "2.5 at 100"
    assert values[-3:] == ["2,560 at 100", "41% at 100", "3.0 GiB at 100"]
    assert page.texts("#marks > span") == ["restart", "2 invalid steps"]


def test_what_the_page_says_of_a_run(opened, mine):
    page = opened(mine)
    assert page.texts("#title") == ["spmd_trainer.experiments.lm.stdlib.StdlibBytesTiny"]
    assert page.texts("#state") == ["finished at step 100 of 100"]
    assert page.texts(".fact b")[:3] == ["100", "2.5000", "3.0000"]
    assert page.texts("#about dd")[1:] == [
        "8 devices (cpu), 1 process", "replica=1, data=4, mdl=2", "25,799", "8 rows", "python 3.11.7, jax 0.10.2",
    ]  # fmt: skip
    labels = page.evaluate("[...document.querySelectorAll('.stack')].map(e => e.getAttribute('aria-label'))")
    assert (
        labels[0] == "steps: 1m50s, 78.6%, waiting for input: 10 s, 7.1%, compiling: 16 s, 11.4%, starting: 4.0 s, 2.9%"
    )
    assert len(labels) == 3, "the whole run and each of its starts"
    assert_names(page.texts("#times-note")[0], "10 steps (10 s)", "again", "restart", "don't count")
    assert page.count("#mesh .device") == 8
    assert page.texts("#mesh-note") == ["replica=1, data=4, mdl=2: 8 devices"]
    assert page.texts("#totals tfoot td") == ["1", "960 B", "256 B"]
    assert page.texts("#overrides code") == ["task.train.num_train_steps=100", f"NAME='{EVIL}'"]
    assert page.texts("#changes td") == ["0.1", "0.005"]
    assert page.texts(".warning pre")[1] == "step 12 is invalid: loss nan"
    assert page.texts(".warning .count") == ["\u00d72"]
    assert not is_shown(page, "runs")
    assert page.texts("#notes") == [""]
    assert page.count("main b b") == 0, "no text became markup"


def test_each_expert_of_a_layer_has_a_bar(opened, mine):
    line = {"step": 5, "moe/0/max_over_mean": 1.5, "moe/0/load": "0.75 0.25 0", "moe/1/load": "0.5 0.5"}
    write_lines(mine / "summaries" / "experts" / "metrics.jsonl", [line])
    page = opened(mine)
    assert page.texts("#experts-layer option") == ["moe/0", "moe/1"]
    assert page.count("#experts .bars div") == 3
    assert_names(page.texts("#experts .stack-head")[0], "3 experts", "33%", "75%", "1 without a token")
    set_value(page, "experts-layer", "moe/1")
    assert page.count("#experts .bars div") == 2


def test_samples_of_two_steps_stand_side_by_side(opened, mine):
    page = opened(mine)
    assert page.texts("#samples-group option") == ["decode: prompts"]
    assert page.texts("#samples-left option:checked") == ["step 50"]
    assert page.texts("#samples-right option:checked") == ["step 100"]
    assert page.texts(".example:nth-child(2) pre") == [f"prompt 1 {EVIL}", "step 50 says 1", "step 100 says 1"]
    page.evaluate(
        "(s => { s.value = '0:100'; s.dispatchEvent(new Event('change')); })(document.querySelector('#samples-left select'))"
    )
    assert page.texts(".example:nth-child(2) pre")[1:] == ["step 100 says 1", "step 100 says 1"]


def test_the_keyboard_moves_along_a_curve_and_zooms(opened, mine):
    page = opened(mine)
    first = "document.querySelector('#main-charts .plot')"
    page.evaluate(f"{first}.focus()")
    page.press("Home")
    assert page.texts("#main-charts .values")[0] == "13.545 at 10"
    page.press("ArrowRight")
    assert page.texts("#main-charts .values")[0].endswith("at 20")
    assert page.texts("#main-charts .values")[3].endswith("at 20"), "the other curves follow"
    page.press("End")
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    assert page.texts("#main-charts .values")[0].endswith("at 80 2 invalid steps")
    assert page.evaluate(f"{first}.getAttribute('aria-valuetext')").endswith("at 80 2 invalid steps")
    page.evaluate(f"{first}.dispatchEvent(new KeyboardEvent('keydown', {{key: '+'}}))")
    scale = "[...plots.values()].map(p => [p.scales.x.min, p.scales.x.max])"
    assert page.evaluate(f"{NEXT_FRAMES}.then(() => {scale})")[:2] == [[57.5, 100], [57.5, 100]]
    assert is_shown(page, "zoom-out")
    page.press("Escape")
    assert page.evaluate(f"{NEXT_FRAMES}.then(() => {scale})")[0] == [10, 100]
    assert not is_shown(page, "zoom-out")


def test_every_control_can_be_reached_with_tab(opened, mine):
    page = opened(mine)
    reached = []
    for _ in range(24):
        page.press("Tab")
        reached.append(
            page.evaluate(
                "document.activeElement.className + document.activeElement.id || document.activeElement.tagName"
            )
        )
    assert reached[:3] == ["smoothing", "log", "plot"]
    assert reached.count("plot") == 8
    assert "SUMMARY" in reached


def test_a_pointer_reads_and_a_drag_zooms(opened, mine):
    page = opened(mine)
    x, y, wide = page.evaluate(
        "(b => [b.x, b.y + 60, b.width])(document.querySelector('.u-over').getBoundingClientRect())"
    )
    page.move_to(x + wide / 2, y)
    page.evaluate(NEXT_FRAMES)
    assert page.texts("#main-charts .values")[0].endswith("at 50")
    for kind, at in (("mousePressed", 0.25), ("mouseMoved", 0.75), ("mouseReleased", 0.75)):
        page.call("Input.dispatchMouseEvent", type=kind, x=x + wide * at, y=y, button="left", buttons=1, clickCount=1)
    page.evaluate(NEXT_FRAMES)
    low, high = page.evaluate("(s => [s.min, s.max])(plots.get('train/mfu').scales.x)")
    assert (low, high) == (pytest.approx(32.5, abs=1), pytest.approx(77.5, abs=1))


def test_a_logarithmic_axis_and_smoothing(opened, tmp_path):
    write_lines(tmp_path / "run" / "summaries" / "train" / "metrics.jsonl", map(train_line, range(1, 101)))
    page = opened(tmp_path / "run")
    page.evaluate("document.querySelector('.log').click()")
    assert page.evaluate("plots.get('train/loss').scales.y.distr") == 3
    set_value(page, "smoothing", "0.9")
    ends = ends_of_curves(page)
    assert ends["train/loss"][:2] == [100, 2.5]
    assert 2.5 < ends["train/loss"][2] < 2.8
    assert len(ends["train/learning/lr"]) == 2, "it has no noise"
    assert page.texts("#main-charts .values")[0] == "2.5 at 100", "the readout has the values as they are"


def test_values_that_differ_by_rounding_alone_are_a_level_line(opened, tmp_path):
    lines = [{"step": step, "loss": 2560.0 + 4e-13 * (step % 2), "learning/lr": 0.0} for step in range(1, 50)]
    write_lines(tmp_path / "run" / "summaries" / "train" / "metrics.jsonl", lines)
    page = opened(tmp_path / "run")
    scale = page.evaluate("(s => [s.min, s.max])(plots.get('train/loss').scales.y)")
    assert scale[1] - scale[0] > 100
    set_value(page, "smoothing", "0.9")
    assert page.evaluate("document.querySelectorAll('.log').length") == 2


def test_more_curves_are_drawn_when_they_are_looked_at(opened, mine):
    page = opened(mine)
    assert page.texts("#others summary") == ["More curves (4)"]
    assert page.count("#other-charts figure") == 0
    page.evaluate("document.getElementById('others').open = true")
    page.evaluate("document.getElementById('others').scrollIntoView()")
    page.wait_for("document.querySelector('#other-charts figure') !== null")
    assert f"layer/{EVIL}" in page.texts("#other-charts figcaption > span")
    set_value(page, "others-filter", "steps_per", "input")
    shown = page.evaluate(
        "[...document.querySelectorAll('#other-charts .place')].filter(e => !e.hidden).map(e => e.dataset.key)"
    )
    assert shown == ["train/steps_per_sec"]


def test_lists_have_filters(opened, mine):
    page = opened(mine)
    for details, where, wanted, kept in (
        ("variables", "#variables-table tbody tr", "no such", 0),
        ("variables", "#variables-table tbody tr", "OVER DATA", 1),
        ("all-settings", "#settings-list p", "num_train", 1),
    ):
        page.evaluate(f"document.getElementById('{details}').open = true")
        set_value(page, "variables-filter" if details == "variables" else "settings-filter", wanted, "input")
        shown = f"[...document.querySelectorAll({json.dumps(where)})].filter(e => !e.hidden).length"
        assert page.evaluate(shown) == kept, wanted


def test_several_runs_lie_over_each_other(opened, mine, tmp_path):
    other = make_run(tmp_path / "other", shift=1.0, rate="0.01")
    page = opened(mine, other)
    assert ends_of_curves(page)["train/loss"] == [100, 2.5, 3.5]
    assert page.texts("#runs-table tbody .run-name") == ["mine", "other"]
    assert page.texts("#main-charts .values")[0].split("\n")[0].startswith("2.5 at 100")
    assert page.texts("#overrides tbody tr > *") == ["task.train.learner.rate", "0.005", "0.01"]
    chosen = "[...document.querySelectorAll('.samples-head select')].map(e => e.selectedOptions[0].text)"
    assert page.evaluate(chosen) == ["mine, step 100", "other, step 100"]
    page.evaluate("document.querySelector('#toggles button').click()")
    assert page.evaluate("plots.get('train/loss').series.slice(1).map(s => s.show)") == [False, True]
    assert page.texts("#main-charts .values")[0] == "3.5 at 100"
    assert page.evaluate("document.querySelector('#toggles button').getAttribute('aria-pressed')") == "false"
    page.evaluate(
        "(s => { s.value = '1:50'; s.dispatchEvent(new Event('change')); })(document.querySelector('#samples-left select'))"
    )
    assert page.evaluate("document.querySelector('.example pre:nth-child(2)').dataset.step") == "other, step 50"


@pytest.mark.parametrize("dark", [False, True])
def test_both_themes_have_readable_colours(opened, mine, dark):
    page = opened(mine, dark=dark)
    light = "(c => { const [r, g, b] = c.match(/[0-9.]+/g).map(Number); return (0.3 * r + 0.6 * g + 0.1 * b) / 255; })"
    ground = page.evaluate(f"{light}(getComputedStyle(document.body).backgroundColor)")
    assert (ground < 0.2) if dark else (ground > 0.9)
    for selector in ("h1", ".fact b", ".values b", ".example pre:not(.prompt)", "#mesh-note", ".warning b"):
        ink = page.evaluate(f"{light}(getComputedStyle(document.querySelector({json.dumps(selector)})).color)")
        assert abs(ink - ground) > 0.35, selector
    line = page.evaluate("(s => typeof s === 'function' ? s() : s)(plots.get('train/loss').series[1].stroke)")
    assert line == ("#7fa4ff" if dark else "#2858d6")


def test_a_change_of_theme_draws_the_curves_again(opened, mine):
    page = opened(mine)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.evaluate(NEXT_FRAMES)
    assert (
        page.evaluate("(s => typeof s === 'function' ? s() : s)(plots.get('train/loss').series[1].stroke)") == "#7fa4ff"
    )


@pytest.mark.parametrize("several", [False, True])
def test_a_phone_needs_no_scrolling_sideways(opened, mine, tmp_path, several):
    page = opened(mine, *([make_run(tmp_path / "other", rate="0.01")] if several else []), width=390, height=844)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.evaluate(NEXT_FRAMES)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("plots.get('train/loss').width") < 390


def test_curves_fit_another_width(opened, mine):
    page = opened(mine)
    page.call("Emulation.setDeviceMetricsOverride", width=700, height=900, deviceScaleFactor=1, mobile=False)
    page.evaluate(NEXT_FRAMES)
    wide, host = page.evaluate("(p => [p.width, p.root.parentElement.clientWidth])(plots.get('train/loss'))")
    assert wide == host < 700


@pytest.mark.parametrize(
    ("mesh", "devices", "labels"),
    [
        ((("data", 1),), 1, ["0"]),
        ((("replica", 2), ("data", 2), ("mdl", 2)), 8, ["mdl 2 \u2192", "data 2 \u2192", "replica=0", "0"]),
        ((("data", 64), ("mdl", 4)), 256, ["data 64 \u2192", "mdl 4 \u2192"]),
        ((("data", 4096),), 64, ["data 4,096 \u2192"]),
    ],
)
def test_a_mesh_is_drawn_with_its_axes(opened, mine, mesh, devices, labels):
    (mine / "sharding_report.json").write_text(json.dumps(report(mesh)))
    page = opened(mine)
    assert page.count("#mesh .device") == devices
    texts = page.evaluate("[...document.querySelectorAll('#mesh text')].map(e => e.textContent)")
    assert texts[: len(labels)] == labels
    assert page.evaluate("document.querySelector('#mesh svg').getBoundingClientRect().height") < 450


def test_notes_stand_at_the_top(opened, mine):
    (mine / "run.json").write_text("{")
    page = opened(mine)
    assert_names(page.texts("#notes p")[0], "run.json", "JSONDecodeError")


def test_a_long_run_opens_whole(opened, tmp_path):
    write_lines(tmp_path / "run" / "summaries" / "train" / "metrics.jsonl", map(train_line, range(10, 100_001, 10)))
    page = opened(tmp_path / "run")
    assert ends_of_curves(page)["train/loss"] == [100_000, 5.0 / 1001]
    assert page.evaluate("plots.get('train/loss').data[0].length") < 2000
