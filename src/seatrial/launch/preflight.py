"""Find every reason to refuse a job before anything starts, and report them all at once.

Nothing is started, prepared or written. Checks the rules of the job file and those of this machine: data, tokenizer,
known hardware, folders. Then, if all values can be read: the launcher's requirements, the layout for
`parallel = "auto"`, and memory.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.base import units
from seatrial.base.errors import InputError
from seatrial.base.files import flat, parse_toml, read_text
from seatrial.data.manifest import is_store
from seatrial.data.megatron import find_pair
from seatrial.data.prepare import data_cache, misfits, resolve_stores, sources_of, validation_misfits
from seatrial.data.sources import find
from seatrial.data.store import TokenStore
from seatrial.data.tokenizer import Tokenizer, load_tokenizer
from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.devices import Device, choose_device, driver_names
from seatrial.hardware.host_memory import host_memory
from seatrial.job.finding import Facts, RuleViolation
from seatrial.job.job import Job
from seatrial.job.loading import by_line, job_file, judged
from seatrial.job.numbers import shares
from seatrial.job.preset_files import PLACEHOLDER
from seatrial.job.rules import HERE_RULES, Rule
from seatrial.job.schedules import schedule_named
from seatrial.job.source import read_text as read_source
from seatrial.job.trackers import TRACKERS
from seatrial.launch import launcher_for
from seatrial.plan.cost.accumulate import chosen
from seatrial.plan.cost.host import Account, host_need, would_fit
from seatrial.plan.cost.memory import memory
from seatrial.plan.cost.memory_fit import judge
from seatrial.plan.cost.predict import capacity, stack_for
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.hardware import known_gpu, known_network
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.search.settle import settle
from seatrial.record.folder import RunFolder
from seatrial.storage import StorageError, is_remote

if TYPE_CHECKING:
    from seatrial.job.schema import Accumulate, DataSection

_PATHS = ("model.hf", "model.init_from", "data.tokenizer", "checkpoint.folder", "checkpoint.fallback")
_MODEL = ("model.preset", "model.hf", "model.num_hidden_layers", "model")
_ANYWAY = "; --ignore-memory starts anyway"
# For these suffixes the file size bounds the number of tokens.
_PLAIN = (".txt", ".md", ".py", ".jsonl")


@dataclass(frozen=True)
class Ready:
    """A job that may start here, with its layout and the chosen number of in-memory copies."""

    job: Job
    account: Account
    data: tuple[str, ...]  # one description per source
    notes: tuple[str, ...]  # warnings


def preflight(
    file: Path,
    overrides: Sequence[str],
    runs: Path,
    *,
    fresh: bool = False,
    ignore_memory: bool = False,
    rules: Sequence[Rule] = (),
    check: Callable[[Job], None] | None = None,
) -> Ready:
    """The job of `file` with `--set` overrides, ready to run below `runs`.

    Raises InputError with every problem; StorageError if the only one is an object store that cannot be reached. For
    `parallel = "auto"` the layout is that of the existing run, or chosen now (always with `fresh`). `ignore_memory`:
    too little memory is only a note. `rules`: checked in addition to those of every start. `check`: instead of
    the launcher's own.
    """
    file = job_file(file)
    data = _Data(data_cache(runs))
    named = _named("gpu", known_gpu), _named("network", known_network)
    rules = (
        *rules,
        *HERE_RULES,
        _unfilled,
        _torch,
        *named,
        _folders,
        _trackers,
        data.tokenizer,
        data.exists,
        data.fits,
    )
    job, problems = judged(
        read_source(file), name=str(file), base_folder=file.parent, overrides=overrides, more_rules=rules
    )
    account, notes = None, list[str]()
    if job is not None:
        try:
            (check or launcher_for(job).check)(job)
        except InputError as error:
            problems += error.diagnostics
        try:
            folder = RunFolder(runs / job.name)
            asked, job = job.train.accumulate, settle(job, folder, fresh=fresh)
            # Without a torch class it is refused, and its memory is unknown.
            if schedule_named(job.layout.schedule).torch_class:
                account = _account(job, asked, None if fresh else folder)
        except InputError as error:  # no layout, or no such device
            problems += error.diagnostics
    if job is not None and account is not None:
        for finding in _memory(account):
            if ignore_memory:
                notes.append(f"{finding.message}; --ignore-memory")
            else:
                problems.append(job.located(finding))
        if not problems:
            if account.gpu_available is not None and (why := judge(account.gpu, account.gpu_available).why):
                notes.append(f"GPU memory is tight, it {why}")
            return Ready(account.settled(), account, tuple(data.descriptions), tuple(notes))
    if data.unreachable is not None and len(problems) == 1:
        raise data.unreachable  # the job itself is fine
    raise InputError(sorted(dict.fromkeys(problems), key=by_line))


# -- this machine


def _unfilled(facts: Facts) -> Iterator[RuleViolation]:
    """Find preset placeholders that are not filled in."""
    for key in _PATHS:
        section, _, name = key.partition(".")
        value = getattr(getattr(facts.job, section), name)
        if found := PLACEHOLDER.search(value or ""):
            yield RuleViolation(
                (key,),
                f"{key} is not filled in: {found[0]} is a placeholder",
                "replace it by the path described in the comment next to it",
            )


def _torch(facts: Facts) -> Iterator[RuleViolation]:
    if facts.layout.expert == 1:
        return
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return  # the ranks' machines have it
    if [int(part) for part in version.split(".")[:2]] < [2, 12]:
        yield RuleViolation(
            ("parallel.expert",),
            f"expert {facts.layout.expert} needs torch 2.12 or later, and {version} is installed: FSDP2 of older versions cannot "
            "shard a layer's experts over other ranks than its other weights",
            "remove `expert`, or install a newer torch",
        )


def _named(key: str, known: Callable[[str], object]) -> Rule:
    """A rule: the name in [cluster] must be one that `known` accepts."""

    def rule(facts: Facts) -> Iterator[RuleViolation]:
        name = getattr(facts.job.cluster, key)
        try:
            if name is not None:
                known(name)
        except InputError as error:
            yield from _violations(error, f"cluster.{key}")

    return rule


def _trackers(facts: Facts) -> Iterator[RuleViolation]:
    """What a tracker needs must be installed. On other hosts this is not known before the run has begun, and is reported then."""
    if facts.job.cluster.launcher != "local":
        return
    for i, name in enumerate(facts.job.watch.trackers or ()):
        entry = TRACKERS.named(name)
        if find_spec(entry.needs) is None:
            yield RuleViolation(
                (f"watch.trackers.{i}", "watch.trackers"),
                f'the tracker "{name}" needs the package {entry.needs}, which is not installed',
                f"{entry.install}, or remove it",
            )


def _violations(error: InputError, *keys: str) -> Iterator[RuleViolation]:
    for d in error.diagnostics:
        where = "" if d.file is None else f"{d.file}: "
        yield RuleViolation(keys, where + d.message, d.hint or "name another")


def _folders(facts: Facts) -> Iterator[RuleViolation]:
    """The checkpoint folder must be writable, or possible to create."""
    for name in ("folder", "fallback"):
        given = getattr(facts.job.checkpoint, name)
        if given is None or is_remote(given) or PLACEHOLDER.search(given):
            continue
        # Of a job whose name is invalid only the first can be checked: reading the name raises.
        why = _unusable(Path(given)) or _unusable(Path(given) / facts.job.name)
        if why:
            yield RuleViolation((f"checkpoint.{name}",), why, "name a folder that you may write to")


def _unusable(path: Path) -> str:
    """Why no folder can be created at `path` or written to; "" if one can."""
    try:
        nearest = next(p for p in (path, *path.parents) if p.exists())
        if not nearest.is_dir():
            return f"{nearest} is not a folder"
        return "" if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written to"
    except OSError as error:
        return f"{path} cannot be used: {error.strerror}"


class _Data:
    """The rules about data, which share the stores they have opened."""

    def __init__(self, cache: Path) -> None:
        self.descriptions: list[str] = []
        self.unreachable: StorageError | None = None
        self._cache = cache
        # Index in data.train -> store, or for data yet to be prepared the maximum number of tokens, if known.
        self._found: dict[int, TokenStore | int | None] = {}
        self._validation: TokenStore | None = None  # if it is prepared already
        self._tokenizer: Tokenizer | None = None

    def tokenizer(self, facts: Facts) -> Iterator[RuleViolation]:
        spec = facts.job.data.tokenizer
        if PLACEHOLDER.search(spec):
            return
        try:
            if spec != "bytes" and os.path.isdir(spec):
                inside = f"name the file in it: {Path(spec) / 'tokenizer.json'}"
                raise InputError(f"the tokenizer {spec} is a folder", hint=inside)
            self._tokenizer = load_tokenizer(spec)
        except InputError as error:
            yield from _violations(error, "data.tokenizer")

    def exists(self, facts: Facts) -> Iterator[RuleViolation]:
        data = facts.job.data
        for i, source in enumerate([*sources_of(data), *([data.validation] if data.validation else [])]):
            trains = i < len(sources_of(data))
            keys = (f"data.train.{i}", "data.train") if trains else ("data.validation",)
            try:
                found = self._find(source, data, "" if trains else "validation: ")
                if trains:
                    self._found[i] = found
                elif isinstance(found, TokenStore):
                    self._validation = found
            except InputError as error:
                yield from _violations(error, *keys)
            except StorageError as error:
                self.unreachable = error
                yield RuleViolation(keys, error.message, error.hint or "try again")
            except OSError as error:
                yield RuleViolation(keys, f"{source}: {error.strerror}", "name another")

    def _find(self, source: str, data: DataSection, label: str) -> TokenStore | int | None:
        if is_remote(source) or is_store(Path(source)):
            (store,) = resolve_stores(data, self._cache, Path.cwd(), sources=[source])
            self.descriptions.append(
                f"{label}{source}: {units.count(store.n_tokens)} tokens ({store.tokenizer.name})"
            )
            return store
        if not source.startswith("builtin:"):
            if find_pair(Path(source)) is not None:
                self.descriptions.append(f"{label}{source}: a Megatron pair, imported at the start")
                return None
            if not os.path.exists(source):
                spec = "TOKENIZER" if PLACEHOLDER.search(data.tokenizer) else shlex.quote(data.tokenizer)
                made = f"seatrial data prepare TEXT... --out {shlex.quote(source)} --tokenizer {spec}"
                raise InputError(
                    f"there is no {source}", hint=f"name an existing source, or create it: {made}"
                )
        files = find([source]).files
        size = sum(f.size for f in files)
        self.descriptions.append(
            f"{label}{source}: {len(files):,} files, {units.memory(size)}, prepared at the start"
        )
        bounded = set(_PLAIN)
        if self._tokenizer is not None and self._tokenizer.chat is not None:
            bounded.remove(".jsonl")  # what a chat template adds to conversations has no bound
        # An invalid UTF-8 byte becomes three, and each document gets an end token.
        return 3 * size + len(files) if all(f.path.suffix in bounded for f in files) else None

    def fits(self, facts: Facts) -> Iterator[RuleViolation]:
        """The vocabulary must fit, and there must be enough samples for a step."""
        data, train, vocabulary = facts.job.data, facts.job.train, facts.architecture.vocab_size
        sources = sources_of(data)
        weights = data.weights or [1.0]
        if self._tokenizer is None:
            return
        if self._validation is not None:
            problems = validation_misfits(
                self._validation, vocabulary, train.sequence_length, train.validate_samples, data.tokenizer
            )
            if problems:
                yield from _violations(InputError(problems), "data.validation")
        if len(weights) != len(sources):
            return
        for i, share in enumerate(shares(weights)):
            if i not in self._found:
                continue
            found, keys = self._found[i], (f"data.train.{i}", "data.train")
            length, batch = train.sequence_length, train.global_batch
            wanted = ceil(share * batch)
            need = wanted * length + 1
            if isinstance(found, TokenStore):
                problems = misfits(found, vocabulary, length, wanted, batch, data.tokenizer)
                if problems:
                    yield from _violations(InputError(problems), *keys)
                continue
            if self._tokenizer.vocab_size > vocabulary:
                yield RuleViolation(
                    ("data.tokenizer",),
                    f"the tokenizer {self._tokenizer.name!r} has {self._tokenizer.vocab_size:,} ids, the model's vocabulary {vocabulary:,}",
                    "use the tokenizer of the model, or a larger model.vocab_size",
                )
            if found is not None and found < need:
                yield RuleViolation(
                    keys,
                    f"{sources[i]} has at most {found:,} tokens: fewer than the {need:,} of one step",
                    "provide more data, or a smaller train.global_batch or train.sequence_length",
                )


# -- memory


def device_of(job: Job) -> tuple[Device, str]:
    """The device of the ranks, and why; other nodes choose their own. Raises InputError."""
    cluster = job.cluster
    if cluster.launcher != "local":
        return ("cpu" if cluster.device == "cpu" else "cuda"), "chosen on each of its nodes"
    with job.about("cluster.device"):
        return choose_device(cluster)


def _account(job: Job, asked: str, folder: RunFolder | None) -> Account:
    """The memory that a job with a layout needs, and what is available.

    `asked`: its `accumulate` before it was settled; `folder`: where an earlier start may have chosen.
    """
    device, reason = device_of(job)
    if job.cluster.launcher != "local":  # runs on other nodes
        available, gpu = None, find_gpu(job.cluster.gpu or "")
    else:
        names = set(driver_names())
        gpu = find_gpu(names.pop()) if len(names) == 1 else None
        available = host_memory()
    gpu_available = None if gpu is None or device == "cpu" else capacity(Cluster(gpu, 1, 1))
    how, why = job.train.accumulate, "as the job says" if asked != "auto" else "chosen with the layout"
    if how == "auto":
        how, why = _accumulate(job, gpu_available, folder)
        train = job.train.model_copy(update={"accumulate": how})
        job = replace(job, file=job.file.model_copy(update={"train": train}))
    return Account(job, device, reason, host_need(job, device), available, gpu_available, why)


def _accumulate(job: Job, available: float | None, folder: RunFolder | None) -> tuple[Accumulate, str]:
    """What `accumulate = "auto"` is, and why: what an earlier start with this layout had, as far as it fits."""
    recipe = Recipe.of(job)
    how, why = chosen(job.architecture, recipe, available)
    try:
        before = {} if folder is None else flat(parse_toml(read_text(folder.job_toml)))
    except (OSError, ValueError):  # the first start, or an unreadable file
        before = {}
    own = {**vars(job.layout), "shard": job.layout.sample_shards}
    same = flat(own, "parallel.").items() <= before.items()
    whole = before.get("train.accumulate", "whole") == "whole"  # the key is missing in older runs
    if same and whole != (how == "whole"):
        if not whole:
            return "sharded", "as in earlier starts of this run"
        if available is None or memory(job.architecture, recipe, stack_for(recipe)).reserved <= available:
            return "whole", "as in earlier starts of this run"
    return how, why


def _memory(account: Account) -> Iterator[RuleViolation]:
    """Findings if the job does not fit, with its memory account and what would fit."""
    if not account.gpu_fits:
        assert account.gpu_available is not None
        yield RuleViolation(
            _MODEL,
            f"the job needs {units.memory(account.gpu)} on a GPU, which has {units.memory(account.gpu_available)}",
            (would_fit(account) or "`seatrial plan JOB --fit` lists the smallest clusters that suffice")
            + _ANYWAY,
        )
    copies, _ = account.copies
    if account.host_fits(copies):
        return
    cpu = account.device == "cpu"
    message = f"the job needs more host memory than is available: {account.host_text()}"
    if cpu:
        message += f"; its ranks are CPU processes ({account.device_reason})"
    for fewer in range(copies - 1, -1, -1):
        if account.host_fits(fewer):
            yield RuleViolation(
                ("resilience.snapshot_copies",), message, f'snapshot_copies = {fewer} or "auto" would fit'
            )
            return
    cluster, would = account.job.cluster, would_fit(account)
    if cpu and cluster.gpu is not None:
        elsewhere = f"start it where its {cluster.nodes * cluster.gpus_per_node} {cluster.gpu} are"
        would = f"{elsewhere}; here {would}" if would else elsewhere
    yield RuleViolation(
        _MODEL,
        message,
        (would or "no built-in model would fit in this layout: it needs a larger host") + _ANYWAY,
    )
