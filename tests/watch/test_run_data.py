"""What the page of a run shows: read from its files, broken ones included."""

import json
import time

import pytest
from etils import epath
from facts import assert_names
from made_up_run import make_run, report, times_line, train_line, write_lines
from page_checks import EVIL, assert_harmless

from spmd_trainer.sharding.page import fill, script_json
from spmd_trainer.watch.pages import run_texts
from spmd_trainer.watch.pages.run_page import PageData, names_of, page_text, write_page
from spmd_trainer.watch.run_times import RunTimesFile


def read(*directories):
    return PageData([epath.Path(directory) for directory in directories]).read()


def charts(data):
    return {chart["key"]: chart for chart in data["charts"]}


def points(chart, run=0):
    series = next(one for one in chart["series"] if one["run"] == run)
    step, steps = 0, []
    for more in series["steps"]:
        step += more
        steps.append(step)
    return dict(zip(steps, series["values"], strict=True))


def test_a_run_is_read_from_its_directory(tmp_path):
    data = read(make_run(tmp_path / "mine"))
    (run,) = data["runs"]
    assert (run["name"], run["state"]["text"], run["state"]["tone"]) == ("mine", "finished at step 100 of 100", "good")
    facts = {fact[0]: fact[1] for fact in run["facts"]}
    assert facts == {
        "Step": "100", "Training loss": "2.5000", "Evaluation": "3.0000", "Throughput": "2,560", "MFU": "41.0%",
        "Device memory": "3.0 GiB", "Goodput": f"{(60 * 50 / 60 + 50) / 140:.1%}",
    }  # fmt: skip
    assert dict(run["about"])["devices"] == "8 devices (cpu), 1 process"
    assert run["overrides"][1] == f"NAME='{EVIL}'"
    assert run["restarts"] == [50]
    assert run["invalid"] == [(80, 2)]
    assert run["goodput"]["redone_steps"] == 10
    assert run["changes"]["rows"] == [{"start": 1, "path": "task.train.learner.rate", "before": "0.1", "now": "0.005"}]
    assert run["report"]["axes"] == [["replica", 1], ["data", 4], ["mdl", 2]]
    assert run["notes"] == []
    assert data["settings"]["mesh"] == "(replica=1, data=4, mdl=2)"


def test_curves_have_their_order_and_every_point_counts_once(tmp_path):
    data = read(make_run(tmp_path / "mine"))
    assert [chart["title"] for chart in data["charts"] if chart["main"]] == [
        "Training loss", "heldout: log_pplx", "heldout: accuracy", "Learning rate", "Gradient norm", "Tokens per second",
        "Model FLOPs utilization (MFU)", "Device memory, peak",
    ]  # fmt: skip
    loss = points(charts(data)["train/loss"])
    assert list(loss) == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert loss[60] == pytest.approx(5 / 1.6, rel=1e-5), "not that of the start that was killed"
    assert loss[100] == 2.5
    others = [chart["name"] for chart in data["charts"] if not chart["main"]]
    assert f"layer/{EVIL}" in others
    assert "identity" not in others


def test_the_load_of_experts_is_that_of_the_last_summary(tmp_path):
    directory = make_run(tmp_path / "mine")
    assert read(directory)["runs"][0]["experts"] == []
    file = directory / "summaries" / "experts" / "metrics.jsonl"
    lines = [{"step": step, "moe/0/max_over_mean": 1.5, "moe/0/load": f"0.{step} 0.25 0"} for step in (5, 75)]
    write_lines(file, lines)
    assert read(directory)["runs"][0]["experts"] == [{"layer": "moe/0", "shares": [0.75, 0.25, 0.0]}]
    write_lines(file, [{"step": 1, "moe/0/load": f"nan {EVIL}"}])
    (run,) = read(directory)["runs"]
    assert run["experts"] == []
    assert_names(run["notes"][0], "summaries/experts")


def test_scalars_with_the_same_values_are_one_main_curve(tmp_path):
    directory = make_run(tmp_path / "mine")
    lines = [
        {"step": s, "avg_xent": 3.0 / s, "log_pplx": 3.0 / s, "total_loss": 3.0 / s, "aux_loss": 0.0} for s in (1, 2)
    ]
    write_lines(directory / "summaries" / "eval_other" / "metrics.jsonl", lines)
    found = [
        chart["name"] for chart in read(directory)["charts"] if chart["main"] and chart["key"].startswith("eval_other")
    ]
    assert found == ["avg_xent"]


