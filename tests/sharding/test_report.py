"""The report (contract 3.8); the HTML page in a real browser."""

import html
import json
import re
import shutil
import subprocess

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharding_helpers import saying

from spmd_trainer.sharding import make_variable_spec, plan_sharding, sharding_report, sharding_totals

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


@pytest.fixture(scope="module")
def mesh():
    return jax.sharding.AbstractMesh((1, 4, 2), ("replica", "data", "mdl"))


@pytest.fixture(scope="module")
def variables(mesh):
    def record(path, shape, spec, reason):
        return make_variable_spec(path, shape, np.float32, spec, mesh.shape, reason)

    return {
        "emb": record("emb/table", (101, 64), P("data", "mdl"), "declared"),
        "scale": record("ln/scale", (64,), P(), "replicated: no rule matched"),
        "kernel": record("out/kernel", (64, 8), P("data"), "rule 2 ('kernel', fsdp(axis='data'))"),
        "evil": record("evil/</script><b>x", (), P(), "replicated: <b>bold</b>"),
    }


def test_totals(variables, mesh):
    totals = sharding_totals(variables, mesh)
    assert totals.num_variables == 4
    assert (totals.num_split, totals.num_replicated, totals.num_padded) == (2, 2, 1)
    assert totals.num_elements == 101 * 64 + 64 + 512 + 1
    assert totals.logical_bytes == 4 * totals.num_elements
    assert totals.padding_bytes == 3 * 64 * 4  # 101 -> 104
    assert totals.bytes_per_device == 4 * (26 * 32 + 64 + 128 + 1)
    assert totals.replicated_bytes_per_device == 4 * (64 + 1)


def test_text(variables, mesh):
    lines = sharding_report(variables, mesh).splitlines()
    assert lines[0] == "Mesh replica=1, data=4, mdl=2: 8 devices"
    assert re.split(r"  +", lines[2]) == [
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
    assert any(line.endswith("replicated: no rule matched") for line in lines)
    assert "4 variables (2 split, 2 replicated, 1 padded), 7,041 elements" in lines[-3]
    assert "Each device holds 4.0 KiB, of which 260 B replicated" in lines[-2]
    assert lines[-1] == "Padding adds 768 B (2.73%)"
    assert len({line.index("float32") for line in lines if "float32" in line}) == 1  # columns stand below each other


def test_json(variables, mesh):
    data = json.loads(sharding_report(variables, mesh, format="json"))
    assert data["mesh"]["axes"] == [
        {"name": "replica", "size": 1},
        {"name": "data", "size": 4},
        {"name": "mdl", "size": 2},
    ]
    assert data["totals"]["padding_bytes"] == 768
    by_path = {v["path"]: v for v in data["variables"]}
    assert by_path["emb/table"] == {
        "path": "emb/table",
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


def test_a_mesh_of_devices_names_them(variables, pax_mesh):
    data = json.loads(sharding_report(variables, pax_mesh, format="json"))
    assert sorted(data["mesh"]["device_ids"]) == list(range(8))


def test_html_needs_nothing_beside_itself(variables, mesh):
    page = sharding_report(variables, mesh, format="html")
    assert not re.search(r"""(src|href)\s*=|@import|url\((?!#)""", page)
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert page.count("</script>") == 2  # a path that holds one cannot end the data early


def test_errors(variables, mesh):
    with pytest.raises(ValueError, match=saying("'htm'", "Did you mean 'html'?", "text")):
        sharding_report(variables, mesh, format="htm")
    with pytest.raises(ValueError, match=saying("P('data'", "plan_sharding")):
        sharding_report([P("data")], mesh)


def test_no_variables(mesh):
    assert "0 variables" in sharding_report({}, mesh)
    assert "Padding adds nothing" in sharding_report({}, mesh)
    assert sharding_totals({}, mesh).bytes_per_device == 0


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
            f"file://{file}#{address}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split('<script type="application/json"')[0]

    return open_page


def texts(dom: str, pattern: str) -> list[str]:
    return [html.unescape(re.sub(r"<[^>]*>", "", found)) for found in re.findall(pattern, dom, flags=re.DOTALL)]


def rows(dom: str) -> list[str]:
    return texts(dom, r'role="option".*?<span class="mono tail"[^>]*>(.*?)</span>')


@needs_chromium
def test_page_shows_and_selects(variables, mesh, browse):
    dom = browse(sharding_report(variables, mesh, format="html"), "at=emb/table")
    assert rows(dom) == [v.path for v in jax.tree.leaves(variables)]
    assert "<b>bold</b>" not in dom
    assert texts(dom, r'id="reason"[^>]*>(.*?)</div>') == ["declared"]
    assert "mesh replica=1, data=4, mdl=2 · 8 devices" in dom
    assert "(101+3, 64)" in dom
    # The mesh as a grid: 8 devices, each with its own piece of 4 x 2; the array in 8 pieces with hatched padding.
    assert sorted(re.findall(r'class="device" data-piece="(\d+)"', dom)) == [str(i) for i in range(8)]
    assert len(re.findall(r'class="piece"', dom)) == 8
    assert len(re.findall(r'class="padding"', dom)) == 1
    assert "device 3 (replica=0, data=1, mdl=1) holds [26:52, 32:64]" in dom


@needs_chromium
def test_page_shows_replicas(variables, mesh, browse):
    dom = browse(sharding_report(variables, mesh, format="html"), "at=out/kernel")
    assert re.findall(r'class="device" data-piece="(\d+)"', dom) == list("00112233")
    assert "Each piece is on 2 devices" in dom


@needs_chromium
def test_page_searches_filters_and_sorts(variables, mesh, browse):
    page = sharding_report(variables, mesh, format="html")
    assert rows(browse(page, "q=fsdp kern")) == ["out/kernel"]
    assert rows(browse(page, "filter=padded")) == ["emb/table"]
    assert rows(browse(page, "sort=bytes&desc=1&filter=split")) == ["emb/table", "out/kernel"]
    assert rows(browse(page, "sort=bytes&filter=split")) == ["out/kernel", "emb/table"]
    assert "No variable matches." in browse(page, "q=nothing-like-this")


@needs_chromium
def test_page_with_ten_thousand_variables_draws_only_rows_in_sight(browse):
    mesh = jax.sharding.AbstractMesh((16, 8), ("data", "mdl"))
    state = {f"layer_{i}": {"w": jax.ShapeDtypeStruct((128 + i % 7, 64), np.float32)} for i in range(10_000)}
    plan = plan_sharding(state, [(".*", ["fsdp('data', 0, True)", "fsdp('mdl', 0)"])], mesh)
    page = sharding_report(plan, mesh, format="html")
    dom = browse(page, "sort=path&at=layer_9999/w")
    assert rows(dom)[:3] == ["layer_0/w", "layer_1/w", "layer_2/w"]
    assert 20 <= len(rows(dom)) <= 80
    assert "10,000 variables" in dom
    assert texts(dom, r'class="path mono"[^>]*>(.*?)</div>') == ["layer_9999/w"]
    assert len(re.findall(r'class="device"', dom)) == 128
