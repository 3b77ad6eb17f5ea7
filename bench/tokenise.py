"""Throughput of `seatrial data prepare` by number of worker processes.

    python bench/tokenise.py [--megabytes 50] [--workers 1 2] [--repeat 3] [--out FIGURES.json]

The text is the Python library, repeated, as one JSONL file; the tokenizer is a byte-level BPE of 16,000 ids trained on
a part of it. The reference in the same run is the `tokenizers` library alone on the same text in one thread, the upper bound of
one worker. Each worker is one thread, so CPU seconds show the cost of distributing the work even if
cores are busy.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from seatrial.data.prepare import prepare
from seatrial.data.sources import find

VOCABULARY = 16_000
TRAINED_ON = 150  # files

ALONE = """
import sys, time
from tokenizers import Tokenizer
import json
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
engine = Tokenizer.from_file(sys.argv[2])
began = time.perf_counter()
for i in range(0, len(texts), 64):
    engine.encode_batch_fast(texts[i : i + 64], add_special_tokens=False)
print(time.perf_counter() - began)
"""


def make(folder: Path, megabytes: int) -> tuple[Path, Path]:
    """(corpus, tokenizer.json)."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    files = find(["builtin:python-library"]).files
    corpus, size = folder / "corpus.jsonl", 0
    with open(corpus, "w", encoding="utf-8") as out:
        while size < megabytes * 10**6:
            for file in files:
                size += out.write(json.dumps({"text": file.path.read_text(errors="replace")}) + "\n")
                if size >= megabytes * 10**6:
                    break
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train([str(file.path) for file in files[:TRAINED_ON]], trainer)
    engine.save(str(folder / "tokenizer.json"))
    return corpus, folder / "tokenizer.json"


def cpu_s() -> float:
    """CPU seconds of this process and its reaped children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    # One worker works in this process: it must not use every core by threads where two would use two.
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, tokenizer = make(folder, args.megabytes)
        megabytes = corpus.stat().st_size / 1e6
        walls: dict[int, list[float]] = {n: [] for n in args.workers}
        cpus: dict[int, list[float]] = {n: [] for n in args.workers}
        alone: list[float] = []
        tokens = 0
        for _ in range(args.repeat):
            told = subprocess.run(
                [sys.executable, "-c", ALONE, str(corpus), str(tokenizer)], capture_output=True, check=True
            )
            alone.append(float(told.stdout))
            for n in args.workers:
                began, used = time.perf_counter(), cpu_s()
                store = prepare([str(corpus)], str(tokenizer), folder / "store", workers=n, force=True)
                walls[n].append(time.perf_counter() - began)
                cpus[n].append(cpu_s() - used)
                tokens = store.n_tokens
    print(f"{megabytes:.0f} MB of JSONL, {tokens / 1e6:.1f} M tokens, {len(os.sched_getaffinity(0))} cores")
    base = min(alone)
    print(f"tokenizers only, one thread    {base:7.2f} s {megabytes / base:8.1f} MB/s")
    figures: dict[str, object] = {"megabytes": megabytes, "tokens": tokens, "alone_s": alone}
    for n in args.workers:
        wall, cpu = min(walls[n]), statistics.median(cpus[n])
        print(
            f"{n} {'worker ' if n == 1 else 'workers'}                      {wall:7.2f} s {megabytes / wall:8.1f} MB/s"
            f"   {min(walls[args.workers[0]]) / wall:5.2f} x of {args.workers[0]}, {base / wall:5.2f} x of alone"
            f"   {cpu:6.2f} CPU s"
        )
        figures[f"workers_{n}"] = {"wall_s": walls[n], "cpu_s": cpus[n]}
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
