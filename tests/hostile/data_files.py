"""Hostile data: templates that never end, records without an end, archives that lie, sources that nest."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import tarfile

from absurd_json import ESCAPES, absurd
from cases import CHAT, Command, Place, chat, corpus

_MIB = 1 << 20


def templates(rng: random.Random, place: Place) -> Command:
    """Chat templates that never end, grow, call themselves, look for a way out, or fail with commands for a terminal."""
    n, escape = rng.choice((10**3, 10**5, 10**9, 10**11)), rng.choice(ESCAPES)
    touch = f"touch {place.root}/executed"
    found = (
        f"{{% for a in range({n}) %}}{{% for b in range({n}) %}}{{% for c in range({n}) %}}" + "{% endfor %}" * 3,
        "{% set x = namespace(s='aaaaaaaa') %}{% for i in range(64) %}{% set x.s = x.s + x.s %}{% endfor %}{{ x.s }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        f"{{{{ 'a'.center({max(n, 10**8)}) }}}}",
        f"{{{{ 'a' * {max(n, 10**8)} }}}}",
        f"{{{{ '%{max(n, 10**8)}d' % 1 }}}}",
        f"{{{{ '{{:{max(n, 10**8)}d}}'.format(1) }}}}",
        f"{{% for m in messages %}}{{% for i in range({max(n, 10**6)}) %}}{{{{ m['content'] }}}}{{% endfor %}}{{% endfor %}}",
        "{{ 9 ** 9 ** 9 }}",
        f"{{{{ 2 ** {max(n, 10**9)} }}}}",
        f"{{{{ raise_exception('no{escape}way') }}}}",
        f"{{{{ missing.a{{ }}}} {escape}",
        f"{{{{ undefined['{escape}']['x'].y }}}}",
        f"{{% include '{escape}' %}}",
        "{{ " + "(" * (n % 10**6) + "1" + ")" * (n % 10**6) + " }}",
        "{{ " + "1+" * 20_000 + "1 }}",
        "{{ " + "[" * 5_000 + "]" * 5_000 + " }}",
        "{% if a %}" * 3_000 + "{% endif %}" * 3_000,
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        f"{{{{ cycler.__init__.__globals__.os.system('{touch}') }}}}",
        f"{{{{ self.__init__.__globals__.__builtins__.__import__('os').system('{touch}') }}}}",
        f"{{{{ (range({n}) | list) | length }}}}",
        f"{{{{ range({n}) | join('x') }}}}",
        f"{{{{ 'a' | indent({n}) }}}}{{{{ lipsum(n={min(n, 10**6)}) }}}}",
        f"{{{{ messages | tojson(indent={n}) }}}}",
        f"{{{{ strftime_now('%Y' * {n}) }}}}",
        f"{{{{ strftime_now('%{n}Y') }}}}",
        f"{{{{ 'ab' | replace('', 'x' * {min(n, 10**7)}) | length }}}}",
        "{{ ('a' * 100000) | wordwrap(1) | batch(1) | list | length }}",
        f"{{% set x = 'a' | list %}}{{% for i in range({n}) %}}{{{{ x.append(x) }}}}{{% endfor %}}{{{{ x }}}}",
        f"{{{{ '{escape}' }}}}{{% for m in messages %}}{{{{ m['content'] }}}}{{% endfor %}}",
    )  # fmt: skip
    text = rng.choice(found)
    (place.model_folder() / "chat_template.jinja").write_text(text)
    return chat(text if len(text) < 120 else f"{text[:60]} ... {text[-40:]}")


def huge_lines(rng: random.Random, place: Place) -> Command:
    """Compressed files of a few MB, or sparse ones, that hold gigabytes in one line."""
    size, kind = rng.choice((3, 4, 6)) << 10, rng.choice(("gz", "zst", "sparse"))
    name = {"gz": rng.choice(("a.jsonl.gz", "a.txt.gz")), "zst": "a.jsonl.zst", "sparse": "a.jsonl"}[kind]
    begin = b'{"text": "' if rng.random() < 0.5 else b""
    block = b"a" * (64 * _MIB)
    path = place.write(name, b"")
    if kind == "sparse":
        os.truncate(path, size * _MIB)
    elif kind == "gz":
        part = gzip.compress(block, 1)
        path.write_bytes(gzip.compress(begin) + part * (size // 64))
    else:
        import zstandard

        packer = zstandard.ZstdCompressor()
        path.write_bytes(packer.compress(begin) + packer.compress(block) * (size // 64))
    what = f"{name}: a line of {size:,} MiB, {path.stat().st_size / _MIB:.1f} MiB"
    if rng.random() < 0.25 and name != "a.txt.gz":
        place.model_folder()
        return chat(f"{what}, as conversations", name, must_refuse=True)
    return corpus(what, name, *(("--fdl.BAD_RECORDS=skip",) if rng.random() < 0.3 else ()))


def tar_members(rng: random.Random, place: Place) -> Command:
    """Archives whose members have other sizes than they say, or go elsewhere."""
    how, escape = rng.randrange(8), rng.choice(ESCAPES)
    size = rng.choice((2**40, 2**33 - 1, 10**15, 2**62, 10_000, 513))
    one = tarfile.TarInfo("001.txt")
    one.size = size
    what = f"a member of {size:,} bytes that has 5"
    content = one.tobuf(rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))) + b"hello".ljust(512, b"\0")
    must_refuse = True
    if how == 1:
        what, content = "a size below 0", _with_size(b"\xff" * 12)
    elif how == 2:
        what, content = (
            "a size that is no number",
            _with_size(rng.choice((b"99999999999\0", b"\x80" + b"\xff" * 11, b" " * 12))),
        )
    elif how == 3:
        headers = rng.choice(
            ({"size": str(10**15)}, {"size": "-5"}, {"size": "x"}, {"GNU.sparse.realsize": str(10**15)})
        )
        what, content = f"pax headers {headers}", _archive("001.txt", b"hello", headers)
    elif how == 4:
        name = rng.choice(
            (
                "../../../executed.txt",
                f"a{escape}b.txt",
                "/tmp/executed.txt",
                "a" * 5_000 + ".txt",
                "x/" * 3_000 + "a.txt",
            )
        )
        what, content, must_refuse = f"a member named {name[:30]!r}", _archive(name, b"hello"), False
    elif how == 5:
        what, content = "members that don't end", _archive("001.txt", b"hello")[:1_024]
    elif how == 6:
        long = tarfile.TarInfo("././@LongLink")
        long.type, long.size = tarfile.GNUTYPE_LONGNAME, size
        what, content = f"a name of {size:,} bytes", long.tobuf(tarfile.GNU_FORMAT) + b"a" * 512
    elif how == 7:
        what, content = (
            "a pax header of 200,000 keys",
            _archive("001.txt", b"hello", {f"k{i}": "v" for i in range(200_000)}),
        )
        must_refuse = False
    ending = rng.choice((b"", bytes(1_024)))
    if how == 5 and ending:
        what, must_refuse = "a whole member", False
    zipped = rng.random() < 0.3
    name = "a.tar.gz" if zipped else "a.tar"
    place.write(name, gzip.compress(content + ending) if zipped else content + ending)
    return corpus(f"{name}: {what}", name, "--fdl.COLUMN=txt", must_refuse=must_refuse)


def _with_size(field: bytes) -> bytes:
    head = bytearray(tarfile.TarInfo("001.txt").tobuf(tarfile.USTAR_FORMAT))
    head[124:136] = field
    head[148:156] = b" " * 8
    head[148:156] = f"{sum(head):06o}\0 ".encode()
    return bytes(head) + b"hello".ljust(512, b"\0")


def _archive(name: str, content: bytes, headers: dict[str, str] | None = None) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        one = tarfile.TarInfo(name)
        one.size, one.pax_headers = len(content), headers or {}
        archive.addfile(one, io.BytesIO(content))
    return file.getvalue()


def records(rng: random.Random, place: Place) -> Command:
    """JSON lines that nest, or hold absurd numbers."""
    document = json.loads(CHAT)
    is_chat = rng.random() < 0.5
    what, content, broken = absurd(rng, document if is_chat else {"text": "a", "n": 1, "more": [1, {"b": 2}]})
    if b"\n" in content or not content.strip():
        broken = False
    if is_chat:
        place.model_folder()
        place.write("chats.jsonl", content + b"\n")
        return chat(f"a conversation: {what}", must_refuse=broken)
    place.write("a.jsonl", content + b"\n")
    return corpus(f"a document: {what}", "a.jsonl", must_refuse=broken)


def sources(rng: random.Random, place: Place) -> Command:
    """Python to port that nests, is long, or says something to the terminal."""
    n, escape = rng.choice((90, 1_000, 20_000, 200_000)), rng.choice(ESCAPES)
    found = (
        ("x" + ".a" * n, "attributes"),
        ("1+" * n + "1", "sums"),
        ("x" + "()" * n, "calls"),
        ("(" * n + ")" * n, "brackets"),
        ("[" * n + "]" * n, "lists"),
        ("-" * n + "1", "signs"),
        ("not " * n + "x", "negations"),
        ("x if y else " * n + "z", "choices"),
        ("lambda: " * n + "0", "functions"),
        ("'a' " * n, "strings side by side"),
        ("x" + "[0]" * n, "indices"),
        ("await " * n + "x", "awaits"),
        ("f'{" * min(n, 1_000) + "1" + "}'" * min(n, 1_000), "formatted strings"),
        ("from praxis.layers import " + ",".join(f"a{i}" for i in range(min(n, 20_000))), "imported names"),
        ("\n".join(f"import paxml.a{i}" for i in range(min(n, 20_000))), "imports"),
        ("\n".join("    " * i + "if x:" for i in range(min(n, 200))) + "\n" + "    " * 200 + "pass", "blocks"),
        (f"from paxml import base_experiment as {'a' * n}", "a long name"),
        (f"from paxml import x\ny = 'paxml.{escape}'", "a string for the terminal"),
        (f"from paxml import x\n# {escape}\nfrom praxis import y", "a comment for the terminal"),
        ("x = " + "9" * n, "digits"),
        ("x = 1" + "\x00" * 3, "zeros"),
        (f"raise SystemExit(open('{place.root}/executed', 'w'))\nfrom paxml import x", "code that must not run"),
    )  # fmt: skip
    text, what = rng.choice(found)
    place.write("ported.py", f"from paxml import base_experiment\n{text}\n".encode("utf-8", "surrogateescape"))
    return Command(f"{n:,} {what}", ("--mode=port", "--module=ported.py"))
