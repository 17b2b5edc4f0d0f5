"""A plan's page: its data, its text, and how it works in a browser."""

import dataclasses
import html
import json
import re
import types

import pytest
from browser_helpers import chromium, needs_chromium
from etils import epath
from facts import assert_names
from page_checks import EVIL, assert_harmless

from spmd_trainer.planner import hlo_liveness, plan_memory, plan_page, plan_search
from spmd_trainer.planner.plan_candidates import Candidate
from spmd_trainer.planner.plan_memory import Group, MemoryOverTime, PeakArray
from spmd_trainer.planner.plan_report import Outcome
from spmd_trainer.training import start_up
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import PlanConfig, make_run_config

GIB = 2**30
SAVED = "residuals saved for the backward pass"
ABOUT = {"experiment": f"lm.tiny.{EVIL}", "overrides": "task.train.num_train_steps=3", "topology": "v5e:2x4: 8 chips"}


def chart(scale: float = 1.0) -> MemoryOverTime:
    """Six points with the peak at the fourth: 2 + 4 + 6 GiB times `scale`."""
    parts = {"variables": [2] * 6, "saved": [0, 1, 3, 4, 2, 0], "layer": [0, 2, 1, 6, 5, 0]}
    names = {"variables": "variables", "saved": SAVED, "layer": f"attn {EVIL}"}
    groups = [Group(kind, names[kind], [int(n * scale * GIB) for n in points]) for kind, points in parts.items()]
    return MemoryOverTime(
        positions=[0, 10, 20, 30, 40, 50],
        length=60,
        groups=groups,
        peak=3,
        operations=[0, 1, 1, 2, 2, 0],
        operation_names=["added by the compiler", "lm/attn, forward", "lm/attn, backward"],
        loops=[
            {"begin": begin, "end": end, "times": 12, "part": part}
            for begin, end, part in ((5, 24, "forward"), (28, 49, "backward"))
        ],
        largest=[PeakArray(6 * GIB, 2, "bf16[8,64]", f"attn {EVIL}", "lm/attn, backward: dot_general")],
    )


def make_plan(
    *,
    memory: int | None = 16 * GIB,
    estimate: bool = True,
    kind: str = "TPU v5 lite",
    chart: MemoryOverTime | None = None,
) -> types.SimpleNamespace:
    """What the page reads of a plan that needs 13 GiB."""
    times = [
        types.SimpleNamespace(kind="all-reduce", axes=("data",), seconds=0.02, links="ICI"),
        types.SimpleNamespace(kind="all-gather", axes=("data", "mdl"), seconds=0.5, links="ICI, DCN"),
    ]
    return types.SimpleNamespace(
        kind=kind,
        mesh={"data": 4, "mdl": 2},
        arguments=2 * GIB,
        temporaries=11 * GIB,
        outputs=0,
        total=13 * GIB,
        padding=3 * 2**20,
        memory=memory,
        memory_over_time=chart,
        fits=None if memory is None else memory >= 13 * GIB,
        estimate=types.SimpleNamespace(shortest=0.6, longest=1.4, collectives=times) if estimate else None,
        collectives=[
            {"kind": "all-reduce", "axes": ["data"], "count": 12, "bytes": 3 * GIB},
            {"kind": "all-gather", "axes": ["data", "mdl"], "count": 40, "bytes": GIB},
        ],
    )


