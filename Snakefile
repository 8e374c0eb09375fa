# snakemake --cores all            on this machine
# snakemake --profile slurm        on a cluster
# snakemake --cores all plans      only the plans; also: profiles, runs, report, grid
include: "workflow/Snakefile"


# An included file cannot set this.
workflow.default_target = "all"
