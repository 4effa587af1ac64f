"""Masks secrets, by the names of their variables and by their form. Nothing here is slow to import: launchers use it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from rankwise.doctor.probe import Fact, Reading
from rankwise.doctor.variables.table import Variable, find, find_family, is_explained, rank_family

MASK = "***"
_WORDS = r"TOKEN(?!IZ)|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|PWD|CREDENTIAL|AUTH|COOKIE|SESSION|SIGNATURE|PRIVATE|CERT|BEARER"
_SECRET_NAME = re.compile(_WORDS, re.IGNORECASE)
# The patterns below are compiled when a text needs them, which is hardly ever: launchers mask what they tell at each
# start.
#: Names that only sound so: folders, sockets, numbers of sessions and networks, names of files, Python's errors.
_OPEN_NAME = r"(?i)(?:OLD)?PWD$|SSH_AUTH_SOCK$|XDG_SESSION_|NCCL_IB_PKEY|GLOO_DEVICE_TRANSPORT_TCP_TLS_|\w+(?:Error|Exception|Warning)$|authors?$"
#: ``user:password@`` and ``token@`` in front of a host. Up to the last @ of the part: a password may hold one.
_USER = r"((?<![\w/])(?:\w[\w+.-]*:)?//)[^\s/?#\"']+@"
#: ``user:password@`` without a scheme. Not a tag and its digest (``image:24.01@sha256:…``), not servers of Lustre
#: (``10.0.0.1@tcp:10.0.0.2@tcp:/``).
_NO_WORD = r"\s,;|&()\[\]{}<>\"'`"
_BARE_USER = (
    rf"(?<![\w@./-])(?:[^{_NO_WORD}:@/=$]+:(?![/:])[^{_NO_WORD}]*|[^{_NO_WORD}:/=$]+:[^{_NO_WORD}:/]*)[^{_NO_WORD}@]"
    r"@(?!sha256:|(?:tcp|o2ib|gni|kfi)\d*\b)"
)
#: ``api_key=…``, ``"token": "…"``, ``Authorization: Bearer …``, inside a longer text.
_PAIR = (
    rf"(?i)()([\w-]*(?:{_WORDS})[\w-]*)([\"']?\s*[:=]\s*)(?:(?:bearer|basic)\s+)?(\"[^\"]*\"|'[^']*'|[^\s,;&\"'}}\]]+)"
)
#: ``--api-key …``, as command lines have it. What begins with a dash is the next flag.
_FLAG = rf"(?i)(?<![\w-])(--?)([\w-]*(?:{_WORDS})[\w-]*)([^\S\n]+)(\"[^\"]*\"|'[^']*'|(?!-)\S*[^\s\"'`),.;])"
#: ``Bearer …`` by itself.
_BEARER = r"(?i)\b(bearer\s+)[\w.~+/=-]{6,}"
#: What well-known services give out. Folders and hosts may begin alike (hf_checkpoints, sk-seoul-1), and are shorter,
#: or have breaks.
_KNOWN_STARTS = tuple(
    "hf_ sk- pk- gh glpat- xox AKIA ASIA AIza ya29. npm_ pypi- dckr_pat_ wandb_v eyJ -----BEGIN".split()  # noqa: SIM905
)
_KNOWN_FORMS = (
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9]{16,}|[sp]k-(?:proj|ant|svcacct|or|lf)-[\w-]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}"
    r"|xox[abprs]-[\w-]{8,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{8,}|ya29\.[\w-]{8,}|npm_[A-Za-z0-9]{16,}|pypi-[A-Za-z0-9_]{16,}[\w-]*|dckr_pat_[\w-]{8,}"
    r"|wandb_v\d_\w{8,})[\w.=+/-]*|\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?|-----BEGIN[^-]*-----(?:.|\n)*"
)
#: A long word of letters and digits without a break: the form of most keys. An UUID has breaks, a host name dots.
_LONG_WORD = re.compile(r"(?<![\w+=])(?=[\w+=]*\d)(?=[\w+=]*[A-Za-z])[A-Za-z0-9+=]{32,}(?![\w+=])")
#: The beginning of an absolute path, up to a word in its midst: containers, packages and caches are named by checksums.
_IN_PATH = r"(?<![^\s=:,;'\"`(])~?/(?!/)[^\s=:,;'\"`(]*/[^\s=:,;'\"`(/]*$"
#: A secret of fewer letters is masked beside its name only: elsewhere the same letters are most often a word.
_FEW_LETTERS = 6


def is_secret_name(name: str) -> bool:
    """Return whether what stands under a name is to be kept secret: WANDB_API_KEY."""
    is_open = is_explained(name.upper()) or re.match(_OPEN_NAME, name) is not None
    return not is_open and _SECRET_NAME.search(name) is not None


def mask_text(text: str) -> str:
    """Return a text with everything masked that looks like a secret, by itself or by the name beside it."""
    # Users come first: what stands in front of a host may look like a pair.
    text = _mask_users(text)
    if _SECRET_NAME.search(text):
        text = re.sub(_PAIR, _mask_named, text)
        text = re.sub(_FLAG, _mask_named, text)
        text = re.sub(_BEARER, rf"\1{MASK}", text)
    return _mask_words(text)


def mask_credentials(text: str) -> str:
    """Return a text with everything masked that is a secret by its own form: ``user:password@``, the keys that services give out.

    For texts about flags and files, where ``key=model`` is a word like any other.
    """
    return _mask_words(_mask_users(text))


def mask_value(name: str, value: str, *, is_known: bool = False) -> str:
    """Return a variable's value as it may be shown; ``is_known``: the name holds no secret, whatever it sounds like (NCCL_IB_PKEY)."""
    if not value:
        return value
    if is_secret_name(name) and not is_known:
        return MASK
    if value.lstrip().startswith(("{", "[")):
        try:
            return json.dumps(_mask_json(json.loads(value)))
        except (ValueError, RecursionError):
            pass  # no JSON after all: it is masked as text
    return mask_text(value)


