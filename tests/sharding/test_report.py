"""The report (contract 3.8): text, JSON, the HTML page's markup, its form in a notebook."""

import html
import json
import re

import jax
import pytest
from facts import assert_names, missing_facts, raises_naming
from jax.sharding import PartitionSpec as P
from report_helpers import MESH, TRAIN_STATE, VARIABLES, record, texts
from sharding_helpers import saying

from spmd_trainer.sharding import (
    ShardingReport,
    report_html,
    sharding_report,
    sharding_totals,
)
from spmd_trainer.sharding.report_data import opening_variable, report_data


def test_totals():
    totals = sharding_totals(VARIABLES, MESH)
    assert totals.num_variables == 4
    assert (totals.num_split, totals.num_replicated, totals.num_padded) == (2, 2, 1)
    assert totals.num_elements == 101 * 64 + 64 + 512 + 1
    assert totals.logical_bytes == 4 * totals.num_elements
    assert totals.padding_bytes == 3 * 64 * 4  # 101 -> 104
    assert totals.bytes_per_device == 4 * (26 * 32 + 64 + 128 + 1)
    assert totals.replicated_bytes_per_device == 4 * (64 + 1)


def test_text():
    lines = sharding_report(VARIABLES, MESH).splitlines()
    assert lines[:2] == [f"jax: {jax.__version__}", "Mesh replica=1, data=4, mdl=2: 8 devices"]
    assert re.split(r"  +", lines[3]) == [
        "variable",
        "dtype",
        "shape",
        "padded",
        "spec",
        "per device",
        "padding",
        "why",
    ]
    emb = next(line for line in lines if line.startswith("emb/table"))
    assert re.split(r"  +", emb) == [
        *("emb/table", "float32", "(101, 64)", "(104, 64)", "P('data', 'mdl')", "3.2 KiB", "768 B (2.97%)", "declared")
    ]
    assert any(not missing_facts(line, "replicated", "no rule") for line in lines)
    assert "4 variables (2 split, 2 replicated, 1 padded), 7,041 elements" in lines[-3]
    assert_names(lines[-2], "4.0 KiB", "260 B", "replicated")
    assert lines[-1] == "Padding adds 768 B (2.73%)"
    assert len({line.index("float32") for line in lines if "float32" in line}) == 1  # columns stand below each other


def test_json():
    data = json.loads(sharding_report(VARIABLES, MESH, format="json"))
    assert data["mesh"]["axes"] == [
        {"name": "replica", "size": 1},
        {"name": "data", "size": 4},
        {"name": "mdl", "size": 2},
    ]
    assert data["totals"]["padding_bytes"] == 768
    by_path = {v["path"]: v for v in data["variables"]}
    assert by_path["emb/table"] == {
        "path": "emb/table",
        "kind": "parameters",
        "dtype": "float32",
        "logical_shape": [101, 64],
        "padded_shape": [104, 64],
        "spec": [["data"], ["mdl"]],
        "spec_text": "P('data', 'mdl')",
        "bytes_per_device": 3328,
        "padding_bytes": 768,
        "logical_bytes": 101 * 64 * 4,
        "reason": "declared",
    }


def test_parameters_optimizer_state_and_the_rest_have_totals_of_their_own():
    data = json.loads(sharding_report(TRAIN_STATE, MESH, format="json"))
    kinds = data["totals_by_kind"]
    assert list(kinds) == ["parameters", "optimizer_state", "other"]
    assert [v["kind"] for v in data["variables"]] == ["other", *["parameters"] * 3, *["optimizer_state"] * 2, "other"]
    # 30 rows of 16 over data=4, mdl=2: padded to 32, a device holds (8, 8).
    assert kinds["parameters"]["logical_bytes"] == 4 * (512 + 30 * 16 + 1000)
    assert kinds["parameters"]["bytes_per_device"] == 4 * (256 + 8 * 8 + 1000)
    assert kinds["parameters"]["padding_bytes"] == 4 * 2 * 16
    assert kinds["optimizer_state"]["logical_bytes"] == 4 * (512 + 30 * 16)
    assert kinds["optimizer_state"]["bytes_per_device"] == 4 * (256 + 8 * 8)
    assert kinds["optimizer_state"]["padding_bytes"] == 4 * 2 * 16
    assert kinds["other"]["logical_bytes"] == kinds["other"]["bytes_per_device"] == 4 * (1 + 3)
    for name, total in data["totals"].items():
        assert total == sum(totals[name] for totals in kinds.values()), name


TOTALS = [
    ("parameters", "3", "1,992", "7.8 KiB", "5.2 KiB", "128 B (1.61%)"),
    ("optimizer state", "2", "992", "3.9 KiB", "1.2 KiB", "128 B (3.23%)"),
    ("other", "2", "4", "16 B", "16 B", ""),
    ("sum", "7", "2,988", "11.7 KiB", "6.4 KiB", "256 B (2.14%)"),
]


def test_text_and_page_show_the_totals_by_kind():
    lines = sharding_report(TRAIN_STATE, MESH).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("totals "))
    assert re.split(r"  +", lines[start]) == ["totals", "variables", "elements", "one copy", "per device", "padding"]
    assert [re.split(r"  +", line) for line in lines[start + 2 : start + 6]] == [
        [cell for cell in row if cell] for row in TOTALS
    ]
    page = sharding_report(TRAIN_STATE, MESH, format="html")
    table = re.search(r'<table class="totals">.*?</table>', page)[0]
    assert texts(table, r"<td>(.*?)</td>") == [cell or "none" for row in TOTALS for cell in row[3:]]
    assert texts(table, r'<th scope="row">(.*?)</th>') == [
        f"{kind} {variables} variables, {elements} elements" for kind, variables, elements, *_ in TOTALS
    ]


