"""HTML pages from Jinja2 templates: each one self-contained file, with no external script, font or picture."""

from __future__ import annotations

from seatrial.base.errors import printable


def render(template: str, **content: object) -> str:
    """The page of `template`, a path in the package: "ui/plan.html". All of `content` is escaped.

    A template extends base/page.html. What it marks `safe` must be trusted text.
    """
    # Imported here: it takes 50 ms, and most commands write no page.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("seatrial", ""),
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(content)


def _printable(value: object) -> object:
    """Text without control characters and lone surrogates, as in file names: a page must not have the first and cannot the second."""
    # What has __html__ is trusted markup, and escaped already.
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
