"""Rules between the keys about the data: the sources of a blend, their weights, the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

from seatrial.job.finding import Facts, RuleViolation
from seatrial.job.numbers import shares

# With a smaller share, finding the position of a source's sample takes long (see `data/blend.py`), and a run of a
# million samples would see fewer than ten of it.
SMALLEST_SHARE = Fraction(1, 100_000)


def _weights(facts: Facts) -> Iterator[RuleViolation]:
    train, weights = facts.job.data.train, facts.job.data.weights
    if isinstance(train, str):
        if weights is not None:
            yield RuleViolation(
                ("data.weights",),
                "weights has no effect: train lists one source",
                'remove it, or list several: train = ["first", "second"]',
            )
        return
    n = len(train)
    if weights is None:
        if n > 1:
            yield RuleViolation(
                ("data.train",),
                f"train lists {n} sources, but weights is missing: a blend needs the proportions",
                f"weights = [{', '.join(['1.0'] * n)}] takes the same number of samples from each"
                if n <= 8
                else f"add weights with {n} numbers",
            )
    elif len(weights) != n:
        yield RuleViolation(
            ("data.weights",),
            f"weights has {len(weights)} {'number' if len(weights) == 1 else 'numbers'}, but train lists {n} "
            f"{'source' if n == 1 else 'sources'}",
            "give one number for each source, in the order of train",
        )


def _shares(facts: Facts) -> Iterator[RuleViolation]:
    weights = facts.job.data.weights
    if weights is None:
        return
    total = sum(weights)
    for i, share in enumerate(shares(weights)):
        if share < SMALLEST_SHARE:
            yield RuleViolation(
                (f"data.weights.{i}", "data.weights"),
                f"weight {weights[i]:g} is {float(share):.2g} of the sum of the weights; the minimum is "
                f"{float(SMALLEST_SHARE):g}",
                f"remove that source, or set its weight to {total * float(SMALLEST_SHARE) * 1.1:.3g} or more",
            )


def _same_source(facts: Facts) -> Iterator[RuleViolation]:
    sources = facts.job.data.train
    if isinstance(sources, str):
        return
    for i, source in enumerate(sources):
        if source in sources[:i]:
            yield RuleViolation(
                (f"data.train.{i}", "data.train"),
                f"{source} is listed twice",
                "list it once, with the sum of its weights",
            )


def _byte_vocabulary(facts: Facts) -> Iterator[RuleViolation]:
    vocabulary = facts.architecture.vocab_size
    if facts.job.data.tokenizer == "bytes" and vocabulary < 257:
        yield RuleViolation(
            ("model.vocab_size", "model"),
            f"vocab_size {vocabulary} is too small for the byte tokenizer, which has 256 bytes and an end-of-document token",
            "vocab_size = 257 is enough; 264 is divisible by 8",
        )


def _validation(facts: Facts) -> Iterator[RuleViolation]:
    source, train = facts.job.data.validation, facts.job.train
    every, samples, steps = train.validate_every_steps, train.validate_samples, train.steps
    if source is not None and every is None:
        yield RuleViolation(
            ("data.validation",),
            "validation has no effect: train.validate_every_steps is missing",
            f"add validate_every_steps = {max(1, steps // 20)} to [train], or remove it",
        )
    for key, value in (("validate_every_steps", every), ("validate_samples", samples)):
        if source is None and value is not None:
            yield RuleViolation(
                (f"train.{key}",),
                f"{key} has no effect: data.validation is missing",
                'name the data in [data]: validation = "PATH", or remove it',
            )
    if every is not None and every > steps:
        yield RuleViolation(
            ("train.validate_every_steps", "train.steps"),
            f"validate_every_steps {every} is more than train.steps {steps}",
            f"use validate_every_steps = {steps} to measure once, after the last step",
        )
    if source is not None and source in facts.job.data.sources:
        yield RuleViolation(
            ("data.validation",),
            f"{source} is also in data.train: the loss on what is trained on is no validation loss",
            "name other data",
        )


DATA_RULES: tuple[Callable[[Facts], Iterator[RuleViolation]], ...] = (
    _weights,
    _shares,
    _same_source,
    _byte_vocabulary,
    _validation,
)
