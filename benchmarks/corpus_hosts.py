"""What many hosts read and tokenise of one corpus in an S3 server on loopback, counted in bytes and documents.

    python -m benchmarks.corpus_hosts [--megabytes 16] [--conversations] [--json FILE]

With 1, 2, 4 and 8 simulated hosts: first the hosts tokenise the corpus together, each its share in a worker of its own; then each
reads one epoch of its rows, with a cache folder of its own. All requests go through a proxy that counts what the server sends.
The bytes are those of whole answers: with rows of 512 tokens, the head of each answer alone is a third of the tokens. Then a
store of a billion documents on disk: how long its start takes, and what the first batches need. With --conversations, the
documents are conversations instead: a question, and its text as the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from etils import epath
from praxis import base_hyperparams, pax_fiddle

from benchmarks import reporting
from spmd_trainer.inputs import Chat, HuggingFaceTokenizer, stdlib_text
from spmd_trainer.inputs.corpus.corpus_input import CorpusInput
from spmd_trainer.inputs.corpus.documents import Documents
from spmd_trainer.inputs.corpus.open_source import open_documents
from spmd_trainer.inputs.corpus.part_worker import Writer
from spmd_trainer.inputs.corpus.prepare import Preparation
from spmd_trainer.inputs.corpus.prepared_source import Helpers, PreparedSource, tokenise
from spmd_trainer.inputs.corpus.token_store import DESCRIPTION_FILE, Description
from spmd_trainer.inputs.tokenizers import ByteTokenizer
from spmd_trainer.storage.local_copies import VARIABLE

HOSTS = (1, 2, 4, 8)
LENGTH, BATCH, FILES, DOCUMENT_BYTES = 2048, 4, 8, 3000
TESTS = pathlib.Path(__file__).parents[1] / "tests"
SERVER = TESTS / "storage" / "s3_server.py"
CHATS = TESTS / "inputs" / "data" / "chat"
TEMPLATE = str(CHATS / "templates" / "chatml_marked.jinja")
MOST_TOGETHER, MOST_FETCHED = 1.1, 1.3
# Of a token in the store; and of the bit that says whether a token of a conversation counts.
TOKEN_BYTES, COUNTED_BYTES = 2, 1 / 8
TOKENISE_SECONDS = 120
BILLION, PARTS = 10**9, 10_000
START_SECONDS, START_BYTES = 2.0, 200e6


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=1)
    parser.add_argument("--megabytes", type=float, default=16, help="size of the corpus")
    parser.add_argument("--conversations", action="store_true", help="count conversations instead of texts")
    parser.add_argument("--billion", help="measure the start of this store in this process, and print JSON")
    args = parser.parse_args()
    if args.billion:
        sys.stdout.write(json.dumps(start_of(args.billion)) + "\n")
        return 0
    report = reporting.Report("corpus_hosts", args.json)
    with tempfile.TemporaryDirectory() as folder, s3_server() as counter:
        size, documents = write_corpus(int(args.megabytes * 2**20), as_conversation if args.conversations else as_text)
        chat = Chat(chat_template=TEMPLATE, too_long="cut").bound(HuggingFaceTokenizer(CHATS / "byte_level"), LENGTH)
        for hosts in HOSTS:
            measure(report, counter, pathlib.Path(folder), hosts, size, documents, chat if args.conversations else None)
        if not args.conversations:
            report_billion(report, pathlib.Path(folder))
    return report.finish()


class Counter:
    """A proxy in front of a server that counts the bytes which the server sends.

    Attributes:
      address: its 'http://host:port'.
      received: bytes so far.
    """

    def __init__(self, server: str):
        """Begins to listen."""
        found = urllib.parse.urlparse(server)
        self._server = (str(found.hostname), int(found.port or 80))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.received = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._socket.accept()
            server = socket.create_connection(self._server)
            for pair in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(2**16):
                self.received += len(block) if counts else 0
                target.sendall(block)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def s3_server() -> Iterator[Counter]:
    """Starts the server and the proxy, and sets the environment to them."""
    process = subprocess.Popen([sys.executable, SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        counter = Counter(process.stdout.readline().strip())
        os.environ |= {
            "AWS_ENDPOINT_URL": counter.address,
            "AWS_ACCESS_KEY_ID": "mine",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        yield counter
    finally:
        process.kill()


def as_text(text: str) -> dict[str, Any]:
    """Returns a record of a text."""
    return {"text": text}


def as_conversation(text: str) -> dict[str, Any]:
    """Returns a record of a conversation with a text as its answer."""
    return {"messages": [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": f"{text}."}]}


def write_corpus(size: int, record: Callable[[str], dict[str, Any]]) -> tuple[int, int]:
    """Writes parts of the standard library to the bucket; returns their bytes and how many they are."""
    texts = []
    for path in stdlib_text.stdlib_train_files():
        content = pathlib.Path(path).read_text(encoding="utf-8", errors="ignore")
        texts += [content[start : start + DOCUMENT_BYTES] for start in range(0, len(content), DOCUMENT_BYTES)]
        if len(texts) * DOCUMENT_BYTES > size:
            break
    total = 0
    for number in range(FILES):
        content = "".join(json.dumps(record(text)) + "\n" for text in texts[number::FILES])
        epath.Path(f"s3://bkt/corpus/{number}.jsonl").write_text(content)
        total += len(content.encode())
    return total, len(texts)


def measure(
    report: reporting.Report,
    counter: Counter,
    folder: pathlib.Path,
    hosts: int,
    size: int,
    documents: int,
    chat: Chat | None,
) -> None:
    """Lets hosts tokenise the corpus together and read it, and reports what they took."""
    corpus = Documents("s3://bkt/corpus/*.jsonl", processor=chat)
    store = f"s3://bkt/tokens-{hosts}"
    task = Preparation(corpus, ByteTokenizer() if chat is None else chat.tokenizer, store)
    opened = open_documents(corpus)
    before = counter.received
    sources = [PreparedSource(opened, task, Helpers(host, hosts, 1, "mine")) for host in range(hosts)]
    for source in sources:
        tokenise([source])
    ends = time.monotonic() + TOKENISE_SECONDS
    while not all(source.is_ready for source in sources):
        if time.monotonic() > ends:
            raise SystemExit(
                f"{hosts} hosts have not tokenised the corpus within {TOKENISE_SECONDS} s; the log above says why"
            )
        time.sleep(0.1)
    together = counter.received - before
    records = [json.loads(path.read_text()) for path in epath.Path(store).glob("tokens-*.json")]
    made = sum(record["documents"] for record in records)
    report.figure(f"{hosts} hosts: documents tokenised / documents", made / documents)
    report.figure(f"{hosts} hosts: bytes read to tokenise / corpus", together / size)
    shares = []
    for host in range(hosts):
        os.environ[VARIABLE] = str(folder / f"cache-{hosts}-{host}")
        before = counter.received
        tokens = read_epoch(store, host, hosts, chat)
        own = tokens * (TOKEN_BYTES if chat is None else TOKEN_BYTES + COUNTED_BYTES)
        shares.append((counter.received - before) / own)
    report.figure(f"{hosts} hosts: bytes fetched / bytes of own rows", shares)
    if made != documents or together > MOST_TOGETHER * size:
        report.fails(f"{hosts} hosts together take more than {MOST_TOGETHER} times the corpus")
    if max(shares) > MOST_FETCHED:
        report.fails(f"one of {hosts} hosts fetches more than {MOST_FETCHED} times its own rows")


def make(store: str, host: int, hosts: int, chat: Chat | None = None, *, is_training: bool) -> CorpusInput:
    """Builds a host's input over a store."""
    config = pax_fiddle.Config(
        CorpusInput,
        name="rows",
        is_training=is_training,
        source=Documents(store, shuffle="global", processor=chat),
        tokenizer=None if chat is None else chat.tokenizer,
        seq_len=LENGTH,
        batch_size=BATCH,
        num_infeed_hosts=hosts,
        infeed_host_index=host,
        shuffle=True,
    )
    made: CorpusInput = base_hyperparams.instantiate(config)
    return made