def test_what_cannot_be_read_is_a_note_and_the_rest_is_shown(tmp_path):
    directory = make_run(tmp_path / "mine")
    (directory / "sharding_report.json").write_text('{"mesh": ')
    (directory / "run.json").write_text("[1]")
    (directory / "decode_out" / "prompts" / "step_50.jsonl").write_text("no json\n")
    with (directory / "summaries" / "train" / "metrics.jsonl").open("a") as file:
        file.write("{broken\n")
    (run,) = read(directory)["runs"]
    notes = "\n".join(run["notes"])
    for name in (
        "sharding_report.json",
        "run.json",
        "decode_out/prompts/step_50.jsonl",
        "metrics.jsonl: 1 line",
    ):
        assert name in notes
    assert run["report"] is None
    assert [one["step"] for one in run["samples"]["decode_out/prompts"]["steps"]] == [100]
    assert run["experiment"] == "unknown experiment"


@pytest.mark.parametrize(
    "about", ['{"devices": {}, "overrides": 5}', '{"parameters": "many"}', "null", '{"versions": [1]}', ""]
)
def test_facts_that_make_no_sense_are_left_out(tmp_path, about):
    directory = make_run(tmp_path / "mine")
    (directory / "run.json").write_text(about)
    with (directory / "run_times.jsonl").open("a") as file:
        file.write(
            '{"start": 1, "seconds": {"step": NaN}, "first_step": 0, "step": 1, "time": 2}\n{"start": Infinity}\n[]\n'
        )
    with (directory / "summaries" / "train" / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 110, "loss": 1{"0" * 400}}}\n{{"step": Infinity}}\n')
    page_text(read(directory))


def test_a_directory_with_next_to_nothing_has_a_page(tmp_path):
    (tmp_path / "summaries").mkdir()
    data = read(tmp_path)
    (run,) = data["runs"]
    assert (run["state"]["text"], run["notes"], data["charts"]) == ("at step 0", [], [])
    assert "<html" in page_text(data)


def add_to_record(directory, **more):
    path = directory / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


def test_how_a_run_stands(tmp_path):
    directory = make_run(tmp_path / "mine")
    times = directory / "run_times.jsonl"
    lines = times.read_text().splitlines()

    def state():
        return read(directory)["runs"][0]["state"]

    times.write_text("\n".join(lines[:-1]) + "\n")
    assert state()["text"] == "at step 100 of 100"
    assert_names(state()["note"], "nothing was written")
    times.write_text("\n".join([*lines[:-1], lines[-1].replace("finished", "stopped")]) + "\n")
    assert state()["text"] == "stopped at step 100 of 100"
    add_to_record(directory, status="failed", failure={"step": 70, "process": 0, "reason": "disk full"})
    assert (state()["text"], state()["note"], state()["tone"]) == ("failed at step 100 of 100", "disk full", "bad")


def test_a_start_that_restores_is_no_end_and_no_restart(tmp_path):
    directory = make_run(tmp_path / "mine")
    add_to_record(directory, status="finished", last_step=100)
    RunTimesFile(epath.Path(directory), time.time()).write({"start": 1.0}, None)
    (run,) = read(directory)["runs"]
    assert (run["state"]["text"], run["state"]["tone"]) == ("at step 100 of 100", "")
    assert_names(run["state"]["note"], "new start", "restores")
    assert run["restarts"] == [50]
    assert run["goodput"]["redone_steps"] == 10


def test_numbers_that_are_not_finite_are_no_facts_except_the_loss(tmp_path):
    nan, inf = float("nan"), float("inf")
    lines = [train_line(1) | {"loss": nan, "mfu": nan, "device_peak_bytes": nan, "steps_per_sec": inf}]
    write_lines(tmp_path / "summaries" / "train" / "metrics.jsonl", [line | {"tokens_per_sec": inf} for line in lines])
    (run,) = read(tmp_path)["runs"]
    assert {fact[0]: fact[1] for fact in run["facts"]} == {"Step": "1", "Training loss": "nan"}


