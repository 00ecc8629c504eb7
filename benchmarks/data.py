"""Preparing data beside datatrove and datasets: the same corpus, tokenizer and core, alternated in one run.

    python -m benchmarks.data                      # 100 MB of this machine's Python sources, median of 3
    python -m benchmarks.data --megabytes 400 --times 5

The tokenizer is Llama 3's of 128,256 tokens, converted from the PyPI package llama-models; where that is not to be had,
one of 32,768 tokens learned from the corpus. Peers get an environment of their own under .tools/data-peers. Times are
those of whole processes; processor seconds (user and system, with children) stay right on a busy machine.
"""

import argparse
import base64
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np

from training.data import join
from training.data.clean import Limits
from training.data.format import ids_of, read_facts
from training.data.records import Fields, units
from training.data.sources import documents
from training.data.survey import Work, survey

HERE: Final = Path(__file__).parents[1]
TOOLS: Final = HERE / ".tools"
PEERS: Final = TOOLS / "data-peers"
PACKAGES: Final = ("datatrove[processing]==0.9.0", "datasets>=4,<6", "transformers<5", "spacy", "orjson", "xxhash<4")
ONE: Final = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
ENDINGS: Final = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".c", ".cpp", ".js", ".html")
PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""How Llama 3's tokenizer cuts text (llama_models/llama3/tokenizer.py)."""
NEAR_MB: Final = 10
"""Of originals in the corpus of near copies: datatrove takes the better part of a minute for so much."""


@dataclass(frozen=True)
class Spent:
    """What one process took."""

    wall_s: float
    cpu_s: float
    rss_mb: float
    told: str


def main() -> None:
    """Print the figures."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--megabytes", type=int, default=100)
    asked.add_argument("--times", type=int, default=3)
    asked.add_argument("--near", nargs=2, metavar=("CORPUS", "FOLDER"), help=argparse.SUPPRESS)
    told = asked.parse_args()
    if told.near:
        near_copies(Path(told.near[0]), Path(told.near[1]))
        return
    with tempfile.TemporaryDirectory(prefix="castra-data-") as scratch:
        folder = Path(scratch)
        corpus = write_corpus(folder / "corpus" / "all.jsonl", told.megabytes)
        vocabulary, end = tokenizer(folder)
        print(f"{corpus.stat().st_size / 1e6:.0f} MB of JSONL, {vocabulary.stem}; load {os.getloadavg()[0]:.1f}")
        throughput(folder, corpus, vocabulary, end, told.times)
        scaling(folder, corpus, vocabulary, told.times)
        copies(folder, told.times)


def throughput(folder: Path, corpus: Path, vocabulary: Path, end: str, times: int) -> None:
    """Print how fast lines become packed tokens on one core, beside the peers, and whether the ids are the same."""
    runs: dict[str, Callable[[], Spent]] = {
        "castra": lambda: ours(folder, corpus, vocabulary, 1),
        "datatrove": lambda: peer("datatrove", folder, corpus, vocabulary, end),
        "datasets": lambda: peer("datasets", folder, corpus, vocabulary, end),
    }
    spent = alternated(runs, times)
    size = corpus.stat().st_size / 1e6
    for name, one in spent.items():
        print(
            f"{name:10} {size / one.wall_s:7.1f} MB/s {size / one.cpu_s:7.1f} MB/cpu-s {one.rss_mb:6.0f} MB  "
            f"{one.wall_s / spent['castra'].wall_s:5.1f} x ours by wall, "
            f"{one.cpu_s / spent['castra'].cpu_s:5.1f} x by processor"
        )
    mine, theirs = our_documents(folder / "castra"), their_documents(folder / "datatrove", folder / "castra")
    print(
        f"ids: {len(mine & theirs)} of {len(mine)} documents have the ids datatrove gives them (special tokens apart)"
    )


def scaling(folder: Path, corpus: Path, vocabulary: Path, times: int) -> None:
    """Print how much faster two processes on two cores are than one."""
    runs = {
        "1": lambda: ours(folder, corpus, vocabulary, 1),
        "2": lambda: ours(folder, corpus, vocabulary, 2, 2),
    }
    spent = alternated(runs, times)
    print(
        f"2 cores    {spent['1'].wall_s / spent['2'].wall_s:.2f} x as fast as 1; "
        f"largest process {spent['2'].rss_mb:.0f} MB"
    )


def copies(folder: Path, times: int) -> None:
    """Print how fast planted near copies are found, and how many of them, beside datatrove's MinHash."""
    corpus, planted = write_copies(folder / "near" / "all.jsonl")
    runs = {
        "castra": lambda: child(
            [sys.executable, "-m", "benchmarks.data", "--near", str(corpus), str(emptied(folder / "mine"))]
        ),
        "minhash": lambda: peer("minhash", folder, corpus, Path("-"), "-"),
    }
    spent = alternated(runs, times)
    size = corpus.stat().st_size / 1e6
    for name, one in spent.items():
        found = json.loads(one.told.splitlines()[-1])["removed"]
        ratio = one.cpu_s / spent["castra"].cpu_s
        print(
            f"{name:10} {size / one.cpu_s:7.2f} MB/cpu-s, {found} of {planted} near copies removed; {ratio:.1f} x ours"
        )


