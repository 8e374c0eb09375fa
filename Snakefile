# snakemake --cores all            on this machine
# snakemake --profile slurm        on a cluster
# snakemake --cores all plans      only the plans; also: profiles, runs, report, grid
from snakemake.utils import min_version

min_version("9.0")


include: "workflow/rules/common.smk"
include: "workflow/rules/documents.smk"
include: "workflow/rules/profile.smk"
include: "workflow/rules/search.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/reference.smk"
include: "workflow/rules/grids.smk"


rule all:
    default_target: True
    input:
        rules.plans.input,
        rules.runs.input,
        "results/report.html",
