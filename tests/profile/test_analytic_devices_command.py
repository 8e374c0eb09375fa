"""The command `devices`."""

from command_calls import call

from shardwright_profile.cli import APP


def test_the_devices_that_can_be_estimated_are_listed_with_their_sources(tmp_path):
    listed = call(APP, "devices")
    assert listed.exit_code == 0 and "H100-SXM (" in listed.stdout and "datasheet" in listed.stdout
    refused = call(APP, "devices", "--devices", tmp_path / "none.toml")
    assert (refused.exit_code, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1)
