"""Secrets are never shown: masks values by the name they stand under, and by what they look like."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.doctor.reading import Fact

MASK = "***"
_WORDS = r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|PWD|CREDENTIAL|AUTH|COOKIE|SESSION|SIGNATURE|PRIVATE|CERT|BEARER"
_SECRET_NAME = re.compile(_WORDS, re.IGNORECASE)
#: ``user:password@`` and ``token@`` in front of a host. Up to the last @ of the part: a password may hold one.
_USER = re.compile(r"(\w[\w+.-]*://)[^\s/?#\"']+@")
#: ``api_key=…``, ``"token": "…"``, ``Authorization: Bearer …``, inside a longer text.
_PAIR = re.compile(rf"(?i)([\w-]*(?:{_WORDS})[\w-]*[\"']?\s*[:=]\s*)(?:(?:bearer|basic)\s+)?(\"[^\"]*\"|'[^']*'|[^\s,;&\"'}}\]]+)")  # fmt: skip
_KNOWN_FORMS = re.compile(
    r"\b(?:hf_|sk-|pk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|ya29\.|npm_|pypi-|dckr_pat_|wandb_v\d_)[\w.=+/-]{8,}"
    r"|\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?|-----BEGIN[^-]*-----(?:.|\n)*",
)
#: A long word of letters and digits without a break: the form of most keys. An UUID has breaks, a host name dots, a path slashes.
_LONG_WORD = re.compile(r"(?<![\w+=])(?=[\w+=]*\d)(?=[\w+=]*[A-Za-z])[A-Za-z0-9+=]{32,}(?![\w+=])")


def is_secret_name(name: str) -> bool:
    """Tell whether what stands under a name is to be kept secret: WANDB_API_KEY."""
    return _SECRET_NAME.search(name) is not None


def mask_text(text: str) -> str:
    """Return a text with everything masked that looks like a secret."""
    text = _USER.sub(rf"\1{MASK}@", text)
    text = _PAIR.sub(rf"\1{MASK}", text)
    return _LONG_WORD.sub(MASK, _KNOWN_FORMS.sub(MASK, text))


def mask_value(name: str, value: str, *, is_known: bool = False) -> str:
    """Return a variable's value as it may be shown.

    Args:
        name: The variable.
        value: What it says.
        is_known: Whether the name is known to hold no secret, whatever it sounds like (NCCL_IB_PKEY).
    """
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


def _mask_json(told: Fact) -> Fact:
    if isinstance(told, dict):
        return {
            mask_text(name): MASK if is_secret_name(name) and one not in (None, "") else _mask_json(one)
            for name, one in told.items()
        }
    if isinstance(told, list):
        return [_mask_json(one) for one in told]
    # A JSON text may hold another one: SM_TRAINING_ENV does.
    return mask_value("", told) if isinstance(told, str) else told
