# Snakemake calls this in the folder that it was called in: the clone.
if ! test -f core/pyproject.toml; then
    echo "error: $PWD: is not the clone, which is installed here: call Snakemake in it" >&2
    exit 2
fi
python -m pip install --quiet --disable-pip-version-check --no-deps .
