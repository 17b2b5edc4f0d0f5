"""The sharding report as HTML: a self-contained page (report.html, .css, .js, report_pictures.js), and a notebook's view."""

from __future__ import annotations

import heapq
import html
import math

from spmd_trainer.sharding import page
from spmd_trainer.sharding.messages import bytes_text, count_text, mesh_text
from spmd_trainer.sharding.report_data import (
    KINDS,
    ReportData,
    VariableData,
    input_section,
    opening_variable,
    percent_text,
    waste_text,
)

# The maximum number of rows in a notebook's table. A notebook stores its output in its file, and draws all of it at once.
NOTEBOOK_ROWS = 200


def report_page(data: ReportData) -> str:
    """Returns the report as a self-contained HTML page.

    Header and totals are plain HTML. The page's script draws the table and the pictures from the data in the page.
    """
    title = data["about"].get("experiment")
    parts = {
        "HEAD": _head(data),
        "TOTALS": _headline(data) + _totals_table(data),
        "INPUTS": input_section(data["inputs"]),
    }
    return page.document(
        f"{title}: sharding report" if title else "Sharding report",
        page.fill(_asset("report.html"), parts),
        styles=(_asset("report.css"),),
        data=_script_data(data),
        scripts=(_asset("report_pictures.js"), _asset("report.js")),
    )


def notebook(data: ReportData) -> str:
    """Returns the report as HTML for a notebook: header, totals, a table, and the full page in a collapsed section.

    The table needs no script and takes its colors from the notebook. The page is in a sandboxed frame, which loads lazily.
    """
    variables, title = data["variables"], data["about"].get("experiment")
    largest = heapq.nlargest(NOTEBOOK_ROWS, range(len(variables)), key=lambda i: (variables[i]["bytes_per_device"], -i))
    rows = "".join(_notebook_row(variables[i]) for i in sorted(largest))
    header = "".join(
        f"<th>{name}</th>" for name in ("variable", "dtype", "shape", "spec", "per device", "padding", "why")
    )
    left_out = len(variables) - len(largest)
    note = (
        f"<p>The table shows the {len(largest)} variables with the most bytes per device; the page below also shows the "
        f"{left_out:,} smaller ones.</p>"
    )
    return (
        f'<div class="spmd-sharding-report"><style>{_asset("report_notebook.css")}</style>'
        f"<p><b>Sharding report{f': {html.escape(title)}' if title else ''}</b></p><p>{_about_line(data)}</p>"
        f"{_totals_table(data)}"
        f'<div class="box"><table class="variables"><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"{note if left_out else ''}"
        "<details><summary>Full page with search and pictures</summary>"
        '<iframe title="Sharding report" sandbox="allow-scripts" loading="lazy" '
        f'srcdoc="{html.escape(report_page(data))}"></iframe></details></div>'
    )


def _mesh_line(data: ReportData) -> str:
    axes = data["mesh"]["axes"]
    devices = count_text(math.prod(axis["size"] for axis in axes), "device")
    return f"mesh {mesh_text({axis['name']: axis['size'] for axis in axes})} · {devices}"


def _about_line(data: ReportData) -> str:
    facts = [f"{name} {value}" for name, value in data["about"].items() if name != "experiment"]
    return html.escape(" · ".join([_mesh_line(data), *facts]))


def _head(data: ReportData) -> str:
    title = data["about"].get("experiment")
    kicker = '<p class="kicker">Sharding report</p>' if title else ""
    facts = "".join(
        f"<span><b>{html.escape(name)}</b> {html.escape(value)}</span>"
        for name, value in data["about"].items()
        if name != "experiment"
    )
    return (
        f"{kicker}<h1>{html.escape(title or 'Sharding report')}</h1>"
        f'<p id="about"><span id="mesh-line">{html.escape(_mesh_line(data))}</span>{facts}</p>'
    )


def _headline(data: ReportData) -> str:
    totals, by_kind = data["totals"], data["totals_by_kind"]
    all_bytes = totals["bytes_per_device"]
    bar = "".join(
        f'<i class="{kind}" style="flex-grow:{by_kind[kind]["bytes_per_device"] / all_bytes:.4f}"></i>'
        for kind in KINDS
        if by_kind[kind]["bytes_per_device"]
    )
    replicated = count_text(totals["num_replicated"], "replicated variable")
    return (
        f'<div class="headline"><b>{bytes_text(all_bytes)}</b><span>per device, '
        f"{bytes_text(totals['replicated_bytes_per_device'])} of it in {replicated}</span>"
        f'<div class="bar" aria-hidden="true">{bar}</div></div>'
    )


def _totals_table(data: ReportData) -> str:
    kinds = [(kind, totals) for kind, totals in data["totals_by_kind"].items() if totals["num_variables"]]
    rows = "".join(_totals_row(kind, totals) for kind, totals in kinds)
    return (
        '<table class="totals"><thead><tr><th scope="col">totals</th><th scope="col">one copy</th>'
        f'<th scope="col">per device</th><th scope="col">padding</th></tr></thead><tbody>{rows}</tbody>'
        f"<tfoot>{_totals_row('sum', data['totals'])}</tfoot></table>"
    )


def _totals_row(kind: str, totals: dict[str, int]) -> str:
    logical, padding = totals["logical_bytes"], totals["padding_bytes"]
    size = f"{count_text(totals['num_variables'], 'variable')}, {count_text(totals['num_elements'], 'element')}"
    return (
        f'<tr class="{kind}"><th scope="row"><i class="{kind}"></i>{kind.replace("_", " ")} <small>{size}</small></th>'
        f"<td>{bytes_text(logical)}</td><td>{bytes_text(totals['bytes_per_device'])}</td>"
        f"<td>{waste_text(padding, logical) or 'none'}</td></tr>"
    )


def _notebook_row(v: VariableData) -> str:
    padded = "" if v["padded_shape"] == v["logical_shape"] else f" → {v['padded_shape']}"
    code = [v["path"], v["dtype"], f"{v['logical_shape']}{padded}", v["spec_text"]]
    plain = [bytes_text(v["bytes_per_device"]), waste_text(v["padding_bytes"], v["logical_bytes"]), v["reason"]]
    cells = [f"<code>{html.escape(text)}</code>" for text in code] + [html.escape(text) for text in plain]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _script_data(data: ReportData) -> dict[str, object]:
    """Returns the data for the page's script. Sizes are included as text, so that HTML and text reports round equally."""
    words = [
        {
            "per_device": bytes_text(v["bytes_per_device"]),
            "one_copy": bytes_text(v["logical_bytes"]),
            "padding": waste_text(v["padding_bytes"], v["logical_bytes"]),
            "padding_share": percent_text(v["padding_bytes"], v["logical_bytes"]),
        }
        for v in data["variables"]
    ]
    return {
        "mesh": data["mesh"],
        "opening": opening_variable(data["variables"]),
        "variables": [{**v, "words": w} for v, w in zip(data["variables"], words, strict=True)],
    }


def _asset(name: str) -> str:
    return page.asset(__package__, name)
