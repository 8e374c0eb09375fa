"""`shardwright models` and `shardwright devices`: everything known by name, with its source."""

from collections.abc import Iterator, Sequence

from shardwright.command import show
from shardwright.devices.table import DeviceTable, device_lines, device_named, read_devices
from shardwright.display.columns import PrintedColumn
from shardwright.io import BadInput, did_you_mean
from shardwright.models.alike import priced_families, same_types
from shardwright.models.description import model_of_config
from shardwright.models.registry import FAMILIES, Preset, read_presets
from shardwright.types import GIB, Model
from shardwright_search.explain.printing import SplitTable, show_rich
from shardwright_search.options import DevicesOptions, ModelsOptions

_BY_KEYS = "A model of another type is priced by its keys, approximately, by --as FAMILY."
_NOTHING = "-"


def list_models(options: ModelsOptions) -> None:
    """Print the tables of presets and families, or all that is known of some presets."""
    presets = read_presets()
    if options.model is None:
        show_rich(_presets_table(presets))
        show_rich(_families_table(presets))
        show(_BY_KEYS)
        return
    named = {name: each for name, each in presets.items() if options.model in (name, each.config["model_type"])}
    if not named and options.model not in FAMILIES:
        remedy = did_you_mean(options.model, [*presets, *FAMILIES], "`shardwright models` lists them")
        raise BadInput("MODEL", f"{options.model!r} is neither a preset nor a family of models", remedy)
    show("\n".join(line for name, preset in named.items() for line in _preset_lines(name, preset)) or _NOTHING)


def list_devices(options: DevicesOptions) -> None:
    """Print the table of devices, or all figures of one."""
    table = read_devices()
    if options.device is None:
        show_rich(_devices_table(table))
        return
    _, device = device_named(table, options.device, "DEVICE")
    key = next(key for key, each in table.devices.items() if each is device)
    show("\n".join(device_lines(DeviceTable(revised=table.revised, devices={key: device}))))


def _presets_table(presets: dict[str, Preset]) -> SplitTable:
    rows = [_preset_row(name, preset) for name, preset in presets.items()]
    headings = ("model", "family", "B parameters", "layers", "tokens a sample")
    return _table("models by name", headings, rows, numbers=headings[2:])


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> SplitTable:
    cells = zip(*rows, strict=True)
    made = [PrintedColumn(head, each, head not in numbers) for head, each in zip(headings, cells, strict=True)]
    return SplitTable(title, made, len(rows))


def _preset_row(name: str, preset: Preset) -> tuple[str, ...]:
    model = _described(name, preset)
    billions = model.parameter_count / 1e9
    size = f"{billions:.3g}" if billions < 1000 else f"{billions:.0f}"
    return name, model.family, size, str(len(model.layers)), str(model.sequence_length)


def _described(name: str, preset: Preset) -> Model:
    return model_of_config(preset.config, name, preset.sequence_length, f"preset {name}")


def _families_table(presets: dict[str, Preset]) -> SplitTable:
    priced = priced_families()
    counted = [each.config["model_type"] for each in presets.values()]
    rows = [
        (
            name,
            family.stock.name,
            str(counted.count(name)),
            "yes" if name in priced else _NOTHING,
            ", ".join(same_types(name)) or _NOTHING,
        )
        for name, family in FAMILIES.items()
    ]
    headings = ("family", "model of transformers", "presets", "for --as", "also read")
    return _table("families, by the model_type of a config.json", headings, rows, numbers=("presets",))


def _preset_lines(name: str, preset: Preset) -> Iterator[str]:
    model = _described(name, preset)
    yield f"{name}: {model.parameter_count / 1e9:.4g} B parameters, {preset.sequence_length} tokens a sample"
    yield f"  source: {preset.source}"
    yield from (f"  {key}: {value}" for key, value in preset.config.items())


def _devices_table(table: DeviceTable) -> SplitTable:
    def scaled(figure: float | None, unit: float) -> str:
        return _NOTHING if figure is None else f"{round(figure / unit, 1):g}"

    devices = table.devices.values()
    rates = [each.peak("bfloat16") or each.peak("float16") for each in devices]
    columns = [
        PrintedColumn("device", list(table.devices), is_text=True),
        PrintedColumn("GiB", [scaled(each.memory_bytes, GIB) for each in devices]),
        PrintedColumn("16 bit", [scaled(rate, 1e12) for rate in rates]),
        PrintedColumn("fp8", [scaled(each.peak("fp8"), 1e12) for each in devices]),
        PrintedColumn("nvfp4", [scaled(each.peak("nvfp4"), 1e12) for each in devices]),
        PrintedColumn("source of these rates", [each.peaks_source or _NOTHING for each in devices], True, True),
    ]
    title = f"devices ({table.revised}): memory in GiB, dense matrix products in TFLOP/s"
    return SplitTable(title, columns, len(table.devices))
