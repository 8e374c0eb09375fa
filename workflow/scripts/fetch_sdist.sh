#!/bin/bash
# fetch_sdist.sh NAME==VERSION SHA256 FOLDER: the tables of Galvatron's sources, as its package index has them.
set -euo pipefail
requirement=$1 sha256=$2 folder=$3
mkdir -p "$folder"
cd "$folder"
printf '%s --hash=sha256:%s\n' "$requirement" "$sha256" >requirements.txt
python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary "${requirement%%==*}" \
    --require-hashes --requirement requirements.txt --dest .
tar --extract --gzip --file ./*.tar.gz --strip-components=1 --wildcards \
    '*/configs/*_profiling_*.json' '*/configs/galvatron_config_*.json' '*/hardware_configs/*.json'
rm ./*.tar.gz
