"""Hostile files of models and runs: folders of Hugging Face, adapters of PEFT, checkpoints of Pax, and a run's own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from absurd_json import ESCAPES, absurd
from cases import Command, Place, adapt, chat, import_pax, look, on_run

_SAFETENSORS = "model.safetensors"


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns the header of a safetensors file, and the bytes after it."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def join(path: Path, header: bytes, data: bytes) -> None:
    """Writes a safetensors file."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _absurd_file(rng: random.Random, path: Path) -> tuple[str, bool]:
    what, content, broken = absurd(rng, json.loads(path.read_bytes()))
    path.write_bytes(content)
    return f"{path.name}: {what}", broken


def safetensors_header(rng: random.Random, place: Place) -> Command:
    path = place.model_folder() / _SAFETENSORS
    header, data = split(path)
    what, content, broken = absurd(rng, header)
    join(path, content, data)
    return look(f"header: {what}", must_refuse=broken)


def index_json(rng: random.Random, place: Place) -> Command:
    folder = place.model_folder()
    shard = "model-00001-of-00001.safetensors"
    header, _ = split((folder / _SAFETENSORS).rename(folder / shard))
    names = [name for name in header if name != "__metadata__"]
    path = folder / "model.safetensors.index.json"
    document = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, shard)}
    if rng.random() < 0.25:
        elsewhere = rng.choice(
            ("../../secret", "/dev/zero", "/etc/passwd", "..", f"a{rng.choice(ESCAPES)}", "model/" * 500)
        )
        document["weight_map"] = dict.fromkeys(names, elsewhere)
        path.write_text(json.dumps(document))
        return look(f"index names {elsewhere[:30]!r}", must_refuse=True)
    path.write_text(json.dumps(document))
    what, broken = _absurd_file(rng, path)
    return look(what, must_refuse=broken)


def config_json(rng: random.Random, place: Place) -> Command:
    folder = place.model_folder()
    if rng.random() < 0.5:
        path = folder / "config.json"
        config = json.loads(path.read_bytes())
        sizes = [name for name, value in config.items() if isinstance(value, int) and not isinstance(value, bool)]
        name, value = rng.choice(sizes), rng.choice((10**6, 10**9, 10**11, 2**63, 10**30, -1, 0))
        path.write_text(json.dumps({**config, name: value}))
        return look(f"{name}={value}")
    what, broken = _absurd_file(rng, folder / rng.choice(("config.json", "config.json", "generation_config.json")))
    return look(what, must_refuse=broken)


def tokenizer_json(rng: random.Random, place: Place) -> Command:
    what, broken = _absurd_file(rng, place.model_folder() / "tokenizer.json")
    return chat(what, must_refuse=broken)


def tokenizer_config(rng: random.Random, place: Place) -> Command:
    what, broken = _absurd_file(rng, place.model_folder() / "tokenizer_config.json")
    return chat(what, must_refuse=broken)


def adapter_config(rng: random.Random, place: Place) -> Command:
    folder = place.adapter_folder()
    if rng.random() < 0.7:
        what, broken = _absurd_file(rng, folder / "adapter_config.json")
        return adapt(what, must_refuse=broken)
    path = folder / "adapter_model.safetensors"
    header, data = split(path)
    what, content, broken = absurd(rng, header)
    join(path, content, data)
    return adapt(f"header of adapters: {what}", must_refuse=broken)


def pax_tree(rng: random.Random, place: Place) -> Command:
    layout = rng.choice(("zarr_1.1", "zarr_1.1", "zarr_0.0", "ocdbt_1.2", "flax_eval_1.1", "flax_0.0"))
    step = place.pax_run(layout)
    if layout == "flax_0.0":
        path = step / "checkpoint"
        content = bytearray(path.read_bytes())
        depth, at = rng.choice((1_000, 200_000)), rng.randrange(len(content))
        what, changed = rng.choice(
            (
                (f"{depth:,} arrays inside each other", b"\x91" * depth + b"\xc0"),
                ("an array of 2**32 - 1", b"\xdd\xff\xff\xff\xff"),
                ("a map of 2**32 - 1", b"\xdf\xff\xff\xff\xff"),
                ("binary of 4 GiB", b"\xc6\xff\xff\xff\xff"),
                (f"cut off at byte {at}", bytes(content[:at])),
                (f"byte {at} differs", bytes(content[:at]) + bytes([content[at] ^ 0xFF]) + bytes(content[at + 1 :])),
            )
        )
        path.write_bytes(changed)
        return import_pax(f"flax msgpack: {what}", step, must_refuse=not what.startswith("byte"))
    found = sorted(p for p in step.rglob("*") if p.is_file() and _is_json(p))
    path = rng.choice(found)
    what, broken = _absurd_file(rng, path)
    return import_pax(f"{layout}: {what}", step, must_refuse=broken and path.name == "metadata")


