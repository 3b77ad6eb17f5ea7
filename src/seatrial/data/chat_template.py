"""A tokenizer's chat template: the Jinja template in a Hugging Face folder, rendered as transformers renders it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import read_json, read_text

_FOLDER, _FILE, _CONFIG = "additional_chat_templates", "chat_template.jinja", "tokenizer_config.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Around what a {% generation %} block renders. Noncharacters: no text may contain them.
BEGIN, END = "\ufdd0", "\ufdd1"
# What an expression of a template raises, besides errors of Jinja itself.
_RAISED = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class TemplateError(Exception):
    """The template does not accept a conversation, or cannot be used."""


class ChatTemplate:
    """The templates of one tokenizer: "default", and where it has one "tool_use", for conversations with tools."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}
        content = json.dumps([self._templates, self._special_tokens], sort_keys=True)
        self.digest = hashlib.sha256(content.encode("utf-8", "replace")).hexdigest()

    def renderer(self, tools: list[Any] | None, time_ns: int) -> Renderer:
        """What renders a conversation with these tools, at this time; TemplateError if there is no template for it."""
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TemplateError(f"it has {', '.join(sorted(self._templates))}, and no default")
        if name not in self._compiled:
            try:
                self._compiled[name] = _environment().from_string(self._templates[name])
            except jinja2.TemplateSyntaxError as error:
                raise TemplateError(f"line {error.lineno}: {error.message}") from error
        now = datetime.fromtimestamp(time_ns / 1e9, UTC)
        # `documents` as transformers passes it where a caller gives none.
        given = {**self._special_tokens, "tools": tools, "documents": None, "strftime_now": now.strftime}
        return Renderer(self._compiled[name], given)


class Renderer:
    """Renders one conversation, whole or in part."""

    def __init__(self, template: jinja2.Template, given: Mapping[str, Any]) -> None:
        self._template = template
        self._given = given
        # Whether the template has {% generation %} blocks.
        self.marks: bool = _generation(template).found

    def text(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False, marked: bool = False
    ) -> str:
        """The text of `messages`, with `marked` with BEGIN and END around generation blocks; TemplateError."""
        generation = _generation(self._template)
        generation.marked = marked
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._given
            )
        except (jinja2.TemplateError, *_RAISED) as error:
            raise TemplateError(str(error) or type(error).__name__) from error


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %} ... {% endgeneration %} around what an assistant generates."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.found = False
        self.marked = False

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.found = True
        return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}" if self.marked else caller()


def _generation(template: jinja2.Template) -> _Generation:
    found = template.environment.extensions[_Generation.identifier]
    assert isinstance(found, _Generation)
    return found


class _Dictionary:
    """`dict` without the attributes of the class, by which a template could leave the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` without names that begin with an underscore, for the same reason."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def _environment() -> jinja2.Environment:
    """The environment of transformers' `apply_chat_template`. Templates are foreign code: before 3.1.6 Jinja's sandbox had gaps."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "dict": _Dictionary(),
        "namespace": _Namespace,
    }
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes the characters of HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template beside the tokenizer.json in `folder`; None if there is none, InputError if it cannot be read.

    chat_template.jinja and additional_chat_templates/NAME.jinja take precedence over tokenizer_config.json, as in transformers.
    """
    path = folder / _CONFIG
    config = _table(path)
    given = config.get("chat_template")
    if isinstance(given, list):  # several, with names
        given = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}
    templates = {"default": given} if isinstance(given, str) else given or {}
    files = {"default": folder / _FILE} if (folder / _FILE).exists() else {}
    files |= {p.stem: p for p in sorted((folder / _FOLDER).glob("*.jinja"))}
    try:
        templates = {name: read_text(file, links=True) for name, file in files.items()} or templates
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read a chat template in {folder}: {error}") from error
    if not templates:
        return None
    if not isinstance(templates, dict) or not all(
        isinstance(s, str) for pair in templates.items() for s in pair
    ):
        raise InputError(Diagnostic("chat_template must be text, or a list of name and template", str(path)))
    special = config
    if "added_tokens_decoder" not in config:  # written by an old version of transformers
        special = config | _table(folder / "special_tokens_map.json")
    tokens = {name: _content(special[name]) for name in _SPECIAL if special.get(name) is not None}
    return ChatTemplate(templates, tokens)


def _table(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`; empty if there is no such file."""
    try:
        found = read_json(path, links=True)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(Diagnostic(f"cannot be read: {error}", file=str(path))) from error
    if not isinstance(found, dict):
        raise InputError(Diagnostic("must be a JSON object", file=str(path)))
    return found


def _content(token: object) -> str:
    return str(token["content"]) if isinstance(token, dict) and "content" in token else str(token)