def mask_fact(name: str, value: str, *, is_known: bool = False) -> str:
    """Return a variable's value as it may be sent to other hosts: what must not be shown is replaced by a short checksum of it.

    So hosts can tell whether they have the same one.
    """
    shown = mask_value(name, value, is_known=is_known)
    if MASK not in shown or shown == value:
        return value
    from hashlib import sha256  # noqa: PLC0415 - launchers hardly ever get here

    return f"{shown} (checksum {sha256(value.encode(errors='surrogateescape')).hexdigest()[:6]})"


#: A variable, and its value as it may be shown.
Listed: TypeAlias = tuple[Variable, str]


def list_variables(env: Mapping[str, str]) -> list[Listed]:
    """Return the variables of the known families, by family; all others are left out, whatever they hold."""
    found = []
    for name, value in env.items():
        if family := find_family(name):
            does = one.does if (one := find(name)) else ""
            found.append((Variable(name, family, does=does), mask_value(name, value, is_known=bool(does))))
    return sorted(found, key=lambda one: (rank_family(one[0].family), one[0].name))


def make_mask(env: Mapping[str, str]) -> Callable[[str], str]:
    """Return what masks a text about an environment: values of its secrets as a whole, and what looks like one.

    Signs that steer a terminal are written out. Only the variables that the doctor shows are looked at.
    """
    swaps: list[tuple[str, str]] = []
    for name, value in env.items():
        if not value or not find_family(name):
            continue
        shown = escape(mask_value(name, value), newlines=True)
        if shown != value:
            swaps.append((f"{name}={value}", f"{name}={shown}"))
            if "\n" in value or (shown == MASK and len(value) >= _FEW_LETTERS):
                swaps.append((value, shown))
    swaps.sort(key=lambda swap: -len(swap[0]))  # a value may be the beginning of another one

    def mask(text: str) -> str:
        for value, shown in swaps:
            text = text.replace(value, shown)
        return mask_text(escape(text))

    return mask


def mask_reading(one: Reading, mask: Callable[[str], str]) -> Reading:
    """Return a reading without secrets; ``mask`` is that of ``make_mask``."""
    facts = {name: _mask_fact(fact) for name, fact in one.facts.items()}
    return replace(one, what=mask(one.what), why=mask(one.why), fix=mask(one.fix), facts=facts)


def _mask_fact(fact: Fact) -> Fact:
    if isinstance(fact, dict):
        return {name: _mask_fact(one) for name, one in fact.items()}
    if isinstance(fact, list):
        return [_mask_fact(one) for one in fact]
    return mask_fact("", fact) if isinstance(fact, str) else fact


def escape(text: str, *, newlines: bool = False) -> str:
    r"""Return a text with signs written out that steer a terminal, or can't be printed (``\x1b``); ends of lines only if ``newlines``."""
    if text.isprintable():
        return text
    # What is no UTF-8 in the environment comes as half a pair, which no stream takes: it is written out, too.
    kept = "" if newlines else "\n"
    return "".join(one if one.isprintable() or one in kept else one.encode("unicode_escape").decode() for one in text)


def _mask_users(text: str) -> str:
    if "@" not in text:
        return text
    return re.sub(_BARE_USER, f"{MASK}@", re.sub(_USER, rf"\1{MASK}@", text))


def _mask_words(text: str) -> str:
    if any(start in text for start in _KNOWN_STARTS):
        text = _mask_forms(text)
    # A word in the midst of a path is the name of a folder.
    return _LONG_WORD.sub(lambda hit: hit[0] if re.search(_IN_PATH, text[: hit.start()]) else MASK, text)


def _mask_named(found: re.Match[str]) -> str:
    """Mask what stands beside the name of a secret: the groups are what is before the name, the name, what is between, the secret."""
    before, name, between, value = found.groups()
    is_open = not is_secret_name(name) or value.strip("\"'").startswith(("…", MASK))
    return found[0] if is_open else f"{before}{name}{between}{MASK}"


def _mask_forms(text: str) -> str:
    """Mask what well-known services give out.

    A folder may begin like it: in a path only what has capitals is masked, as keys do by chance.
    """
    form, shown, at = re.compile(_KNOWN_FORMS), "", 0
    while found := form.search(text, at):
        before, head = text[: found.start()], found[0].partition("/")[0]
        is_folder = head.islower() and re.search(_IN_PATH, before) is not None
        shown += text[at : found.start()] + (head if is_folder else MASK)
        at = found.start() + len(head) if is_folder else found.end()
    return shown + text[at:]


def _mask_json(info: Fact) -> Fact:
    if isinstance(info, dict):
        secret = {name for name, one in info.items() if is_secret_name(name) and one not in (None, "")}
        return {mask_text(name): MASK if name in secret else _mask_json(one) for name, one in info.items()}
    if isinstance(info, list):
        # The words of a command line: SM_USER_ARGS is such a list.
        flags = [isinstance(one, str) and re.fullmatch(r"--?[A-Za-z][\w-]*", one) is not None for one in info]
        secret_flags = [
            is_flag and is_secret_name(str(one).lstrip("-")) for one, is_flag in zip(info, flags, strict=True)
        ]
        hidden = [is_after and not is_flag for is_after, is_flag in zip([False, *secret_flags], flags, strict=False)]
        return [MASK if is_hidden else _mask_json(one) for one, is_hidden in zip(info, hidden, strict=True)]
    # A JSON text may hold another one: SM_TRAINING_ENV does.
    return mask_value("", info) if isinstance(info, str) else info
