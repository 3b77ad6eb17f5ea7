"""Loading: what is read, what overrides do, and that every problem is told at once and at its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import GOOD, load, only_problem, problems

from seatrial.base.errors import InputError
from seatrial.job import load_job


def test_a_good_file_becomes_a_job(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(GOOD)
    job = load_job(tmp_path / "job.toml")
    assert job.name == "trial"
    assert job.architecture.hidden_size == 128
    assert (job.layout.tensor, job.layout.pipeline, job.layout.shard) == (2, 2, 2)
    assert job.layout.world_size == 8
    assert job.microbatches == 4
    assert job.optimizer.min_lr_ratio == 0.1


def test_byte_order_mark_and_windows_lines_are_read(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_job(tmp_path / "job.toml").name == "trial"


@pytest.mark.parametrize(
    ("line", "bad", "line_column", "message", "hint"),
    [
        ("steps = 200", "stepz = 200", (18, 1), "unknown key `stepz` in [train]", "did you mean `steps`?"),
        ("lr = 3e-3", "lr = 3e-3\nseed = 1", (25, 1), "unknown key `seed` in [optimizer]", "`seed` is a key of [train]"),
        ("steps = 200", 'steps = "200"', (18, 9), 'train.steps: expected an integer, found the string "200"', "remove the quotes: 200"),
        ("steps = 200", "steps = 200.0", (18, 9), "train.steps: expected an integer, found the number 200.0", "write 200"),
        ("steps = 200", "steps = true", (18, 9), "train.steps: expected an integer, found true", None),
        ("steps = 200", "steps = 1979-05-27", (18, 9), "train.steps: expected an integer, found a date or time", None),
        ("steps = 200", "steps = {}", (18, 9), "train.steps: expected an integer, found a table", None),
        ("steps = 200", "steps = 0", (18, 9), "train.steps must be at least 1, not 0", None),
        ("steps = 200", "steps = 200\ncompile = 'true'", (19, 11), 'train.compile: expected true or false, found the string "true"', "remove the quotes: true"),
        ("lr = 3e-3", "lr = 0", (24, 6), "optimizer.lr must be at least 1e-12, not 0", None),
        ("lr = 3e-3", "lr = 3e300", (24, 6), "optimizer.lr must be at most 1, not 3e+300", None),
        ("steps = 200", "steps = 0x" + "f" * 5000, (18, 9), "train.steps: an integer of about 6,000 digits", "TOML integers have 64 bits"),
        ("steps = 200", "steps = 200\ncompile = 0x" + "f" * 5000, (19, 11), "train.compile: an integer of about 6,000 digits", "TOML integers have 64 bits"),
        ("steps = 200", "steps = 200\nprecision = 0x" + "f" * 5000, (19, 13), "train.precision: an integer of about 6,000 digits", "TOML integers have 64 bits"),
        ("lr = 3e-3", "lr = inf", (24, 6), "optimizer.lr: expected a finite number, found inf", None),
        ("lr = 3e-3", "lr = nan", (24, 6), "optimizer.lr: expected a finite number, found nan", None),
        ("lr = 3e-3", "lr = 3e-3\nbeta1 = 1.0", (25, 9), "optimizer.beta1 must be less than 1, not 1.0", None),
        ("lr = 3e-3", "lr = 3e-3\ndecay = 'wsf'", (25, 9), 'optimizer.decay: expected "cosine", "linear", "wsd", "inverse_sqrt" or "constant", found the string "wsf"', 'did you mean "wsd"?'),
        ("lr = 3e-3\n", "", (23, 2), "[optimizer] is missing the key `lr`", "add it below the section's header: lr = 3e-4"),
        ('name = "trial"', 'name = "../up"', (1, 8), 'name: "../up" is not a valid name for a run folder', None),
        ('name = "trial"', "name = 3", (1, 8), "name: expected a string, found the integer 3", 'put it in quotes: "3"'),
        ("[cluster]", "[clutser]", (9, 2), "unknown section [clutser]", "did you mean [cluster]?"),
        ("[checkpoint]", "[watch]\nport = 1\n[checkpoint]", (27, 1), "unknown key `port` in [watch]", "`port` is a key of [cluster]"),
        ('name = "trial"', 'name = "trial"\nsteps = 3', (2, 1), "unknown key `steps` outside the sections", "`steps` is a key of [train]"),
        ('name = "trial"', 'name = "trial"\nwatch = 3', (2, 9), "watch: expected a section, found the integer 3", "write [watch] and its keys below it"),
        ('train = "builtin:python-library"', 'train = ""', (7, 9), "data.train is empty", None),
        ('train = "builtin:python-library"', 'train = []', (7, 9), "data.train is empty", None),
        ('train = "builtin:python-library"', 'train = 3', (7, 9), "data.train: expected a string, found the integer 3", 'put it in quotes: "3"'),
        ('train = "builtin:python-library"', 'train = ["a", 3]\nweights = [1, 1]', (7, 15), "data.train[1]: expected a string, found the integer 3", 'put it in quotes: "3"'),
        ('train = "builtin:python-library"', 'train = ["a", ""]\nweights = [1, 1]', (7, 15), "data.train[1] is empty", None),
        ('train = "builtin:python-library"', 'train = ["a", "b"]\nweights = []', (8, 11), "data.weights is empty", None),
        ('train = "builtin:python-library"', 'train = ["a", "b"]\nweights = 0.5', (8, 11), "data.weights: expected an array, found the number 0.5", "put it in brackets: [0.5]"),
        ('train = "builtin:python-library"', 'train = ["a", "b"]\nweights = [1, -1]', (8, 15), "data.weights[1] must be greater than 0, not -1", None),
        ('train = "builtin:python-library"', 'train = ["a", "b"]\nweights = [0.0, 1]', (8, 12), "data.weights[0] must be greater than 0, not 0.0", None),
        ('train = "builtin:python-library"', 'train = ["a", "b"]\nweights = [1, nan]', (8, 15), "data.weights[1]: expected a finite number, found nan", None),
        ('train = "builtin:python-library"', 'train = ["a", "b"]\nweights = [inf, 1]', (8, 12), "data.weights[0]: expected a finite number, found inf", None),
        ('train = "builtin:python-library"', 'train = ["a", "b"]\nweights = [1, "1"]', (8, 15), 'data.weights[1]: expected a number, found the string "1"', "remove the quotes: 1"),
        ('train = "builtin:python-library"', 'train = ["a", "b"]\nweights = [1, 1e19]', (8, 15), "data.weights[1] must be at most 1e+18, not 1e+19", None),
        ('train = "builtin:python-library"', 'train = "a"\ncache_gb = 0', (8, 12), "data.cache_gb must be greater than 0, not 0", None),
        ('train = "builtin:python-library"', 'train = "a"\nattend_across_documents = 0', (8, 27), "data.attend_across_documents: expected true or false, found the integer 0", None),
        ("every_steps = 50", "every_steps = 0", (27, 15), "checkpoint.every_steps must be at least 1, not 0", None),
        ("every_steps = 50", 'every_steps = "often"', (27, 15), 'checkpoint.every_steps: expected a number of steps or "auto", found the string "often"', None),
        ("every_steps = 50", 'every_steps = "automatic"', (27, 15), 'checkpoint.every_steps: expected a number of steps or "auto", found the string "automatic"', 'did you mean "auto"?'),
        ("every_steps = 50", 'every_steps = "50"', (27, 15), 'checkpoint.every_steps: expected a number of steps or "auto", found the string "50"', "remove the quotes: 50"),
        ("every_steps = 50", "every_steps = 1.5", (27, 15), "checkpoint.every_steps: expected an integer, found the number 1.5", None),
        ("every_steps = 50", "every_steps = 50\nkeep_every_steps = -1", (28, 20), "checkpoint.keep_every_steps must be at least 0, not -1", None),
        ("every_steps = 50", "every_steps = 50\nmax_unsaved_s = 0", (28, 17), "checkpoint.max_unsaved_s must be greater than 0, not 0", None),
        ("every_steps = 50", 'every_steps = 50\nfolder = ""', (28, 10), "checkpoint.folder is empty", None),
        ("every_steps = 50", 'every_steps = 50\nread_back = "no"', (28, 13), 'checkpoint.read_back: expected true or false, found the string "no"', None),
        ("[parallel]\ntensor = 2\npipeline = 2\n", "", None, None, None),
    ],
)  # fmt: skip
def test_a_problem_is_reported_as_text_at_its_location(
    line: str, bad: str, line_column: tuple[int, int] | None, message: str | None, hint: str | None
) -> None:
    assert line in GOOD
    text = GOOD.replace(line, bad, 1)
    if message is None:
        load(text)  # the section has defaults
        return
    found = [p for p in problems(text) if p.message == message]
    assert len(found) == 1, [p.message for p in problems(text)]
    assert (found[0].line, found[0].column) == line_column
    assert found[0].file == "job.toml"
    if hint is not None:
        assert found[0].hint is not None
        assert found[0].hint.startswith(hint)


def test_caret_covers_the_value() -> None:
    problem = only_problem(text=GOOD.replace("steps = 200", 'steps = "two hundred"', 1))
    assert problem.render() == (
        'job.toml:18:9: error: train.steps: expected an integer, found the string "two hundred"\n'
        '  18 | steps = "two hundred"\n'
        "     |         ^^^^^^^^^^^^^"
    )


def test_all_problems_are_reported_at_once_in_order() -> None:
    text = (
        GOOD.replace('preset = "qwen2.5-tiny"', 'preset = "qwen2.5-tiny"\nhiden_size = 3')
        .replace("steps = 200", "steps = 0", 1)
        .replace("sequence_length = 256", "sequence_length = 4096")
        .replace("global_batch = 32", "global_batch = 30")
        .replace("[checkpoint]\nevery_steps = 50\n", "")
        .replace('name = "trial"', "")
    )
    found = problems(text, "train.seed=x")
    assert [(p.line, p.message[:16]) for p in found] == [
        (5, "unknown key `hid"),
        (19, "train.steps must"),
        (20, "sequence_length "),
        (21, "global_batch 30 "),
        (None, "`name` is missin"),
        (None, "train.seed: expe"),
        (None, "the section [che"),
    ]


@pytest.mark.parametrize(
    ("text", "place", "start"),
    [
        ('name = "x\n', (1, 10), "not valid TOML: "),
        ("name = x\n", (1, 8), "not valid TOML: invalid value"),
        ("[train\nsteps = 1\n", (1, 7), "not valid TOML: expected ']'"),
        ("[train]\nsteps = 1\nsteps = 2\n", (3, 1), "not valid TOML: cannot overwrite a value"),
        ("[train]\n[data]\n[train]\n", (3, 2), "not valid TOML: cannot declare [train] twice"),
        ("a = [1,", (1, 8), "not valid TOML: "),
        ("x" * 3, (1, 4), "not valid TOML: "),
        ("a = " + "[" * 5000, (None, None), "arrays or tables are nested too deeply"),
        ("a = " + "9" * 5000, (None, None), "not valid TOML: "),
    ],
)
def test_syntax_errors_have_a_place(text: str, place: tuple[int | None, int | None], start: str) -> None:
    (problem,) = problems(text)
    assert problem.message.startswith(start)
    assert (problem.line, problem.column) == place


@pytest.mark.parametrize("kind", ["missing", "folder", "binary"])
def test_unreadable_files_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "job.toml"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\x93NUMPY\xff")
    with pytest.raises(InputError) as caught:
        load_job(path)
    (problem,) = caught.value.diagnostics
    assert problem.file == str(path)
    assert problem.hint


def test_missing_sections_are_each_one_problem() -> None:
    assert [p.message for p in problems("")] == [
        "`name` is missing",
        "the section [model] is missing",
        "the section [data] is missing",
        "the section [train] is missing",
        "the section [optimizer] is missing",
        "the section [checkpoint] is missing",
    ]


AUTO = GOOD.replace("[parallel]\ntensor = 2\npipeline = 2\n", "").replace(
    '"trial"', '"trial"\nparallel = "auto"'
)


def test_auto_leaves_the_layout_open() -> None:
    """What needs no layout is judged all the same."""
    assert load(AUTO).is_open
    assert load(GOOD, "parallel=auto").is_open
    assert not load(GOOD).is_open
    problem = only_problem("train.sequence_length=100000", text=AUTO)
    assert "max_position_embeddings" in problem.message


def test_auto_beside_keys_of_the_section_is_refused() -> None:
    for problem in (
        only_problem("parallel.tensor=2", text=AUTO),
        only_problem(text=AUTO + "[parallel]\ntensor = 2\n"),
        only_problem("parallel=auto", "parallel.tensor=2"),
    ):
        assert "chooses every key of [parallel]" in (problem.hint or "")
    twice = only_problem(text=GOOD + "[parallel]\n")
    assert "auto" not in (twice.hint or "")


def test_another_word_than_auto_is_refused() -> None:
    problem = only_problem("parallel=automatic")
    assert "expected a section" in problem.message
    assert 'parallel = "auto"' in (problem.hint or "")


class TestOverrides:
    def test_values_are_toml_or_text(self) -> None:
        job = load(
            GOOD, "train.steps=7", "optimizer.lr=1e-4", "train.compile=true", "train.precision=bf16", 'name="other"',
            "train.sample_prompt=def f(", "optimizer.decay = constant", "cluster.gpu=300",
        )  # fmt: skip
        assert job.train.steps == 7
        assert job.optimizer.lr == 1e-4
        assert job.train.compile is True
        assert job.train.precision == "bf16"
        assert job.name == "other"
        assert job.train.sample_prompt == "def f("
        assert job.optimizer.decay == "constant"
        assert job.cluster.gpu == "300"

    def test_the_last_override_counts(self) -> None:
        assert load(GOOD, "train.steps=7", "train.steps=8").train.steps == 8

    def test_a_section_can_be_replaced(self) -> None:
        assert load(GOOD, "parallel={tensor=2}", "parallel.replicate=2").layout.replicate == 2

    def test_a_section_that_is_not_in_the_file_is_added(self) -> None:
        text = GOOD.replace("[checkpoint]\nevery_steps = 50\n", "")
        assert load(text, "checkpoint.every_steps=5").checkpoint.every_steps == 5

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("train.steps=x", 'train.steps: expected an integer, found the string "x"'),
            ("train.stepz=1", "unknown key `stepz` in [train]"),
            ("tran.steps=1", "unknown section [tran]"),
            ("steps=1", "unknown key `steps` outside the sections"),
            ("train.steps", "an override is KEY=VALUE"),
            ("=3", "an override is KEY=VALUE"),
            ("train..steps=3", "an override is KEY=VALUE"),
            ("name.first=3", "`name` is a value, not a section"),
            (
                "parallel.tensor=8",
                "num_attention_heads 4 is not divisible by tensor 8: a head cannot be split",
            ),
            ("train=3", "train: expected a section, found the integer 3"),
            ("parallel={tensor=8", 'parallel: expected a section, found the string "{tensor=8"'),
            ("parallel={tensor='2'}", 'parallel.tensor: expected an integer, found the string "2"'),
        ],
    )
    def test_problems_point_at_the_override(self, override: str, message: str) -> None:
        found = [p for p in problems(GOOD, override) if p.message == message]
        assert len(found) == 1, [p.message for p in problems(GOOD, override)]
        assert found[0].render().startswith(f"--set {override}: error: {message}")
        assert found[0].line is None


def test_paths_are_relative_to_what_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = GOOD.replace('"builtin:python-library"', '"tokens"')
    assert load(text, folder=Path("jobs")).data.train == str(tmp_path / "jobs" / "tokens")
    assert load(text, "data.train=tokens", folder=Path("jobs")).data.train == str(tmp_path / "tokens")
    assert load(GOOD, "data.train=s3://bucket/x").data.train == "s3://bucket/x"
    text = text.replace(
        'train = "tokens"', 'train = ["one", "s3://bucket/two", "/three"]\nweights = [1, 2, 3]'
    )
    there = str(tmp_path / "jobs" / "one")
    assert load(text, folder=Path("jobs")).data.train == [there, "s3://bucket/two", "/three"]
    listed = 'data.train=["one", "two"]'
    assert load(GOOD, listed, "data.weights=[1, 1]").data.sources == (
        str(tmp_path / "one"),
        str(tmp_path / "two"),
    )
    assert load(GOOD, "data.train=[one]").data.train == str(tmp_path / "[one]")
    assert load().data.train == "builtin:python-library"
    text = GOOD.replace("every_steps = 50", 'every_steps = 50\nfolder = "saves"\nfallback = "s3://bucket/x"')
    checkpoint = load(text, folder=Path("jobs")).checkpoint
    assert (checkpoint.folder, checkpoint.fallback) == (str(tmp_path / "jobs" / "saves"), "s3://bucket/x")