def near_copies(corpus: Path, folder: Path) -> None:
    """Find near copies by our steps alone, in this process."""
    cut = tuple(units(documents(str(corpus))))
    work = Work(cut, Fields(False, "text", "messages", 10**8), Limits(1, 10**8), 0.8, 1e-4, folder)
    for i in range(len(cut)):
        survey(work, i)
    join.exact(work, None)
    for i in range(join.bands(0.8)):
        join.band(work, i)
    for i in range(join.pieces(work)):
        join.compare(work, i)
    join.select(work)
    print(json.dumps({"removed": work.parts.open("selected").facts["dropped"].get("near_duplicate", 0)}))


def alternated(runs: dict[str, Callable[[], Spent]], times: int) -> dict[str, Spent]:
    """Run all in turns; return of each the run with the median processor time."""
    found: dict[str, list[Spent]] = {name: [] for name in runs}
    for _ in range(times):
        for name, run in runs.items():
            found[name].append(run())
    return {name: sorted(some, key=lambda one: one.cpu_s)[len(some) // 2] for name, some in found.items()}


def ours(folder: Path, corpus: Path, vocabulary: Path, workers: int, cores: int = 1) -> Spent:
    """Prepare the corpus: cleaned, exact copies removed, encoded, packed, hashed."""
    data = {
        "source": str(corpus),
        "include": ["*"],
        "min_chars": 1,
        "max_chars": 10**8,
        "max_documents": None,
        "near_duplicate": 1,
        "held_out": 1e-4,
        "sequence_length": 2048,
        "workers": workers,
        "tokenizer": str(vocabulary),
    }
    job = {"spec": {"data": data, "model": {"vocab_size": 2**18}}, "output": str(emptied(folder / "castra"))}
    (folder / "job.json").write_text(json.dumps(job))
    return child([sys.executable, "-m", "training.data.prepare", str(folder / "job.json")], cores)


def peer(name: str, folder: Path, corpus: Path, vocabulary: Path, end: str) -> Spent:
    """Let a peer do it."""
    script = HERE / "benchmarks" / "peers" / "prepare_data.py"
    output = emptied(folder / name)
    return child([str(environment()), str(script), name, str(corpus), str(vocabulary), end, str(output)])


def child(command: Sequence[str], cores: int = 1) -> Spent:
    """Run a process on so many cores, and tell what it and its children took."""
    own = sorted(os.sched_getaffinity(0))[-cores:]
    watched = ["import os, resource, subprocess, sys, json"]
    watched += [f"os.sched_setaffinity(0, {own})"]
    watched += ["done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)"]
    watched += ["spent = resource.getrusage(resource.RUSAGE_CHILDREN)"]
    watched += ["sys.stderr.write(done.stderr if done.returncode else '')"]
    watched += ["print(json.dumps([spent.ru_utime + spent.ru_stime, spent.ru_maxrss / 1024, done.stdout]))"]
    watched += ["sys.exit(done.returncode)"]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(watched), *command],
        env=os.environ | ONE,
        cwd=HERE,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    wall = time.perf_counter() - began
    cpu, rss, told = json.loads(done.stdout)
    return Spent(wall, cpu, rss, told)


def our_documents(folder: Path) -> set[bytes]:
    """Return hashes of the documents' ids."""
    facts = read_facts(folder)
    found: set[bytes] = set()
    for part in ("train", "held_out"):
        flat = np.concatenate(list(ids_of(folder, facts, part)))
        found |= hashes(flat, facts["eos_id"])
    return found


def their_documents(folder: Path, mine: Path) -> set[bytes]:
    """Return the same of what datatrove wrote."""
    facts = read_facts(mine)
    kind = "<u2" if facts["vocab_size"] <= 2**16 else "<u4"
    return {one for path in folder.glob("*.ds") for one in hashes(np.fromfile(path, kind), facts["eos_id"])}


def hashes(flat: Any, end: int) -> set[bytes]:
    """Return a hash of each piece of a stream that the end token ends."""
    pieces = np.split(flat, np.flatnonzero(flat == end) + 1)[:-1]
    return {blake2b(piece.astype("<u4").tobytes(), digest_size=16).digest() for piece in pieces}


def environment() -> Path:
    """Return the interpreter of the peers' environment, made if need be."""
    python = PEERS / "bin" / "python"
    if not (PEERS / "made").exists():
        print(f"installing {', '.join(PACKAGES)} in {PEERS}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", PEERS], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True, stdout=sys.stderr)
        (PEERS / "made").touch()
    return python


