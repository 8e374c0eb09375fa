"""The page of `explore`: its form, and placeholders for results."""

from html import escape
from importlib.resources import files

from shardwright.devices.table import read_devices
from shardwright.display.html import html_page
from shardwright.models.registry import read_presets
from shardwright.types import GIB
from shardwright_search.advise.page import ROWS
from shardwright_search.systems.registry import SYSTEMS

_TITLE = "Shardwright: explore plans"
_FIRST = "Choose a model and GPUs: each change is searched at once. All figures are estimates; nothing is measured."
_MODEL = '<input id="model" list="models" spellcheck="false" placeholder="a preset or a config.json">'
_BUDGETS = "Each point is the best plan for a budget of memory. Hollow points are of searches that were stopped."
_PRICES = "Each point is the best plan on a quarter to four times as many GPUs. The ring is at those that are chosen."
_SECTIONS = (
    ("The plan", "plan", ROWS),
    ("Memory of a GPU, by category", "memory", ""),
    ("Memory against time", "memory_front", _BUDGETS),
    ("Price against time", "price_front", _PRICES),
)


def explore_page() -> tuple[str, str]:
    """Return the page and its script."""
    script = files("shardwright_search.explore").joinpath("explore.js").read_text(encoding="utf-8")
    sections = "".join(
        f"<section data-found hidden><h2>{title}</h2>{f'<p class=soft>{words}</p>' if words else ''}"
        f'<div id="{name}" tabindex="-1"></div></section>'
        for title, name, words in _SECTIONS
    )
    body = (
        "<noscript><p>This page needs JavaScript.</p></noscript>"
        f'{_form()}<p id="status" role="status" aria-live="polite"></p>'
        '<div id="found" data-found hidden><p class="first" id="sentence"></p><div id="answer"></div>'
        '<p class="buttons"><button type="button" id="keep">Keep beside others</button>'
        '<a class="button" id="launch" hidden>Download what starts it</a></p><ul id="notes"></ul></div>'
        '<section id="kept" hidden><h2>Side by side</h2><div class="cards" id="cards"></div></section>'
        f"{sections}"
    )
    return html_page(_TITLE, escape(_FIRST), body, script), script


def _form() -> str:
    models = "".join(f'<option value="{escape(name)}"></option>' for name in read_presets())
    titles = {"": "this runtime"} | {str(name): entry.title for name, entry in SYSTEMS.items()}
    systems = "".join(f'<option value="{name}">{escape(title)}</option>' for name, title in titles.items())
    return (
        f'<datalist id="models">{models}</datalist><form class="fields" id="form" autocomplete="off">'
        f"{_field('Model', _MODEL)}"
        f"{_nodes('', 'GPUs')}{_nodes('-2', 'and')}"
        f"{_number('batch', 'Samples of a step', 'usual')}{_number('seq', 'Tokens of a sample', 'the model’s')}"
        f"{_field('System', f'<select id=for>{systems}</select>')}"
        f"{_number('budget_gib', 'GiB of a GPU that a plan may use', '92 %', 'any')}</form>"
    )


def _nodes(number: str, name: str) -> str:
    """Return the form fields for the nodes of one type."""
    devices = {key: each.memory_bytes for key, each in read_devices().devices.items() if each.memory_bytes}
    listed = "".join(
        f'<option value="{escape(key)}">{escape(key)}, {size / GIB:.0f} GiB</option>' for key, size in devices.items()
    )
    empty = "choose a device" if not number else "no other type"
    return (
        f"<fieldset><legend>{name}</legend>"
        f'<input id="nodes{number}" aria-label="nodes" type="number" min="1" value="1">'
        f'<span>nodes of</span><input id="each{number}" aria-label="GPUs of a node" type="number" min="1" value="8">'
        f'<select id="device{number}" aria-label="device"><option value="">{empty}</option>{listed}</select></fieldset>'
    )


def _number(name: str, words: str, default: str, step: str = "1") -> str:
    return _field(words, f'<input id="{name}" type="number" min="0" step="{step}" placeholder="{escape(default)}">')


def _field(words: str, control: str) -> str:
    return f"<label><span>{escape(words)}</span>{control}</label>"
