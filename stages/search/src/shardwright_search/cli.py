"""The planner's commands: options and function of each."""

from typing import NoReturn

from shardwright.command import Command, CommandLine, run
from shardwright_search import options

_COMMANDS = "shardwright_search.commands"
_SYSTEMS = "shardwright_search.systems"

APP = CommandLine(
    name="shardwright",
    purpose="Find the plan that trains a model fastest within a memory budget, and say why.",
    commands={
        "advise": Command(options.AdviseOptions, f"{_COMMANDS}.advise:advise"),
        "new": Command(options.NewOptions, f"{_COMMANDS}.new:write_configuration"),
        "plan": Command(options.PlanOptions, f"{_COMMANDS}.plan:plan"),
        "evaluate": Command(options.EvaluateOptions, f"{_COMMANDS}.given_plans:evaluate_plan"),
        "correct": Command(options.CorrectOptions, f"{_COMMANDS}.given_plans:correct"),
        "explore": Command(options.ExploreOptions, "shardwright_search.explore.server:explore"),
        "explain": Command(options.ExplainOptions, f"{_COMMANDS}.explain:explain"),
        "export": Command(options.ExportOptions, f"{_COMMANDS}.given_plans:export_plan"),
        "devices": Command(options.DevicesOptions, f"{_COMMANDS}.listing:list_devices"),
        "models": Command(options.ModelsOptions, f"{_COMMANDS}.listing:list_models"),
        "grid": Command(options.GridOptions, f"{_COMMANDS}.grid:grid"),
        "import galvatron": Command(options.ImportGalvatronOptions, f"{_SYSTEMS}.galvatron:import_galvatron"),
        "place": Command(options.PlaceOptions, f"{_COMMANDS}.place:place"),
        "rent": Command(options.RentOptions, f"{_COMMANDS}.rent:rent"),
        "simulate": Command(options.SimulateOptions, f"{_COMMANDS}.explain:simulate_plan"),
        "uniform": Command(options.UniformOptions, f"{_COMMANDS}.given_plans:uniform"),
        "verify": Command(options.VerifyOptions, f"{_COMMANDS}.verify:verify"),
    },
)


def main() -> NoReturn:
    """Run the command line."""
    run(APP)


if __name__ == "__main__":
    main()
