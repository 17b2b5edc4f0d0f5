"""Images in Parquet files and tar shards, written by pyarrow and webdataset. Image n is of colour (n, 2n, 255 - n)."""

import io

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")
SHAPE = (6, 8, 3)


def pixels(number, shape=SHAPE):
    return np.broadcast_to(np.array([number, 2 * number, 255 - number], np.uint8), shape)


def encoded(number, form="png", shape=SHAPE):
    return encoded_array(pixels(number, shape), form)


def encoded_array(array, form="png"):
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(array)).save(file, form, **({"quality": 95} if form == "jpeg" else {}))
    return file.getvalue()


def write_tar(folder, numbers, name="a", suffix="", form="png", change=lambda number, members: members):
    """A shard; `change` may change the members of a sample."""
    webdataset = pytest.importorskip("webdataset")
    path = folder / f"{name}.tar{suffix}"
    with webdataset.TarWriter(str(path)) as writer:
        for number in numbers:
            members = {form: encoded(number, "png" if form == "png" else "jpeg"), "cls": str(number).encode()}
            writer.write({"__key__": f"s{number:03d}", **change(number, members)})
    return str(path)


def write_parquet(folder, numbers, name="a", rows=3, content=None, labels=None):
    """A file in the layout of the library datasets: a struct of bytes and path, and a column of labels."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / f"{name}.parquet"
    images = [{"bytes": encoded(n), "path": f"{n}.png"} for n in numbers] if content is None else content
    table = pyarrow.table({"image": images, "label": list(numbers) if labels is None else labels})
    parquet.write_table(table, path, row_group_size=rows)
    return str(path)