def tokenizer(folder: Path) -> tuple[Path, str]:
    """Return a tokenizer.json and the token that ends its texts."""
    command = [str(environment()), "-m", "pip", "download", "--quiet", "--no-deps", "llama-models", "-d", str(folder)]
    if subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0:
        with zipfile.ZipFile(next(folder.glob("llama_models*.whl"))) as wheel:
            return converted(wheel.read("llama_models/llama3/tokenizer.model"), folder / "llama3.json")
    from training.data.tokens import END_OF_TEXT, train

    made = train(texts(folder / "corpus" / "all.jsonl", 20_000_000), 2**15)
    made.save(str(folder / "learned32k.json"))
    return folder / "learned32k.json", END_OF_TEXT


def converted(raw: bytes, path: Path) -> tuple[Path, str]:
    """Write tiktoken's ranks as a tokenizer.json: a merge is each pair of tokens that make a token, by its rank."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    signs = bytes_to_unicode()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in raw.splitlines() if line)}
    named = {token: "".join(signs[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=lambda one: ranks[one]):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        merges += [(named[a], named[b]) for a, b in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    made = Tokenizer(models.BPE({named[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    end = "<|end_of_text|>"
    made.add_special_tokens(["<|begin_of_text|>", end, *(f"<|reserved_special_token_{i}|>" for i in range(254))])
    made.save(str(path))
    return path, end


def write_corpus(path: Path, megabytes: int) -> Path:
    """Write this machine's Python sources and documentation, shuffled, as JSONL."""
    roots = [Path(sysconfig.get_paths()[name]) for name in ("purelib", "stdlib")]
    found = sorted({file for root in roots for file in root.rglob("*") if file.suffix in ENDINGS and file.is_file()})
    random.Random(1).shuffle(found)
    path.parent.mkdir(parents=True)
    written, seen = 0, set()
    with path.open("w") as out:
        for file in found:
            raw = file.read_bytes()
            if not 200 < len(raw) < 200_000 or raw in seen or written > megabytes * 1e6:
                continue
            seen.add(raw)
            text = raw.decode(errors="ignore")
            written += out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return path


def texts(path: Path, most: int) -> Iterator[str]:
    """Yield the texts of lines, about so many bytes."""
    with path.open() as lines:
        for line in lines:
            if (most := most - len(line)) > 0:
                yield json.loads(line)["text"]


def write_copies(path: Path) -> tuple[Path, int]:
    """Write texts of words and of every second one a copy with one word in two hundred changed."""
    rng = random.Random(2)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(20_000)]
    path.parent.mkdir(parents=True)
    planted = size = 0
    with path.open("w") as out:
        while size < NEAR_MB * 1e6:
            text = rng.choices(words, k=rng.randint(200, 600))
            size += out.write(json.dumps({"text": " ".join(text)}) + "\n")
            if rng.random() < 0.5:
                for place in rng.sample(range(len(text)), len(text) // 200):
                    text[place] = rng.choice(words)
                out.write(json.dumps({"text": " ".join(text)}) + "\n")
                planted += 1
    return path, planted


def emptied(folder: Path) -> Path:
    """Return a folder that is not there yet."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


if __name__ == "__main__":
    main()