def test_every_start_counts_its_invalid_steps_from_0(tmp_path):
    def invalid(counts, *starts):
        lines = [train_line(step) | {"invalid_steps": float(count)} for step, count in counts]
        write_lines(tmp_path / "summaries" / "train" / "metrics.jsonl", lines)
        write_lines(tmp_path / "run_times.jsonl", [times_line(1e9 * (1 + n), *one) for n, one in enumerate(starts)])
        return read(tmp_path)["runs"][0]["invalid"]

    assert invalid([(10, 2), (20, 2), (30, 3), (40, 3)], (0, 20), (20, 40)) == [(10, 2), (30, 3)]
    again = [(10, 2), (20, 2), (30, 1), (40, 1), (15, 1), (25, 1), (35, 1)]
    assert invalid(again, (0, 20), (20, 40), (10, 35)) == [(10, 2), (15, 1)], "the start from 20 was taken again"
    assert invalid([(10, 2), (20, 2), (20, 3), (30, 3)]) == [(10, 2), (20, 3)], "no times: seen in the steps"


def test_loss_spikes_are_marked_where_they_were_counted(tmp_path):
    counts = [(10, 0), (20, 1), (30, 1), (40, 3)]
    lines = [train_line(step) | {"loss_spikes": float(count)} for step, count in counts]
    write_lines(tmp_path / "summaries" / "train" / "metrics.jsonl", lines)
    (run,) = read(tmp_path)["runs"]
    assert (run["spikes"], run["invalid"]) == ([(20, 1), (40, 2)], [])


def test_several_runs_share_curves_and_show_what_differs(tmp_path):
    one = make_run(tmp_path / "one")
    other = make_run(
        tmp_path / "other", shift=1.0, rate="0.01", extra_setting="task.train.new: 'yes'\n--hang_seconds: None"
    )
    (other / "run_times.jsonl").unlink()
    data = read(one, other)
    assert [run["name"] for run in data["runs"]] == ["one", "other"]
    loss = charts(data)["train/loss"]
    assert (points(loss, 0)[100], points(loss, 1)[100]) == (2.5, 3.5)
    assert data["differences"]["rows"] == [
        {"path": "task.train.learner.rate", "values": ["0.005", "0.01"]},
        {"path": "task.train.new", "values": [None, "'yes'"]},
    ]
    assert data["settings"] is None
    assert data["runs"][1]["restarts"] == [60], "seen in the summaries where there are no times"


def test_a_dataset_that_a_run_lacks_is_one_difference(tmp_path):
    """Unless others that have it differ in its fields."""
    without = make_run(tmp_path / "without")
    dataset = "decode_datasets[0]: Text\ndecode_datasets[0].rows: {}\ndecode_datasets[0].start: 'eos'"
    few, many = (make_run(tmp_path / str(rows), extra_setting=dataset.format(rows)) for rows in (8, 9))
    root = {"path": "decode_datasets[0]", "values": [None, "Text"]}
    assert read(without, few)["differences"]["rows"] == [root]
    three = [row["path"] for row in read(without, few, many)["differences"]["rows"]]
    assert three == ["decode_datasets[0]", "decode_datasets[0].rows"]


def test_names_tell_runs_apart():
    paths = [epath.Path(path) for path in ("/a/lr1/run", "/a/lr2/run", "/b/run2")]
    assert names_of(paths) == ["lr1/run", "lr2/run", "b/run2"]
    assert names_of([epath.Path("/a/run")]) == ["run"]


def test_a_loss_that_is_not_finite_is_a_gap_and_a_mark(tmp_path):
    directory = tmp_path / "mine"
    lines = [
        train_line(1),
        train_line(2) | {"loss": float("nan")},
        train_line(3) | {"loss": float("inf")},
        train_line(4),
    ]
    write_lines(directory / "summaries" / "train" / "metrics.jsonl", lines)
    data = read(directory)
    assert list(points(charts(data)["train/loss"]).values())[1:3] == [None, None]
    assert data["runs"][0]["invalid"] == [(2, 1), (3, 1)]
    page_text(data)


def test_very_many_invalid_steps_are_counted_together(tmp_path):
    lines = [train_line(step) | {"invalid_steps": float(step)} for step in range(1, 10_001)]
    write_lines(tmp_path / "summaries" / "train" / "metrics.jsonl", lines)
    marks = read(tmp_path)["runs"][0]["invalid"]
    assert len(marks) == 400
    assert (marks[0], sum(number for _, number in marks)) == ((1, 25), 10_000)


def test_warnings_that_differ_in_numbers_are_one_kind(tmp_path):
    directory = make_run(tmp_path / "mine")
    (run,) = read(directory)["runs"]
    first, second = sorted(run["warnings"]["rows"], key=lambda kind: kind["first"])
    assert (first["count"], first["text"]) == (2, "step 12 is invalid: loss nan")
    assert (first["first"], first["last"]) == ("2026-01-05 10:00:01", "2026-01-05 10:00:02")
    assert (second["level"], second["where"]) == ("ERROR", "mine.py:7")
    assert second["text"].endswith("of two lines")


