"""All tests: modules are imported without collecting garbage, of which they make none: a third of the time."""

import gc

gc.disable()


def pytest_collection_finish() -> None:
    """What was imported is not looked through later, either."""
    gc.freeze()
    gc.enable()
