"""Results that are made again: where they differ, after an upgrade that asks for it, and where one is missing."""


def test_an_equal_result_reruns_nothing_below_it(finished):
    profile = finished.folder / "results" / "profiles" / "demo@cpu.h5"
    profile.write_bytes(profile.read_bytes())
    assert finished.snakemake("plans", "-n").jobs == {}


def test_an_upgrade_reruns_what_is_computed_only_where_the_configuration_says_so(finished, monkeypatch):
    target = "results/models/demo.json"
    release = {"version": "1"}
    monkeypatch.setattr("shardwright.io.versions.version", lambda _package: release["version"])
    assert "Nothing to be done" in finished.snakemake(target).output
    finished.configure(lambda config: config.update(rerun_on_upgrade=True))
    assert finished.snakemake(target).jobs == {"describe": 1}
    assert "Nothing to be done" in finished.snakemake(target).output
    release["version"] = "2"
    assert finished.snakemake(target, "-n").jobs == {"describe": 1}


def test_a_result_that_is_deleted_is_made_again_where_it_is_needed(finished):
    (finished.folder / "results/profiles/demo@cpu.h5").unlink()
    finished.configure(lambda config: config["searches"]["tight"].update(num_microbatches=[1, 2]))
    done = finished.snakemake("plans")
    assert (done.status, done.jobs.get("fit"), "measure" in done.jobs) == (0, 1, False), done.output
    assert "Nothing to be done" in finished.snakemake("plans").output
