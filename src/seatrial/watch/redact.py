"""Removes secrets from text before it leaves a site: known values, values of keys with secret names, well-known formats.

When in doubt, a value is removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

GONE = "[redacted]"
_LEAST = 6  # characters: a shorter known value would match ordinary words

# `token` as a whole word only: not tokens_per_s, not tokenizer. Numbers after it are counts.
_NAME = (
    r"(?:pass(?:wd|word|phrase|code)|secret|(?<!per_)token(?![a-z])|api_?-?key|access_?-?key|private_?-?key|account_?-?key|"
    r"signing_?-?key|encryption_?-?key|credential|authori[sz]ation|auth(?![a-z])|cookie|bearer|webhook|signature|"
    r"connection_?-?string|netrc|dsn)"
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_COUNT = re.compile(r"[-+]?[0-9][0-9._e+-]{0,11}|true|false|null|none", re.IGNORECASE)
# All repetitions are bounded: a log line may be megabytes long.
_VALUE = r""""(?:\\.|[^"\\]){0,4096}"|'[^']{0,4096}'"""
_PAIR = re.compile(
    rf"(?P<key>{_NAME}[\w.-]{{0,64}}[\"']?\s{{0,8}}(?:=>|[:=])\s{{0,8}})(?P<value>{_VALUE}|[^\s,;\"']{{1,4096}})",
    re.IGNORECASE,
)
_OPTION = re.compile(
    rf"(?P<keep>--?[\w-]{{0,64}}{_NAME}[\w-]{{0,64}}[ =]{{1,8}})(?:{_VALUE}|[^\s\"']{{1,4096}})",
    re.IGNORECASE,
)
_IS_OPTION = re.compile(rf"--?[\w-]{{0,64}}{_NAME}[\w-]{{0,64}}", re.IGNORECASE)
_PATTERNS = (
    re.compile(
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)",
        re.DOTALL,
    ),
    re.compile(r"\A.*?-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----", re.DOTALL),  # a key cut off at its start
    # user:password@ in a URL; signatures in a URL
    re.compile(r"(?P<keep>\b[a-z][a-z0-9+.-]{0,20}://)[^\s/@\"']{1,512}(?=@)", re.IGNORECASE),
    re.compile(
        rf"(?P<keep>[?&][^=\s&\"']{{0,64}}(?:{_NAME}|\bsig|\bkey)[^=\s&\"']{{0,64}}=)[^&\s\"']{{1,4096}}",
        re.IGNORECASE,
    ),
    re.compile(r"(?P<keep>\b(?:bearer|basic|digest)\s{1,8})[A-Za-z0-9._~+/=-]{8,4096}", re.IGNORECASE),
    re.compile(r"(?P<keep>\b(?:password|passwd|login)\s{1,8})[^\s=:]\S{0,511}", re.IGNORECASE),  # .netrc
    re.compile(r"(?P<keep>hooks\.slack\.com/|/api/webhooks/)[^\s\"']{1,512}"),
    re.compile(r"\b(?:AKIA|ASIA|AGPA|AIDA|AROA)[A-Z0-9]{12,40}\b"),  # AWS
    re.compile(
        r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[a-z]-|dop_v1_|npm_|pypi-|nvapi-)[\w-]{10,512}"
    ),
    re.compile(r"\bAIza[\w-]{30,60}"),  # Google
    re.compile(r"\beyJ[\w-]{8,4096}\.[\w-]{8,4096}(?:\.[\w-]{0,4096})?"),  # JSON web token
    re.compile(r"(?P<keep>\bwandb\b[^\n]{0,80}?\b)[0-9a-f]{40}\b", re.IGNORECASE),
)
_KEY_FILE = re.compile(
    r"[~/][^\s\"'=:,]{0,256}?(?:/\.ssh/|/\.aws/|/\.netrc|/\.kube/|/secrets?/|/credentials?\b|\.pem\b|\.key\b|"
    r"\bid_(?:rsa|ed25519|ecdsa)\b)[^\s\"',]{0,256}"
)


class Redactor:
    """Replaces secrets, counted in `removed`. `known`: values to remove wherever they occur."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.removed = 0
        values = sorted({v for v in known if len(v) >= _LEAST}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, values))) if values else None

    def text(self, text: str) -> str:
        """Redact free text: a log, a job file, a script."""
        if self._known is not None:
            text = self._replace(self._known, text)
        for pattern in _PATTERNS:
            text = self._replace(pattern, text)
        text = _PAIR.sub(self._pair, text)
        text = self._replace(_OPTION, text)
        return self._replace(_KEY_FILE, text)

    def value(self, value: Any, name: str = "") -> Any:
        """Redact a parsed JSON value; `name`: its key."""
        match value:
            case dict():
                named = value.get("name")
                return {
                    self.text(str(k)): self.value(
                        v, f"{named} {k}" if k == "value" and isinstance(named, str) else str(k)
                    )
                    for k, v in value.items()
                }
            case list():
                after = ("", *value)
                return [
                    self.value(v, name if not _is_option(before) else "secret")
                    for before, v in zip(after, value, strict=False)
                ]
            case str() if is_secret_name(name) and value and not _COUNT.fullmatch(value):
                self.removed += 1
                return GONE
            case int() if is_secret_name(name) and not isinstance(value, bool) and abs(value) >= 10**12:
                self.removed += 1
                return GONE
            case str():
                return self.text(value)
        return value

    def _replace(self, pattern: re.Pattern[str], text: str) -> str:
        def one(match: re.Match[str]) -> str:
            self.removed += 1
            return f"{match.groupdict().get('keep', '')}{GONE}"

        return pattern.sub(one, text)

    def _pair(self, match: re.Match[str]) -> str:
        value = match["value"]
        inner = value[1:-1] if value[:1] in "\"'" and value[-1:] == value[:1] else value
        if not inner or inner == GONE or inner.startswith(GONE) or _COUNT.fullmatch(inner):
            return match[0]
        self.removed += 1
        quote = value[0] if inner != value else ""
        return f"{match['key']}{quote}{GONE}{quote}"


def is_secret_name(name: str) -> bool:
    """Whether a variable or key with this name holds a secret."""
    return _SECRET_NAME.search(name) is not None


def secrets_of(values: Mapping[str, Any]) -> set[str]:
    """Values under secret names at any depth, and passwords in URLs."""
    found: set[str] = set()
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= secrets_of(value)
        elif isinstance(value, str):
            if is_secret_name(name) and not _COUNT.fullmatch(value):
                found.add(value)
            if address := re.match(r"[a-z][a-z0-9+.-]*://[^\s/@:]*:([^\s/@]+)@", value, re.IGNORECASE):
                found.add(address[1])
    return found


def _is_option(value: Any) -> bool:
    return isinstance(value, str) and _IS_OPTION.fullmatch(value) is not None