def test_a_long_log_is_read_from_its_end(tmp_path, monkeypatch):
    directory = make_run(tmp_path / "mine")
    monkeypatch.setattr(run_texts, "_LOG_BYTES", 120)
    (run,) = read(directory)["runs"]
    assert_names(run["notes"], "logs/train.log", "only its end", "warnings")


def test_many_steps_of_samples_are_spread_and_long_texts_are_marked(tmp_path):
    directory = make_run(tmp_path / "mine")
    for step in range(1, 100):
        write_lines(
            directory / "decode_out" / "prompts" / f"step_{step}.jsonl", [{"prompt": "p", "output": "x" * 5000}]
        )
    write_lines(directory / "eval_out" / "heldout" / "step_5.jsonl", [{"index": 3, "scores": [1.0, 2.0]}])
    samples = read(directory)["runs"][0]["samples"]
    steps = samples["decode_out/prompts"]["steps"]
    assert len(steps) == run_texts.MOST_STEPS
    assert (steps[0]["step"], steps[-1]["step"]) == (1, 100)
    assert samples["decode_out/prompts"]["left_out"] == 100 - run_texts.MOST_STEPS
    output = steps[0]["examples"][0]["output"]
    assert output.startswith("x" * 3000)
    assert_names(output[3000:], "2,000 more characters")
    assert samples["eval_out/heldout"]["steps"][0]["examples"] == [
        {"index": 3, "prompt": "", "output": '{"scores": [1.0, 2.0]}'}
    ]


def test_nothing_in_the_data_ends_the_script(tmp_path):
    text = page_text(read(make_run(tmp_path / "mine")))
    assert_harmless(text, scripts=2)
    begin = text.index('id="data">') + len('id="data">')
    inside = text[begin : text.index("</script>", begin)]
    assert not set("<>&\u2028\u2029") & set(inside)
    assert EVIL in json.loads(inside)["runs"][0]["overrides"][1]
    assert script_json({"x": "\ud800"}).isascii()
    assert_harmless(page_text(read(tmp_path / "mine"), follow=True), scripts=2, asks_server=True)
    assert fill("__PAGE_A__ __PAGE_B__", {"A": "__PAGE_B__", "B": "b"}) == "__PAGE_B__ b"


def test_a_second_reading_looks_only_at_what_has_changed(tmp_path, monkeypatch):
    directory = make_run(tmp_path / "mine")
    data = PageData([epath.Path(directory)])
    before = data.read()
    monkeypatch.setattr(run_texts, "read_examples", lambda path: pytest.fail(f"{path} was read again"))
    with (directory / "summaries" / "train" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train_line(110)) + "\n")
    after = data.read()
    assert points(charts(after)["train/loss"])[110] == pytest.approx(5 / 2.1)
    assert after["runs"][0]["samples"] == before["runs"][0]["samples"]


def test_more_scalars_than_a_page_can_hold_are_counted(tmp_path):
    lines = [train_line(step) | {f"layer/{n}": 1.0 for n in range(300)} for step in (1, 2)]
    write_lines(tmp_path / "summaries" / "train" / "metrics.jsonl", lines)
    data = read(tmp_path)
    assert len([chart for chart in data["charts"] if not chart["main"]]) == 240
    assert data["left_out"] == 300 + 3 - 240


@pytest.mark.full
def test_a_hundred_thousand_steps_make_a_page_below_3_mb(tmp_path):
    lines = (
        {**train_line(step), **{f"layer/{n}": 1.0 / step + n for n in range(60)}} for step in range(10, 100_001, 10)
    )
    write_lines(tmp_path / "summaries" / "train" / "metrics.jsonl", lines)
    write_page([epath.Path(tmp_path)], epath.Path(tmp_path) / "run.html")
    assert (tmp_path / "run.html").stat().st_size < 3e6


def test_a_mesh_of_thousands_of_devices_is_cut(tmp_path):
    directory = make_run(tmp_path / "mine")
    large = report((("data", 4096), ("mdl", 2)))
    large["mesh"]["device_ids"] = list(range(8192))
    (directory / "sharding_report.json").write_text(json.dumps(large))
    assert len(read(directory)["runs"][0]["report"]["device_ids"]) == 512