def _is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except ValueError:
        return False


def run_markers(rng: random.Random, place: Place) -> Command:
    """The files of a run that say whose it is, and how it stands."""
    run = place.trained_run()
    name = rng.choice(
        ("run.json", "run.json", "end_of_training.json", "failure_1.json", "experiment.json", "sharding_report.json")
    )
    path = run / name
    if not path.exists():
        path.write_text(json.dumps({"step": 2, "process": 1, "reason": "x", "experiment": "lm.hf.FromFolder"}))
        if rng.random() < 0.5:
            (run / "run.json").unlink()
            (run / "experiment.json").write_text(json.dumps({"experiment": "lm.hf.FromFolder"}))
    what, _ = _absurd_file(rng, path)
    return on_run(what, rng.choice(("page", "export", "train")))


def step_markers(rng: random.Random, place: Place) -> Command:
    """The files of a checkpoint that say what it holds."""
    step = place.trained_run() / "checkpoints" / "2"
    names = ("manifest.json", "record/record.json", "state/_METADATA", "_CHECKPOINT_METADATA", "state/_sharding")
    path = step / rng.choice(names)
    mode = rng.choice(("export", "export", "train"))
    if rng.random() < 0.3:
        content = path.read_bytes()
        at = rng.randrange(len(content))
        damaged = rng.choice(
            (content[:at], b"", content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], bytes(len(content)))
        )
        path.write_bytes(damaged)
        return on_run(f"{path.name}: damaged at byte {at}", mode)
    what, _ = _absurd_file(rng, path)
    return on_run(what, mode)


def safetensors_damage(rng: random.Random, place: Place) -> Command:
    """Files that are cut off, and tensors that don't lie one after the other."""
    path = place.model_folder() / _SAFETENSORS
    header, data = split(path)
    names = [name for name in header if name != "__metadata__"]
    first, second = rng.sample(names, 2)
    at = rng.randrange(path.stat().st_size)
    how = rng.randrange(9)
    if how == 0:
        path.write_bytes(path.read_bytes()[:at])
        return look(f"cut off at byte {at}", must_refuse=True)
    if how == 1:
        length = rng.choice((2**63, 2**64 - 1, 10**8 + 1, 99_999_999, 0, 1))
        path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
        return look(f"a header of {length} bytes", must_refuse=True)
    if how == 2:
        join(path, json.dumps(header).encode(), data + b"x" * 1_000)
        return look("bytes after the last tensor", must_refuse=True)
    if how == 3:
        join(path, b"{" + json.dumps(header).encode()[1:-1] + b"," + json.dumps(header).encode()[1:], data)
        return look("every name twice", must_refuse=True)
    if how == 4:
        header[first]["dtype"] = rng.choice(("X", "", "F4", 1, None, [], {}, "\x1b[2J"))
        return _rewritten(path, header, data, f"dtype {header[first]['dtype']!r}")
    if how == 5:
        shape = rng.choice(
            ([2**32, 2**32], [0, 2**62], [-1, -1], [1] * 100_000, [2**31, 2**33], [1.5], [True], [None], "16", {})
        )
        header[first]["shape"] = shape
        return _rewritten(path, header, data, f"shape {str(shape)[:40]}")
    start, end = header[first]["data_offsets"]
    if how == 6:
        for name in names:
            begin, stop = header[name]["data_offsets"]
            header[name]["data_offsets"] = [0, stop - begin]
        return _rewritten(path, header, data, "all tensors at offset 0")
    if how == 7:
        begin, stop = header[second]["data_offsets"]
        begin = min(max(start - (stop - begin) + rng.randrange(1, 20) * 4, 0), len(data) - (stop - begin))
        header[second]["data_offsets"] = [
            begin,
            begin + header[second]["data_offsets"][1] - header[second]["data_offsets"][0],
        ]
        return _rewritten(path, header, data, f"{second} moved to {begin}")
    offsets = rng.choice(
        ([float(start), float(end)], [end, start], [-4, end - start - 4], [start], [], None, [start, end, 0], [start, 1e308],
         [start + 2**40, end + 2**40], [str(start), str(end)], [start, True])
    )  # fmt: skip
    header[first]["data_offsets"] = offsets
    return _rewritten(path, header, data, f"offsets {offsets}")


def _rewritten(path: Path, header: dict[str, Any], data: bytes, what: str) -> Command:
    join(path, json.dumps(header).encode(), data)
    return look(what, must_refuse=True)