def read_epoch(store: str, host: int, hosts: int, chat: Chat | None) -> int:
    """Reads one epoch; returns the tokens of the host's own rows."""
    source, tokens = make(store, host, hosts, chat, is_training=False), 0
    while True:
        try:
            tokens += int(np.count_nonzero(source.get_next().segment_ids))
        except StopIteration:
            return tokens


def report_billion(report: reporting.Report, folder: pathlib.Path) -> None:
    """Makes a store of a billion documents, of which all parts are one file, and measures its start in a process of its own."""
    store = folder / "billion"
    store.mkdir()
    writer = Writer(str(store / "part"), np.dtype(np.uint16))
    for number in range(BILLION // PARTS):
        writer.add(np.full(200 + number % 200, 7, np.uint16), 300)
    batches = writer.close()
    names = [f"tokens-{number:05d}-of-{PARTS:05d}.arrow" for number in range(PARTS)]
    for name in names:
        os.link(store / "part", store / name)
    tokens = PARTS * sum(batch.tokens for batch in batches)
    statistics = {"documents": BILLION, "tokens": tokens, "largest": 7}
    described = Description(
        ByteTokenizer().fingerprint(), "uint16", [BILLION // PARTS] * PARTS, dict.fromkeys(names, batches), statistics
    )
    (store / DESCRIPTION_FILE).write_text("\n".join(described.lines()))
    command = [sys.executable, "-m", "benchmarks.corpus_hosts", f"--billion={store}"]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])
    report.figure("start, a billion stored documents", found["seconds"], "s")
    report.figure("and memory added, with 20 batches", found["added"], "MB", scale=1e-6)
    if found["seconds"] > START_SECONDS or found["added"] > START_BYTES:
        report.fails(f"the start takes more than {START_SECONDS:g} s or {START_BYTES:,.0f} bytes")


def start_of(store: str) -> dict[str, float]:
    """Returns how long the first batch takes, and the memory that 20 batches add."""
    before = _memory()
    began = time.perf_counter()
    source = make(store, 0, 8, is_training=True)
    source.get_next()
    seconds = time.perf_counter() - began
    for _ in range(20):
        source.get_next()
    return {"seconds": seconds, "added": _memory() - before}


def _memory() -> int:
    """Returns the bytes of this process's memory."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
