# The small files that are written from the configuration, for the stages to read.
# Each of these is written again only when its own part of the configuration changes.
for kind, path, text_of in (
    ("cluster", "clusters/{name}.json", CONFIG.cluster_json),
    (
        "unpriced_cluster",
        "clusters/unpriced/{name}.json",
        CONFIG.unpriced_cluster_json,
    ),
    ("model_config", "models/{name}/config.json", CONFIG.model_config_json),
    ("profile_settings", "settings/{name}.json", CONFIG.profile_json),
    ("search", "searches/{name}.json", CONFIG.search_json),
    ("blend", "data/{name}/blend.json", CONFIG.blend_json),
):

    rule:
        name:
            f"write_{kind}"
        output:
            f"results/{path}",
        log:
            f"results/logs/write_{kind}/{{name}}.log",
        localrule: True
        params:
            text=lambda wildcards, of=text_of: of(wildcards.name),
        shell:
            "printf '%s\\n' {params.text:q} > {output:q} 2> {log:q}"
