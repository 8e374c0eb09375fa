"""The settings of the page's form, as its URL's query has them."""

from collections.abc import Mapping
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

import msgspec
from msgspec import Meta, field

from shardwright.io import BadInput, has_controls
from shardwright.types.limits import Gib, Samples, Tokens
from shardwright_search.options import AdviseOptions, System

_Text = Annotated[str, Meta(min_length=1, max_length=1000)]
_MOST_SETTINGS = 200


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of the page; those left out have the defaults of `advise`."""

    model: _Text
    gpus: _Text
    batch: Samples | None = None
    seq: Tokens | None = None
    target: System | None = field(default=None, name="for")
    budget_gib: Gib | None = None

    def options(self, time_limit_s: float) -> AdviseOptions:
        """Return the settings as options of `advise`."""
        return AdviseOptions(
            model=self.model,
            gpus=self.gpus,
            batch=self.batch,
            seq=self.seq,
            target=self.target,
            budget_gib=self.budget_gib,
            time_limit=time_limit_s,
        )


def asked_of(settings: Mapping[str, str]) -> Asked:
    """Return the settings that are not empty; raise BadInput naming the one at fault."""
    given = {name: value for name, value in settings.items() if value}
    if (odd := next((name for name, value in given.items() if has_controls(value)), None)) is not None:
        raise BadInput(odd, "contains control characters", "give another")
    lacking = next((name for name in ("model", "gpus") if name not in given), None)
    if lacking is not None:
        raise BadInput(lacking, "is not given", "choose one")
    try:
        return msgspec.convert(given, Asked, strict=False)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$.")
        raise BadInput(where.rstrip("`") or "settings", reason, "correct it") from None


def settings_of(query: str) -> dict[str, str]:
    """Return the settings of a query; of repeated settings the last one."""
    return dict(parse_qsl(query, max_num_fields=_MOST_SETTINGS))


def query_of(link: str) -> str:
    """Return the query of a URL, or of the part after its question mark, without the token."""
    query = urlsplit(link).query if "://" in link else link.removeprefix("?")
    return "&".join(part for part in query.split("&") if part and not part.startswith("token="))
