# The small files that are written from the configuration and its grids, for the stages to read.
# Each of these is written again only when its own part of the configuration changes.
for kind, path, text_of in (
    ("cluster", "clusters/{name}", lambda w: CONFIG.cluster_json(w.name)),
    ("unpriced_cluster", "clusters/unpriced/{name}", lambda w: CONFIG.cluster_json(w.name, priced=False)),
    ("model_config", "models/{name}/config", lambda w: CONFIG.model_config_json(w.name)),
    ("profile_settings", "settings/{name}", lambda w: CONFIG.profile_json(w.name)),
    ("search", "searches/{name}", lambda w: CONFIG.search_json(w.name)),
    ("blend", "data/{data}/blend", lambda w: CONFIG.blend_json(DATA[w.data])),
    ("grid_cells", "grids/{grid}/asked/{model}@{cluster}", lambda w: GRIDS[w.grid].cells_json(w.model, w.cluster)),
    ("grid_cluster", "grids/{grid}/clusters/{cluster}", lambda w: GRIDS[w.grid].cluster_json(w.cluster)),
    ("grid_published_times", "grids/{grid}/published_times", lambda w: GRIDS[w.grid].published_times_json),
    ("grid_front", "grids/{grid}/fronts/{front}.search", lambda w: GRIDS[w.grid].front_json(w.front)),
):

    rule:
        name:
            f"write_{kind}"
        output:
            f"results/{path}.json",
        log:
            f"results/logs/{path}.log",
        localrule: True
        params:
            text=text_of,
        shell:
            "printf '%s\\n' {params.text:q} > {output:q} 2> {log:q}"