def candidate(mdl: int, minibatches: int = 1) -> Candidate:
    return Candidate((("data", 8 // mdl), ("mdl", mdl)), minibatches=minibatches)


def compiled(mdl: int, seconds: float, num_bytes: int, *, fits: bool = True) -> Outcome:
    return Outcome(
        candidate(mdl),
        seconds=seconds if fits else None,
        shortest=seconds * 0.7,
        longest=seconds * 1.3,
        bytes=num_bytes,
        state_bytes=num_bytes // 2,
        padding=1024,
        rows=8,
        dominant="all-reduce over data",
        reason="" if fits else "needs 20.0 GiB of 16.0 GiB per chip, most of it temporaries",
        compiled_in=3.0,
    )


OUTCOMES = [
    compiled(1, 1.0, 12 * GIB),
    compiled(2, 2.0, 6 * GIB),
    compiled(4, 3.0, 7 * GIB),  # slower and larger than the second
    compiled(8, 0.5, 20 * GIB, fits=False),
    Outcome(candidate(1, 2), predicted=4.0, state_bytes=3 * GIB, rows=8, reason="predicted 4 s"),
    Outcome(candidate(2, 2), predicted=2.5, state_bytes=2 * GIB, rows=8, not_reached="the budget ran out before it was compiled"),
    Outcome(candidate(4, 2), reason=f"Mesh <b>doesn't</b> fit {EVIL}"),
]  # fmt: skip


def flags(found: Candidate) -> str:
    return f"--fdl.set=\"NAME='{EVIL}'\" --mesh={found}"


def search_record(outcomes=OUTCOMES, **settings):
    plans = {
        id(outcome): plan_page.plan_record(make_plan(chart=chart(scale)))
        for outcome, scale in zip(plan_page.worth_showing(outcomes), (1.0, 0.5), strict=False)
    }
    outcomes = [dataclasses.replace(outcome, details=plans.get(id(outcome))) for outcome in outcomes]
    return plan_page.search_record(outcomes, **{"chip_memory": 16 * GIB, "flags": flags, **settings})


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_collectives_have_bytes_and_seconds_by_kind_and_axes():
    rows = plan_page.plan_record(make_plan(chart=chart()))["collectives"]
    assert [(r["kind"], r["axes"], r["count"], r["bytes"], r["seconds"], r["links"]) for r in rows] == [
        ("all-gather", ["data", "mdl"], 40, GIB, 0.5, "ICI, DCN"),
        ("all-reduce", ["data"], 12, 3 * GIB, 0.02, "ICI"),
    ]
    without = plan_page.plan_record(make_plan(estimate=False))["collectives"]
    assert [(r["kind"], r["seconds"]) for r in without] == [("all-reduce", None), ("all-gather", None)]


def test_each_candidate_has_a_status_a_position_and_its_reason():
    record = search_record()
    points = {p["name"]: p for p in record["points"]}
    reasons = {name: record["reasons"][p["reason"]] for name, p in points.items()}
    assert len(points) == 7
    found = {name: (p["status"], p["front"], p["seconds"], p["bytes"]) for name, p in points.items()}
    assert found == {
        "data:8, 1 minibatches": ("fits", True, 1.0, 12 * GIB),
        "data:4,mdl:2, 1 minibatches": ("fits", True, 2.0, 6 * GIB),
        "data:2,mdl:4, 1 minibatches": ("fits", False, 3.0, 7 * GIB),
        "mdl:8, 1 minibatches": ("too large", False, 0.5, 20 * GIB),
        "data:8, 2 minibatches": ("out", False, 4.0, 3 * GIB),
        "data:4,mdl:2, 2 minibatches": ("waiting", False, 2.5, 2 * GIB),
        "data:2,mdl:4, 2 minibatches": ("out", False, None, None),
    }
    assert reasons["data:8, 1 minibatches"] == ""
    assert reasons["data:8, 2 minibatches"] == "predicted 4 s"
    assert reasons["data:4,mdl:2, 2 minibatches"] == OUTCOMES[5].not_reached


def test_a_candidate_that_the_compiler_refused_is_no_other_one_that_is_out():
    refused = Outcome(candidate(1), predicted=1.0, state_bytes=GIB, reason="RESOURCE_EXHAUSTED", compiled_in=9.0)
    record = search_record([*OUTCOMES[:3], refused])
    point = next(p for p in record["points"] if record["reasons"][p["reason"]] == "RESOURCE_EXHAUSTED")
    assert (point["status"], point["seconds"], point["bytes"]) == ("failed", 1.0, GIB)
    assert "3 fit, 1 failed to compile<" in plan_page.search_page(ABOUT, record)


def test_if_nothing_fits_the_smallest_is_shown():
    large = [compiled(2, 1.0, 40 * GIB, fits=False), compiled(1, 1.0, 20 * GIB, fits=False), OUTCOMES[4]]
    assert plan_page.worth_showing(large) == [large[1]]
    assert plan_page.worth_showing([OUTCOMES[4]]) == []
    page = plan_page.search_page(ABOUT, search_record(large))
    assert "nothing fits" in page
    assert "does not fit" in page


def test_a_page_with_thousands_of_candidates_stays_small_and_says_what_it_leaves_out():
    several = [
        Outcome(
            candidate(1, n),
            predicted=1 + n / 7,
            state_bytes=GIB + n,
            rows=8,
            reason=f"predicted {1 + n / 7} s, too long",
        )
        for n in range(3000)
    ]
    front = [compiled(1, 0.1 + n, (100 - n) * GIB) for n in range(30)]
    record = search_record([*several, *front])
    assert len(record["points"]) == plan_page.MOST_CANDIDATES
    assert record["left_out"] == 3030 - plan_page.MOST_CANDIDATES
    assert sum(p["status"] == "fits" for p in record["points"]) == 30, "what was compiled stays"
    assert len(record["shown"]) == 30, "the whole front is in the table"
    for outcome in front:
        outcome.details = {"a": "program"}
    plan_search._drop_details([*several, *front])
    assert sum(outcome.details is not None for outcome in front) == plan_page.MOST_PLANS
    long = memory_with_points(400)
    for shown in record["shown"][: plan_page.MOST_PLANS]:
        shown["plan"] = plan_page.plan_record(make_plan(chart=long))
    assert len(plan_page.search_page(ABOUT, record)) < 500_000


def memory_with_points(count: int) -> MemoryOverTime:
    """A chart of as many points and groups as a compiled program gives, of which half change at each point."""
    groups = [
        Group("layer", f"layer_{n}", [(GIB + n + point) if n % 2 else GIB for point in range(count)]) for n in range(10)
    ]
    return MemoryOverTime(list(range(count)), count, groups, count - 1, [0] * count, [""], [], [])


def test_all_text_is_escaped_and_all_marks_of_the_template_are_replaced():
    pages = [
        plan_page.plan_page(ABOUT, plan_page.plan_record(make_plan(chart=chart()))),
        plan_page.search_page(ABOUT, search_record()),
    ]
    for page in pages:
        assert EVIL not in page.split('id="data">')[0]
        assert html.escape(EVIL) in page
        assert_harmless(page, scripts=1)
        assert not set("<>&\u2028") & set(page.split('id="data">')[1].split("</script>")[0])
        assert set(re.findall(r"__PAGE_\w+?__", page)) == {"__PAGE_CSS__"}, "the one in the experiment's name"
        assert "://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert data_of(pages[0])["plan"]["memory"]["groups"][2]["name"] == f"attn {EVIL}"
    assert data_of(pages[1])["search"]["reasons"][-1] == f"Mesh <b>doesn't</b> fit {EVIL}"


@pytest.mark.parametrize(
    ("memory", "text"), [(16 * GIB, "fits: 81%"), (12 * GIB, "does not fit: 108%"), (None, "on host devices")]
)
def test_the_head_says_whether_it_fits(memory, text):
    page = plan_page.plan_page(ABOUT, plan_page.plan_record(make_plan(memory=memory, chart=chart())))
    assert text in page
    assert "0.6 to 1.4 s" in page
    assert "3.0 MiB" in page


def test_of_a_gpu_s_memory_only_a_part_can_be_taken():
    record = plan_page.plan_record(make_plan(kind="NVIDIA H100 80GB HBM3", memory=20 * GIB, chart=chart()))
    assert record["usable_memory"] < record["chip_memory"]
    assert_names(plan_page.plan_page(ABOUT, record), "fits: 65% of 20.0 GiB", "JAX can take 95%")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    directory = epath.Path(tmp_path_factory.mktemp("plan_page"))
    config = make_run_config(
        "lm.stdlib.StdlibBytesTiny", directory, overrides=["task.train.num_train_steps=7"], mode="inspect"
    )
    return Job.build(config)


@pytest.mark.full
def test_arguments_of_a_real_step_are_its_variables_and_its_optimizer_state(job):
    found = plan_memory.memory_over_time(hlo_liveness.schedule(start_up.compile_train_step(job).fn.as_text()))
    mesh = job.partitioner.mesh_shape()
    sizes = {"mdl_vars": 0, "opt_states": 0}
    for variable in job.partitioner.metadata.records():
        name = variable.path.partition("/")[0]
        if name in sizes:
            sizes[name] += variable.bytes_per_device(mesh)
    groups = {group.kind: group.num_bytes for group in found.groups}
    assert set(groups["variables"]) == {sizes["mdl_vars"]}
    assert set(groups["optimizer"]) == {sizes["opt_states"]}
    assert {"layer", "rest"} <= groups.keys()


def test_pages_are_written_beside_the_other_reports(job):
    plan = make_plan(chart=chart())
    plan.attention, plan.xla_flags = ["dot product: the sequence is short"], {"xla_some_flag": True}
    plan_page.write_plan_page(job, plan)
    path = job.config.job_log_dir / plan_page.FILE
    page = path.read_text()
    for text in ("spmd_trainer.experiments.lm.stdlib.StdlibBytesTiny", "num_train_steps=7", "data=4, mdl=2", "8 chips (cpu)",
                 "the sequence is short", "xla_some_flag=True", "jaxlib "):  # fmt: skip
        assert html.escape(text) in page, text
    searched = PlanConfig(job.config.experiment, job.config.job_log_dir)
    job = dataclasses.replace(job, config=searched)
    plan_page.write_search_page(job, OUTCOMES, chip_memory=None)
    assert data_of(path.read_text())["search"]["counts"] == {
        "fits": 3,
        "too large": 1,
        "failed": 0,
        "out": 2,
        "waiting": 1,
    }
    path.unlink()


def test_nothing_is_written_without_a_directory(tmp_path):
    config = make_run_config("lm.stdlib.StdlibBytesTiny", tmp_path, mode="inspect", writes_reports=False)
    plan_page._write(types.SimpleNamespace(config=config), "page")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page; afterwards checks that it raised no error and asked for nothing but itself."""
    pages = []

    def open_page(text: str, **settings):
        file = tmp_path / f"page{len(pages)}.html"
        file.write_text(text, encoding="utf-8")
        pages.append((browser.open(file, **settings), file))
        return pages[-1][0]

    yield open_page
    for page, file in pages:
        assert page.errors == []
        assert page.requests == [file.as_uri()]
        assert page.evaluate("window.alerted") is None


def here(page) -> list[str]:
    """The last column of the memory's table: bytes at the cursor, top area first, then the total."""
    return page.texts("#memory-table tr td:last-child")


@needs_chromium
def test_the_memory_chart_in_a_browser(opened):
    page = opened(plan_page.plan_page(ABOUT, plan_page.plan_record(make_plan(chart=chart()))))
    assert page.count("#memory-chart path.area") == 3
    assert page.texts("#memory-table tbody th") == [
        f"attn {EVIL}",
        SAVED,
        "variables",
    ]
    assert here(page) == ["6.0 GiB", "4.0 GiB", "2.0 GiB", "12.0 GiB"], "at first the cursor is at the peak"
    (readout,) = page.texts("#memory-readout")
    assert_names(readout, "12.0 GiB", "position 30 of 60", "the peak", "lm/attn, backward")
    peak, allocated, limit = page.texts("#memory-legend > span")
    assert (peak, allocated) == ("peak 12.0 GiB", "allocated 13.0 GiB")
    assert_names(limit, "chip 16.0 GiB")
    # 13 and 16 GiB lie within the chart, in this order.
    ends = page.evaluate(
        "['allocated', 'limit'].map(c => document.querySelector('#memory-chart .' + c).y1.baseVal.value)"
    )
    assert ends[0] > ends[1] > 0
    assert page.count("#memory-chart .loop") == 2
    # The keyboard reaches the chart and moves the cursor.
    page.evaluate("document.querySelector('#memory-chart svg').focus()")
    page.press("End")
    assert here(page) == ["0 B", "0 B", "2.0 GiB", "2.0 GiB"]
    page.press("ArrowLeft")
    assert here(page)[-1] == "9.0 GiB"
    slider = "document.querySelector('#memory-chart svg').getAttribute('aria-valuetext')"
    assert page.evaluate(slider) == "9.0 GiB at position 40 of 60, lm/attn, backward"
    # So does a pointer.
    box = page.evaluate("(b => [b.x, b.y])(document.querySelector('#memory-chart svg').getBoundingClientRect())")
    page.move_to(box[0] + 60, box[1] + 150)
    assert here(page)[-1] == "2.0 GiB"
    collective, *numbers = page.texts("#collectives-table tbody tr:first-child > *")
    assert_names(collective, "all-gather", "data, mdl", "(ICI, DCN)")
    assert numbers == ["40", "1.0 GiB", "500 ms"]
    assert page.texts("#largest-table tbody td") == ["6.0 GiB"]
    assert page.evaluate("document.getElementById('search').hidden && document.getElementById('all').hidden")
    assert page.count("main b") == 1, "the readout's number; no text became markup"


@needs_chromium
def test_a_search_in_a_browser(opened):
    page = opened(plan_page.search_page(ABOUT, search_record()))
    assert page.count("#scatter .point") == 4, "what was compiled"
    assert page.count("#scatter .fits") == 3
    assert page.count("#scatter .too-large") == 1
    assert page.count("#scatter line.limit") == 1
    (readout,) = page.texts("#scatter-readout")
    assert_names(readout, "data:8, 1 minibatches: 1 s", "12.0 GiB per chip", "Pareto front")
    assert page.texts(".front tbody th") == ["1 data:8, 1 minibatches", "2 data:4,mdl:2, 1 minibatches"]
    assert page.evaluate("document.querySelector('.run code').textContent") == flags(candidate(1))
    page.evaluate("document.querySelector('#scatter svg').focus()")
    page.press("Home")
    (readout,) = page.texts("#scatter-readout")
    assert_names(readout, "mdl:8, 1 minibatches: 500 ms", "20.0 GiB per chip", f"doesn't fit: {OUTCOMES[3].reason}")
    # Predictions too.
    page.evaluate("document.getElementById('predicted').click()")
    assert page.count("#scatter .point") == 6, "one has no numbers"
    page.evaluate("document.querySelector('#scatter svg').focus()")
    page.press("End")
    (readout,) = page.texts("#scatter-readout")
    assert_names(readout, "data:8, 2 minibatches: predicted 4 s", "3.0 GiB of state", f"left out: {OUTCOMES[4].reason}")
    page.evaluate("document.getElementById('predicted').click()")
    assert page.count("#scatter .point") == 4
    assert page.texts("#scatter-readout")[0].startswith("data:8, 1 minibatches: 1 s"), "the fastest is selected again"
    # Another candidate of the front has another program.
    assert page.texts("#choice option") == ["data:8, 1 minibatches", "data:4,mdl:2, 1 minibatches"]
    assert here(page)[-1] == "12.0 GiB"
    page.evaluate("(c => { c.value = 1; c.dispatchEvent(new Event('change')); })(document.getElementById('choice'))")
    assert here(page) == ["3.0 GiB", "2.0 GiB", "1.0 GiB", "6.0 GiB"]
    # All candidates, with a filter.
    opening = "d.addEventListener('toggle', () => setTimeout(done)); d.open = true"
    page.evaluate(f"new Promise(done => {{ const d = document.getElementById('all'); {opening}; }})")
    assert page.texts("#all-note") == ["7 of 7 shown."]
    page.evaluate(
        "(f => { f.value = 'mesh fit'; f.dispatchEvent(new Event('input')); })(document.getElementById('filter'))"
    )
    assert page.texts("#all-table tbody th") == ["data:2,mdl:4, 2 minibatches"]
    assert page.texts("#all-table tbody td") == ["left out", f"Mesh <b>doesn't</b> fit {EVIL}", "unknown", "unknown"]


@needs_chromium
def test_the_flags_are_selected_as_the_shell_needs_them(opened):
    page = opened(plan_page.search_page(ABOUT, search_record()), width=390)
    page.evaluate("document.querySelector('.copy').click()")
    assert page.evaluate("getSelection().toString()") == flags(candidate(1))


@needs_chromium
def test_charts_are_drawn_again_for_another_width(opened):
    page = opened(plan_page.search_page(ABOUT, search_record()))
    page.evaluate("document.querySelector('#memory-chart svg').focus()")
    page.press("End")
    page.call("Emulation.setDeviceMetricsOverride", width=700, height=900, deviceScaleFactor=1, mobile=False)
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    for chart_id in ("scatter", "memory-chart"):
        host, drawn = page.evaluate(
            f"(h => [h.clientWidth, +h.firstChild.getAttribute('width')])({chart_of(chart_id)})"
        )
        assert drawn == host < 700
    assert here(page)[-1] == "2.0 GiB", "the cursor stays"


def chart_of(element_id: str) -> str:
    return f"document.getElementById('{element_id}')"


@needs_chromium
def test_batches_of_different_size_are_compared_per_row(opened):
    outcomes = [compiled(1, 1.0, 12 * GIB), compiled(2, 1.2, 13 * GIB)]
    outcomes[1].rows = 16
    page = opened(plan_page.search_page(ABOUT, search_record(outcomes)))
    (readout,) = page.texts("#scatter-readout")
    assert_names(readout, "data:4,mdl:2, 1 minibatches: 1.2 s for 16 rows", "13.0 GiB per chip", "Pareto front")
    assert page.texts(".fact.good b") == ["1.2 s for 16 rows"]
    assert "step per row" in page.evaluate("document.querySelector('#scatter svg').textContent")


@needs_chromium
def test_no_program_is_shown_if_none_is_known(opened):
    page = opened(plan_page.search_page(ABOUT, search_record([OUTCOMES[4], OUTCOMES[6]])))
    hidden = "['front', 'chosen', 'memory', 'collectives', 'largest'].filter(id => !document.getElementById(id).hidden)"
    assert page.evaluate(hidden) == []
    assert page.count("#scatter .point") == 1


@needs_chromium
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_phone_scrolls_in_one_direction_only(opened, dark):
    about = {**ABOUT, "versions": "jax-0.10.2-" * 40}
    for text in (
        plan_page.search_page(about, search_record()),
        plan_page.plan_page(about, plan_page.plan_record(make_plan(chart=chart()))),
    ):
        page = opened(text, width=390, height=844, dark=dark)
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(243, 244, 247)"
        assert light != dark