ABOUT = {"experiment": "lm.tiny.<Tiny> & 'co'", "date": "2026-01-31 12:04", "spmd-trainer": "0.1.0"}


def test_the_head_names_experiment_date_and_versions():
    shown = {**ABOUT, "jax": jax.__version__}
    assert sharding_report(VARIABLES, MESH, about=ABOUT).splitlines()[:4] == [f"{k}: {v}" for k, v in shown.items()]
    assert json.loads(sharding_report(VARIABLES, MESH, format="json", about=ABOUT))["about"] == shown
    page = sharding_report(VARIABLES, MESH, format="html", about=ABOUT)
    assert texts(page, r"<title>(.*?)</title>") == ["lm.tiny.<Tiny> & 'co': sharding report"]
    head = re.search(r"<header>.*</header>", page)[0]
    assert "<Tiny>" not in page
    assert texts(head, r"<h1>(.*?)</h1>") == ["lm.tiny.<Tiny> & 'co'"]
    assert texts(head, r"<span>(.*?)</span>") == [f"{name} {shown[name]}" for name in ("date", "spmd-trainer", "jax")]
    given = json.loads(sharding_report(VARIABLES, MESH, format="json", about={"jax": "0.0.1"}))
    assert given["about"] == {"jax": "0.0.1"}


def opens_on(variables, mesh):
    data = report_data(variables, mesh, {})["variables"]
    index = opening_variable(data)
    return None if index is None else data[index]["path"]


def test_the_page_opens_on_the_largest_variable_that_is_cut():
    assert opens_on(TRAIN_STATE, MESH) == "mdl_vars/params/bias"  # its optimizer state is as large, and later
    assert opens_on([record("a", (4, 4), P("data")), record("b", (4, 8), P("data"))], MESH) == "b"
    assert opens_on([record("a", (4,)), record("b", (8,)), record("c", (8,))], MESH) == "b"
    # replica=1 cuts nothing.
    assert opens_on([record("whole", (64,), P("replica")), record("cut", (8,), P("mdl"))], MESH) == "cut"
    assert opens_on([], MESH) is None


def test_a_report_has_all_forms():
    report = ShardingReport(VARIABLES, MESH, about=ABOUT)
    for form in ("text", "json", "html"):
        assert getattr(report, form)() == sharding_report(VARIABLES, MESH, format=form, about=ABOUT)
    assert str(report) == report.text()
    assert repr(report) == (
        "<ShardingReport lm.tiny.<Tiny> & 'co': 4 variables (2 split) on mesh replica=1, data=4, mdl=2, 4.0 KiB per device>"
    )
    assert repr(ShardingReport([], MESH)).startswith("<ShardingReport 0 variables (0 split)")


def test_a_notebook_shows_a_table_without_scripts_and_the_page_in_a_frame():
    report = ShardingReport(VARIABLES, MESH, about=ABOUT)
    shown = report._repr_html_()
    frame = re.search(r'<iframe [^>]*srcdoc="([^"]*)"></iframe>', shown)
    assert html.unescape(frame[1]) == report.html()
    assert 'sandbox="allow-scripts"' in frame[0]
    table = shown.replace(frame[0], "")
    assert "<script" not in table
    assert "<b>bold" not in table
    assert texts(table, r"<tr><td>(.*?)</td>") == [v.path for v in jax.tree.leaves(VARIABLES)]
    assert texts(table, r"<td>([^<]*)</td></tr>")[-4:] == [v.reason for v in jax.tree.leaves(VARIABLES)]
    assert "lm.tiny.<Tiny> & 'co'" in html.unescape(table)
    assert "smaller ones" not in table


def test_a_notebook_shows_the_largest_of_many_variables_and_says_so():
    many = [record(f"w{i}", (1 + i % 1000,)) for i in range(1000)]
    shown = ShardingReport(many, MESH)._repr_html_()
    table = shown[: shown.index("<iframe")]
    assert texts(table, r"<tr><td>(.*?)</td>") == [f"w{i}" for i in range(1000 - report_html.NOTEBOOK_ROWS, 1000)]
    assert_names(table, "page below", f"{1000 - report_html.NOTEBOOK_ROWS} smaller")


def test_a_mesh_of_devices_names_them(pax_mesh):
    data = json.loads(sharding_report(VARIABLES, pax_mesh, format="json"))
    assert sorted(data["mesh"]["device_ids"]) == list(range(8))


def test_html_needs_nothing_beside_itself():
    page = sharding_report(VARIABLES, MESH, format="html")
    assert not re.search(r"""(src|href)\s*=(?!"data:)|@import|url\((?!#)""", page)
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert page.count("</script>") == 2  # a path that holds one cannot end the data early
    assert not re.search("__REPORT_", page)


def test_a_path_like_a_mark_of_the_template_stays():
    assert '"path":"__REPORT_CSS__"' in sharding_report([record("__REPORT_CSS__", (1,))], MESH, format="html")


def test_errors():
    with raises_naming(ValueError, "'htm'", "mean html", "text"):
        sharding_report(VARIABLES, MESH, format="htm")
    with pytest.raises(ValueError, match=saying("P('data'", "plan_sharding")):
        sharding_report([P("data")], MESH)


def test_no_variables():
    assert "0 variables" in sharding_report({}, MESH)
    assert "Padding adds nothing" in sharding_report({}, MESH)
    assert sharding_totals({}, MESH).bytes_per_device == 0
